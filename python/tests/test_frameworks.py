"""Arrays of PyTorch, JAX and CuPy, where they are installed, on the CPU and on a CUDA device where there is one."""

import naive
import numpy as np
import pytest

import foveal

CUDA = any(device["device"] == "cuda:0" for device in foveal.devices())
Q, K, V = naive.random(1, 2, 5, 4, 16), naive.random(2, 2, 9, 2, 16), naive.random(3, 2, 9, 2, 16)
EXPECTED = np.stack([naive.attend(Q[b], K[b], V[b], causal=True)[0] for b in range(2)])
LSE = np.stack([naive.attend(Q[b], K[b], V[b], causal=True)[1] for b in range(2)])


def near(value, expected, bound):
    assert float(np.abs(np.asarray(value, np.float64) - expected).max()) < bound


def torch_places():
    return ["cpu", "cuda"] if CUDA else ["cpu"]


@pytest.mark.parametrize("place", torch_places())
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch(place, dtype):
    torch = pytest.importorskip("torch")
    if place == "cuda" and dtype == "float32":
        pytest.skip("FLASH_ATTN has float16 and bfloat16")
    q, k, v = (torch.from_numpy(x).to(place, getattr(torch, dtype)) for x in (Q, K, V))
    bound = {"float32": 1e-5, "float16": 3e-3, "bfloat16": 2e-2}[dtype]
    output, lse = foveal.attention(q, k, v, causal=True, return_lse=True)
    assert output.dtype == q.dtype and output.device == q.device and lse.dtype == torch.float32
    near(output.float().cpu(), EXPECTED, bound)
    near(lse.cpu(), LSE, bound * 4)
    out = torch.zeros_like(q)
    heads_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    assert foveal.attention(*heads_first, causal=True, out=out) is out
    near(out.float().cpu(), EXPECTED, bound)
    starts, key_starts = (torch.tensor(x, dtype=torch.int32, device=place) for x in ([0, 5, 10], [0, 9, 18]))
    flat = foveal.varlen_attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), starts, key_starts, causal=True, max_query_len=5, max_seq_len=9
    )
    near(flat.float().cpu(), EXPECTED.reshape(10, 4, 16), bound)


def test_torch_views_that_negate_lazily_are_refused():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    with pytest.raises(ValueError, match="value is a view that PyTorch negates"):
        foveal.attention(q, k, torch._neg_view(v))


