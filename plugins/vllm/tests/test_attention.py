"""The logic of vLLM's own backend test: random batches in paged caches, compared with plain attention."""

import random
from copy import copy

import pytest
import torch
from harness import BATCHES, Batch, Layer, Model, check, make_builder, make_cache, run, step
from vllm.config import VllmConfig
from vllm.platforms import current_platform

from foveal_vllm.builder import FovealMetadataBuilder
from foveal_vllm.impl import FovealImpl

CUDA = torch.cuda.is_available()
PLACES = [
    ("cpu", torch.float32),
    ("cpu", torch.bfloat16),
    pytest.param(("cuda", torch.bfloat16), marks=pytest.mark.skipif(not CUDA, reason="no CUDA device")),
    pytest.param(("cuda", torch.float16), marks=pytest.mark.skipif(not CUDA, reason="no CUDA device")),
]


@pytest.fixture(params=PLACES, ids=lambda place: f"{place[0]}-{str(place[1])[6:]}")
def place(request):
    device, dtype = request.param
    before = current_platform.device_name
    current_platform.device_name = device
    yield {"device": device, "dtype": dtype}
    current_platform.device_name = before


@pytest.mark.parametrize("heads", [(32, 8), (8, 2)])
@pytest.mark.parametrize("name", BATCHES)
def test_causal(place, name, heads):
    head_size = 128 if place["device"] == "cuda" else 64
    if place["device"] == "cpu" and heads[0] > 8 and "large" in name:
        pytest.skip("the reference takes too long")
    step(Batch(Model(**place, num_heads=heads[0], num_kv_heads=heads[1], head_size=head_size), *BATCHES[name]))


@pytest.mark.parametrize("seed", range(20))
def test_random_batches(place, seed):
    rng = random.Random(seed)
    requests = rng.randint(1, 12)
    query_lens = [rng.choice([0, 1, 1, 1, 2, 5, 40]) for _ in range(requests)]
    seq_lens = [q + rng.choice([0, 1, 15, 16, 200]) if q else 0 for q in query_lens]
    if not any(query_lens):
        query_lens[0] = seq_lens[0] = 1
    kv_heads = rng.choice([1, 2, 3])
    model = Model(
        **place,
        num_heads=kv_heads * rng.choice([1, 4, 7]),
        num_kv_heads=kv_heads,
        head_size=rng.choice([16, 64, 80, 128, 256]),
        sliding_window=rng.choice([None, None, 1, 24]),
        logits_soft_cap=rng.choice([None, 0.0, 5.0]),
        kv_cache_dtype=rng.choice(["auto", "fp8", "fp8_e5m2"]),
        k_scale=0.25,
        v_scale=0.5,
    )
    step(
        Batch(model, seq_lens, query_lens, seed=seed, padding=8),
        layout=rng.choice(["NHD", "HND", "kv_first", "padded_pages", "across_layers"]),
        extra_requests=rng.randint(0, 3),
        extra_tokens=rng.randint(0, 5),
    )


@pytest.mark.parametrize("layout", ["NHD", "HND", "kv_first", "padded_pages", "across_layers"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
def test_layouts_and_cache_dtypes(place, layout, kv_cache_dtype):
    model = Model(**place, kv_cache_dtype=kv_cache_dtype, k_scale=0.03, v_scale=0.02)
    step(Batch(model, *BATCHES["mixed_small"]), layout)


@pytest.mark.parametrize("name", ["small_decode", "small_prefill", "mixed_medium", "speculative_small"])
@pytest.mark.parametrize("window", [1, 100])
def test_sliding_window(place, name, window):
    step(Batch(Model(**place, sliding_window=window), *BATCHES[name]))


@pytest.mark.parametrize("features", ["alibi", "soft_cap", "sinks", "sinks_window"])
@pytest.mark.parametrize("name", ["mixed_small", "medium_decode", "chunked"])
def test_features(place, name, features):
    slopes = [2.0 ** -(h + 1) for h in range(8)] if features == "alibi" else None
    sinks = torch.linspace(-1, 1, 8).to(**place) if "sinks" in features else None
    model = Model(
        **place,
        alibi_slopes=slopes,
        logits_soft_cap=3.0 if features == "soft_cap" else None,
        sinks=sinks,
        sliding_window=33 if "window" in features else None,
    )
    step(Batch(model, *BATCHES[name]))


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("name", ["small_decode", "small_prefill", "mixed_small"])
def test_decoders_that_are_not_causal(place, name, window):
    step(Batch(Model(**place, sliding_window=window), *BATCHES[name]), causal=False)


@pytest.mark.parametrize("attn_type", ["encoder", "encoder_only"])
@pytest.mark.parametrize("window", [None, 20])
def test_encoders(place, attn_type, window):
    model = Model(**place, attn_type=attn_type, sliding_window=window)
    batch = Batch(model, *BATCHES["whole_prompts"])
    config = VllmConfig()
    layer = Layer(config, model)
    common = batch.metadata(causal=False)
    # vLLM gives such groups slots, and no cache.
    common.slot_mapping = torch.zeros_like(common.slot_mapping)
    metadata = make_builder(config).build(0, common)
    check(run(layer, batch, metadata, common), batch.expected(causal=False))


def test_cross_attention(place):
    """As vLLM wraps a backend for it: encoder lengths for keys, slots of its own, and the write within forward."""

    class CrossBuilder(FovealMetadataBuilder):
        def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
            common = copy(common_attn_metadata)
            common.causal = False
            metadata = super().build(common_prefix_len, common, fast_build)
            metadata.slot_mapping = slots
            return metadata

    class CrossImpl(FovealImpl):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output):
            if key is not None:
                self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)

    model = Model(**place, attn_type="encoder_decoder")
    batch = Batch(model, [50, 7], [3, 1])
    config = VllmConfig()
    layer = Layer(config, model, impl_cls=CrossImpl)
    layer.kv_cache = make_cache(model, batch.num_blocks)
    slots = torch.cat([batch.slots(r) for r in range(2)]).to(place["device"])
    common = batch.metadata()
    builder = make_builder(config, builder_cls=CrossBuilder)
    expected = batch.expected(causal=False)
    batch.key, batch.value = torch.cat(batch.keys), torch.cat(batch.values)
    check(run(layer, batch, builder.build(0, common), common, update=False), expected)
    batch.key = batch.value = None  # The steps after the first one have only the cache.
    check(run(layer, batch, builder.build(0, common), common, update=False), expected)


