"""Foveal's kernels and PyTorch in one process: python3 gpu_check.py libfoveal_gpu_check.so [foveal-first]"""

import ctypes
import sys

library = ctypes.CDLL(sys.argv[1])
library.foveal_gpu_check_scale.restype = ctypes.c_char_p
library.foveal_gpu_check_scale.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int,
                                           ctypes.c_void_p, ctypes.c_int]


def scale(out, source, factor, stream):
    """out = factor * source on PyTorch's stream."""
    error = library.foveal_gpu_check_scale(out.data_ptr(), source.data_ptr(), out.numel(), factor,
                                           stream.cuda_stream, out.device.index)
    assert error is None, error.decode()


if "foveal-first" in sys.argv:
    # Foveal retains the primary context before the runtime knows of any. No data: only the load.
    error = library.foveal_gpu_check_scale(None, None, 0, 2, None, 0)
    assert error is None, error.decode()

import torch  # noqa: E402

x = torch.randn(100_000, device="cuda:0")
out = torch.empty_like(x)
stream = torch.cuda.Stream()
with torch.cuda.stream(stream):
    y = x + 1
    scale(out, y, 2, stream)
    z = out * 3
stream.synchronize()
assert torch.equal(z, (x + 1) * 2 * 3)
print("on PyTorch's stream and memory, between its kernels: ok")

# In PyTorch's graph, with the kernel's first use inside the capture (factor 9 is a new key).
static = x.clone()
graph = torch.cuda.CUDAGraph()
torch.cuda.synchronize()
with torch.cuda.graph(graph):
    shifted = static + 1
    scale(out, shifted, 9, torch.cuda.current_stream())
    result = out - 1
for seed in range(3):
    torch.manual_seed(seed)
    static.copy_(torch.randn_like(static))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, (static + 1) * 9 - 1)
print("in PyTorch's graph, first used inside its capture, replayed with other data: ok")

product = torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
assert torch.isfinite(product).all()
print("PyTorch still works afterwards: ok")