def test_torch_gradients_are_refused():
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x) for x in (Q, K, V))
    with pytest.raises(ValueError, match="query requires a gradient"):
        foveal.attention(q.requires_grad_(), k, v)
    with torch.no_grad():
        near(foveal.attention(q, k, v, causal=True), EXPECTED, 1e-5)
    near(foveal.attention(torch.nn.Parameter(q).detach(), k, v, causal=True), EXPECTED, 1e-5)
    with pytest.raises(ValueError, match="query cannot be read: Cannot pack tensors on meta"):
        foveal.attention(q.detach().to("meta"), k, v)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_torch_streams():
    """The step's work is ordered behind what was queued on the caller's stream: a wrong stream would read zeros."""
    torch = pytest.importorskip("torch")
    q, k, v = (torch.from_numpy(x).to("cuda", torch.float16) for x in (Q, K, V))
    expected = foveal.attention(q, k, v, causal=True)
    for give in (lambda s: None, lambda s: s, lambda s: s.cuda_stream):
        side = torch.cuda.Stream()
        late = torch.zeros_like(q)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            late.copy_(q)
            output = foveal.attention(late, k, v, causal=True, stream=give(side))
        side.synchronize()
        assert torch.equal(output, expected)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_torch_paged_engine_on_cuda():
    torch = pytest.importorskip("torch")
    spec = foveal.Spec(num_heads=4, num_kv_heads=2, head_size=16, dtype=torch.float16)
    backend = foveal.select(spec, device="cuda:0")
    memory = torch.zeros(backend.kv_cache_layout(spec, 16, 4).shape, dtype=torch.float16, device="cuda")
    cache, layer = backend.kv_cache(spec, memory), backend.make_layer(spec)
    builder = backend.make_builder(spec, 16, 4, device=torch.device("cuda:0"))
    ints = lambda x, t=torch.int32: torch.tensor(x, dtype=t, device="cuda")
    k, v, q = (torch.from_numpy(x[0]).to("cuda", torch.float16) for x in (K, V, Q))
    slots = ints([32 + i for i in range(9)], torch.int64)
    layer.update_kv_cache(k, v, cache, slots)
    with pytest.raises(TypeError, match="num_actual_tokens must be given"):
        builder.build(ints([0, 5]), ints([9]), block_table=ints([[2]]))
    plan = builder.build(ints([0, 5]), ints([9]), block_table=ints([[2]]), num_actual_tokens=5, max_query_len=5, max_seq_len=9)
    output = layer.forward(q, cache, plan, torch.empty_like(q))
    near(output.float().cpu(), EXPECTED[0], 3e-3)
    again = foveal.paged_attention(q, memory, ints([0, 5]), ints([9]), ints([[2]]), max_query_len=5, max_seq_len=9)
    assert torch.equal(again, output)
    with pytest.raises(ValueError, match="query is f32.*cpu"):
        layer.forward(Q[0], cache, plan, output)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_torch_graph():
    """A captured forward, replayed for other lengths, each planned by a build of the same sizes."""
    torch = pytest.importorskip("torch")
    spec = foveal.Spec(num_heads=4, num_kv_heads=2, head_size=64, dtype="float16")
    backend = foveal.select(spec, device="cuda:0", needs_graphs="always")
    memory = torch.randn(backend.kv_cache_layout(spec, 16, 64).shape, dtype=torch.float16, device="cuda")
    cache, layer = backend.kv_cache(spec, memory), backend.make_layer(spec)
    stream = torch.cuda.Stream()
    builder = backend.make_builder(spec, 16, 64, device="cuda:0", stream=stream)
    query = torch.randn(8, 4, 64, dtype=torch.float16, device="cuda")
    output = torch.empty_like(query)
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device="cuda")
    starts, lens, table = ints([0, 3, 8]), ints([200, 300]), torch.arange(64, dtype=torch.int32, device="cuda").view(2, 32)
    sizes = dict(block_table=table, num_actual_tokens=8, max_query_len=8, max_seq_len=512)
    with torch.cuda.stream(stream):
        captured = builder.build(starts, lens, **sizes, for_graph_capture=True)
        layer.forward(query, cache, captured, output)  # Once outside, as every library wants it.
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            layer.forward(query, cache, captured, output)
        for new_starts, new_lens in (([0, 3, 8], [200, 300]), ([0, 8, 8], [512, 0]), ([0, 1, 8], [17, 400])):
            starts.copy_(ints(new_starts))
            lens.copy_(ints(new_lens))
            expected = foveal.paged_attention(query, memory, starts, lens, table, max_query_len=8, max_seq_len=512)
            output.zero_()
            plan = builder.build(starts, lens, **sizes)
            graph.replay()
            stream.synchronize()
            near(output.float().cpu(), expected.float().cpu().numpy(), 2e-3)
            del plan
    assert builder.use_cascade(4096, num_reqs=64, num_tokens=64 * 64) in (True, False)


def test_jax():
    jax = pytest.importorskip("jax")
    with jax.default_device(jax.devices("cpu")[0]):
        q, k, v = (jax.numpy.asarray(x) for x in (Q, K, V))
        output, lse = foveal.attention(q, k, v, causal=True, return_lse=True)
        assert isinstance(output, jax.Array) and isinstance(lse, jax.Array)
        near(output, EXPECTED, 1e-5)
        near(lse, LSE, 1e-5)
        half = foveal.attention(*(x.astype(jax.numpy.bfloat16) for x in (q, k, v)), causal=True)
        assert half.dtype == jax.numpy.bfloat16
        near(half.astype(jax.numpy.float32), EXPECTED, 2e-2)
        flat = foveal.varlen_attention(q[0], k[0], v[0], jax.numpy.array([0, 5], "int32"), jax.numpy.array([0, 9], "int32"), causal=True)
        near(flat, EXPECTED[0], 1e-5)
        with pytest.raises(ValueError, match="output is a JAX array|output is read-only"):
            foveal.attention(q, k, v, out=q)


@pytest.mark.skipif(not CUDA, reason="no CUDA device")
def test_cupy():
    cupy = pytest.importorskip("cupy")
    q, k, v = (cupy.asarray(x.astype(np.float16)) for x in (Q, K, V))
    output, lse = foveal.attention(q, k, v, causal=True, return_lse=True)
    assert isinstance(output, cupy.ndarray) and isinstance(lse, cupy.ndarray)
    near(cupy.asnumpy(output), EXPECTED, 3e-3)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        other = foveal.attention(q, k, v, causal=True)
        stream.synchronize()
    assert (other == output).all()
