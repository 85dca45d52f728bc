"""Foveal: the attention layer of an LLM inference engine.

Arrays of NumPy, PyTorch, JAX and CuPy are read without a copy. Functions for single calls: `attention`, `varlen_attention`,
`paged_attention`, `merge_states`. For engines: `select` a backend for a `Spec`, then `Backend.make_builder`, `Builder.build` once a step,
and `Layer.update_kv_cache` and `Layer.forward` in each layer. `explain` says which backend serves a layer, and why no other does.
"""

from ._foveal import (
    Backend,
    Builder,
    KVCache,
    KVCacheLayout,
    Layer,
    Metadata,
    MlaLayer,
    Selection,
    Spec,
    UnsupportedError,
    devices,
    explain,
    select,
    version,
)
from ._functions import attention, merge_states, paged_attention, varlen_attention

__version__ = version()

__all__ = [
    "Backend",
    "Builder",
    "KVCache",
    "KVCacheLayout",
    "Layer",
    "Metadata",
    "MlaLayer",
    "Selection",
    "Spec",
    "UnsupportedError",
    "attention",
    "devices",
    "explain",
    "merge_states",
    "paged_attention",
    "select",
    "varlen_attention",
    "version",
]
