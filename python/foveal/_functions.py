"""Attention in single calls. Engines, which plan a step once for many layers, use the objects instead."""

from __future__ import annotations

from _thread import _local  # threading.local, without the rest of threading.

from . import _arrays, _foveal
from ._arrays import Described

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional, Union

    from ._arrays import Array, Stream

_KEPT = 64


class _Kept(_local):
    """What was selected and made for recent calls of this thread: a builder plans in memory of its own, so no other thread's step may meet it."""

    def __init__(self) -> None:
        self.entries: dict[Any, tuple[Any, ...]] = {}

    def get(self, members: tuple[tuple[str, Any], ...], device: str, stream: int, causal: bool, block_size: int, num_blocks: int) -> tuple[Any, ...]:
        # 3, 3.0 and True are the same key of a dict, and not the same argument.
        key = (members, tuple(tuple(map(type, value)) if isinstance(value, tuple) else type(value) for _, value in members), device, stream, causal,
               block_size, num_blocks)
        found = self.entries.pop(key, None)
        if found is None:
            spec = _foveal.Spec(**dict(members))
            backend = _foveal.select(spec, device=device, causal=causal, needs_lse=True, block_size=block_size if num_blocks else None)
            builder = backend.make_builder(spec, block_size, num_blocks, device=device, stream=stream)
            found = (spec, backend, builder, backend.make_layer(spec))
            if len(self.entries) >= _KEPT:
                del self.entries[next(iter(self.entries))]  # The one not used for longest.
        self.entries[key] = found
        return found


_kept = _Kept()


def _numbers(name: str, value: Any) -> Any:
    """Sequences and arrays as tuples, which can be keys."""
    if value is None or isinstance(value, (int, float)):
        return value
    numbers = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(numbers, (list, tuple)) or not all(isinstance(number, (int, float)) for number in numbers):
        raise TypeError(f"{name} is a {type(value).__name__}, it must be a sequence of numbers")
    return tuple(numbers)


def _members(query: Described, num_kv_heads: int, head_size_v: int, cache_dtype: str, scale: Any, window: Any, logits_soft_cap: Any, alibi_slopes: Any,
             sinks: Any, **rest: Any) -> tuple[tuple[str, Any], ...]:
    if query.dtype not in ("f32", "f16", "bf16", "f8e4m3", "f8e5m2", "f64"):
        raise ValueError(f"{query.name} is {query}, its dtype must be float32, float16, bfloat16 or float8")
    members = {
        "num_heads": query.shape[-2], "num_kv_heads": num_kv_heads, "head_size": query.shape[-1], "head_size_v": head_size_v,
        "dtype": query.dtype, "kv_cache_dtype": None if cache_dtype == query.dtype else cache_dtype, "scale": scale,
        "window": _numbers("window", window), "logits_soft_cap": logits_soft_cap, "alibi_slopes": _numbers("alibi_slopes", alibi_slopes),
        "sinks": _numbers("sinks", sinks), **rest,
    }
    for name in ("scale", "logits_soft_cap", "k_scale", "v_scale"):
        value = members.get(name)
        if value is not None and not isinstance(value, (int, float)):
            raise TypeError(f"{name} is a {type(value).__name__}, it must be a number")
    return tuple(members.items())


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is a {type(value).__name__}, it must be True or False")
    return value


def _stream(query: Described, stream: Stream) -> Stream:
    """The caller's, or the current one of the query's framework; a number serves as a key."""
    return query.stream if stream is None else stream


def _same_place(first: Described, *others: Described) -> None:
    for other in others:
        if other.device != first.device:
            raise ValueError(f"{other.name} is {other}, it must be on {first.device} as {first.name} is")


def _output(query: Described, out: Optional[Array], shape: tuple[int, ...]) -> Array:
    if out is None:
        return _arrays.empty(query, shape)
    given = Described("out", out, len(shape))
    if given.shape != shape or given.dtype != query.dtype or given.device != query.device:
        raise ValueError(f"out is {given}, it must be {query.dtype}{list(shape)} on {query.device}")
    return out


