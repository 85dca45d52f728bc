from contextlib import contextmanager
from types import SimpleNamespace

_current = None


class VllmConfig(SimpleNamespace):
    """Layers register themselves in compilation_config.static_forward_context."""

    def __init__(self, backend=None, max_num_batched_tokens=8192):
        super().__init__(
            attention_config=SimpleNamespace(backend=backend),
            compilation_config=SimpleNamespace(static_forward_context={}),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=max_num_batched_tokens),
        )


@contextmanager
def set_current_vllm_config(config):
    global _current
    before, _current = _current, config
    try:
        yield
    finally:
        _current = before


def get_current_vllm_config_or_none():
    return _current


def get_layers_from_vllm_config(vllm_config, layer_type, layer_names=None):
    layers = vllm_config.compilation_config.static_forward_context
    wanted = layers if layer_names is None else layer_names
    return {name: layers[name] for name in wanted if isinstance(layers.get(name), layer_type)}
