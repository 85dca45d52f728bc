"""Boolean masks as sequences: what a dense mask says, in the form that variable-length attention takes.

A row of a mask that hides keys in its middle has no such form. All others have: rows that follow each other and see the same keys (an encoder's),
or one key more each (causality), or a window that moves along, are one sequence.
"""

from __future__ import annotations

from typing import NamedTuple, Optional

import torch


class Call(NamedTuple):
    """One call of varlen_attention on flattened batches: `rows` of the queries (None: all of them), and where each sequence's rows and keys start."""

    rows: Optional[torch.Tensor]
    query_start_loc: torch.Tensor
    key_start_loc: torch.Tensor
    max_query_len: int
    max_seq_len: int
    causal: bool
    window: Optional[tuple[int, int]]


class _Kind(NamedTuple):
    causal: bool
    window: Optional[tuple[int, int]]
    follows: torch.Tensor  # [batch, rows - 1]: whether row i + 1 belongs to the sequence of row i.


def calls_of(mask: torch.Tensor) -> Optional[list[Call]]:
    """The calls that together compute attention under a bool mask [batch, rows, keys], or None where a row hides keys between those it sees."""
    batch, rows, keys = mask.shape
    # One transfer: the first and the last key that each row sees, and how many.
    first, last, count = torch.stack([_first_true(mask), keys - 1 - _first_true(mask.flip(-1)), mask.sum(-1)]).cpu()
    seen = count > 0
    if bool((seen & (last - first + 1 != count)).any()):
        return None
    same_first, same_last = first[:, 1:] == first[:, :-1], last[:, 1:] == last[:, :-1]
    next_first, next_last = first[:, 1:] == first[:, :-1] + 1, last[:, 1:] == last[:, :-1] + 1
    # The kind that makes most rows follow each other; after it the rows at the ends of padded windows, whose ranges stay, grow or shrink.
    kinds = [
        max(_kinds(first, last, count, seen, rows == keys), key=lambda kind: int(kind.follows.sum())),
        _Kind(False, None, same_first & same_last),
        _Kind(True, None, same_first & next_last),
    ]
    parts, left = [], seen
    for kind in kinds:
        follows = kind.follows & left[:, 1:] & left[:, :-1]
        parts.append((_either_side(follows), kind._replace(follows=follows)))
        left = left & ~parts[-1][0]
    # Rows are placed by the end of their keys, n rows of m keys at m − n and on: such a row sees what is right of itself, and m − n to the left.
    follows = next_first & same_last & left[:, 1:] & left[:, :-1]
    begins, ends = _runs(_either_side(follows), follows)
    widths = count.flatten()[begins] - (ends - begins + 1)
    for width in widths.unique().tolist():
        chosen = torch.zeros(batch * rows, dtype=torch.bool)
        for begin, end in zip(begins[widths == width].tolist(), ends[widths == width].tolist()):
            chosen[begin : end + 1] = True
        parts.append((chosen.view(batch, rows), _Kind(False, (width, -1), follows)))
    left = left & ~_either_side(follows)
    parts.append((left, _Kind(False, None, torch.zeros_like(follows))))
    calls = [_call(first, last, chosen, kind, keys, mask.device) for chosen, kind in parts if bool(chosen.any())]
    return None if None in calls else calls


def _first_true(mask: torch.Tensor) -> torch.Tensor:
    return mask.view(torch.uint8).argmax(-1)


def _kinds(first: torch.Tensor, last: torch.Tensor, count: torch.Tensor, seen: torch.Tensor, square: bool) -> list[_Kind]:
    both = seen[:, 1:] & seen[:, :-1]
    same_first, next_last = first[:, 1:] == first[:, :-1], last[:, 1:] == last[:, :-1] + 1
    width = int(count.max())
    moved = torch.maximum(first[:, :-1], last[:, 1:] - (width - 1))
    kinds = [
        _Kind(False, None, both & same_first & (last[:, 1:] == last[:, :-1])),
        _Kind(True, None, both & same_first & next_last),
        _Kind(True, (width - 1, 0), both & next_last & (first[:, 1:] == moved)),
    ]
    if square:
        # A window to both sides, of a row at its own position; the sequence is from the first to the last key that any row sees.
        position = torch.arange(first.shape[1]).expand_as(first)
        begin = torch.where(seen, first, first.shape[1]).amin(-1, keepdim=True)
        end = torch.where(seen, last, -1).amax(-1, keepdim=True)
        inside = seen & (position >= begin) & (position <= end)
        if bool(inside.any()):
            left, right = int((position - first)[inside].max()), int((last - position)[inside].max())
            fits = inside & (first == torch.maximum(begin, position - left)) & (last == torch.minimum(end, position + right))
            # All of its rows must fit: rows are placed by the end of their sequence.
            whole = (fits | ~((position >= begin) & (position <= end))).all(-1, keepdim=True)
            fits = fits & whole
            kinds.append(_Kind(False, (left, right), fits[:, 1:] & fits[:, :-1]))
    return kinds


def _either_side(follows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(follows, (1, 0)) | torch.nn.functional.pad(follows, (0, 1))


def _runs(chosen: torch.Tensor, follows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last row of each sequence of the chosen rows, in the flattened batch."""
    begins = chosen & ~torch.nn.functional.pad(follows & chosen[:, :-1], (1, 0))
    ends = chosen & ~torch.nn.functional.pad(follows & chosen[:, 1:], (0, 1))
    return begins.flatten().nonzero().flatten(), ends.flatten().nonzero().flatten()


def _call(first: torch.Tensor, last: torch.Tensor, chosen: torch.Tensor, kind: _Kind, keys: int, device: torch.device) -> Optional[Call]:
    flat_begins, flat_ends = _runs(chosen, kind.follows)
    offset = flat_begins // chosen.shape[1] * keys
    # Along a sequence both bounds only grow.
    key_begins = (first.flatten()[flat_begins] + offset).tolist()
    key_ends = (last.flatten()[flat_ends] + offset + 1).tolist()
    lengths = (flat_ends - flat_begins + 1).tolist()
    query_starts, key_starts, longest = [0], [0], 1
    for begin, end, length in zip(key_begins, key_ends, lengths):
        if begin < key_starts[-1]:
            return None  # Two sequences of one call see the same keys.
        if begin > key_starts[-1]:  # Keys between sequences are a sequence without queries.
            query_starts.append(query_starts[-1])
            key_starts.append(begin)
        query_starts.append(query_starts[-1] + length)
        key_starts.append(end)
        longest = max(longest, end - begin)
    chosen_rows = None if bool(chosen.all()) else chosen.flatten().nonzero().flatten().to(device)
    ints = lambda values: torch.tensor(values, dtype=torch.int32, device=device)
    gaps = max((b - a for a, b in zip(key_starts, key_starts[1:])), default=0)
    return Call(chosen_rows, ints(query_starts), ints(key_starts), max(lengths), max(longest, gaps), kind.causal, kind.window)
