"""What a call of the engine's objects costs beside the C call, in microseconds: the best of many runs.

    python python/tests/bench_overhead.py
"""

import timeit

import numpy as np

import foveal

CALLS, RUNS = 2000, 30


def microseconds(call):
    return min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def measure(name, array, device="cpu", dtype="float32"):
    """`array` makes an array of the framework from one of NumPy."""
    spec = foveal.Spec(num_heads=1, head_size=8, dtype=dtype)
    backend = foveal.select(spec, device=device)
    cache = backend.kv_cache(spec, array(np.zeros((2, 2, 16, 1, 8), np.float32)))
    layer = backend.make_layer(spec)
    starts, lens, table, slots = (array(np.array(x, t)) for x, t in (([0, 1], "i4"), ([1], "i4"), ([[1]], "i4"), ([16], "i8")))
    sizes = {} if device == "cpu" else {"num_actual_tokens": 1, "max_query_len": 1, "max_seq_len": 1}
    builder = backend.make_builder(spec, 16, 2, device=device)
    plan = builder.build(starts, lens, block_table=table, slot_mapping=slots, **sizes)
    query, key, output = (array(np.zeros((1, 1, 8), np.float32)) for _ in range(3))
    in_c = min(foveal._foveal._time_forward(layer, query, cache, plan, output, CALLS) for _ in range(RUNS)) * 1e6
    forward = microseconds(lambda: layer.forward(query, cache, plan, output))
    nothing = microseconds(lambda: None)
    update = microseconds(lambda: layer.update_kv_cache(key, key, cache, slots))
    build = microseconds(lambda: builder.build(starts, lens, block_table=table, slot_mapping=slots, **sizes))
    print(f"{name:12} forward {forward - nothing:6.2f}  its C call {in_c:6.2f}  overhead {forward - nothing - in_c:6.2f}"
          f"   update_kv_cache {update - nothing:6.2f}   build {build - nothing:6.2f}")


if __name__ == "__main__":
    measure("NumPy", lambda x: x)
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed")
    else:
        measure("PyTorch", torch.from_numpy)
        if torch.cuda.is_available():
            half = lambda x: torch.from_numpy(x).to("cuda", torch.float16 if x.dtype == np.float32 else None)
            measure("PyTorch CUDA", half, "cuda:0", "float16")
