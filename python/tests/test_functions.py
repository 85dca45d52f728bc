"""The single-call functions on NumPy arrays, against attention written out."""

import ml_dtypes
import naive
import numpy as np
import pytest

import foveal

F32 = {"rtol": 0, "atol": 1e-5}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys", "heads", "kv_heads"), [(7, 7, 4, 2), (1, 19, 3, 1), (5, 12, 2, 2)])
def test_dense(causal, queries, keys, heads, kv_heads):
    q, k, v = naive.random(1, 3, queries, heads, 16), naive.random(2, 3, keys, kv_heads, 16), naive.random(3, 3, keys, kv_heads, 16)
    output, lse = foveal.attention(q, k, v, causal=causal, return_lse=True)
    assert output.shape == (3, queries, heads, 16) and output.dtype == np.float32 and lse.shape == (3, heads, queries)
    for b in range(3):
        expected, expected_lse = naive.attend(q[b], k[b], v[b], causal=causal)
        np.testing.assert_allclose(output[b], expected, **F32)
        np.testing.assert_allclose(lse[b], expected_lse, **F32)


@pytest.mark.parametrize(
    ("options", "reference"),
    [
        ({"scale": 0.0}, {"scale": 0.0}),
        ({"scale": 0.3}, {"scale": 0.3}),
        ({"window": 3}, {"window": 3}),
        ({"window": (2, 1)}, {"window": (2, 1)}),
        ({"logits_soft_cap": 0.5}, {"cap": 0.5}),
        ({"alibi_slopes": [0.5, 0.25]}, {"slopes": [0.5, 0.25]}),
        ({"sinks": np.array([1.0, -0.5], np.float32)}, {"sinks": [1.0, -0.5]}),
    ],
)
def test_every_option_reaches_the_kernel(options, reference):
    q, k, v = naive.random(1, 2, 6, 2, 8), naive.random(2, 2, 9, 1, 8), naive.random(3, 2, 9, 1, 8)
    causal = options.get("window") != (2, 1)
    output = foveal.attention(q, k, v, causal=causal, **options)
    plain = foveal.attention(q, k, v, causal=causal)
    for b in range(2):
        np.testing.assert_allclose(output[b], naive.attend(q[b], k[b], v[b], causal=causal, **reference)[0], **F32)
    assert np.abs(output - plain).max() > 1e-3


def test_values_of_another_size():
    q, k, v = naive.random(1, 1, 4, 2, 24), naive.random(2, 1, 4, 2, 24), naive.random(3, 1, 4, 2, 16)
    np.testing.assert_allclose(foveal.attention(q, k, v)[0], naive.attend(q[0], k[0], v[0])[0], **F32)


@pytest.mark.parametrize("joined", [True, False])
def test_transposed_heads_and_out(joined):
    """[batch, heads, rows, size] transposed, as transformers passes it; the output too. Nothing is copied."""
    q, k, v = naive.random(1, 2, 4, 5, 8), naive.random(2, 2, 2, 9, 8), naive.random(3, 2, 2, 9, 8)
    out = np.zeros((2, 5, 4, 8), np.float32) if joined else np.zeros((2, 4, 5, 8), np.float32).transpose(0, 2, 1, 3)
    args = [x.transpose(0, 2, 1, 3) for x in (q, k, v)]
    result, lse = foveal.attention(*args, causal=True, out=out, return_lse=True)
    assert result is out
    for b in range(2):
        expected, expected_lse = naive.attend(*(x[b] for x in args), causal=True)
        np.testing.assert_allclose(out[b], expected, **F32)
        np.testing.assert_allclose(lse[b], expected_lse, **F32)


def test_only_the_output_is_transposed():
    """Its rows of all batches are not one view: a reshape would write to a copy."""
    q, k, v = naive.random(1, 2, 5, 4, 8), naive.random(2, 2, 9, 2, 8), naive.random(3, 2, 9, 2, 8)
    out = np.zeros((2, 4, 5, 8), np.float32).transpose(0, 2, 1, 3)
    foveal.attention(q, k, v, out=out)
    np.testing.assert_array_equal(out, foveal.attention(q, k, v))


@pytest.mark.parametrize(("dtype", "bound"), [(np.float16, 2e-3), (ml_dtypes.bfloat16, 2e-2)])
def test_half_precisions(dtype, bound):
    """NumPy has no bfloat16 of its own: ml_dtypes' is read."""
    q, k, v = (naive.random(i, 1, 6, 2, 32, dtype=dtype) for i in range(3))
    output = foveal.attention(q, k, v)
    assert output.dtype == dtype
    np.testing.assert_allclose(output[0].astype(np.float64), naive.attend(q[0], k[0], v[0])[0], rtol=0, atol=bound)


def test_varlen():
    q, k, v = naive.random(1, 9, 4, 8), naive.random(2, 14, 2, 8), naive.random(3, 14, 2, 8)
    starts, key_starts = np.array([0, 5, 5, 9], np.int32), np.array([0, 6, 8, 14], np.int32)
    output, lse = foveal.varlen_attention(q, k, v, starts, key_starts, causal=True, return_lse=True)
    assert lse.shape == (4, 9)
    for r in range(3):
        rows, keys = slice(starts[r], starts[r + 1]), slice(key_starts[r], key_starts[r + 1])
        expected, expected_lse = naive.attend(q[rows], k[keys], v[keys], causal=True)
        np.testing.assert_allclose(output[rows], expected, **F32)
        np.testing.assert_allclose(lse[:, rows], expected_lse, **F32)
    same = foveal.varlen_attention(q, k[:9], v[:9], starts)
    np.testing.assert_allclose(same[:5], naive.attend(q[:5], k[:5], v[:5])[0], **F32)


