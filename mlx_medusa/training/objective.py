"""What heads are trained and judged by: states of all guesses at once, cross-entropy, acceptance."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_medusa.medusa.causal import CausalHeads, Match
from mlx_medusa.medusa.drafters import Base
from mlx_medusa.medusa.heads import MedusaHeads
from mlx_medusa.medusa.recurrent import RecurrentHeads
from mlx_medusa.training.data import Batch

_LOG2_E = 1.4426950408889634
RANKS = 8  # best guesses whose accuracies are counted one by one
_ROWS = 512  # rows of logits that are in memory at once


class Target:
    """The part of the vocabulary that is guessed: ``ids`` [N] rising, and the base's rows of its projection [N, D]."""

    def __init__(self, base: Base, ids: np.ndarray, vocab_size: int):
        self.ids = ids
        self.rows = base.projection_rows(mx.array(ids)).astype(mx.float32)
        self.embed = base.embed
        self._columns = np.full(vocab_size, -1, dtype=np.int32)
        self._columns[ids] = np.arange(len(ids))
        mx.eval(self.rows)

    def columns(self, tokens: np.ndarray) -> np.ndarray:
        """Ids -> their rows, -1 for those that cannot be guessed."""
        return self._columns[tokens]


def guess_states(heads: Any, batch: Batch, guesses: int, target: Target) -> mx.array:
    """The states [K, B, T, D] that feed the projection, all positions and guesses in parallel.

    Recurrent heads are given the true tokens: a guess only counts where those before it were right, and then they are
    what the heads are given in use.
    """
    if isinstance(heads, MedusaHeads):
        flat = batch.hidden.reshape(-1, batch.hidden.shape[-1])
        return heads(flat, guesses).reshape(guesses, *batch.hidden.shape)
    if isinstance(heads, CausalHeads):
        return mx.stack(causal_rollout(heads, batch, guesses, target.embed))
    assert isinstance(heads, RecurrentHeads)
    rows = batch.hidden.shape[1]
    embedded = target.embed(mx.array(batch.tokens)).astype(mx.float32)
    memory = heads.attend(batch.memory)
    state, states = batch.hidden, []
    for guess in range(guesses):
        state = heads(state, embedded[:, guess : guess + rows], memory, attend)
        states.append(heads.layer_norm(state))
    return mx.stack(states)


def causal_rollout(
    heads: CausalHeads, batch: Batch, guesses: int, embed: Callable[[mx.array], mx.array]
) -> list[mx.array]:
    """The states [B, T, D] of each guess, of heads that look back. ``embed``: ids [...] -> [..., D].

    Row j sees the states of its prompt and of the rows up to j.
    """
    size, rows = batch.hidden.shape[:2]
    before = batch.memory.shape[1]
    lengths = before if batch.memory_lengths is None else mx.array(batch.memory_lengths)[:, None, None]
    columns, places = mx.arange(before + rows), mx.arange(before, before + rows)
    seen = (columns >= before - lengths) & (columns <= places[:, None])
    bias = mx.where(mx.broadcast_to(seen, (size, rows, before + rows)), 0.0, -1e9)[:, None]
    masked = partial(attend, bias=bias)
    context = mx.concatenate([batch.memory, batch.hidden], axis=1)
    memory = heads.keys_values(context, mx.broadcast_to(columns, context.shape[:2]))
    embedded = embed(mx.array(batch.tokens)).astype(mx.float32)
    state, states = batch.hidden, []
    for guess in range(guesses):
        positions = mx.broadcast_to(places + 1 + guess, (size, rows))
        match = match_of(batch, guess, embed) if heads.args.match_length else None
        state = heads(state, embedded[:, guess : guess + rows], match, positions, memory, masked)
        states.append(state)
    return states


def match_of(batch: Batch, guess: int, embed: Callable[[mx.array], mx.array]) -> Match:
    """Where each row's newest tokens came before. ``embed``: ids [...] -> [..., D]."""
    assert batch.matches is not None
    assert batch.followed is not None
    assert batch.match_lengths is not None
    context = mx.concatenate([batch.memory, batch.hidden], axis=1)
    states = context[mx.arange(len(context))[:, None], mx.array(batch.matches[guess])]
    followed = embed(mx.array(batch.followed[guess])).astype(mx.float32)
    return states, followed, mx.array(batch.match_lengths[guess])


