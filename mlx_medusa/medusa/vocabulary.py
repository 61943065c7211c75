"""From a drafter's states to the tokens that it guesses: the whole vocabulary, or a draft vocabulary.

What is guessed never changes the text, so drafters may look at fewer tokens, and less closely, than the verifier does.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import mlx.core as mx

from mlx_medusa.errors import CheckpointError

_BLOCK = 32  # tokens of which the screen lets one pass
_WIDE = 64  # logits of which one block is made to find the highest few


class Guess(Protocol):
    """From states to the likeliest tokens, lazily; of equal logits the lowest id comes first."""

    def __call__(self, states: mx.array) -> mx.array:
        """States [n, D] -> the best id of each, [n]."""
        ...

    def top(self, states: mx.array, count: int) -> mx.array:
        """States [n, D] -> the ``count`` best ids of each, [n, count], the best first."""
        ...


def best(logits: mx.array) -> mx.array:
    """The id of the highest logit of each row of [n, V], of equal ones the lowest. Lazy, [n]."""
    return mx.argmax(logits, axis=-1)


def ranked(logits: mx.array, count: int) -> mx.array:
    """The ids of the ``count`` highest logits of each row of [n, V], of equal ones the lowest first. Lazy, [n, count].

    A row is read once for the highest logit of each block of 64; the ids are in the ``count`` best blocks. Where V is
    smaller than ``count``, ids come twice.
    """
    rows, size = logits.shape
    padded = mx.pad(logits, [(0, 0), (0, -size % _WIDE)], constant_values=-mx.inf).reshape(rows, -1, _WIDE)
    blocks = mx.sort(_one_by_one(mx.max(padded, axis=-1), min(count, padded.shape[1])), axis=-1)
    ids = (blocks[:, :, None] * _WIDE + mx.arange(_WIDE)).reshape(rows, -1)
    passed = mx.take_along_axis(padded, blocks[:, :, None], axis=1).reshape(rows, -1)
    found = mx.take_along_axis(ids, _one_by_one(passed, count), axis=-1)
    return mx.minimum(found, size - 1)  # no padding


def _one_by_one(logits: mx.array, count: int) -> mx.array:
    """The same for short rows, by ``count`` searches."""
    found = []
    for _ in range(count):
        found.append(mx.argmax(logits, axis=-1, keepdims=True))
        logits = mx.put_along_axis(logits, found[-1], mx.array(-mx.inf, logits.dtype), axis=-1)
    return mx.concatenate(found, axis=-1)


class Vocabulary:
    """Guesses among all tokens, by the verifier's projection ``logits``: [n, D] -> [n, V]."""

    def __init__(self, logits: Callable[[mx.array], mx.array]):
        self._logits = logits

    def __call__(self, states: mx.array) -> mx.array:
        return best(self._logits(states))

    def top(self, states: mx.array, count: int) -> mx.array:
        return ranked(self._logits(states), count)


class DraftVocabulary:
    """Guesses among ``ids`` [N], which rise, by their rows of the projection [N, D].

    With a ``basis`` [D, r] of the directions in which states are largest, the rows are read in two steps: all of them
    in those r directions, then, in full, the best one of each block of 32. On tiny.en, with r = 96, that takes a third
    of the time and loses about 1 % of the right guesses, which more ids more than make up for.
    """

    def __init__(self, ids: mx.array, rows: mx.array, basis: mx.array | None = None):
        if basis is not None:
            padding = mx.broadcast_to(ids[-1:], (-len(ids) % _BLOCK,))  # never chosen: its twin comes first
            ids = mx.concatenate([ids, padding])
            rows = mx.concatenate([rows, mx.broadcast_to(rows[-1:], (len(padding), rows.shape[1]))])
            # deal the tokens out, so that the frequent ones, whose ids are low, are not rivals in one block
            order = mx.arange(len(ids)).reshape(_BLOCK, -1).T.reshape(-1)
            ids, rows = ids[order], rows[order]
            self._rows = rows
            rows = rows @ basis
        self.ids = ids
        self._basis = basis
        self._columns = mx.contiguous(rows.T)  # a single row is multiplied faster so
        mx.eval(self.ids, self._columns)

    def __call__(self, states: mx.array) -> mx.array:
        """States [n, D] -> ids [n]."""
        ids, logits = self._read(states)
        return mx.take_along_axis(ids, best(logits)[:, None], axis=-1)[:, 0]

    def top(self, states: mx.array, count: int) -> mx.array:
        """States [n, D] -> ids [n, count]. With a basis, no two come from one block, so a few may be passed over."""
        ids, logits = self._read(states)
        return mx.take_along_axis(ids, ranked(logits, count), axis=-1)

    def _read(self, states: mx.array) -> tuple[mx.array, mx.array]:
        """(ids [n, m], their logits [n, m])"""
        if self._basis is None:
            logits = states @ self._columns
            return mx.broadcast_to(self.ids, logits.shape), logits
        coarse = ((states @ self._basis) @ self._columns).reshape(len(states), -1, _BLOCK)
        passed = mx.argmax(coarse, axis=-1) + mx.arange(0, len(self.ids), _BLOCK)  # [n, N / 32]
        return self.ids[passed], (self._rows[passed] @ states[:, :, None])[:, :, 0]


def check_vocabulary(ids: mx.array, vocab_size: int, source: object) -> None:
    """CheckpointError unless ``ids`` [N] rise strictly (so that of equal logits the lowest id wins) below V."""
    values: list[int] = ids.tolist()  # type: ignore[assignment]
    rising = all(a < b for a, b in pairwise(values))
    if not values or not rising or values[0] < 0 or values[-1] >= vocab_size:
        raise CheckpointError(
            f"{source}: draft_vocabulary must hold rising ids below {vocab_size}: train the heads again"
        )
