"""How the next token is drawn at a temperature: lossless with any drafts, or with Medusa's typical acceptance.

Lossless sampling. The token at position t is drawn by inverting the distribution function of p(. | tokens before t)
at a number u(seed, t), which is uniform and independent of everything else. Plain sampling does that one token at a
time; a verifier pass does it at every row, for the prefix of that row, and the loop keeps the guesses that equal the
draws. So the text is the same function of u(seed, 0), u(seed, 1), ... whatever was guessed: drafts change neither the
distribution nor, for a given seed, the text (but for rounding, as in greedy decoding: a pass of another width may swap
tokens that nearly tie at the edge of a filter).

Nothing is lost in speed. Of the guesses x1, x2, ... at one place, which are no draws but fixed by what came before,
x1 is kept with probability p(x1), and one of them with p(x1) + p(x2) + ... Speculative sampling with a draft
distribution that is one point keeps x with min(1, p(x) / 1) = p(x) (Leviathan et al. 2023, arxiv.org/abs/2211.17192).
Its form for several guesses, which removes a rejected one from p and scales the rest up before it tries the next, keeps
one of them with p(x1) + (1 - p(x1)) p(x2) / (1 - p(x1)) + ..., the same sum (multi-step speculative sampling, Miao et
al. 2023, arxiv.org/abs/2305.09781).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise

import mlx.core as mx
import numpy as np

from mlx_medusa.errors import MedusaError, OptionError
from mlx_medusa.medusa.trees import Draft
from mlx_medusa.mlx_lm_parts import part


def uniform(seed: int, position: int) -> float:
    """The random number u of a position, 0 < u <= 1 in steps of 2**-53; a hash, so the same on every machine."""
    digest = blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return ((int.from_bytes(digest, "little") >> 11) + 1) * 2.0**-53


@dataclass(frozen=True)
class Sampler:
    """Draws from softmax(logits / temperature) without what the filters remove; names and order are mlx-lm's.

    ``top_p``: of the most probable tokens, those that hold this probability together (0 or 1: all). ``min_p``: those
    with at least this part of the best one's probability. ``top_k``: the k best (0: all). OptionError for numbers that
    are out of range.
    """

    temperature: float
    top_p: float = 0.0
    min_p: float = 0.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise OptionError(f"temperature is {self.temperature}, but must be a positive number")
        for name in ("top_p", "min_p"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name} is {getattr(self, name)}, but must be from 0 to 1")
        for name in ("top_k", "seed"):
            if getattr(self, name) < 0:
                raise OptionError(f"{name} is {getattr(self, name)}, but must not be negative")

    def __call__(self, positions: Sequence[int], logits: mx.array, draft: Draft | None = None) -> list[int]:
        """The next token of each of W rows: ``positions`` [W] it stands at, ``logits`` [W, V] float32 for it.

        ``draft`` is what the rows verify, None for a row that verifies nothing. Raises MedusaError where the logits are
        not finite.
        """
        return self._draw(positions, self.probabilities(logits))

    def probabilities(self, logits: mx.array) -> np.ndarray:
        """Logits [W, V] float32 -> the distribution that each row draws from, [W, V] float64, to float32's rounding."""
        if 0 < self.top_p < 1 or self.min_p or self.top_k:
            logits = self._filtered(logits)
        return np.asarray(mx.softmax(logits * (1 / self.temperature), axis=-1), dtype=np.float64)

    def _filtered(self, logits: mx.array) -> mx.array:
        filters = part("sample_utils")
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        if 0 < self.top_p < 1:
            logprobs = filters.apply_top_p(logprobs, self.top_p)
        if self.min_p:
            logprobs = filters.apply_min_p(logprobs, self.min_p)
        if 0 < self.top_k < logprobs.shape[-1]:
            logprobs = filters.apply_top_k(logprobs, self.top_k)
        return logprobs

    def _draw(self, positions: Sequence[int], probabilities: np.ndarray) -> list[int]:
        """The first token at which the sum of probabilities reaches u, 0 < u <= 1: never one of probability 0."""
        sums = np.cumsum(probabilities, axis=-1)
        if not np.isfinite(sums[:, -1]).all():
            raise MedusaError("the model computes numbers that are not finite: use --dtype float32")
        numbers = [uniform(self.seed, position) for position in positions]
        return [int(row.searchsorted(row[-1] * u)) for row, u in zip(sums, numbers, strict=True)]


@dataclass(frozen=True)
class TypicalSampler(Sampler):
    """Keeps guesses that are typical enough, which changes the distribution: texts come faster, and are others.

    A guess x is kept where p(x) > min(epsilon, delta exp(-H(p))), with H the entropy; of the longest paths of such
    guesses the most probable one is taken, and the token after it is drawn. Cai et al. 2024, section 2.3.1, with the
    numbers of FasterDecoding/Medusa.
    """

    epsilon: float = 0.09
    delta: float = 0.3

    def __call__(self, positions: Sequence[int], logits: mx.array, draft: Draft | None = None) -> list[int]:
        """As ``Sampler``, but where a guess is kept, it is the row's next token."""
        p = self.probabilities(logits)
        picks = self._draw(positions, p)
        if draft is None or not draft.tokens:
            return picks
        entropy = -np.sum(p * np.log(np.maximum(p, np.finfo(np.float64).tiny)), axis=-1)  # 0 log 0 = 0
        threshold = np.minimum(self.epsilon, self.delta * np.exp(-entropy))
        found: list[tuple[int, float]] = [
            (0, 0.0)
        ]  # of each row: (length, log probability) of its path, if kept
        for token, parent in zip(draft.tokens, draft.tree.parents, strict=True):
            length, chance = found[parent]
            kept = length == draft.tree.depths[parent] and p[parent, token] > threshold[parent]
            found.append((length + 1, chance + float(np.log(p[parent, token]))) if kept else (-1, 0.0))
        best = draft.tree.routes[found.index(max(found))]
        for parent, row in pairwise(best):
            picks[parent] = draft.tokens[row - 1]
        return picks


def make_sampler(
    temperature: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    *,
    typical: bool = False,
) -> Sampler | None:
    """The sampler of these settings; None, which is exact greedy decoding, at temperature 0. OptionError for others."""
    if temperature == 0:
        if typical:
            raise OptionError(
                "typical acceptance needs a temperature above 0: at 0 the text is the greedy one"
            )
        return None
    return (TypicalSampler if typical else Sampler)(temperature, top_p, min_p, top_k, seed)
