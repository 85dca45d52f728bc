"""10,000 calls of each kind leave no memory and no references behind, neither those that succeed nor those that fail."""

import gc
import sys
import tracemalloc

import ml_dtypes
import naive
import numpy as np
import pytest

import foveal

CALLS = 10_000


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def engine():
    spec = foveal.Spec(num_heads=4, num_kv_heads=2, head_size=8, dtype="f32")
    backend = foveal.select(spec)
    memory = np.zeros((4, 2, 16, 2, 8), np.float32)
    return spec, backend, memory, backend.make_builder(spec, 16, 4), backend.make_layer(spec)


def make_step():
    spec, backend, memory, builder, layer = engine()
    query, key, output = naive.random(1, 2, 4, 8), naive.random(2, 2, 2, 8), np.empty((2, 4, 8), np.float32)
    starts, lens, table, slots = np.array([0, 2], np.int32), np.array([2], np.int32), np.array([[1]], np.int32), np.array([16, 17], np.int64)
    arrays = (memory, query, key, output, starts, lens, table, slots)

    def step():
        cache = backend.kv_cache(spec, memory)
        plan = builder.build(starts, lens, block_table=table, slot_mapping=slots)
        layer.update_kv_cache(key, key, cache, slots)
        layer.forward(query, cache, plan, output)

    return step, arrays


def make_functions():
    q, k = naive.random(1, 1, 2, 2, 8), naive.random(2, 1, 3, 2, 8)
    half = q.astype(ml_dtypes.bfloat16)

    def call():
        foveal.attention(q, k, k, return_lse=True)
        foveal.attention(half, half, half, sinks=[1.0, 2.0])

    return call, (q, k, half)


def make_errors():
    spec, backend, memory, builder, layer = engine()
    q, wrong = naive.random(1, 1, 2, 2, 8), naive.random(2, 1, 3, 2, 8).astype(np.float16)
    plan = builder.build(np.array([0, 2], np.int32), np.array([2], np.int32))
    read_only = np.zeros((2, 4, 8), np.float32)
    read_only.flags.writeable = False

    def call():
        for action in (
            lambda: foveal.attention(q, wrong, wrong),
            lambda: foveal.attention(q, "x", q),
            lambda: foveal.Spec(num_heads=3, num_kv_heads=2, head_size=8),
            lambda: layer.forward(q[0], (wrong[0], q), plan, read_only),
            lambda: builder.build(np.array([0, 2], np.int32), np.array([9], np.int32), block_table=np.array([[9]], np.int32)),
        ):
            with pytest.raises((ValueError, TypeError)):
                action()

    return call, (q, wrong, read_only)


def make_objects():
    def call():
        spec = foveal.Spec(num_heads=2, head_size=8, dtype="f32", sinks=[1.0, 2.0], kv_sharing_target="another")
        backend = foveal.select(spec)
        backend.make_builder(spec, 16, 4)
        backend.make_layer(spec)
        str(foveal.explain(spec).candidates)

    return call, ()


@pytest.mark.parametrize(("make", "calls"), [(make_step, CALLS), (make_functions, CALLS), (make_errors, CALLS // 5), (make_objects, CALLS // 10)])
def test_no_leak(make, calls):
    call, arrays = make()
    for _ in range(calls // 10):  # Caches fill.
        call()
    gc.collect()
    references, before = [sys.getrefcount(a) for a in arrays], resident_bytes()
    for _ in range(calls):
        call()
    gc.collect()
    assert [sys.getrefcount(a) for a in arrays] == references
    assert resident_bytes() - before < max(calls * 40, 1 << 20)
    # Python's own objects, of fewer calls: tracing is slow. Free lists of the interpreter count as memory in use and fill up.
    traced_calls = min(calls, 2000)
    tracemalloc.start()
    for _ in range(traced_calls // 10):
        call()
    gc.collect()
    traced, _ = tracemalloc.get_traced_memory()
    for _ in range(traced_calls):
        call()
    gc.collect()
    traced_after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert traced_after - traced < 60_000  # One object a call would be more.