def _biased(members: tuple[tuple[str, Any], ...], query: Described, bias: Described, shape: tuple[int, ...], causal: bool) -> tuple[Any, list[Any]]:
    """A builder, and layers that add the bias: one, or one for each entry of the batch."""
    if bias.device != query.device or query.device != "cpu":
        raise _foveal.UnsupportedError(f"bias is {bias}, with query on {query.device}: a bias is added on the CPU only")
    if bias.dtype != "f32" or bias.shape[3] != shape[3] or any(n not in (1, wanted) for n, wanted in zip(bias.shape, shape)):
        raise ValueError(f"bias is {bias}, it must be f32{list(shape)}, where each of the first three may be 1")
    parts = [bias.array] if bias.shape[0] == 1 else [bias.view[b : b + 1] for b in range(shape[0])]
    specs = [_foveal.Spec(**dict(members), _score_bias=part) for part in parts]
    backend = _foveal.select(specs[0], device="cpu", causal=causal, needs_lse=True)
    return backend.make_builder(specs[0], 16, 0, device="cpu"), [backend.make_layer(spec) for spec in specs]


def attention(
    query: Array, key: Array, value: Array, *, causal: bool = False, scale: Optional[float] = None,
    window: Union[None, int, tuple[int, int]] = None, logits_soft_cap: Optional[float] = None, alibi_slopes: Any = None, sinks: Any = None,
    bias: Optional[Array] = None, out: Optional[Array] = None, return_lse: bool = False, stream: Stream = None,
) -> Any:
    """Attention of dense batches.

    query: [batch, queries, num_heads, head_size]; key: [batch, keys, num_kv_heads, head_size]; value: [batch, keys, num_kv_heads, head_size_v],
    of any strides with a contiguous last dimension (so [batch, heads, rows, size] transposed will do). num_kv_heads divides num_heads.
    Returns output [batch, queries, num_heads, head_size_v], of the query's framework and dtype, or `out` where it is given; with return_lse
    also the log-sum-exp, float32 [batch, num_heads, queries].

    causal: row i of q sees keys up to keys - queries + i. scale: by default 1/sqrt(head_size). window: W tokens, the token itself counted, or
    (left, right) without it; -1 is unlimited. logits_soft_cap: score becomes cap * tanh(score / cap). alibi_slopes, sinks: num_heads numbers.
    bias: float32 [batch, num_heads, queries, keys], each of the first three may be 1 for all; added to the scores after the soft cap, -inf
    hides a key. On the CPU only, and excludes alibi_slopes. stream: a CUDA stream; by default the current one of the query's framework.

    Raises ValueError or TypeError that names the argument, and UnsupportedError with every reason where no backend serves the call.
    """
    causal, return_lse = _flag("causal", causal), _flag("return_lse", return_lse)
    q, k, v = Described("query", query, 4), Described("key", key, 4), Described("value", value, 4)
    _same_place(q, k, v)
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    if k.shape[0] != batch:
        raise ValueError(f"key is {k}, it must have the batch of query, {batch}")
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(f"value is {v}, its first three dimensions must be those of key, {list(k.shape[:3])}")
    members = _members(q, k.shape[2], v.shape[3], q.dtype, scale, window, logits_soft_cap, alibi_slopes, sinks)
    stream = _stream(q, stream)
    output = _output(q, out, (batch, queries, heads, v.shape[3]))
    if bias is None or batch == 0:
        joined = batch <= 1 or (q.joined and k.joined and v.joined and Described("out", output, 4).joined)
        _, _, builder, *layers = _kept.get(members, q.device, stream, causal, 16, 0)
    else:
        joined = False
        builder, layers = _biased(members, q, Described("bias", bias, 4), (batch, heads, queries, keys), causal)
    at_once = batch if joined else 1
    starts = [queries * b for b in range(at_once + 1)]
    key_starts = [keys * b for b in range(at_once + 1)]
    plan = builder.build(
        _arrays.int32(q, starts), _arrays.int32(q, [keys] * at_once), key_start_loc=_arrays.int32(q, key_starts), causal=causal,
        num_actual_tokens=queries * at_once, max_query_len=queries, max_seq_len=keys,
    )
    lse = _arrays.empty(q, (heads, batch * queries), "float32") if return_lse else None
    if joined:
        rows = lambda d, a: a.reshape((d.shape[0] * d.shape[1], *d.shape[2:]))
        layers[0].forward(rows(q, q.view), (rows(k, k.view), rows(v, v.view)), plan, output.reshape((batch * queries, heads, v.shape[3])), lse, stream)
    else:
        for b in range(batch):
            part = None if lse is None else lse[:, b * queries : (b + 1) * queries]
            layers[b % len(layers)].forward(q.view[b], (k.view[b], v.view[b]), plan, output[b], part, stream)
    output = output if out is not None else _arrays.finish(q, output)
    return (output, _arrays.finish(q, _arrays.head_first(lse, batch))) if return_lse else output


