"""Attention of one layer."""

import foveal
import torch
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from . import choice
from .builder import FovealMetadata


class FovealImpl(AttentionImpl):
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if kv_cache_dtype not in choice.KV_CACHE_DTYPES:
            raise NotImplementedError(f"kv_cache_dtype is {kv_cache_dtype}, Foveal has {', '.join(choice.KV_CACHE_DTYPES)}")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window = sliding_window
        self.attn_type = attn_type
        self.sinks = sinks
        self.plain = attn_type in (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)  # Keys and values without a cache.
        # vLLM makes a model under its dtype.
        self.dtype = torch.get_default_dtype()
        self.kv_cache_dtype = choice.KV_CACHE_DTYPES[kv_cache_dtype]
        self._members = {
            "num_heads": num_heads,
            "num_kv_heads": self.num_kv_heads,
            "head_size": head_size,
            "scale": scale,
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "alibi_slopes": alibi_slopes,
            "logits_soft_cap": logits_soft_cap,
            "attn_type": AttentionType(attn_type).value,
            "kv_sharing_target": kv_sharing_target_layer_name,
        }
        # The sinks are weights, which are not loaded yet: numbers in their place show whether Foveal serves the layer.
        placeholders = None if sinks is None else [0.0] * num_heads
        spec = foveal.Spec(**self._members, window=choice.window_of(sliding_window, True), sinks=placeholders)
        self.backend = choice.select(spec)
        self.backend.make_layer(spec)
        self._layers: dict[tuple, foveal.Layer] = {}
        self._kv_cache: tuple[torch.Tensor, foveal.KVCache] | None = None

    def spec(self, window: tuple[int, int], k_scale: float = 1.0, v_scale: float = 1.0) -> foveal.Spec:
        sinks = None if self.sinks is None else self.sinks.tolist()
        return foveal.Spec(**self._members, window=window, sinks=sinks, k_scale=k_scale, v_scale=v_scale)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        self._layers.clear()

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        if not self.plain:
            window = choice.window_of(self.sliding_window, True)
            self._layer(layer, window).update_kv_cache(key, value, self._cache(kv_cache), slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FovealMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("output_scale or output_block_scale is given, Foveal does not quantise its output")
        if attn_metadata is None:  # A profiling run, whose output must be defined all the same.
            return output.zero_()
        window = choice.window_of(self.sliding_window, attn_metadata.causal)
        kv = (key, value) if self.plain else self._cache(kv_cache)
        return self._layer(layer, window).forward(query, kv, attn_metadata.plans[window], output)

    def _layer(self, layer: torch.nn.Module, window: tuple[int, int]) -> foveal.Layer:
        """vLLM may find scales only in the first step, so they belong to the key."""
        made_for = (window, layer._k_scale_float, layer._v_scale_float)
        found = self._layers.get(made_for)
        if found is None:
            if layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1:
                raise NotImplementedError("k_scale and v_scale are one a head, Foveal has one for all")
            found = self._layers[made_for] = self.backend.make_layer(self.spec(*made_for))
        return found

    def _cache(self, kv_cache: torch.Tensor) -> foveal.KVCache:
        """Read once: vLLM passes the same tensor in every step."""
        if self._kv_cache is None or self._kv_cache[0] is not kv_cache:
            key, value = choice.split(kv_cache)
            if key.dtype == torch.uint8:  # fp8, as vLLM has it.
                key, value = key.view(self.kv_cache_dtype), value.view(self.kv_cache_dtype)
            self._kv_cache = (kv_cache, foveal.KVCache(key, value))
        return self._kv_cache[1]
