"""The attention layer's interface: names, defaults and order of the checks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class MultipleOf:
    def __init__(self, base):
        self.base = base


class AttentionCGSupport(Enum):
    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


class AttentionBackend(ABC):
    supported_dtypes = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"): ...

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension=False):
        raise NotImplementedError

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls):
        return []

    @classmethod
    def supports_head_size(cls, head_size):
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype):
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, name):
        return name is None or not cls.supported_kv_cache_dtypes or name in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size):
        sizes = cls.get_supported_kernel_block_sizes()
        return block_size is None or not sizes or any(block_size % getattr(size, "base", size) == 0 for size in sizes)

    @classmethod
    def is_mla(cls):
        return False

    is_sparse = is_ssm = supports_sink = supports_mm_prefix = supports_alibi_sqrt = is_mla
    supports_per_head_quant_scales = supports_non_causal = supports_batch_invariance = is_mla

    @classmethod
    def supports_kv_connector(cls):
        return True

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability):
        return True

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
    ):
        return None

    @classmethod
    def get_required_kv_cache_layout(cls):
        return None

    @classmethod
    def indexes_kv_by_block_stride(cls):
        plain, layered = cls.get_kv_cache_stride_order(), cls.get_kv_cache_stride_order(include_num_layers_dimension=True)
        return len(layered) == len(plain) + 1 and layered[0] != 0

    @classmethod
    def validate_configuration(
        cls,
        head_size,
        dtype,
        kv_cache_dtype=None,
        block_size=None,
        use_mla=False,
        has_sink=False,
        use_sparse=False,
        use_mm_prefix=False,
        use_per_head_quant_scales=False,
        device_capability=None,
        attn_type=AttentionType.DECODER,
        use_non_causal=False,
        use_batch_invariant=False,
        use_kv_connector=False,
    ):
        checks = [
            (cls.supports_head_size(head_size), "head_size not supported"),
            (cls.supports_dtype(dtype), "dtype not supported"),
            (cls.supports_kv_cache_dtype(kv_cache_dtype), "kv_cache_dtype not supported"),
            (cls.supports_block_size(block_size), "block_size not supported"),
            (not use_mm_prefix or cls.supports_mm_prefix(), "partial multimodal token full attention not supported"),
            (use_mla == cls.is_mla(), "MLA not supported" if use_mla else "non-MLA not supported"),
            (not has_sink or cls.supports_sink(), "attention sinks not supported"),
            (use_sparse == cls.is_sparse(), "sparse not supported" if use_sparse else "non-sparse not supported"),
            (not use_per_head_quant_scales or cls.supports_per_head_quant_scales(), "per-head quant scales not supported"),
            (cls.supports_compute_capability(device_capability), "compute capability not supported"),
            (cls.supports_attn_type(attn_type), f"attention type {attn_type} not supported"),
            (not use_non_causal or cls.supports_non_causal(), "non-causal attention not supported"),
            (not use_batch_invariant or cls.supports_batch_invariance(), "batch invariance not supported"),
            (not use_kv_connector or cls.supports_kv_connector(), "KV connector not supported"),
        ]
        reasons = [reason for passed, reason in checks if not passed]
        joint = cls.supports_combination(
            head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
        )
        return reasons if joint is None else [*reasons, joint]


class AttentionMetadata:
    pass


M = TypeVar("M")


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    mm_req_doc_ranges: dict | None = None
    rswa_prefix_lens: torch.Tensor | None = None


class AttentionMetadataBuilder(ABC, Generic[M]):
    reorder_batch_threshold = None
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return AttentionCGSupport.NEVER

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)

    def build_for_drafting(self, common_attn_metadata, draft_index):
        return self.build(0, common_attn_metadata, fast_build=True)

    def use_cascade_attention(self, *args, **kwargs):
        return False


class AttentionImpl(ABC):
    can_return_lse_for_decode = False
    supports_pcp = False
    supports_quant_query_input = False

    def fused_output_quant_supported(self, quant_key):
        return False

    def process_weights_after_loading(self, act_dtype):
        pass

    @abstractmethod
    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ): ...