def test_one_plan_for_a_group_and_a_layer_that_shares_a_cache(place):
    """Windowed layers beside others, and one that reads another's cache and never writes it."""
    config = VllmConfig()
    models = {"a": Model(**place), "b": Model(**place, sliding_window=9), "c": Model(**place, shares="a")}
    batches = {name: Batch(model, *BATCHES["mixed_small"]) for name, model in models.items()}
    layers = {name: Layer(config, model, name) for name, model in models.items()}
    for name in "ab":
        layers[name].kv_cache = make_cache(models[name], batches[name].num_blocks)
        batches[name].fill(layers[name].kv_cache)
    layers["c"].kv_cache = layers["a"].kv_cache
    batches["c"].key.fill_(0)  # Not written.
    common = batches["a"].metadata()
    metadata = make_builder(config, "abc").build(0, common)
    assert len(metadata.plans) == 2
    for name in "abc":
        before = layers[name].kv_cache.clone()
        check(run(layers[name], batches[name], metadata, common), batches[name].expected())
        assert torch.equal(before.view(torch.uint8), layers[name].kv_cache.view(torch.uint8)) == (name == "c")


def test_blocks_that_the_cache_manager_counts_in_are_larger(place):
    """The builder is told the kernel's block size, and the table names kernel blocks: nothing of the manager's is seen."""
    model = Model(**place)
    config = VllmConfig()
    layer = Layer(config, model)
    batch = Batch(model, *BATCHES["mixed_small"])
    cache = make_cache(model, batch.num_blocks, block_size=32)
    layer.kv_cache = cache
    common = batch.metadata()
    # Slots of the first two blocks of 16 are now of the first block of 32, and so on.
    requests = len(batch.seq_lens)
    table = torch.arange(1, 1 + 2 * requests, dtype=torch.int32).reshape(requests, 2)
    slots = [table[r, at // 32].long() * 32 + at % 32 for r, n in enumerate(batch.seq_lens) for at in [torch.arange(n)]]
    layer.impl.do_kv_cache_update(layer, torch.cat(batch.keys), torch.cat(batch.values), cache, torch.cat(slots).to(cache.device))
    common.block_table_tensor = table.to(cache.device)
    metadata = make_builder(config, block_size=32).build(0, common)
    check(run(layer, batch, metadata, common, update=False), batch.expected())


def test_common_prefix(place):
    model = Model(**place, sinks=torch.linspace(-1, 1, 8).to(**place))
    batch = Batch(model, [300 + 7 * r for r in range(9)], [1 + r % 4 for r in range(9)])
    for r in range(1, 9):
        batch.block_table[r, :16] = batch.block_table[0, :16]
        batch.keys[r][:256], batch.values[r][:256] = batch.keys[0][:256], batch.values[0][:256]
    config = VllmConfig()
    layer = Layer(config, model)
    layer.kv_cache = make_cache(model, batch.num_blocks)
    batch.fill(layer.kv_cache)
    common = batch.metadata()
    builder = make_builder(config)
    assert builder.use_cascade_attention(256, batch.query_lens, 8, 2, False, False, False, 132, 1)
    check(run(layer, batch, builder.build(256, common), common), batch.expected())
    if place["device"] == "cpu":  # Where Foveal can see the table.
        common.block_table_tensor[5, 3] = 1
        with pytest.raises(ValueError, match="common_prefix_len is 256, but request 5 names other blocks"):
            builder.build(256, common)


@pytest.mark.parametrize(
    "case",
    [(255, 9, 4, False, False, False, 1), (256, 7, 4, False, False, False, 1), (256, 9, 1, False, False, False, 1)]
    + [(256, 9, 4, True, False, False, 1), (256, 9, 4, False, True, False, 1), (256, 9, 4, False, False, True, 1)]
    + [(256, 9, 4, False, False, False, 2)],
)
def test_steps_that_are_no_cascade(case):
    prefix, requests, queries, alibi, window, local, ranks = case
    config = VllmConfig()
    Layer(config, Model())
    assert not make_builder(config).use_cascade_attention(prefix, [queries] * requests, 8, 2, alibi, window, local, 132, ranks)


def test_scales_that_are_found_in_the_first_step(place):
    model = Model(**place, kv_cache_dtype="fp8")
    batch = Batch(model, *BATCHES["whole_prompts"])
    config = VllmConfig()
    layer = Layer(config, model)
    layer.kv_cache = make_cache(model, batch.num_blocks)
    common = batch.metadata()
    builder = make_builder(config)
    check(run(layer, batch, builder.build(0, common), common), batch.expected())
    model.k_scale, model.v_scale = layer._k_scale_float, layer._v_scale_float = 0.02, 0.03
    check(run(layer, batch, builder.build_for_drafting(common, 0), common), batch.expected())


def test_weights_that_are_loaded_again(place):
    model = Model(**place, sinks=torch.zeros(8).to(**place))
    batch = Batch(model, *BATCHES["small_decode"])
    config = VllmConfig()
    layer = Layer(config, model)
    layer.kv_cache = make_cache(model, batch.num_blocks)
    batch.fill(layer.kv_cache)
    common = batch.metadata()
    builder = make_builder(config)
    check(run(layer, batch, builder.build(0, common), common), batch.expected())
    model.sinks = torch.linspace(0, 3, 8).to(**place)
    layer.impl.sinks.copy_(model.sinks)
    layer.impl.process_weights_after_loading(model.dtype)
    check(run(layer, batch, builder.build(0, common), common), batch.expected())


def test_a_cache_that_is_bound_anew(place):
    model = Model(**place)
    batch = Batch(model, *BATCHES["mixed_small"])
    config = VllmConfig()
    layer = Layer(config, model)
    common = batch.metadata()
    for extra in (0, 4):
        layer.kv_cache = make_cache(model, batch.num_blocks + extra)
        batch.fill(layer.kv_cache)
        check(run(layer, batch, make_builder(config).build(0, common), common), batch.expected())


def test_a_profiling_run_has_a_defined_output(place):
    config = VllmConfig()
    layer = Layer(config, Model(**place))
    query = torch.ones(5, 8, 64).to(**place)
    output = torch.full_like(query, torch.nan)
    layer.impl.forward(layer, query, query, query, layer.kv_cache, None, output)
    assert (output == 0).all()


def test_batch_invariance(place, monkeypatch):
    """A request alone and among others: the same bits."""
    import vllm.envs

    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    model = Model(**place, num_heads=2, num_kv_heads=1)
    batch = Batch(model, [4096, *[50] * 40], [1] * 41)
    config = VllmConfig()
    layer = Layer(config, model)
    layer.kv_cache = make_cache(model, batch.num_blocks)
    batch.fill(layer.kv_cache)
    common = batch.metadata()
    builder = make_builder(config)
    together = run(layer, batch, builder.build(0, common), common)
    alone = Batch(model, batch.seq_lens[:1], batch.query_lens[:1])
    alone.query, alone.block_table = batch.query[:4], batch.block_table[:1]
    only = alone.metadata()
    assert torch.equal(run(layer, alone, builder.build(0, only), only, update=False), together[:1])


def test_what_a_builder_of_foveal_is_told(monkeypatch):
    """Which kernels are made ready, and whether they may split: numbers cannot always tell."""
    import vllm.envs

    monkeypatch.setattr(vllm.envs, "VLLM_BATCH_INVARIANT", True)
    config = VllmConfig(max_num_batched_tokens=300)
    layer = Layer(config, Model())
    batch = Batch(layer.model, *BATCHES["small_decode"])
    layer.kv_cache = make_cache(layer.model, batch.num_blocks)
    told = {}

    class Backend:
        def make_builder(self, spec, block_size, num_blocks, **more):
            told.update(more, block_size=block_size, num_blocks=num_blocks)
            return backend.make_builder(spec, block_size, num_blocks, **more)

    backend, layer.impl.backend = layer.impl.backend, Backend()
    make_builder(config).build(0, batch.metadata())
    assert told.pop("device") == torch.device("cpu") and told.pop("stream") is None
    assert told == {"block_size": 16, "num_blocks": batch.num_blocks, "max_num_tokens": 300, "batch_invariant": True}
