"""Attention as docs/contracts.md has it, in NumPy and float64."""

import numpy as np


def attend(query, key, value, *, causal=False, scale=None, window=None, cap=None, slopes=None, sinks=None, bias=None):
    """[queries, heads, size] over [keys, kv_heads, size]: output and LSE [heads, queries]. bias: [heads, queries, keys]."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    queries, heads, size = query.shape
    keys, kv_heads, _ = key.shape
    scale = 1 / np.sqrt(size) if scale is None else scale
    output = np.zeros((queries, heads, value.shape[2]))
    lse = np.full((heads, queries), -np.inf)
    positions = keys - queries + np.arange(queries)[:, None]
    at = np.arange(keys)[None, :]
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= at <= positions
    if window is not None:
        left, right = (window - 1, 0) if isinstance(window, int) else window
        seen &= (left < 0) | (at >= positions - left)
        seen &= (right < 0) | (at <= positions + right)
    for h in range(heads):
        g = h // (heads // kv_heads)
        scores = scale * query[:, h] @ key[:, g].T
        if cap:
            scores = cap * np.tanh(scores / cap)
        if slopes is not None:
            scores = scores + slopes[h] * (at - positions)
        if bias is not None:
            scores = scores + bias[h]
        for i in range(queries):
            s = scores[i][seen[i]]
            if s.size == 0:
                continue
            m = max(s.max(), -np.inf if sinks is None else sinks[h])
            weights = np.exp(s - m)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[h] - m))
            output[i, h] = weights / total @ value[seen[i], g]
            lse[h, i] = s.max() + np.log(np.exp(s - s.max()).sum())
    return output, lse


def random(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(dtype)
