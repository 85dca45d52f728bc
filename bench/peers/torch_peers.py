#!/usr/bin/env python3
"""PyTorch's scaled_dot_product_attention on the shapes that `foveal bench --json` wrote.

    foveal bench prefill --device cuda --json rows.json
    bench/peers/torch_peers.py rows.json [--threads N] [--out rows_with_peers.json]

Times every prefill and decode row and prints both beside each other: on a GPU the FlashAttention-2
and cuDNN backends, as medians of graph replays like foveal's own, and prefill only; on a CPU its
flash attention. Run it right behind foveal on the same machine: clocks differ between machines and
over hours. PyTorch has no paged cache: its keys and values are plain.
"""

import peers
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

GPU_BACKENDS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
CPU_BACKENDS = {"torch": SDPBackend.FLASH_ATTENTION}
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def median_us_on_gpu(call, least=3, most=100, enough_us=500e3):
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


def time_us(row, backend, device):
    if row["dtype"] not in DTYPES:
        raise peers.Unsupported(f"dtype is {row['dtype']}, PyTorch takes {', '.join(DTYPES)}")
    host = peers.tensors(row)
    # Tokens outside of heads in memory, as foveal has them.
    query, key, value = (torch.from_numpy(part).to(device, DTYPES[row["dtype"]]).transpose(1, 2) for part in host)
    grouped = {"enable_gqa": True} if row["num_kv_heads"] != row["num_heads"] else {}

    def attend():
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=row["causal"] and row["q_len"] > 1, **grouped)

    try:
        with sdpa_kernel(backend), torch.no_grad():
            output = attend().transpose(1, 2).float().cpu().numpy()
            peers.require_right(row, *(part.transpose(1, 2).float().cpu().numpy() for part in (query, key, value)),
                                output)
            return (median_us_on_gpu if device == "cuda" else peers.median_us_on_cpu)(attend)
    except RuntimeError as error:
        raise peers.Unsupported(str(error).splitlines()[0]) from error


def make_peers(report, threads):
    device = report["device"].split(":")[0]  # "cpu" or "cuda:0"
    versions = {"torch": torch.__version__}
    if threads:
        torch.set_num_threads(threads)
    if device == "cuda":
        versions |= {"cudnn": str(torch.backends.cudnn.version()), "GPU": torch.cuda.get_device_name()}
    backends = GPU_BACKENDS if device == "cuda" else CPU_BACKENDS
    return (versions, ("prefill",) if device == "cuda" else ("prefill", "decode"),
            {name: lambda row, backend=backend: time_us(row, backend, device) for name, backend in backends.items()})


if __name__ == "__main__":
    peers.main(__doc__, make_peers)
