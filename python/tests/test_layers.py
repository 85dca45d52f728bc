"""The engine's objects: prefill and decode through a paged cache, MLA, and what explains a choice."""

import json
import threading

import naive
import numpy as np
import pytest

import foveal

BLOCK = 16


def spec(**changes):
    return foveal.Spec(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float32", **changes})


def test_an_engines_loop():
    layer_spec = spec()
    backend = foveal.select(layer_spec)
    assert backend.name == "CPU_ATTN" and backend.runtime
    layout = backend.kv_cache_layout(layer_spec, BLOCK, 6)
    assert layout.shape == [6, 2, BLOCK, 2, 8] and layout.dtype == "f32" and layout.size_bytes == 6 * layer_spec.page_size_bytes(BLOCK)
    memory = np.zeros(layout.shape, np.float32)
    cache = backend.kv_cache(layer_spec, memory)
    builder = backend.make_builder(layer_spec, BLOCK, 6)
    layer = backend.make_layer(layer_spec)
    table = np.array([[4, 2], [1, 3]], np.int32)
    keys, values = naive.random(1, 2, 32, 2, 8), naive.random(2, 2, 32, 2, 8)
    done = [0, 0]
    for new in [(18, 5)] + [(1, 1)] * 6:
        starts = np.cumsum([0, *new]).astype(np.int32)
        where = [(r, done[r] + i) for r in range(2) for i in range(new[r])]
        slots = np.array([table[r, p // BLOCK] * BLOCK + p % BLOCK for r, p in where], np.int64)
        done = [d + n for d, n in zip(done, new)]
        plan = builder.build(starts, np.array(done, np.int32), block_table=table, slot_mapping=slots)
        query = naive.random(sum(done), len(where), 4, 8)
        k, v = (np.stack([x[r, p] for r, p in where]) for x in (keys, values))
        layer.update_kv_cache(k, v, cache, slots)
        output, lse = np.empty_like(query), np.empty((4, len(where)), np.float32)
        assert layer.forward(query, cache, plan, output, lse) is output
        for r in range(2):
            rows = slice(starts[r], starts[r + 1])
            expected, expected_lse = naive.attend(query[rows], keys[r, : done[r]], values[r, : done[r]], causal=True)
            np.testing.assert_allclose(output[rows], expected, rtol=0, atol=1e-5)
            np.testing.assert_allclose(lse[:, rows], expected_lse, rtol=0, atol=1e-5)
    assert memory[4, 0].any() and not memory[5].any()


def test_a_plan_does_not_see_later_changes():
    """What the step's arrays hold after build() must not matter: the plan has copies."""
    layer_spec = spec()
    backend = foveal.select(layer_spec)
    cache = backend.kv_cache(layer_spec, naive.random(3, 4, 2, BLOCK, 2, 8))
    starts, lens, table = np.array([0, 2], np.int32), np.array([20], np.int32), np.array([[1, 2]], np.int32)
    layer = backend.make_layer(layer_spec)
    plan = backend.make_builder(layer_spec, BLOCK, 4).build(starts, lens, block_table=table)
    query, first, second = naive.random(1, 2, 4, 8), np.empty((2, 4, 8), np.float32), np.empty((2, 4, 8), np.float32)
    layer.forward(query, cache, plan, first)
    starts[:], lens[:], table[:] = 1 << 30, 1 << 30, 1 << 30
    layer.forward(query, cache, plan, second)
    np.testing.assert_array_equal(first, second)


def test_mla():
    dims = (16, 8, 4, 6)
    layer_spec = foveal.Spec(num_heads=2, num_kv_heads=1, head_size=20, head_size_v=16, scale=0.3, dtype="f32", mla=dims)
    backend = foveal.select(layer_spec)
    assert backend.name == "CPU_MLA"
    layer, builder = backend.make_layer(layer_spec), backend.make_builder(layer_spec, BLOCK, 3)
    assert isinstance(layer, foveal.MlaLayer) and not hasattr(layer, "forward")
    starts, lens = np.array([0, 3], np.int32), np.array([3], np.int32)
    q, k, v = naive.random(1, 3, 2, 12), naive.random(2, 3, 2, 12), naive.random(3, 3, 2, 6)
    output = np.empty((3, 2, 6), np.float32)
    layer.forward_mha(q, k, v, builder.build(starts, lens), output)
    np.testing.assert_allclose(output, naive.attend(q, k, v, causal=True, scale=0.3)[0], rtol=0, atol=1e-5)

    memory = np.zeros((3, BLOCK, 20), np.float32)
    cache = foveal.KVCache(memory)
    latent, rope = naive.random(4, 3, 16), naive.random(5, 3, 4)
    layer.update_kv_cache(latent, rope, cache, np.array([32, 33, 34], np.int64))
    np.testing.assert_array_equal(memory[2, :3], np.concatenate([latent, rope], 1))
    absorbed, output = naive.random(6, 3, 2, 20), np.empty((3, 2, 16), np.float32)
    layer.forward_mqa(absorbed, cache, builder.build(starts, lens, block_table=np.array([[2]], np.int32)), output)
    entries = memory[2, :3, None]
    np.testing.assert_allclose(output, naive.attend(absorbed, entries, entries[..., :16], causal=True, scale=0.3)[0], rtol=0, atol=1e-5)
    plain = foveal.KVCache(naive.random(1, 3, BLOCK, 2, 8), naive.random(1, 3, BLOCK, 2, 8))
    with pytest.raises(ValueError, match="kv_cache has keys and values, an MLA layer needs"):
        layer.forward_mqa(absorbed, plain, builder.build(starts, lens, block_table=np.array([[2]], np.int32)), output)
    with pytest.raises(ValueError, match="kv_cache is one of an MLA layer"):
        foveal.select(spec()).make_layer(spec()).update_kv_cache(q, k, cache, starts)


def test_one_builder_from_many_threads():
    layer_spec = spec()
    backend = foveal.select(layer_spec)
    cache = backend.kv_cache(layer_spec, naive.random(3, 4, 2, BLOCK, 2, 8))
    builder, layer = backend.make_builder(layer_spec, BLOCK, 4), backend.make_layer(layer_spec)
    query = naive.random(1, 2, 4, 8)

    def run(results):
        for _ in range(200):
            plan = builder.build(np.array([0, 2], np.int32), np.array([40], np.int32), block_table=np.array([[1, 2, 3]], np.int32))
            results.append(layer.forward(query, cache, plan, np.empty_like(query)))

    results = [[] for _ in range(4)]
    threads = [threading.Thread(target=run, args=(r,)) for r in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(output, results[0][0]) for r in results for output in r) and len(results[3]) == 200


def test_explain():
    selection = foveal.explain(spec(), device="cpu")
    assert selection.chosen == "CPU_ATTN" and "CPU_ATTN" in str(selection) and selection.summary.startswith("CPU_ATTN")
    assert json.loads(selection.json)["config"]["head_size"] == 8
    by_id = {candidate["id"]: candidate for candidate in selection.candidates}
    assert by_id["CPU_ATTN"]["chosen"] and by_id["CPU_ATTN"]["reasons"] == []
    assert any("device is cpu" in reason for reason in by_id["FLASH_ATTN"]["reasons"])
    assert foveal.explain(spec(), device="cuda:0", compute_capability=90, backend="CPU_ATTN").chosen is None
    with pytest.raises(foveal.UnsupportedError, match="CPU_ATTN.*cannot serve"):
        foveal.select(spec(), device="cuda", compute_capability=90, backend="cpu_attn")
    assert issubclass(foveal.UnsupportedError, ValueError)
    assert foveal.devices()[0]["device"] == "cpu"


def test_cascades_and_graphs_are_asked_of_the_builder():
    spec = foveal.Spec(num_heads=4, num_kv_heads=4, head_size=16, dtype="float32")
    builder = foveal.select(spec).make_builder(spec, 16, 4)
    assert builder.use_cascade(256, num_reqs=64, num_tokens=64, single_token_queries=True) in (True, False)
    assert builder.use_cascade(0, 1, 1) is False
    with pytest.raises(ValueError, match="num_reqs"):
        builder.use_cascade(256, num_reqs=-1, num_tokens=1)
    step = (np.array([0, 1], np.int32), np.array([1], np.int32))
    with pytest.raises(foveal.UnsupportedError, match="CPU_ATTN has graph support 'never'"):
        builder.build(*step, block_table=np.array([[0]], np.int32), for_graph_capture=True)
    with pytest.raises(ValueError, match="for_graph_capture is True, common_prefix_len must be 0"):
        builder.build(*step, block_table=np.array([[0]], np.int32), common_prefix_len=16, for_graph_capture=True)