def varlen_attention(
    query: Array, key: Array, value: Array, query_start_loc: Array, key_start_loc: Optional[Array] = None, *, causal: bool = False,
    scale: Optional[float] = None, window: Union[None, int, tuple[int, int]] = None, logits_soft_cap: Optional[float] = None, alibi_slopes: Any = None,
    sinks: Any = None, max_query_len: Optional[int] = None, max_seq_len: Optional[int] = None, out: Optional[Array] = None, return_lse: bool = False,
    stream: Stream = None,
) -> Any:
    """Attention of sequences of different lengths, packed one behind the other.

    query: [T, num_heads, head_size]; key: [keys, num_kv_heads, head_size]; value: [keys, num_kv_heads, head_size_v].
    query_start_loc, key_start_loc: int32 [num_reqs + 1], where each sequence's rows start (cu_seqlens elsewhere); key_start_loc is by default
    query_start_loc. On CUDA they must be there too, with max_query_len and max_seq_len, at least the longest lengths.
    Returns output [T, num_heads, head_size_v]; with return_lse also the log-sum-exp, float32 [num_heads, T]. The rest is as for `attention`.
    """
    causal, return_lse = _flag("causal", causal), _flag("return_lse", return_lse)
    q, k, v = Described("query", query, 3), Described("key", key, 3), Described("value", value, 3)
    _same_place(q, k, v)
    members = _members(q, k.shape[1], v.shape[2], q.dtype, scale, window, logits_soft_cap, alibi_slopes, sinks)
    key_name = "query_start_loc" if key_start_loc is None else "key_start_loc"
    key_starts = query_start_loc if key_start_loc is None else key_start_loc
    described = Described(key_name, key_starts, 1)
    if described.dtype != "i32" or described.shape[0] < 1:
        raise ValueError(f"{key_name} is {described}, it must be i32[num_reqs + 1]")
    if described.device == "cpu":
        values = memoryview(key_starts).tolist() if isinstance(key_starts, memoryview) else key_starts.tolist()
        if any(b < a for a, b in zip(values, values[1:])):
            raise ValueError(f"{key_name} decreases, it must not")
        lens = _arrays.int32(described, [b - a for a, b in zip(values, values[1:])])
    else:
        lens = key_starts[1:] - key_starts[:-1]
    stream = _stream(q, stream)
    output = _output(q, out, (*q.shape[:2], v.shape[2]))
    lse = _arrays.empty(q, (q.shape[1], q.shape[0]), "float32") if return_lse else None
    _, _, builder, layer = _kept.get(members, q.device, stream, causal, 16, 0)
    plan = builder.build(
        query_start_loc, lens, key_start_loc=key_starts, causal=causal, num_actual_tokens=q.shape[0], max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    layer.forward(query, (key, value), plan, output, lse, stream)
    output = output if out is not None else _arrays.finish(q, output)
    return (output, _arrays.finish(q, lse)) if return_lse else output


def paged_attention(
    query: Array, kv_cache: Union[Array, tuple[Array, Array]], query_start_loc: Array, seq_lens: Array, block_table: Array, *, causal: bool = True,
    scale: Optional[float] = None, window: Union[None, int, tuple[int, int]] = None, logits_soft_cap: Optional[float] = None, alibi_slopes: Any = None,
    sinks: Any = None, k_scale: Optional[float] = None, v_scale: Optional[float] = None, common_prefix_len: int = 0,
    max_query_len: Optional[int] = None, max_seq_len: Optional[int] = None, out: Optional[Array] = None, return_lse: bool = False,
    stream: Stream = None,
) -> Any:
    """Attention of one step over a paged KV cache.

    query: [T, num_heads, head_size]. kv_cache: [num_blocks, 2, block_size, num_kv_heads, head_size], or (key_cache, value_cache) of
    [num_blocks, block_size, num_kv_heads, head size] each, of any strides with a contiguous last dimension; fp8 too, where what is stored is
    value / k_scale and value / v_scale. query_start_loc: int32 [num_reqs + 1], where each request's query rows start; seq_lens: int32
    [num_reqs], keys of each, those of this step included; block_table: int32 [num_reqs, max_blocks]. The new keys must be in the cache. On CUDA
    these are there too, with max_query_len and max_seq_len. common_prefix_len: keys that all requests share in the same blocks.
    Returns output [T, num_heads, head_size_v]; with return_lse also the log-sum-exp, float32 [num_heads, T]. The rest is as for `attention`,
    but causal is the default.
    """
    causal, return_lse = _flag("causal", causal), _flag("return_lse", return_lse)
    q = Described("query", query, 3)
    if block_table is None:
        raise TypeError("block_table is None, it must be given")
    if isinstance(kv_cache, tuple):
        if len(kv_cache) != 2:
            raise ValueError(f"kv_cache is a tuple of {len(kv_cache)}, it must be (key_cache, value_cache) or one array")
        k, v = Described("kv_cache[0]", kv_cache[0], 4), Described("kv_cache[1]", kv_cache[1], 4)
        _same_place(q, k, v)
        num_blocks, block_size, kv_heads, _ = k.shape
        size_v = v.shape[3]
        cache = _foveal.KVCache(*kv_cache)
    else:
        k = Described("kv_cache", kv_cache, 5)
        _same_place(q, k)
        num_blocks, two, block_size, kv_heads, size_v = k.shape
        if two != 2:
            raise ValueError(f"kv_cache is {k}, it must be [num_blocks, 2, block_size, num_kv_heads, head_size]")
        cache = None
    if num_blocks < 1 or block_size < 1:
        raise ValueError(f"kv_cache is {k}, it must have blocks")
    members = _members(q, kv_heads, size_v, k.dtype, scale, window, logits_soft_cap, alibi_slopes, sinks, k_scale=k_scale, v_scale=v_scale)
    stream = _stream(q, stream)
    output = _output(q, out, (*q.shape[:2], size_v))
    lse = _arrays.empty(q, (q.shape[1], q.shape[0]), "float32") if return_lse else None
    spec, backend, builder, layer = _kept.get(members, q.device, stream, causal, block_size, num_blocks)
    plan = builder.build(
        query_start_loc, seq_lens, block_table=block_table, causal=causal, common_prefix_len=common_prefix_len, num_actual_tokens=q.shape[0],
        max_query_len=max_query_len, max_seq_len=max_seq_len,
    )
    layer.forward(query, backend.kv_cache(spec, kv_cache) if cache is None else cache, plan, output, lse, stream)
    output = output if out is not None else _arrays.finish(q, output)
    return (output, _arrays.finish(q, lse)) if return_lse else output


def merge_states(
    a: Array, a_lse: Array, b: Array, b_lse: Array, *, out: Optional[Array] = None, out_lse: Optional[Array] = None, stream: Stream = None,
) -> tuple[Array, Array]:
    """Merges two partial attentions of the same queries over disjoint keys.

    a, b: outputs [T, num_heads, head_size_v]; a_lse, b_lse: their log-sum-exps, float32 [num_heads, T]; an LSE of -inf or +inf marks an empty
    part. Returns (output, lse) of the same shapes; `out` and `out_lse` are written where given, and may be a or b and their LSEs.
    """
    part = Described("a", a, 3)
    output = _output(part, out, part.shape)
    lse = _arrays.empty(part, (part.shape[1], part.shape[0]), "float32") if out_lse is None else out_lse
    _foveal._merge_attn_states(output, lse, a, a_lse, b, b_lse, stream)
    return (output if out is not None else _arrays.finish(part, output), lse if out_lse is not None else _arrays.finish(part, lse))
