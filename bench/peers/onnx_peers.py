#!/usr/bin/env python3
"""ONNX Runtime's attention on the CPU, on the shapes that `foveal bench --json` wrote.

    foveal bench prefill decode --json rows.json
    bench/peers/onnx_peers.py rows.json [--threads N] [--out rows_with_peers.json]

Times every prefill and decode row: GroupQueryAttention where it is causal, with the cache in place for decode, and
MultiHeadAttention where it is not. Both are contrib operators, in float32 and float16.
"""

import numpy as np
import onnxruntime
import peers
from onnx import TensorProto, helper

DTYPES = {"f32": (TensorProto.FLOAT, np.float32), "f16": (TensorProto.FLOAT16, np.float16)}


def session_of(node, inputs, outputs, element, threads):
    def infos(names):
        return [helper.make_tensor_value_info(name, TensorProto.INT32 if name in ("seqlens_k", "total") else element, None)
                for name in names]

    graph = helper.make_graph([node], "attention", infos(inputs), infos(outputs))
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20),
                                                                   helper.make_opsetid("com.microsoft", 1)])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def attention(row, query, key, value, threads):
    """What attends, without arguments, and gives [batch, tokens, heads · size]."""
    element, numpy_type = DTYPES[row["dtype"]]

    def flat(tensor):
        return tensor.reshape(tensor.shape[0], tensor.shape[1], -1)

    feeds = {"query": flat(query), "key": flat(key), "value": flat(value)}
    outputs = ["output"]
    if not row["causal"]:
        if row["num_heads"] != row["num_kv_heads"]:
            raise peers.Unsupported("MultiHeadAttention has as many KV heads as heads")
        node = helper.make_node("MultiHeadAttention", list(feeds), outputs, domain="com.microsoft",
                                num_heads=row["num_heads"])
    else:
        past = row["kv_len"] - row["q_len"]
        feeds |= {name: np.ascontiguousarray(feeds[name][:, past:]) for name in ("key", "value")}
        if past:  # Both at their place in a cache as long as it must be, which new tokens are written into.
            feeds["past_key"], feeds["past_value"] = (np.ascontiguousarray(part.transpose(0, 2, 1, 3))
                                                      for part in (key, value))
        feeds["seqlens_k"] = np.full(row["batch"], row["kv_len"] - 1, np.int32)
        feeds["total"] = np.array(row["kv_len"], np.int32)
        outputs += ["present_key", "present_value"]
        names = ["query", "key", "value", *(("past_key", "past_value") if past else ("", "")), "seqlens_k", "total"]
        node = helper.make_node("GroupQueryAttention", names, outputs, domain="com.microsoft",
                                num_heads=row["num_heads"], kv_num_heads=row["num_kv_heads"])
    session = session_of(node, list(feeds), outputs, element, threads)
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    for name, held in values.items():
        binding.bind_ortvalue_input(name, held)
    values["output"] = onnxruntime.OrtValue.ortvalue_from_numpy(np.full(flat(query).shape, np.nan, numpy_type))
    for name in outputs:
        if name == "output":
            binding.bind_ortvalue_output(name, values[name])
        elif "past_key" in feeds:
            binding.bind_ortvalue_output(name, values[name.replace("present", "past")])
        else:
            shape = (row["batch"], row["num_kv_heads"], row["kv_len"], row["head_size"])
            values[name] = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(shape, numpy_type))
            binding.bind_ortvalue_output(name, values[name])
    return lambda: session.run_with_iobinding(binding), lambda: values["output"].numpy()


def time_us(row, threads):
    if row["dtype"] not in DTYPES:
        raise peers.Unsupported(f"dtype is {row['dtype']}, the operators take {', '.join(DTYPES)} on a CPU")
    query, key, value = (part.astype(DTYPES[row["dtype"]][1]) for part in peers.tensors(row))
    try:
        attend, output = attention(row, query, key, value, threads)
        attend()
        peers.require_right(row, query, key, value, output().reshape(query.shape))
        return peers.median_us_on_cpu(attend)
    except RuntimeError as error:  # The base of all that ONNX Runtime throws.
        raise peers.Unsupported(str(error).splitlines()[0]) from error


def make_peers(report, threads):
    if report["device"] != "cpu":
        raise SystemExit(f"rows are of {report['device']}, this script times on a CPU")
    return ({"onnxruntime": onnxruntime.__version__}, ("prefill", "decode"),
            {"onnxruntime": lambda row: time_us(row, threads)})


if __name__ == "__main__":
    peers.main(__doc__, make_peers)
