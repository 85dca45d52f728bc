"""Bad arguments raise ValueError or TypeError that name the argument; arrays are read as they are."""

import array

import ml_dtypes
import naive
import numpy as np
import pytest

import foveal

Q, K = naive.random(1, 1, 3, 4, 8), naive.random(2, 1, 5, 2, 8)
STEP = (np.array([0, 3], np.int32), np.array([5], np.int32))
CACHE = naive.random(3, 4, 2, 16, 2, 8)


def read_only(value):
    value = value.copy()
    value.flags.writeable = False
    return value


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: foveal.attention([1.0], K, K), TypeError, "query is a list, it must be an array"),
        (lambda: foveal.attention(None, K, K), TypeError, "query is None"),
        (lambda: foveal.attention(b"1234", K, K), TypeError, "query is a bytes"),
        (lambda: foveal.attention(np.ma.masked_array(Q), K, K), TypeError, "query is a numpy.ma"),
        (lambda: foveal.attention(Q.astype(np.float64), K, K), ValueError, "dtype is f64"),
        (lambda: foveal.attention(Q.astype(np.int32), K, K), ValueError, "query is i32"),
        (lambda: foveal.attention(Q.astype(complex), K, K), TypeError, "query has elements of the format 'Zd'"),
        (lambda: foveal.attention(Q.astype(object), K, K), TypeError, "query has elements of the format 'O'"),
        (lambda: foveal.attention(Q.astype(">f4"), K, K), TypeError, "query has elements of the format '>f'"),
        (lambda: foveal.attention(Q[0], K, K), ValueError, r"query is f32\[3, 4, 8\] on cpu, it must have 4 dimensions"),
        (lambda: foveal.attention(Q, K[..., ::2], K), ValueError, r"key"),
        (lambda: foveal.attention(Q, K, K[:, :3]), ValueError, r"value is f32\[1, 3, 2, 8\]"),
        (lambda: foveal.attention(Q, K.astype(np.float16), K.astype(np.float16)), ValueError, "key is f16"),
        (lambda: foveal.attention(Q[:, :, :3], K, K), ValueError, "num_heads is 3, it must be a multiple of num_kv_heads = 2"),
        (lambda: foveal.attention(Q, K, K, causal=1), TypeError, "causal is a int, it must be True or False"),
        (lambda: foveal.attention(Q, K, K, scale="big"), TypeError, "scale is a str, it must be a number"),
        (lambda: foveal.attention(Q, K, K, scale=float("nan")), ValueError, "scale is nan"),
        (lambda: foveal.attention(Q, K, K, scale=float("inf")), ValueError, "scale is inf"),
        (lambda: foveal.attention(Q, K, K, window=0), ValueError, "window is 0, it must be at least 1"),
        (lambda: foveal.attention(Q, K, K, window=(1, 2, 3)), ValueError, "window has 3 entries"),
        (lambda: foveal.attention(Q, K, K, window=1 << 70), ValueError, "window is an integer of more than 64 bits"),
        (lambda: foveal.attention(Q, K, K, alibi_slopes=[1.0]), ValueError, "alibi_slopes has 1 entries"),
        (lambda: foveal.attention(Q, K, K, sinks=[[1.0]] * 4), TypeError, "sinks is a list, it must be a sequence of numbers"),
        (lambda: foveal.attention(Q, K, K, sinks={1: 2}), TypeError, "sinks is a dict"),
        (lambda: foveal.attention(Q, K, K, stream="s"), TypeError, "stream is a str"),
        (lambda: foveal.attention(Q, K, K, out=np.empty((1, 3, 4, 4), np.float32)), ValueError, r"out is f32\[1, 3, 4, 4\]"),
        (lambda: foveal.attention(Q, K, K, out=np.empty((1, 3, 4, 8), np.float16)), ValueError, "out is f16"),
        (lambda: foveal.attention(Q, K, K, out=read_only(Q)), ValueError, "output is read-only, it must be writable"),
        (lambda: foveal.varlen_attention(Q[0], K[0], K[0], np.array([0, 3])), ValueError, "query_start_loc is i64"),
        (lambda: foveal.varlen_attention(Q[0], K[0], K[0], STEP[0], np.array([3, 0], np.int32)), ValueError, "key_start_loc decreases"),
        (lambda: foveal.varlen_attention(Q[0], K[0], K[0], np.array([0, 9], np.int32)), ValueError, "query_start_loc ends at 9"),
        (lambda: foveal.paged_attention(Q[0], CACHE, *STEP, np.array([[4]], np.int32)), ValueError, r"block_table\[0\]\[0\] names block 4"),
        (lambda: foveal.paged_attention(Q[0], CACHE, *STEP, None), TypeError, "block_table is None"),
        (lambda: foveal.paged_attention(Q[0], (CACHE,), *STEP, np.array([[1]], np.int32)), ValueError, "kv_cache is a tuple of 1"),
        (lambda: foveal.paged_attention(Q[0], CACHE[:, 0], *STEP, np.array([[1]], np.int32)), ValueError, "kv_cache is f32"),
        (lambda: foveal.paged_attention(Q[0], CACHE, *STEP, np.array([[1]], np.int32), common_prefix_len="x"), TypeError, "common_prefix_len is a str"),
        (lambda: foveal.merge_states(Q[0], Q[0, 0], Q[0], Q[0, 0]), ValueError, "a.lse"),
        (lambda: foveal.Spec(num_heads=4), TypeError, "head_size must be given"),
        (lambda: foveal.Spec(num_heads=4, head_size=8, heads=2), TypeError, "heads is unknown; known are num_heads"),
        (lambda: foveal.Spec(num_heads=4.0, head_size=8), TypeError, "num_heads is a float, it must be an integer"),
        (lambda: foveal.Spec(num_heads=True, head_size=8), TypeError, "num_heads is a bool"),
        (lambda: foveal.Spec(num_heads=4, head_size=8, dtype="int3"), ValueError, "dtype is 'int3', accepted are float32"),
        (lambda: foveal.Spec(num_heads=4, head_size=8, attn_type="x"), ValueError, "attn_type is 'x', accepted are 'decoder'"),
        (lambda: foveal.Spec(num_heads=4, head_size=8, mla=(1, 2)), TypeError, "mla is a tuple, it must be"),
        (lambda: foveal.select("spec"), TypeError, "spec is a str, it must be a foveal.Spec"),
        (lambda: foveal.select(foveal.Spec(num_heads=1, head_size=8), device="tpu"), ValueError, "device is 'tpu', accepted are 'cpu'"),
        (lambda: foveal.select(foveal.Spec(num_heads=1, head_size=8), block=1), TypeError, "block is unknown"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_outputs_are_untouched_on_errors():
    out = np.full((1, 3, 4, 8), 7, np.float32)
    with pytest.raises(ValueError, match="value"):
        foveal.attention(Q, K, K.astype(np.float16), out=out)
    assert (out == 7).all()


def test_buffers_and_read_only_inputs():
    """Whatever has a buffer will do: memoryviews, array.array, read-only arrays."""
    expected = foveal.attention(Q, K, K)
    np.testing.assert_array_equal(foveal.attention(memoryview(read_only(Q)), K, K), expected)
    flat = foveal.varlen_attention(Q[0], K[0], K[0], array.array("i", [0, 3]), memoryview(np.array([0, 5], np.int32)))
    np.testing.assert_array_equal(flat, expected[0])
    np.testing.assert_array_equal(foveal.attention(Q, K[:, ::-1], K[:, ::-1]), foveal.attention(Q, K[:, ::-1].copy(), K[:, ::-1].copy()))


def test_views_of_nothing_are_not_walked():
    """2^50 rows of no columns, by broadcasting: refused at once."""
    endless = np.broadcast_to(np.zeros((1, 0), np.int32), (1 << 50, 0))
    with pytest.raises(ValueError, match="block_table"):
        foveal.paged_attention(Q[0], CACHE, *STEP, endless)
    with pytest.raises(ValueError, match="block_table has more than"):
        foveal.paged_attention(Q[0], CACHE, *STEP, np.broadcast_to(np.zeros((1, 1), np.int32), (1 << 50, 1)))


def test_a_buffer_is_not_resized_while_it_is_held():
    memory = np.zeros((4, 2, 16, 2, 8), np.float32)
    cache = foveal.select(foveal.Spec(num_heads=4, num_kv_heads=2, head_size=8, dtype="f32")).kv_cache(
        foveal.Spec(num_heads=4, num_kv_heads=2, head_size=8, dtype="f32"), memory
    )
    with pytest.raises((ValueError, BufferError)):
        memory.resize((1, 1, 1, 1, 1))
    del cache


class OldProducer:
    """DLPack of before 1.0: no max_version, capsules without a version."""

    def __init__(self, value):
        self.value = value
        self.shape, self.dtype, self.reshape = value.shape, value.dtype, value.reshape

    def __dlpack__(self, stream=None):
        return self.value.__dlpack__()

    def __dlpack_device__(self):
        return self.value.__dlpack_device__()


class NewProducer(OldProducer):
    def __dlpack__(self, *, stream=None, max_version=None):
        assert max_version == (1, 1)
        return self.value.__dlpack__(max_version=max_version)


@pytest.mark.parametrize("producer", [OldProducer, NewProducer])
def test_other_producers_of_dlpack(producer):
    spec = foveal.Spec(num_heads=4, num_kv_heads=2, head_size=8, dtype="f32")
    backend = foveal.select(spec)
    layer, builder = backend.make_layer(spec), backend.make_builder(spec, 16)
    plan = builder.build(STEP[0], STEP[1], key_start_loc=np.array([0, 5], np.int32))
    output = np.empty((3, 4, 8), np.float32)
    layer.forward(producer(Q[0]), (producer(K[0]), K[0]), plan, producer(output))
    np.testing.assert_allclose(output, naive.attend(Q[0], K[0], K[0], causal=True)[0], rtol=0, atol=1e-5)
    if producer is NewProducer:
        with pytest.raises(ValueError, match="output is read-only"):
            layer.forward(Q[0], (K[0], K[0]), plan, producer(read_only(output)))
    with pytest.raises(TypeError, match="query: __dlpack__ of a .* returned no DLPack capsule"):
        bad = producer(Q[0])
        bad.value = type("Bad", (), {"__dlpack__": lambda self, **_: 3, "__dlpack_device__": lambda self: (1, 0)})()
        layer.forward(bad, (K[0], K[0]), plan, output)


def test_what_a_framework_says_names_the_argument():
    class Broken:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_):
            raise BufferError("it lies elsewhere\nand more")

    with pytest.raises(ValueError, match="^key cannot be read: it lies elsewhere$"):
        foveal.attention(Q, Broken(), K)


def test_ml_dtypes_of_a_cache():
    spec = foveal.Spec(num_heads=4, num_kv_heads=2, head_size=8, dtype=ml_dtypes.bfloat16, kv_cache_dtype=np.dtype(ml_dtypes.float8_e5m2))
    backend = foveal.select(spec)
    memory = np.zeros((2, 2, 16, 2, 8), ml_dtypes.float8_e5m2)
    cache = backend.kv_cache(spec, memory)
    key = naive.random(1, 1, 2, 8, dtype=ml_dtypes.bfloat16)
    backend.make_layer(spec).update_kv_cache(key, -key, cache, np.array([17], np.int64))
    np.testing.assert_array_equal(memory[1, 0, 1].astype(np.float32), key[0].astype(ml_dtypes.float8_e5m2).astype(np.float32))
    np.testing.assert_array_equal(memory[1, 1, 1].astype(np.float32), -key[0].astype(ml_dtypes.float8_e5m2).astype(np.float32))