def attend(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, bias: mx.array | None = None
) -> mx.array:
    """softmax(scale Q K^T + bias) V, with a gradient that does not compute powers again as MLX's own does.

    Queries [B, H, T, d], keys and values [B, G, S, d] with H a multiple of G, bias [B, 1, T, S] -> [B, H, T, d].
    """
    shape, groups = queries.shape, keys.shape[1]
    queries = queries.reshape(shape[0], groups, -1, shape[3])
    if bias is not None:
        bias = mx.tile(bias * _LOG2_E, (1, 1, shape[1] // groups, 1))

    @mx.custom_function
    def compute(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        scores = (queries * (scale * _LOG2_E)) @ keys.swapaxes(-1, -2)
        scores = scores if bias is None else scores + bias
        weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
        weights = weights / mx.sum(weights, axis=-1, keepdims=True)
        return weights @ values, weights

    @compute.vjp
    def gradient(primals: Any, cotangents: Any, outputs: Any) -> tuple[mx.array, mx.array, mx.array]:
        (queries, keys, values), (out, weights), outer = primals, outputs, cotangents[0]
        of_weights = outer @ values.swapaxes(-1, -2) - mx.sum(outer * out, axis=-1, keepdims=True)
        of_scores = weights * of_weights * scale
        return of_scores @ keys, of_scores.swapaxes(-1, -2) @ queries, weights.swapaxes(-1, -2) @ outer

    found: Any = compute(queries, keys, values)
    return found[0].reshape(shape)


def labels(batch: Batch, guesses: int) -> np.ndarray:
    """The token [K, B, T] that guess k of row j should be, token j + 1 + k; -1 past the end of a sequence."""
    rows = batch.hidden.shape[1]
    found = np.stack([batch.tokens[:, 1 + k : 1 + k + rows] for k in range(guesses)]).astype(np.int32)
    places = np.arange(rows)[None, None] + 1 + np.arange(guesses)[:, None, None]
    return np.where(places < batch.lengths[None, :, None], found, -1)


def loss_of_batch(
    heads: Any,
    batch: Batch,
    target: Target,
    guesses: int,
    decay: float,
    imitation: float = 0.0,
    soft: float = 0.0,
) -> tuple[mx.array, mx.array]:
    """(mean loss with weights decay^k, summed cross-entropies per guess [K]).

    The loss of a guess is its cross-entropy and, ``imitation`` times, the squared distance of its state from the state
    with which the verifier predicts that token, over their mean square: D numbers to learn from, not one token (Li et
    al. 2024, EAGLE, https://arxiv.org/abs/2401.15077, section 3.2). ``soft``: how much of what the cross-entropy is
    taken of is the verifier's own distribution there; the rest is the one token.
    """
    wanted = labels(batch, guesses)
    columns = np.where(wanted < 0, -1, target.columns(np.maximum(wanted, 0))).reshape(-1)
    index = np.flatnonzero(columns >= 0)
    of_guess = np.repeat(np.arange(guesses), wanted[0].size)[index]
    weights = (decay**of_guess).astype(np.float32)
    weights /= max(weights.sum(), 1e-9)
    states = guess_states(heads, batch, guesses, target)
    rows, scale = mx.array(index), mx.array(weights)
    states = states.reshape(-1, states.shape[-1])[rows]
    goals = target.rows[mx.array(columns[index])]
    if soft and batch.later is not None:
        expected = mean_rows(batch.later, target.rows).reshape(-1, states.shape[-1])[rows]
        goals = goals + soft * (expected - goals)
    loss, losses = cross_entropy(states, target.rows, goals, scale)
    if imitation and batch.later is not None:
        later = batch.later.reshape(-1, states.shape[-1])[rows]
        loss = loss + imitation * (scale @ mx.mean((states - later) ** 2, axis=-1)) / mx.mean(later**2)
    per_guess = mx.zeros(guesses).at[mx.array(of_guess)].add(mx.stop_gradient(losses))
    return loss, per_guess


def mean_rows(later: mx.array, rows: mx.array) -> mx.array:
    """softmax(later rows^T) rows of the verifier's states [K, B, T, D] that each guess should be."""
    guesses, _, _, dim = later.shape
    each = mx.concatenate(
        [later[0], *(later[k][:, -1:] for k in range(1, guesses))], axis=1
    )  # [B, T + K - 1, D]
    flat, found = each.reshape(-1, dim), []
    for start in range(0, len(flat), _ROWS):
        logits = flat[start : start + _ROWS] @ rows.T
        powers = mx.power(2.0, (logits - mx.max(logits, axis=-1, keepdims=True)) * _LOG2_E)
        found.append((powers @ rows) / mx.sum(powers, axis=-1, keepdims=True))
    means = mx.stop_gradient(mx.concatenate(found)).reshape(each.shape)
    return mx.stack([means[:, k : k + later.shape[2]] for k in range(guesses)])


def cross_entropy(
    states: mx.array, rows: mx.array, goals: mx.array, weights: mx.array
) -> tuple[mx.array, mx.array]:
    """Cross-entropies of softmax(states rows^T), states [n, D] and a frozen projection ``rows`` [N, D].

    (Their sum with ``weights`` [n], each of them [n]).

    What is wanted is a distribution over the rows, and of that only the mean row, ``goals`` [n, D], is needed: of one
    token that is its row. Only the sum has a gradient. It is found on the way, a block of rows at a time, so that
    logits [n, N] are never in memory, nor computed twice.
    """

    @mx.custom_function
    def compute(states: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        losses, gradients = [], []
        for start in range(0, len(states), _ROWS):
            block = slice(start, start + _ROWS)
            logits = states[block] @ rows.T
            highest = mx.max(logits, axis=-1, keepdims=True)
            exponentials = mx.power(
                2.0, (logits - highest) * _LOG2_E
            )  # cheaper than exp on MLX's CPU backend
            total = mx.sum(exponentials, axis=-1, keepdims=True)
            chosen = mx.sum(states[block] * goals[block], axis=-1, keepdims=True)
            losses.append((mx.log(total) + highest - chosen)[:, 0])
            gradients.append((exponentials @ rows) / total - goals[block])
        each = mx.concatenate(losses)
        return mx.sum(each * weights), each, mx.concatenate(gradients) * weights[:, None]

    @compute.vjp
    def gradient(_: Any, cotangents: Any, outputs: Any) -> mx.array:
        return cotangents[0] * outputs[2]

    found: Any = compute(states)
    return found[0], found[1]


@dataclass
class Scores:
    """How good the guesses of some sequences are; counts per guess [K]."""

    guesses: int
    offered: np.ndarray = field(init=False)  # positions with a token there
    top1: np.ndarray = field(init=False)
    top5: np.ndarray = field(init=False)
    chain: np.ndarray = field(init=False)  # right, and so are all before it
    ranked: np.ndarray = field(
        init=False
    )  # [K, R] all before it are right, and it is among the best R, at this rank
    reached: np.ndarray = field(init=False)  # all before it are right
    tokens: int = 0
    rounds: int = 0

    def __post_init__(self) -> None:
        self.offered, self.top1, self.top5, self.chain, self.reached = (
            np.zeros(self.guesses, dtype=np.int64) for _ in range(5)
        )
        self.ranked = np.zeros((self.guesses, RANKS), dtype=np.int64)

    @property
    def tokens_per_verify(self) -> float:
        """Of the decode loop, if it ran over these sequences: the rounds are walked through one by one."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def add(self, heads: Any, batch: Batch, target: Target) -> None:
        """Judge a batch."""
        wanted = labels(batch, self.guesses)
        columns = np.where(wanted < 0, -1, target.columns(np.maximum(wanted, 0)))
        ranks = ranks_of(guess_states(heads, batch, self.guesses, target), columns, target)
        right = ranks == 0
        chain = np.cumprod(right, axis=0).astype(bool)
        self.offered += (wanted >= 0).sum(axis=(1, 2))
        self.top1 += right.sum(axis=(1, 2))
        self.top5 += (ranks < 5).sum(axis=(1, 2))
        self.chain += chain.sum(axis=(1, 2))
        reached = np.concatenate([np.ones_like(chain[:1]), chain[:-1]]) & (wanted >= 0)
        self.reached += reached.sum(axis=(1, 2))
        for rank in range(RANKS):
            self.ranked[:, rank] += (reached & (ranks == rank)).sum(axis=(1, 2))
        accepted = chain.sum(axis=0)  # [B, T]
        for row, length in enumerate(batch.lengths):
            self._walk(accepted[row], int(length))

    def _walk(self, accepted: np.ndarray, length: int) -> None:
        """Count the rounds that decide the tokens after the first."""
        pending = 0
        while pending < length - 1:
            step = min(int(accepted[pending]) + 1, length - 1 - pending)
            pending += step
            self.tokens += step
            self.rounds += 1

    def to_dict(self) -> dict[str, Any]:
        """Rates per guess (of the positions that have a token there), and tokens per verify."""
        offered = np.maximum(self.offered, 1)
        rates = {"top1": self.top1, "top5": self.top5, "chain": self.chain}
        return {
            "tokens_per_verify": round(self.tokens_per_verify, 4),
            **{name: (counts / offered).round(4).tolist() for name, counts in rates.items()},
            "accuracies": self.accuracies(),
        }

    def accuracies(self) -> list[list[float]]:
        """[K, R]: how often each rank is right where all guesses before are, as ``trees.grow`` takes it."""
        return (self.ranked / np.maximum(self.reached, 1)[:, None]).round(4).tolist()


def ranks_of(states: mx.array, columns: np.ndarray, target: Target) -> np.ndarray:
    """At which place of the logits of states [K, B, T, D] ``columns`` [K, B, T] come, 0 the first; [K, B, T].

    Of equal ones the first counts, as in use. A column of -1 has no place: N.
    """
    flat = states.reshape(-1, states.shape[-1])
    wanted = mx.array(np.maximum(columns, 0).reshape(-1))
    found = []
    for start in range(0, len(flat), _ROWS):
        block = slice(start, start + _ROWS)
        logits = flat[block] @ target.rows.T
        chosen = mx.take_along_axis(logits, wanted[block][:, None], axis=-1)
        above = mx.sum(logits > chosen, axis=-1)
        tied = (above == 0) & (mx.argmax(logits, axis=-1) != wanted[block])
        found.append(above + tied)
        mx.eval(found[-1])  # or the logits of all blocks would be in memory
    ranks = np.array(mx.concatenate(found)).reshape(columns.shape)
    return np.where(columns >= 0, ranks, len(target.ids))
