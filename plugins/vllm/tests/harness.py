"""A step of vLLM in small: a layer, its cache, a batch with block table and slots, and what must come out."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import reference
import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

from foveal_vllm import choice
from foveal_vllm.backend import FovealBackend

BLOCK_SIZE = 16
# Seq lens and query lens; those of vLLM's own backend test, and some that it has not.
BATCHES = {
    "small_decode": ([32, 40], [1, 1]),
    "small_prefill": ([32, 40], [8, 8]),
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "medium_decode": ([128, 256, 512, 1024] * 2, [1] * 8),
    "medium_prefill": ([256, 512, 1024, 2048], [16] * 4),
    "mixed_medium": ([512, 1024, 2048] * 2, [1, 1, 1, 7, 7, 7]),
    "large_decode": ([2048] * 32, [1] * 32),
    "large_prefill": ([4096] * 8, [32] * 8),
    "mixed_large": ([1024, 2048, 4096] * 2, [1, 1, 1, 32, 32, 32]),
    "single_decode": ([1024], [1]),
    "single_prefill": ([1024], [64]),
    "whole_prompts": ([32, 64, 128, 256], [32, 64, 128, 256]),
    "speculative_small": ([128, 256, 512, 1024], [4] * 4),
    "speculative_medium": ([512, 1024, 2048] * 2, [8] * 6),
    "chunked": ([300, 1000, 17, 129], [128, 256, 17, 1]),
    "padded_requests": ([33, 48, 0, 0], [1, 5, 0, 0]),
}


@dataclass
class Model:
    """What a layer's attention is."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    num_heads: int = 8
    num_kv_heads: int = 2
    head_size: int = 64
    kv_cache_dtype: str = "auto"
    attn_type: str = "decoder"
    sliding_window: int | None = None
    alibi_slopes: list[float] | None = None
    logits_soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    shares: str | None = None

    @property
    def scale(self):
        return 0.7 * self.head_size**-0.5

    @property
    def cache_dtype(self):
        return choice.KV_CACHE_DTYPES[self.kv_cache_dtype] or self.dtype

    def stored(self, x, scale):
        """What a cache keeps of keys or values."""
        if self.cache_dtype.itemsize > 1:
            return x
        bound = torch.finfo(self.cache_dtype).max
        return (x.float() / scale).clamp(-bound, bound).to(self.cache_dtype)

    def read(self, x, scale):
        return x if self.cache_dtype.itemsize > 1 else x.float() * scale


class Layer(AttentionLayerBase):
    """Registers itself, as vLLM's do, with sinks that are not loaded yet."""

    def __init__(self, config, model, name="layer", impl_cls=None):
        self.model = model
        extra = {}
        if model.sinks is not None:
            extra["sinks"] = torch.full_like(model.sinks, torch.nan)
        default = torch.get_default_dtype()
        torch.set_default_dtype(model.dtype)
        try:
            self.impl = (impl_cls or FovealBackend.get_impl_cls())(
                model.num_heads,
                model.head_size,
                model.scale,
                model.num_kv_heads,
                model.alibi_slopes,
                model.sliding_window,
                model.kv_cache_dtype,
                model.logits_soft_cap,
                model.attn_type,
                model.shares,
                **extra,
            )
        finally:
            torch.set_default_dtype(default)
        if model.sinks is not None:
            extra["sinks"].copy_(model.sinks)
        self.impl.process_weights_after_loading(model.dtype)
        self._k_scale, self._v_scale = (torch.tensor(s, device=model.device) for s in (model.k_scale, model.v_scale))
        self._k_scale_float, self._v_scale_float = model.k_scale, model.v_scale
        self.kv_sharing_target_layer_name = model.shares
        self.kv_cache = torch.tensor([])
        config.compilation_config.static_forward_context[name] = self


