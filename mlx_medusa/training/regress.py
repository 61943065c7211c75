"""First weights of causal heads: the base's last layers and least squares, which one pass over a harvest gives.

Queries, keys, values and the MLP's inputs are those of the base. Then each map that adds to the next state is, one
after the other, the one that leaves the smallest squared distance from the verifier's own next state. Trained on from
there, heads need a fraction of the steps.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_medusa.medusa.causal import CausalHeads
from mlx_medusa.training.data import Batch, Decoded, Harvest
from mlx_medusa.training.objective import causal_rollout, match_of
from mlx_medusa.training.start import parameters

_ROWS = 40_000  # positions that are enough
_BATCH, _FEW = 8, 12  # sequences of a batch, batches that are enough for few numbers
_ROUNDS = 3  # in which the first map and its gates are solved for in turn
_RIDGE = 0.01  # of the mean square of what is mapped
_SMALLEST = 1e-3  # of a norm's weights that is undone

Rows = Iterator[
    tuple[mx.array, mx.array]
]  # what a map is given [n, I], what it should add to the next state [n, D]
Embed = Callable[[mx.array], mx.array]  # ids [...] -> [..., D]


def first_weights(
    heads: CausalHeads,
    model: Any,
    embed: Embed,
    harvest: Harvest,
    sequences: Sequence[Decoded],
) -> None:
    """Set all weights of ``heads``. ``model``: a Llama."""
    few = _enough(sequences)

    def batches() -> Iterator[Batch]:
        for start in range(0, len(few), _BATCH):
            yield harvest.batch(few[start : start + _BATCH], 1)

    _take_layers(heads, model.model, next(batches()))
    for layer in heads.layers:
        for owner, name in ((layer.self_attn, "o_proj"), (layer.mlp, "down_proj")):
            owner[name].weight = mx.zeros_like(owner[name].weight)
    for _ in range(_ROUNDS if heads.args.match_length else 1):
        heads.joint.weight = _solve(_joined(heads, embed, batches()), heads.joint.weight.shape)
        if heads.args.match_length:
            _open_gates(heads, embed, batches())
    for layer in heads.layers:
        for owner, name, source in (
            (layer.self_attn, "o_proj", "v_proj"),
            (layer.mlp, "down_proj", "up_proj"),
        ):
            _level(heads, embed, next(batches()), owner, name, owner[source])
            owner[name].weight = _solve(_run(heads, embed, batches(), owner, name), owner[name].weight.shape)


def _enough(sequences: Sequence[Decoded]) -> list[Decoded]:
    """The first sequences that have enough positions together."""
    ends = np.cumsum([one.length for one in sequences])
    return [one for one in sequences[: int(np.searchsorted(ends, _ROWS)) + 1] if one.length > 1]


def _take_layers(heads: CausalHeads, decoder: Any, batch: Batch) -> None:
    """The base's last layers, given the verifier's last states where they are used to those before the last norm.

    All that is between maps has about the size 1, dimension by dimension: a few dimensions of a Llama's states are far
    larger than the rest, and steps of one size would be too large for some weights and too small for others.
    """
    states = batch.hidden.reshape(-1, batch.hidden.shape[-1])[mx.array(np.flatnonzero(_there(batch)))]
    last = parameters(decoder.norm)["weight"]
    undone = mx.where(mx.abs(last) < _SMALLEST, 0.0, 1 / last)
    normed = states * mx.rsqrt(mx.mean(states**2, axis=-1, keepdims=True))
    spread = mx.sqrt(mx.mean(normed**2, axis=0)) + 1e-3
    before = mx.mean(mx.rsqrt(mx.mean((normed * undone) ** 2, axis=-1)))
    weights = {
        "norm.weight": mx.sqrt(mx.mean(states**2, axis=0)) + 1e-3,
        "state_norm.weight": 1 / spread,
    }
    for index, source in enumerate(decoder.layers[-len(heads.layers) :]):
        theirs = parameters(source)
        units = _largest(theirs, heads.args.ffn_dim)
        for norm, names in (("input", "qkv"), ("post_attention", ("gate", "up"))):
            scale = theirs[f"{norm}_layernorm.weight"] * undone * spread * before
            for name in names:
                path = f"self_attn.{name}_proj.weight" if norm == "input" else f"mlp.{name}_proj.weight"
                kept = theirs[path] if norm == "input" else theirs[path][units]
                weights[f"layers.{index}.{path}"] = kept * scale
    heads.load_weights(list(weights.items()), strict=False)


def _largest(layer: dict[str, mx.array], count: int) -> mx.array:
    """The ``count`` units of a layer's MLP with the largest weights, in their order."""
    size = mx.sqrt(
        mx.sum(layer["mlp.down_proj.weight"] ** 2, axis=0) * mx.sum(layer["mlp.up_proj.weight"] ** 2, axis=1)
    )
    return mx.sort(mx.argsort(-size)[:count])


def _there(batch: Batch) -> np.ndarray:
    """[B, T] bool: the rows that have a next state."""
    return np.arange(batch.hidden.shape[1]) < batch.lengths[:, None] - 1


