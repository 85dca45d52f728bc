"""Hugging Face transformers on Foveal; tested with 5.17 and 5.24.

    from foveal.integrations import transformers as on_foveal

    on_foveal.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="foveal")
    model.generate(…)
    on_foveal.use_in_continuous_batching(model).generate_batch(…)

What Foveal cannot compute as the model asks for it is refused by the argument's name: dropout, attention weights as an output, a mask that hides
keys between visible ones (on a GPU; the CPU computes any), a bias on a GPU, arguments that are not known.
"""

from __future__ import annotations

import sys
from typing import Any, Optional

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from .. import UnsupportedError, attention, varlen_attention
from ._masks import Call, calls_of

NAME = "foveal"
# Continuous batching takes a name with "flash" in it for an attention of packed sequences that needs no mask. In earlier releases (5.17 is one) the
# prefix "paged|" says that, and the function updates the cache.
PACKED_NAME = "foveal_flash"
PAGED_NAME = "paged|foveal"

# Tensors among the keyword arguments that leave the attention of a layer as it is.
_HARMLESS = {
    "position_ids", "cache_position", "input_ids", "token_type_ids", "encoder_hidden_states", "logits_indices", "logits_to_keep", "cu_seq_lens_q",
    "cu_seq_lens_k", "labels", "logits_processor_args",
}


def register() -> None:
    """Makes attn_implementation="foveal" work in every model that chooses its attention by name."""
    # torch.compile leaves these calls as they are.
    for name in (NAME, PACKED_NAME):
        AttentionInterface.register(name, torch.compiler.disable(attend))
        # Without this entry models would be given no mask at all, and padding would be attended to.
        AttentionMaskInterface.register(name, mask)
    AttentionInterface.register(PAGED_NAME, torch.compiler.disable(attend_paged))


def use_in_continuous_batching(model: torch.nn.Module) -> torch.nn.Module:
    """Lets model.generate_batch() and its managers run on Foveal; returns the model. The other ways to call the model stay on Foveal too."""
    # set_attn_implementation() would look for a package of that name. The earlier releases put "paged|" before any name themselves.
    model.config._attn_implementation = NAME if _updates_cache() else PACKED_NAME
    return model


def _updates_cache() -> bool:
    """Whether the attention function, and not the model, updates the cache in continuous batching."""
    return "paged|sdpa" in AttentionInterface._global_mapping


@torch.compiler.assume_constant_result
def _models_beside(package: str) -> tuple[bool, bool]:
    """Of the models whose files are in the package: whether all choose their attention by name, and whether all then follow what SDPA expects,
    that is, attention without a mask is causal where the layer's `is_causal` says so, and only there."""
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(f"{package}.modeling_")]
    classes = [value for module in loaded for value in vars(module).values() if isinstance(value, type) and issubclass(value, PreTrainedModel)]
    own = [value for value in classes if value.__module__.startswith(f"{package}.")]
    return all(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in loaded), bool(own) and all(value._supports_sdpa for value in own)


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: int = 0, kv_offset: int = 0, *, allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False, config: Any = None, **kwargs: Any,
) -> Optional[torch.Tensor]:
    """A bool mask [batch, 1, q_length, kv_length], or None where the layer's own causality says it all."""
    by_name, as_sdpa = _models_beside(type(config).__module__.rpartition(".")[0])
    if not by_name:
        # Some old models take the masks of any attention's name, compute attention themselves, and would add our bool mask to their scores.
        raise UnsupportedError(f"attn_implementation is {NAME!r}, but {config.model_type} computes its attention itself: use 'eager'")
    # None stands for causality only where it cannot mean two things: the last row is at the last key.
    ends_together = isinstance(q_offset, int) and q_offset + q_length == kv_offset + kv_length
    plain = ends_together and q_length in (1, kv_length)
    made = sdpa_mask(
        batch_size, q_length, kv_length, q_offset, kv_offset, allow_is_causal_skip=allow_is_causal_skip and plain and as_sdpa,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip and as_sdpa, **kwargs,
    )
    if made is not None and not torch.compiler.is_compiling():
        made.foveal_calls = {}  # It is ours, and will not be written: what is found out about it serves all layers.
    return made