@pytest.mark.parametrize("as_views", [False, True])
def test_paged(as_views):
    cache = naive.random(4, 6, 2, 16, 2, 8)
    q = naive.random(1, 5, 4, 8)
    starts, lens = np.array([0, 4, 5], np.int32), np.array([20, 9], np.int32)
    table = np.array([[3, 1], [5, 0]], np.int32)
    kv = (cache[:, 0], cache[:, 1]) if as_views else cache
    output, lse = foveal.paged_attention(q, kv, starts, lens, table, return_lse=True)
    for r in range(2):
        k, v = (cache[table[r], i].reshape(-1, 2, 8)[: lens[r]] for i in range(2))
        rows = slice(starts[r], starts[r + 1])
        expected, expected_lse = naive.attend(q[rows], k, v, causal=True)
        np.testing.assert_allclose(output[rows], expected, **F32)
        np.testing.assert_allclose(lse[:, rows], expected_lse, **F32)


def test_paged_fp8_scales():
    stored = naive.random(4, 3, 2, 16, 1, 8).astype(ml_dtypes.float8_e4m3fn)
    q = naive.random(1, 1, 2, 8)
    args = (np.array([0, 1], np.int32), np.array([17], np.int32), np.array([[2, 1]], np.int32))
    output = foveal.paged_attention(q, stored, *args, k_scale=2.0, v_scale=0.5)
    values = stored.astype(np.float64)[[2, 1]]
    k, v = (values[:, i].reshape(-1, 1, 8)[:17] for i in range(2))
    np.testing.assert_allclose(output, naive.attend(q, 2.0 * k, 0.5 * v)[0], rtol=0, atol=1e-5)


def test_merge():
    q, k, v = naive.random(1, 3, 2, 8), naive.random(2, 10, 2, 8), naive.random(3, 10, 2, 8)
    starts = np.array([0, 3], np.int32)
    parts = []
    for keys in (slice(0, 4), slice(4, 10)):
        key_starts = np.array([0, keys.stop - keys.start], np.int32)
        parts += foveal.varlen_attention(q, k[keys], v[keys], starts, key_starts, return_lse=True)
    output, lse = foveal.merge_states(*parts)
    expected, expected_lse = naive.attend(q, k, v)
    np.testing.assert_allclose(output, expected, **F32)
    np.testing.assert_allclose(lse, expected_lse, **F32)
    written, _ = foveal.merge_states(*parts, out=parts[0], out_lse=parts[1])
    assert written is parts[0]
    np.testing.assert_array_equal(parts[0], output)


def test_empty_batches():
    assert foveal.attention(np.zeros((0, 3, 2, 8), np.float32), np.zeros((0, 3, 2, 8), np.float32), np.zeros((0, 3, 2, 8), np.float32)).shape == (0, 3, 2, 8)
    none = np.zeros((1, 0, 2, 8), np.float32)
    assert not foveal.attention(np.ones((1, 2, 2, 8), np.float32), none, none).any()


def test_a_call_like_one_before_is_checked_like_the_first():
    q, k, v = naive.random(1, 1, 4, 2, 16), naive.random(2, 1, 9, 2, 16), naive.random(3, 1, 9, 2, 16)
    foveal.attention(q, k, v, window=1, logits_soft_cap=1)
    for window in (1.0, True):
        with pytest.raises(TypeError, match="window is a"):
            foveal.attention(q, k, v, window=window, logits_soft_cap=1)
    with pytest.raises(TypeError, match="window"):
        foveal.attention(q, k, v, window=(1.0, 0))


@pytest.mark.parametrize("shape", [(1, 1, 1, 9), (1, 4, 5, 9), (3, 1, 5, 9), (3, 4, 5, 9)])
def test_a_bias(shape):
    q, k, v = naive.random(1, 3, 5, 4, 16), naive.random(2, 3, 9, 2, 16), naive.random(3, 3, 9, 2, 16)
    bias = naive.random(4, *shape)
    bias[..., 2] = -np.inf  # Hidden from all.
    output, lse = foveal.attention(q, k, v, bias=bias, causal=True, logits_soft_cap=2.0, return_lse=True)
    whole = np.broadcast_to(bias, (3, 4, 5, 9))
    for b in range(3):
        expected, expected_lse = naive.attend(q[b], k[b], v[b], causal=True, cap=2.0, bias=whole[b])
        np.testing.assert_allclose(output[b], expected, **F32)
        np.testing.assert_allclose(lse[b], expected_lse, **F32)


@pytest.mark.parametrize("bias", [np.zeros((2, 4, 5, 9), np.float32), np.zeros((3, 4, 5, 1), np.float32), np.zeros((3, 4, 5, 9))])
def test_a_wrong_bias(bias):
    q, k, v = naive.random(1, 3, 5, 4, 16), naive.random(2, 3, 9, 2, 16), naive.random(3, 3, 9, 2, 16)
    with pytest.raises(ValueError, match="bias is"):
        foveal.attention(q, k, v, bias=bias)
    with pytest.raises(ValueError, match="alibi_slopes"):
        foveal.attention(q, k, v, bias=np.zeros((1, 1, 1, 9), np.float32), alibi_slopes=[0.1] * 4)
