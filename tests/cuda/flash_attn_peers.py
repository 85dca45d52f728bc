# torch's FA2 and cuDNN back ends on the shapes of flash_attn_bench, timed from graph replays.
import torch, itertools
from torch.nn.attention import SDPBackend, sdpa_kernel
F = torch.nn.functional.scaled_dot_product_attention
def time_us(fn, n=20):
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        for _ in range(3): fn()
        torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, stream=s): fn()
        ts = []
        for _ in range(n):
            a = torch.cuda.Event(True); b = torch.cuda.Event(True)
            a.record(s); g.replay(); b.record(s); b.synchronize(); ts.append(a.elapsed_time(b) * 1000)
    ts.sort(); return ts[len(ts) // 2]
for d, (b, n), causal in itertools.product((64, 128, 256), ((4, 4096), (1, 16384)), (False, True)):
    h = 2048 // d
    q, k, v = (torch.randn(b, n, h, d, device='cuda', dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    fl = 4 * b * h * n * n * d / (2 if causal else 1)
    out = []
    for name, be in (('FA2', SDPBackend.FLASH_ATTENTION), ('cuDNN', SDPBackend.CUDNN_ATTENTION)):
        try:
            with sdpa_kernel(be): us = time_us(lambda: F(q, k, v, is_causal=causal))
            out.append(f'{name} {us:9.1f} us {fl/us/1e6:6.1f} TFLOP/s')
        except Exception as e: out.append(f'{name} failed {str(e)[:80]}')
    print(f'peer b{b} q{n} d{d} causal={causal}: ' + '  '.join(out), flush=True)
x = torch.empty(1 << 30, dtype=torch.float32, device='cuda').normal_()
print('read bandwidth GB/s', x.numel() * 4 / time_us(lambda: x.sum(), 10) / 1e3)
