#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on the shapes that `foveal bench --json` wrote.

    foveal bench prefill --device cuda --json rows.json
    bench/peers/torch_peers.py rows.json [--out rows_with_peers.json]

Times the FlashAttention-2 and cuDNN backends on every prefill row, as medians of graph replays like
foveal's own, and prints both beside each other. Run it right behind foveal on the same machine:
clocks differ between machines and over hours.
"""

import argparse
import json

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def median_us(call, least=3, most=100, enough_us=500e3):
    """As CudaMachine::time() does it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
        graph.replay()
        times = []
        while len(times) < least or (len(times) < most and sum(times) < enough_us):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(1000 * begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def time_peers(row):
    def tensor(heads, length):  # Tokens outside of heads in memory, as foveal has them.
        shape = (row["batch"], length, heads, row["head_size"])
        return torch.randn(shape, device="cuda", dtype=DTYPES[row["dtype"]]).transpose(1, 2)

    query = tensor(row["num_heads"], row["q_len"])
    key, value = (tensor(row["num_kv_heads"], row["kv_len"]) for _ in range(2))
    grouped = {"enable_gqa": True} if row["num_kv_heads"] != row["num_heads"] else {}

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=row["causal"], **grouped)

    peers = {}
    for name, backend in BACKENDS.items():
        try:
            with sdpa_kernel(backend):
                us = median_us(attend)
            peers[name] = {"median_us": us, "tflops": row["flops"] / us / 1e6}
        except RuntimeError as error:
            peers[name] = {"failure": str(error).splitlines()[0]}
    return peers


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="what foveal bench --json wrote")
    parser.add_argument("--out", help="write the same with the peers' times added to each row")
    options = parser.parse_args()
    with open(options.rows, encoding="utf-8") as file:
        report = json.load(file)

    report["peers"] = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version(),
                       "machine": torch.cuda.get_device_name()}
    print(f"foveal {report['version']} on {report['machine']}")
    print(f"torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}; TFLOP/s, and how "
          "many times as fast foveal is\n")
    print(f"{'shape':44} {'foveal':>8} {'fa2':>8} {'ratio':>6} {'cudnn':>8} {'ratio':>6}")
    done = {}  # Plain and paged rows of a shape have the same peers.
    for row in report["rows"]:
        if row["kind"] != "prefill" or "failure" in row:
            continue
        shape = (f"{row['batch']} x {row['q_len']} {row['num_heads']}/{row['num_kv_heads']} heads of "
                 f"{row['head_size']} {'causal' if row['causal'] else 'full'} {row['dtype']}")
        row["peers"] = done[shape] if shape in done else done.setdefault(shape, time_peers(row))
        line = f"{shape + (' paged' if row['block_size'] else ''):44} {row['tflops']:8.1f}"
        for peer in row["peers"].values():
            if "failure" in peer:
                line += f" {'-':>8} {'-':>6}"
            else:
                line += f" {peer['tflops']:8.1f} {peer['median_us'] / row['median_us']:6.2f}"
        print(line, flush=True)
    for shape, peers in done.items():
        for name, peer in peers.items():
            if "failure" in peer:
                print(f"{name} on {shape}: {peer['failure']}")
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            json.dump(report, file, indent=2)
            file.write("\n")


if __name__ == "__main__":
    main()