def _calls(given: torch.Tensor, batch: int, rows: int, keys: int) -> Optional[list[Call]]:
    """The calls for a mask [batch or 1, 1, rows or 1, keys or more], bool or of what is added to scores; None where there are none."""
    known = getattr(given, "foveal_calls", {})
    shape = (batch, rows, keys)
    if shape not in known:
        visible = _visible(given)
        known[shape] = None if visible is None else calls_of(_fit(visible, rows, keys)[:, 0].expand(batch, -1, -1))
    return known[shape]


def _fit(given: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
    """Caches of a fixed length have masks that reach beyond the keys."""
    return given[..., :keys].expand(-1, -1, rows, keys)


def _visible(given: torch.Tensor) -> Optional[torch.Tensor]:
    """A mask of one head's as bool; None where it does more than hide."""
    if given.shape[1] != 1 or given.dtype == torch.bool:
        return given if given.shape[1] == 1 else None
    hidden = given <= torch.finfo(given.dtype).min / 2
    return None if bool(((given != 0) & ~hidden).any()) else ~hidden


def attend(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Optional[torch.Tensor] = None, *,
    scaling: Optional[float] = None, dropout: float = 0.0, is_causal: Optional[bool] = None, sliding_window: Optional[int] = None,
    softcap: Optional[float] = None, s_aux: Optional[torch.Tensor] = None, position_bias: Optional[torch.Tensor] = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [batch, num_heads, S, head_size], key and value [batch, num_kv_heads, T, size] to an output
    [batch, S, num_heads, head_size_v]. s_aux: the sinks. Rows that see no key come out as zeros."""
    _refuse_unknown(dropout, kwargs)
    rows, keys = query.shape[2], key.shape[2]
    packed = attention_mask is None and kwargs.get("cu_seq_lens_q") is not None
    # A single row sees all keys either way.
    causal = attention_mask is None and (rows > 1 or packed) and _is_causal(module, is_causal)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    options = {"scale": scale, "logits_soft_cap": softcap, "sinks": None if s_aux is None else s_aux.detach().float()}
    size = value.shape[-1]
    query, key, value = (_rows(x) for x in (query, key, value))
    window = int(sliding_window) if causal and sliding_window is not None else None

    if packed:
        return _packed(query, key, value, kwargs, causal=causal, window=window, **options)[..., :size], None
    if causal and rows != keys:
        raise ValueError(f"attention_mask is None for {rows} causal queries of {keys} keys: it must say which key the first of them is at")

    if not query.numel() or not keys:
        return query.new_zeros(*query.shape[:3], size), None
    bias = position_bias
    if attention_mask is not None:
        _check_mask(attention_mask, query, keys)
        calls = None if bias is not None else _calls(attention_mask, query.shape[0], rows, keys)
        if calls is not None:
            return _in_calls(query, key, value, calls, options)[..., :size], None
        if bias is None and query.is_cuda:
            raise UnsupportedError(
                "attention_mask hides keys between keys that the same row sees, differs between heads, or adds to scores: on a GPU it must be causal, "
                "bidirectional, a window of one of them, and padding"
            )
        bias = _added(bias, _fit(attention_mask, rows, keys))
    if bias is not None:
        bias = _fit(bias.detach().float(), rows, keys)
    output = attention(query, key, value, causal=causal, window=window, bias=bias, **options)
    return output[..., :size], None


def attend_paged(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Optional[torch.Tensor] = None, *,
    cache: Any, read_index: Any, write_index: Any, cu_seq_lens_k: Any, max_seqlen_q: int, max_seqlen_k: Any, sliding_window: Optional[int] = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Continuous batching where the function updates the cache: key and value are of the new tokens only."""
    key, value = cache.update(key, value, module.layer_idx, read_index, write_index)
    key, value = (x.transpose(0, 1)[None] for x in (key, value))
    if isinstance(cu_seq_lens_k, dict):
        group = "full_attention" if sliding_window is None else "sliding_attention"
        cu_seq_lens_k, max_seqlen_k = cu_seq_lens_k[group], max_seqlen_k[group]
    return attend(
        module, query, key, value, attention_mask, is_causal=True, sliding_window=sliding_window, cu_seq_lens_k=cu_seq_lens_k,
        max_length_q=max_seqlen_q, max_length_k=max_seqlen_k, **kwargs,
    )


def _is_causal(module: torch.nn.Module, given: Optional[bool]) -> bool:
    """Of a layer that is called without a mask."""
    if given is not None or hasattr(module, "is_causal"):
        return module.is_causal if given is None else given
    if not _models_beside(type(module).__module__.rpartition(".")[0])[1]:
        raise ValueError(f"attention_mask is None, and {type(module).__name__} has no is_causal: it cannot be known whether it is causal")
    return True  # As SDPA takes it.


def _check_mask(given: torch.Tensor, query: torch.Tensor, keys: int) -> None:
    batch, rows, heads, _ = query.shape
    fits = given.dim() == 4 and given.shape[0] in (1, batch) and given.shape[1] in (1, heads) and given.shape[2] in (1, rows)
    if not fits or (given.shape[3] != 1 and given.shape[3] < keys):
        raise ValueError(f"attention_mask has the shape {list(given.shape)}, it must be [{batch} or 1, {heads} or 1, {rows} or 1, {keys}]")
    if given.dtype != torch.bool and not given.is_floating_point():
        raise ValueError(f"attention_mask is {given.dtype}, it must be bool, or floats to be added to scores")


def _refuse_unknown(dropout: float, kwargs: dict[str, Any]) -> None:
    if dropout:
        raise ValueError(f"dropout is {dropout}, it must be 0: Foveal is for inference, call model.eval()")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions is True: Foveal never forms the weights; attn_implementation='eager' does")
    for name, value in kwargs.items():
        if isinstance(value, torch.Tensor) and name not in _HARMLESS:
            raise ValueError(f"{name} is a tensor, which Foveal does not know and would ignore: use another attn_implementation for this model")


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[batch, heads, rows, size] as [batch, rows, heads, size], a view where possible: heads must be contiguous, of a multiple of 8. The zeros
    added to others change neither scores nor the rest of the output."""
    x = x.transpose(1, 2)
    missing = -x.shape[-1] % 8
    return torch.nn.functional.pad(x, (0, missing)) if missing else x if x.stride(-1) == 1 else x.contiguous()


def _packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lens: dict[str, Any], **options: Any) -> torch.Tensor:
    """Sequences one behind the other in a batch of one: continuous batching, and packed inputs. There may be rows behind the last."""
    if query.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is given for a batch of {query.shape[0]}: packed sequences are a batch of 1")
    starts, key_starts = (lens[name].to(query.device, torch.int32) for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    output = varlen_attention(
        query[0], key[0], value[0], starts, key_starts, max_query_len=lens.get("max_length_q"), max_seq_len=lens.get("max_length_k"), **options
    )
    return output[None]


def _added(bias: Optional[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """The bias under the mask: −∞ where it hides a key."""
    if given.dtype == torch.bool:
        given = torch.where(given, 0.0, -torch.inf)
    else:
        given = torch.where(given <= torch.finfo(given.dtype).min / 2, -torch.inf, given.float())
    return given if bias is None else given + bias.float()


def _in_calls(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, calls: list[Call], options: dict[str, Any]) -> torch.Tensor:
    batch, rows, heads, _ = query.shape
    flat_query, flat_key, flat_value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    output = None
    for call in calls:
        part = varlen_attention(
            flat_query if call.rows is None else flat_query[call.rows], flat_key, flat_value, call.query_start_loc,
            call.key_start_loc, causal=call.causal, window=call.window, max_query_len=call.max_query_len, max_seq_len=call.max_seq_len, **options,
        )
        if call.rows is None:
            output = part
            continue
        if output is None:
            output = part.new_zeros(batch * rows, *part.shape[1:])
        output[call.rows] = part
    if output is None:
        output = value.new_zeros(batch * rows, heads, value.shape[-1])
    return output.unflatten(0, (batch, rows))
