"""What vLLM asks before it takes a backend. Every refusal has its reason, and nothing is left out in silence."""

import foveal
import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.attention.backends.utils import get_kv_cache_layout

from . import choice
from .builder import FovealMetadataBuilder
from .impl import FovealImpl


class FovealBackend(AttentionBackend):
    # The widest; supports_combination has what Foveal says of the device.
    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes = list(choice.KV_CACHE_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # A member of vLLM's enum, which looks the name up.

    @staticmethod
    def get_impl_cls() -> type[FovealImpl]:
        return FovealImpl

    @staticmethod
    def get_builder_cls() -> type[FovealMetadataBuilder]:
        return FovealMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes() -> list:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Foveal honours every stride; the block stays outermost, so that pages may be padded, or packed with other layers'."""
        if get_kv_cache_layout() == "HND":
            return (1, 4, 0, 2, 3, 5) if include_num_layers_dimension else (0, 1, 3, 2, 4)
        return (1, 0, 2, 3, 4, 5) if include_num_layers_dimension else (0, 1, 2, 3, 4)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True  # vLLM 0.26 and later ask.

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
    ) -> str | None:
        if kv_cache_dtype is not None and kv_cache_dtype not in choice.KV_CACHE_DTYPES:
            return None  # Refused by name already.
        try:
            spec = foveal.Spec(
                num_heads=1,
                head_size=head_size,
                dtype=dtype,
                kv_cache_dtype=choice.KV_CACHE_DTYPES[kv_cache_dtype or "auto"],
                sinks=[0.0] if has_sink else None,
            )
            reasons = choice.reasons_against(spec, block_size, device_capability)
        except (NotImplementedError, TypeError, ValueError) as error:  # Another platform, or a layer that cannot be.
            return str(error)
        return "; ".join(reasons) or None
