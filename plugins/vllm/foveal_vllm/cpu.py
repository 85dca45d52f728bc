"""CPU_ATTN on a CPU: Foveal where CUSTOM was selected, else vLLM's own."""

from vllm.config import get_current_vllm_config_or_none
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from .backend import FovealBackend


def __getattr__(name: str) -> type:
    if name != "SelectedBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = get_current_vllm_config_or_none()
    if config is not None and config.attention_config.backend is AttentionBackendEnum.CUSTOM:
        return FovealBackend
    return resolve_obj_by_qualname(AttentionBackendEnum.CPU_ATTN.value)
