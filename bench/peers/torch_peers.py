#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on the shapes that `foveal bench --json` wrote.

    foveal bench prefill --device cuda --json rows.json
    bench/peers/torch_peers.py rows.json [--threads N] [--out rows_with_peers.json]

Times every prefill and decode row and prints both beside each other: on a GPU the FlashAttention-2
and cuDNN backends, as medians of graph replays like foveal's own, and prefill only; on a CPU its
flash attention. Run it right behind foveal on the same machine: clocks differ between machines and
over hours. PyTorch has no paged cache: its keys and values are plain.
"""

import argparse
import json
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

GPU_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
CPU_BACKENDS = {"torch": SDPBackend.FLASH_ATTENTION}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def median_us_on_cpu(call, least=3, most=100, enough_us=500e3):
    """As CpuMachine::time() does it."""
    call()
    times = []
    while len(times) < least or (len(times) < most and sum(times) < enough_us):
        begin = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - begin))
    return sorted(times)[len(times) // 2]


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


def time_peers(row, device):
    def tensor(heads, length):  # Tokens outside of heads in memory, as foveal has them.
        shape = (row["batch"], length, heads, row["head_size"])
        return torch.randn(shape, device=device, dtype=DTYPES[row["dtype"]]).transpose(1, 2)

    query = tensor(row["num_heads"], row["q_len"])
    key, value = (tensor(row["num_kv_heads"], row["kv_len"]) for _ in range(2))
    grouped = {"enable_gqa": True} if row["num_kv_heads"] != row["num_heads"] else {}

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=row["causal"] and row["q_len"] > 1, **grouped)

    peers = {}
    for name, backend in (GPU_BACKENDS if device == "cuda" else CPU_BACKENDS).items():
        try:
            with sdpa_kernel(backend), torch.no_grad():
                us = (median_us if device == "cuda" else median_us_on_cpu)(attend)
            peers[name] = {"median_us": us} | {rate: row[rate] * row["median_us"] / us for rate in ("tflops", "gb_per_s") if rate in row}
        except RuntimeError as error:
            peers[name] = {"failure": str(error).splitlines()[0]}
    return peers


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="what foveal bench --json wrote")
    parser.add_argument("--threads", type=int, help="CPU threads, as foveal had them")
    parser.add_argument("--out", help="write the same with the peers' times added to each row")
    options = parser.parse_args()
    with open(options.rows, encoding="utf-8") as file:
        report = json.load(file)

    device = report["device"]
    if options.threads:
        torch.set_num_threads(options.threads)
    report["peers"] = {"torch": torch.__version__}
    if device == "cuda":
        report["peers"] |= {"cudnn": torch.backends.cudnn.version(), "machine": torch.cuda.get_device_name()}
    names = GPU_BACKENDS if device == "cuda" else CPU_BACKENDS
    print(f"foveal {report['version']} on {report['machine']}; {report['peers']}")
    print("TFLOP/s (prefill) or GB/s (decode), and how many times as fast foveal is\n")
    print(f"{'shape':60} {'foveal':>8}" + "".join(f" {name:>8} {'ratio':>6}" for name in names))
    done = {}  # Plain and paged rows of a shape have the same peers.
    for row in report["rows"]:
        rate = {"prefill": "tflops", "decode": "gb_per_s" if device == "cpu" else None}.get(row["kind"])
        if rate is None or "failure" in row:
            continue
        shape = (f"{row['kind']} {row['batch']} x {row['kv_len']} {row['num_heads']}/{row['num_kv_heads']} heads of "
                 f"{row['head_size']} {'causal' if row['causal'] else 'full'} {row['dtype']}")
        row["peers"] = done[shape] if shape in done else done.setdefault(shape, time_peers(row, device))
        line = f"{shape + (' paged' if row['block_size'] else ''):60} {row[rate]:8.3g}"
        for peer in row["peers"].values():
            if "failure" in peer:
                line += f" {'-':>8} {'-':>6}"
            else:
                line += f" {peer[rate]:8.3g} {peer['median_us'] / row['median_us']:6.2f}"
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
