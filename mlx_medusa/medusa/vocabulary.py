"""From a drafter's states to the tokens that it guesses: the whole vocabulary, or a draft vocabulary.

What is guessed never changes the text, so drafters may look at fewer tokens, and less closely, than the verifier does.
"""

from collections.abc import Callable
from itertools import pairwise

import mlx.core as mx

from mlx_medusa.errors import CheckpointError

Guess = Callable[[mx.array], mx.array]  # states [n, D] -> ids [n], lazily; of equal logits the lowest id

_BLOCK = 32  # tokens of which the screen lets one pass


def best(logits: mx.array) -> mx.array:
    """The id of the highest logit of each row of [n, V], of equal ones the lowest. Lazy, [n]."""
    return mx.argmax(logits, axis=-1)


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
        if self._basis is None:
            return self.ids[best(states @ self._columns)]
        coarse = ((states @ self._basis) @ self._columns).reshape(len(states), -1, _BLOCK)
        passed = mx.argmax(coarse, axis=-1) + mx.arange(0, len(self.ids), _BLOCK)  # [n, N / 32]
        logits = (self._rows[passed] @ states[:, :, None])[:, :, 0]
        return self.ids[mx.take_along_axis(passed, best(logits)[:, None], axis=-1)[:, 0]]


def check_vocabulary(ids: mx.array, vocab_size: int, source: object) -> None:
    """CheckpointError unless ``ids`` [N] rise strictly (so that of equal logits the lowest id wins) below V."""
    values: list[int] = ids.tolist()  # type: ignore[assignment]
    rising = all(a < b for a, b in pairwise(values))
    if not values or not rising or values[0] < 0 or values[-1] >= vocab_size:
        raise CheckpointError(
            f"{source}: draft_vocabulary must hold rising ids below {vocab_size}: train the heads again"
        )