class _Recorder(nn.Module):
    """A layer that remembers what it was given."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.given = mx.zeros(0)

    def __call__(self, x: mx.array) -> mx.array:
        self.given = x
        return self.layer(x)


@contextmanager
def _recorded(owner: Any, name: str) -> Iterator[_Recorder]:
    """Remember what the layer ``name`` of ``owner`` is given."""
    recorder = _Recorder(owner[name])
    owner[name] = recorder
    try:
        yield recorder
    finally:
        owner[name] = recorder.layer


def _run(heads: CausalHeads, embed: Embed, batches: Iterator[Batch], owner: Any, name: str) -> Rows:
    """Of each batch (what the layer ``name`` of ``owner`` is given [n, I], what the next state lacks [n, D])."""
    with _recorded(owner, name) as inner, _recorded(heads, "norm") as outer:
        for batch in batches:
            assert batch.later is not None
            causal_rollout(heads, batch, 1, embed)
            rows = mx.array(np.flatnonzero(_there(batch)))
            given, state, later = (
                x.reshape(-1, x.shape[-1])[rows] for x in (inner.given, outer.given, batch.later[0])
            )
            yield given, later / outer.layer.weight - state


def _joined(heads: CausalHeads, embed: Embed, batches: Iterator[Batch]) -> Rows:
    """The same of ``joint``, before which there is nothing."""
    for batch in batches:
        assert batch.later is not None
        embedded = embed(mx.array(batch.tokens[:, : batch.hidden.shape[1]])).astype(mx.float32)
        match = match_of(batch, 0, embed) if heads.args.match_length else None
        rows = mx.array(np.flatnonzero(_there(batch)))
        given, later = (
            x.reshape(-1, x.shape[-1])[rows]
            for x in (heads.join(batch.hidden, embedded, match), batch.later[0])
        )
        yield given, later / heads.norm.weight


def _solve(rows: Rows, shape: tuple[int, ...]) -> mx.array:
    """The map [out, in] that leaves the smallest squared distance."""
    outputs, inputs = shape
    moment, cross = mx.zeros((inputs, inputs)), mx.zeros((inputs, outputs))
    for given, missing in rows:
        moment, cross = moment + given.T @ given, cross + given.T @ missing
        mx.eval(moment, cross)
    square = np.array(moment, dtype=np.float64)
    square += _RIDGE * np.trace(square) / inputs * np.eye(inputs) + 1e-9 * np.eye(inputs)
    found = np.linalg.solve(square, np.array(cross, dtype=np.float64))
    return mx.array(found.T.astype(np.float32))


def _open_gates(heads: CausalHeads, embed: Embed, batches: Iterator[Batch]) -> None:
    """Scale what joins, state, tokens and match, by the numbers that suit the rows of each match length best."""
    dim, weight = heads.args.hidden_size, heads.joint.weight
    parts = weight.shape[1] // dim
    gates = heads.gates.reshape(-1, parts * dim)
    moment, cross = np.zeros((len(gates), parts, parts)), np.zeros((len(gates), parts))
    each = list(islice(batches, _FEW))
    for batch, (given, wanted) in zip(each, _joined(heads, embed, iter(each)), strict=True):
        assert batch.match_lengths is not None
        lengths = batch.match_lengths[0][_there(batch)]
        slices = [slice(k * dim, (k + 1) * dim) for k in range(parts)]
        shares = [given[:, part] @ weight[:, part].T for part in slices]
        products = np.array(mx.stack([mx.sum(a * b, axis=1) for a in shares for b in [*shares, wanted]]))
        for length in range(len(gates)):
            sums = products[:, lengths == length].sum(axis=1).reshape(parts, parts + 1)
            moment[length] += sums[:, :parts]
            cross[length] += sums[:, parts]
    for length in range(len(gates)):
        ridge = 1e-3 * max(np.trace(moment[length]), 1.0) * np.eye(parts)  # towards no change
        change = np.linalg.solve(moment[length] + ridge, cross[length] + ridge @ np.ones(parts))
        gates[length] = gates[length] * mx.repeat(mx.array(change.astype(np.float32)), dim)
    heads.gates = gates.reshape(-1)
    mx.eval(heads.gates)


def _level(heads: CausalHeads, embed: Embed, batch: Batch, owner: Any, name: str, source: nn.Linear) -> None:
    """Scale the rows of ``source`` so that what it makes of a batch, as the map ``name`` is given it, has size 1.

    Values are shared by groups of heads: one of their rows makes as many numbers as there are heads in a group.
    """
    given, _ = next(_run(heads, embed, iter([batch]), owner, name))
    square = mx.mean(given**2, axis=0)
    rows = len(source.weight)
    if rows != len(square):
        size = heads.args.head_dim
        square = mx.mean(square.reshape(rows // size, -1, size), axis=1).reshape(-1)
    source.weight = source.weight * mx.rsqrt(square + 1e-6)[:, None]
