"""Attention as docs/contracts.md has it, in PyTorch and float64."""

import torch


def attend(query, key, value, scale, *, causal=True, window=(-1, -1), cap=None, slopes=None, sinks=None):
    """[queries, heads, size] over [keys, kv_heads, size] to [queries, heads, size]."""
    query, key, value = (x.double().movedim(1, 0) for x in (query, key, value))
    group = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
    (heads, queries, _), keys = query.shape, key.shape[1]
    distance = torch.arange(keys, device=query.device) - (keys - queries + torch.arange(queries, device=query.device)[:, None])
    left, right = window
    hidden = (distance > 0) & causal
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scale * query @ key.transpose(1, 2)
    if cap:
        scores = cap * torch.tanh(scores / cap)
    if slopes is not None:
        scores += torch.tensor(slopes, dtype=torch.float64, device=query.device)[:, None, None] * distance
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(heads, queries, 1)], 2)
    weights = scores.softmax(2)[:, :, :keys].nan_to_num()  # A row that sees no key is 0.
    return (weights @ value).movedim(0, 1)