def make_cache(model, num_blocks, layout="NHD", block_size=BLOCK_SIZE):
    """As vLLM hands it over, full of NaN."""
    shape = FovealBackend.get_kv_cache_shape(num_blocks, block_size, model.num_kv_heads, model.head_size)
    dtype, device = model.cache_dtype, model.device
    page = torch.Size(shape[1:]).numel()
    if layout == "NHD":
        cache = torch.empty(shape, dtype=dtype, device=device)
    elif layout == "HND":
        cache = torch.empty([shape[i] for i in (0, 1, 3, 2, 4)], dtype=dtype, device=device).permute(0, 1, 3, 2, 4)
    elif layout == "kv_first":
        cache = torch.empty([2, num_blocks, *shape[2:]], dtype=dtype, device=device)
    elif layout == "padded_pages":
        strides = (page + 64, page // 2, model.num_kv_heads * model.head_size, model.head_size, 1)
        cache = torch.empty(num_blocks * (page + 64), dtype=dtype, device=device).as_strided(shape, strides)
    elif layout == "across_layers":
        cache = torch.empty([num_blocks, 3, *shape[1:]], dtype=dtype, device=device)[:, 1]
    cache.fill_(torch.nan)
    return cache.view(torch.uint8) if dtype.itemsize == 1 else cache


@dataclass
class Batch:
    """Random keys and values for all sequences of a step; the context's stand in the cache before it."""

    model: Model
    seq_lens: list[int]
    query_lens: list[int]
    seed: int = 0
    padding: int = 3  # Rows behind num_actual_tokens.
    keys: list = field(init=False)

    def __post_init__(self):
        model, device = self.model, self.model.device
        generator = torch.Generator().manual_seed(self.seed)
        random = lambda *shape: torch.randn(*shape, generator=generator).to(device, model.dtype)
        self.keys = [random(n, model.num_kv_heads, model.head_size) for n in self.seq_lens]
        self.values = [random(n, model.num_kv_heads, model.head_size) for n in self.seq_lens]
        self.tokens = sum(self.query_lens)
        self.query = random(self.tokens + self.padding, model.num_heads, model.head_size)
        new = lambda whole: torch.cat(
            [x[n - q :] for x, n, q in zip(whole, self.seq_lens, self.query_lens)]
            + [torch.full((self.padding, model.num_kv_heads, model.head_size), torch.nan, dtype=model.dtype, device=device)]
        )
        self.key, self.value = new(self.keys), new(self.values)
        # Blocks in any order; 0 is the null block, which rows of the table end in.
        blocks = [-(-n // BLOCK_SIZE) for n in self.seq_lens]
        self.num_blocks = sum(blocks) + 3
        order = iter((torch.randperm(self.num_blocks - 1, generator=generator) + 1).tolist())
        self.block_table = torch.zeros(len(blocks), max(blocks) + 2, dtype=torch.int32)
        for r, count in enumerate(blocks):
            self.block_table[r, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)

    def slots(self, r):
        at = torch.arange(self.seq_lens[r])
        return self.block_table[r, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE

    def metadata(self, causal=True, extra_requests=0, extra_tokens=0):
        device = self.model.device
        starts = torch.tensor([0, *self.query_lens, *[0] * extra_requests]).cumsum(0).int()
        slots = [self.slots(r)[n - q :] for r, (n, q) in enumerate(zip(self.seq_lens, self.query_lens))]
        table = torch.cat([self.block_table, torch.zeros(extra_requests, self.block_table.shape[1], dtype=torch.int32)])
        return CommonAttentionMetadata(
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([*self.seq_lens, *[0] * extra_requests], dtype=torch.int32, device=device),
            num_reqs=len(self.seq_lens) + extra_requests,
            num_actual_tokens=self.tokens + extra_tokens,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens) + 5,  # An upper bound is allowed.
            block_table_tensor=table.to(device),
            slot_mapping=torch.cat([*slots, torch.full((extra_tokens,), -1)]).to(device),
            causal=causal,
        )

    def fill(self, cache, whole=False):
        """Writes the context, or all, into a cache by hand."""
        views = choice.split(cache.view(self.model.cache_dtype))
        for r, (n, q) in enumerate(zip(self.seq_lens, self.query_lens)):
            slots = self.slots(r)[: n if whole else n - q].to(cache.device)
            for view, x, scale in zip(views, (self.keys[r], self.values[r]), (self.model.k_scale, self.model.v_scale)):
                stored = self.model.stored(x[: len(slots)], scale)
                view.view(torch.uint8)[slots // BLOCK_SIZE, slots % BLOCK_SIZE] = stored.view(torch.uint8)

    def expected(self, causal=True):
        model = self.model
        window = (-1, -1)
        if model.sliding_window is not None:  # It counts the token itself, and is symmetric where attention is not causal.
            window = (model.sliding_window - 1, 0 if causal else model.sliding_window - 1)
        parts, start = [], 0
        for k, v, q in zip(self.keys, self.values, self.query_lens):
            if model.attn_type in ("decoder", "encoder_decoder"):
                k, v = (model.read(model.stored(x, s), s) for x, s in ((k, model.k_scale), (v, model.v_scale)))
            parts.append(
                reference.attend(
                    self.query[start : start + q],
                    k,
                    v,
                    model.scale,
                    causal=causal,
                    window=window,
                    cap=model.logits_soft_cap,
                    slopes=model.alibi_slopes,
                    sinks=model.sinks,
                )
            )
            start += q
        return torch.cat(parts)


def make_builder(config, names=("layer",), block_size=BLOCK_SIZE, builder_cls=None, **spec):
    models = [config.compilation_config.static_forward_context[name].model for name in names]
    kv_cache_spec = SimpleNamespace(block_size=block_size, num_kv_heads=models[0].num_kv_heads, head_size=models[0].head_size, **spec)
    return (builder_cls or FovealBackend.get_builder_cls())(kv_cache_spec, list(names), config, torch.device(models[0].device))


def run(layer, batch, metadata, common, update=True):
    """As vLLM's layer does it: the cache first, then attention into a buffer; what lies behind the step's rows stays as it was."""
    if update:
        layer.impl.do_kv_cache_update(layer, batch.key, batch.value, layer.kv_cache, common.slot_mapping)
    output = torch.full_like(batch.query, 7.0)
    layer.impl.forward(layer, batch.query, batch.key, batch.value, layer.kv_cache, metadata, output)
    assert (output[common.num_actual_tokens :] == 7.0).all()
    return output[: common.num_actual_tokens]


def check(output, expected):
    bound = 1e-5 if output.dtype == torch.float32 else 1e-2
    assert output.isfinite().all()
    torch.testing.assert_close(output.double(), expected.double(), atol=bound, rtol=bound)


def step(batch, layout="NHD", causal=True, **padding):
    """One layer, one step, everything checked."""
    current_platform.device_name = batch.model.device
    config = VllmConfig()
    layer = Layer(config, batch.model)
    layer.kv_cache = make_cache(batch.model, batch.num_blocks, layout)
    batch.fill(layer.kv_cache)
    common = batch.metadata(causal, **padding)
    metadata = make_builder(config).build(0, common)
    output = run(layer, batch, metadata, common)
    check(output[: batch.tokens], batch.expected(causal))
    assert (output[batch.tokens :] == 0).all()
    filled = make_cache(batch.model, batch.num_blocks, layout)
    batch.fill(filled, whole=True)
    assert torch.equal(layer.kv_cache.contiguous().view(torch.uint8), filled.contiguous().view(torch.uint8))
