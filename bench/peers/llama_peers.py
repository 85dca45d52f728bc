#!/usr/bin/env python3
"""llama.cpp's flash attention on the CPU, on the shapes that `foveal bench --json` wrote.

    foveal bench prefill decode --json rows.json
    bench/peers/llama_peers.py rows.json [--threads N] [--out rows_with_peers.json]

Times every prefill and decode row: the operator ggml_flash_attn_ext alone, out of the library that llama-cpp-python
builds for the processor it is installed on. Keys and values are plain, in the row's dtype; queries are float32, as
llama.cpp has them. A graph of that one operator is computed by its own threads.
"""

import ctypes
import importlib.metadata
import os
import pathlib

import numpy as np
import peers

TYPES = {"f32": 0, "f16": 1, "bf16": 30}  # enum ggml_type
SIZES = {"f32": 4, "f16": 2, "bf16": 2}


class InitParams(ctypes.Structure):
    """ggml_init_params"""

    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


def load_ggml():
    package = importlib.metadata.distribution("llama-cpp-python")
    folder = pathlib.Path(package.locate_file("llama_cpp/lib"))
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), mode=ctypes.RTLD_GLOBAL)
    pointer, integer, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    for library, name, result, arguments in (
            (base, "ggml_init", pointer, [InitParams]), (base, "ggml_free", None, [pointer]),
            (base, "ggml_new_tensor_4d", pointer, [pointer, ctypes.c_int] + [integer] * 4),
            (base, "ggml_get_data", pointer, [pointer]),
            (base, "ggml_flash_attn_ext", pointer, [pointer] * 5 + [number] * 3),
            (base, "ggml_new_graph", pointer, [pointer]),
            (base, "ggml_build_forward_expand", None, [pointer, pointer]),
            (cpu, "ggml_graph_compute_with_ctx", ctypes.c_int, [pointer, pointer, ctypes.c_int])):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        setattr(base, name, function)
    return base


def rounded(dtype, tensor):
    """As float32, and as the bytes of the dtype."""
    if dtype == "bf16":
        bits = tensor.view(np.uint32)
        bits = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return (bits.astype(np.uint32) << 16).view(np.float32), bits
    stored = tensor.astype({"f32": np.float32, "f16": np.float16}[dtype])
    return stored.astype(np.float32), stored


def time_us(ggml, row, threads):
    dtype = row["dtype"]
    if dtype not in TYPES:
        raise peers.Unsupported(f"dtype is {dtype}, llama.cpp takes {', '.join(TYPES)}")
    query, key, value = peers.tensors(row)
    (key, key_bytes), (value, value_bytes) = rounded(dtype, key), rounded(dtype, value)
    batch, queries, keys, size = row["batch"], row["q_len"], row["kv_len"], row["head_size"]
    mask_rows = (queries + 63) // 64 * 64  # Of a multiple of 64, which older versions ask for.
    needed = 8 * query.size + SIZES[dtype] * (key.size + value.size) + 2 * keys * mask_rows
    context = ggml.ggml_init(InitParams(needed + query.size // 8 + (64 << 20), None, False))
    if not context:
        raise peers.Unsupported(f"ggml_init found no {needed} bytes")

    def tensor(kind, array):
        shape = (1,) * (4 - array.ndim) + array.shape
        made = ggml.ggml_new_tensor_4d(context, kind, *reversed(shape))
        array = np.ascontiguousarray(array)
        ctypes.memmove(ggml.ggml_get_data(made), array.ctypes.data, array.nbytes)
        return made

    try:
        # Heads outside of tokens in memory, as its KV cache has them for an operator.
        by_head = [part.transpose(0, 2, 1, 3) for part in (query, key_bytes, value_bytes)]
        mask = None
        if row["causal"] and queries > 1:
            seen = np.arange(keys)[None, :] <= keys - queries + np.arange(mask_rows)[:, None]
            mask = tensor(TYPES["f16"], np.where(seen, np.float16(0), np.float16(-np.inf)))
        result = ggml.ggml_flash_attn_ext(context, tensor(0, by_head[0]), tensor(TYPES[dtype], by_head[1]),
                                          tensor(TYPES[dtype], by_head[2]), mask, size ** -0.5, 0.0, 0.0)
        graph = ggml.ggml_new_graph(context)
        ggml.ggml_build_forward_expand(graph, result)

        def attend():
            if ggml.ggml_graph_compute_with_ctx(context, graph, threads) != 0:
                raise peers.Unsupported("ggml_graph_compute failed")

        attend()
        memory = (ctypes.c_float * query.size).from_address(ggml.ggml_get_data(result))
        peers.require_right(row, query, key, value, np.array(memory).reshape(query.shape))
        return peers.median_us_on_cpu(attend)
    finally:
        ggml.ggml_free(context)


def make_peers(report, threads):
    if report["device"] != "cpu":
        raise SystemExit(f"rows are of {report['device']}, this script times on a CPU")
    ggml = load_ggml()
    threads = threads or len(os.sched_getaffinity(0))
    return ({"llama-cpp-python": importlib.metadata.version("llama-cpp-python")}, ("prefill", "decode"),
            {"llama.cpp": lambda row: time_us(ggml, row, threads)})


if __name__ == "__main__":
    peers.main(__doc__, make_peers)
