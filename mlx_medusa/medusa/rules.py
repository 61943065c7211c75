"""Everything that edits logits, and the one function that picks the next token under it.

A rule is a pure function of (tokens so far, logits row). It is given W rows at once, each with the prefix that row
would have in plain decoding, so that a verified draft sees exactly the rules it would have seen one token at a time.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_medusa.medusa.grammar import TimestampGrammar
from mlx_medusa.medusa.sampling import Sampler
from mlx_medusa.medusa.trees import Draft

Prefix = Sequence[int]  # prompt and decided tokens before a row


class Rule(Protocol):
    def __call__(self, prefixes: Sequence[Prefix], logits: mx.array) -> mx.array:
        """Prefixes of W rows and their logits [W, V] float32 -> edited logits [W, V]."""
        ...


def pick(
    rules: Sequence[Rule],
    prefixes: Sequence[Prefix],
    logits: mx.array,
    sampler: Sampler | None = None,
    draft: Draft | None = None,
) -> tuple[list[int], mx.array]:
    """The next token of each row under the rules: (W ids, edited logits [W, V] float32).

    Without a sampler the highest logit wins, of equal ones the lowest id. ``draft`` is what the rows verify, if
    anything. Plain decoding and the verifier both call this.
    """
    logits = logits.astype(mx.float32)
    for rule in rules:
        logits = rule(prefixes, logits)
    if sampler is None:
        return highest(logits), logits
    return sampler([len(prefix) for prefix in prefixes], logits, draft), logits


def highest(logits: mx.array) -> list[int]:
    """The id of the highest logit of each row of [W, V], of equal ones the lowest id."""
    ids: list[int] = mx.argmax(logits, axis=-1).tolist()  # type: ignore[assignment]
    return ids


def _ban(ids: Sequence[int], vocab_size: int) -> mx.array:
    """[V] float32: -inf at ``ids``, 0 elsewhere."""
    bias = np.zeros(vocab_size, dtype=np.float32)
    bias[list(ids)] = -np.inf
    return mx.array(bias)


class Suppress:
    """Tokens that are never written."""

    def __init__(self, ids: Sequence[int], vocab_size: int):
        self._bias = _ban(ids, vocab_size)

    def __call__(self, prefixes: Sequence[Prefix], logits: mx.array) -> mx.array:
        return logits + self._bias


class SuppressAtBegin:
    """Tokens that may not come first, that is right after a prompt of ``begin`` tokens."""

    def __init__(self, ids: Sequence[int], vocab_size: int, begin: int):
        self._bias = _ban(ids, vocab_size)
        self._begin = begin

    def __call__(self, prefixes: Sequence[Prefix], logits: mx.array) -> mx.array:
        first = [len(prefix) == self._begin for prefix in prefixes]
        if not any(first):
            return logits
        return mx.where(mx.array(first)[:, None], logits + self._bias, logits)


class Timestamps:
    """Whisper's timestamp grammar, as ``ApplyTimestampRules`` of openai/whisper.

    Timestamps are the ids from ``timestamp_begin`` on. They come in pairs (end of a segment, begin of the next) except
    before ``eos``, never go back, the first token is one of at most ``max_initial`` steps (None: no limit), and one
    is forced where their total probability exceeds that of every single other token.
    """

    def __init__(
        self, timestamp_begin: int, eos: int, no_timestamps: int, begin: int, max_initial: int | None = None
    ):
        self._grammar = TimestampGrammar(timestamp_begin, eos, no_timestamps, max_initial)
        self._begin = begin

    def __call__(self, prefixes: Sequence[Prefix], logits: mx.array) -> mx.array:
        written = (prefix[self._begin :] for prefix in prefixes)
        banned = np.stack([self._grammar.banned(tokens, logits.shape[-1]) for tokens in written])
        logits = mx.where(mx.array(banned), -mx.inf, logits)
        text, stamps = logits[:, : self._grammar.first], logits[:, self._grammar.first :]
        force = mx.logsumexp(stamps, axis=-1, keepdims=True) > mx.max(text, axis=-1, keepdims=True)
        return mx.concatenate([mx.where(force, -mx.inf, text), stamps], axis=-1)


class NoRepeatNGram:
    """No run of ``size`` tokens comes twice, the prompt counted: transformers' ``NoRepeatNGramLogitsProcessor``.

    Only the run that a prefix ends with can be completed, so that one is looked for, and no table of runs is built.
    """

    def __init__(self, size: int):
        self._size = size

    def __call__(self, prefixes: Sequence[Prefix], logits: mx.array) -> mx.array:
        shortest = min(prefixes, key=len)
        shared, size = np.asarray(shortest), len(shortest)  # the rows of a pass go on from it
        banned = [
            self._banned(
                np.concatenate([shared, np.asarray(prefix[size:], shared.dtype)])
                if prefix[:size] == shortest
                else np.asarray(prefix)
            )
            for prefix in prefixes
        ]
        if not any(banned):
            return logits
        bias = np.zeros(logits.shape, dtype=np.float32)
        for row, ids in zip(bias, banned, strict=True):
            row[[token for token in ids if token < len(row)]] = -np.inf
        return logits + mx.array(bias)

    def _banned(self, tokens: np.ndarray) -> set[int]:
        """What would complete a run that ``tokens`` [n] hold already."""
        count = self._size - 1
        if len(tokens) < self._size:
            return set()
        starts = np.ones(len(tokens) - count, dtype=bool)  # of runs that begin as the prefix ends
        for offset in range(count):
            starts &= tokens[offset : offset + len(starts)] == tokens[len(tokens) - count + offset]
        return set(tokens[count:][starts].tolist())


class Processors:
    """mlx-lm's logits processors (``mlx_lm.sample_utils.make_logits_processors``) as a rule."""

    def __init__(self, processors: Sequence[Callable[[mx.array, mx.array], mx.array]]):
        self._processors = processors

    def __call__(self, prefixes: Sequence[Prefix], logits: mx.array) -> mx.array:
        rows = []
        for index, prefix in enumerate(prefixes):
            row, tokens = logits[index : index + 1], mx.array(list(prefix))
            for processor in self._processors:
                row = processor(tokens, row)
            rows.append(row)
        return mx.concatenate(rows)
