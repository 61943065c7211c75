"""Causal recurrent heads, for text: one small block that runs once per guess and looks back at the verifier's states.

What is joined: the state that predicted the newest token, the embedding of that token, and, if the same words came
before, the verifier's state there and the embedding of the token that followed. One Llama block, whose attention reads
the verifier's states of all tokens so far, makes of them the state that predicts the next token, as the verifier would
have it; that state and the token that it gives are what the next guess is made from.

It is the recurrence of EAGLE (Li et al. 2024, https://arxiv.org/abs/2401.15077), but keys and values are always of the
verifier's own states, so a round needs no pass to repair those of guesses. The place is looked up by its tokens, as in
prompt lookup decoding (https://github.com/apoorvumang/prompt-lookup-decoding): small models repeat themselves, and an
attention that finds repetitions takes far more to train than the little that heads learn from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa.errors import CheckpointError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.trees import Tree
from mlx_medusa.medusa.vocabulary import Guess
from mlx_medusa.models.layers import attention, turn

Memory = list[tuple[mx.array, mx.array]]  # K and V [B, groups, S, d] per layer, K with positions
Attend = Callable[[mx.array, mx.array, mx.array, float], mx.array]  # Q, K, V, scale -> softmax(scale Q K^T) V
# Where the newest tokens came before, if they did: the verifier's states [B, T, D], the embeddings of the tokens that
# followed [B, T, D], and how many tokens are the same [B, T]; 0: nowhere, and the rest may be anything
Match = tuple[mx.array, mx.array, mx.array]
_MAY_BE_ZERO = ("match_length", "draft_vocabulary", "draft_rank")


@dataclass(frozen=True)
class CausalArgs:
    """The ``medusa`` part of a folder's config, where its ``type`` is "causal"."""

    num_heads: int  # guesses that the block was trained for
    num_layers: int
    hidden_size: int
    attention_heads: int
    key_value_heads: int
    head_dim: int
    ffn_dim: int
    rope_theta: int
    match_length: int = (
        0  # most tokens in a row that are compared to find where the same came before; 0: none
    )
    draft_vocabulary: int = 0  # number of tokens that it can guess; 0: all
    draft_rank: int = 0  # directions in which these are screened; 0: all are read in full
    norm_eps: float = 1e-5

    @classmethod
    def from_config(cls, config: dict[str, Any], source: object) -> "CausalArgs":
        """Read the settings; CheckpointError if one is missing or impossible."""
        values = {field.name: config.get(field.name, 0) for field in fields(cls)}
        eps = values.pop("norm_eps") or cls.norm_eps
        for name, value in values.items():
            least = 0 if name in _MAY_BE_ZERO else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CheckpointError(f"{source}: medusa setting {name!r} is {value!r}, expected a number")
        if not isinstance(eps, float) or not 0 < eps < 1:
            raise CheckpointError(f"{source}: medusa setting 'norm_eps' is {eps!r}, expected a small number")
        args = cls(**values, norm_eps=eps)
        if args.attention_heads % args.key_value_heads or args.head_dim % 2:
            raise CheckpointError(
                f"{source}: 'key_value_heads' does not divide 'attention_heads', or 'head_dim' is odd"
            )
        return args


class StateAttention(nn.Module):
    """Grouped attention to the verifier's states, whose K and V the caller keeps; names are Llama's."""

    def __init__(self, args: CausalArgs):
        super().__init__()
        self.head_dim = args.head_dim
        inner, shared = args.attention_heads * args.head_dim, args.key_value_heads * args.head_dim
        self.q_proj = nn.Linear(args.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(args.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(args.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(inner, args.hidden_size, bias=False)
        self.rope = partial(
            mx.fast.rope, dims=args.head_dim, traditional=False, base=float(args.rope_theta), scale=1.0
        )

    def _split(self, x: mx.array) -> mx.array:
        return x.reshape(*x.shape[:2], -1, self.head_dim)

    def keys_values(self, states: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        """States [B, S, D] at positions [B, S] -> K and V [B, groups, S, d]."""
        keys = turn(self.rope, self._split(self.k_proj(states)), positions)
        return keys, self._split(self.v_proj(states)).swapaxes(1, 2)

    def __call__(
        self, x: mx.array, positions: mx.array, keys: mx.array, values: mx.array, attend: Attend
    ) -> mx.array:
        queries = turn(self.rope, self._split(self.q_proj(x)), positions)
        out = attend(queries, keys, values, self.head_dim**-0.5)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, dim: int, ffn_dim: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.up_proj = nn.Linear(dim, ffn_dim, bias=False)
        self.down_proj = nn.Linear(ffn_dim, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A Llama layer that attends to given keys and values."""

    def __init__(self, args: CausalArgs):
        super().__init__()
        self.self_attn = StateAttention(args)
        self.mlp = MLP(args.hidden_size, args.ffn_dim)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, args.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, args.norm_eps)

    def keys_values(self, states: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
        return self.self_attn.keys_values(self.input_layernorm(states), positions)

    def __call__(
        self, x: mx.array, positions: mx.array, keys: mx.array, values: mx.array, attend: Attend
    ) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), positions, keys, values, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class CausalHeads(nn.Module):
    """The block. Its vocabulary projection and token embedding are the verifier's."""

    def __init__(self, args: CausalArgs):
        super().__init__()
        self.args = args
        dim = args.hidden_size
        self.state_norm = nn.RMSNorm(dim, args.norm_eps)
        self.token_norm = nn.RMSNorm(dim, args.norm_eps)
        parts = 4 if args.match_length else 2
        self.joint = nn.Linear(parts * dim, dim, bias=False)
        if (
            args.match_length
        ):  # how much of each number joins, by how many tokens match: [match_length + 1, 4 D], flat
            self.gates = mx.ones((args.match_length + 1) * parts * dim)
        self.layers = [Layer(args) for _ in range(args.num_layers)]
        self.norm = nn.RMSNorm(dim, args.norm_eps)

    def keys_values(self, states: mx.array, positions: mx.array) -> Memory:
        """K and V per layer of the verifier's states [B, S, D], each at the position [B, S] of its token."""
        states = self.state_norm(states)
        return [layer.keys_values(states, positions) for layer in self.layers]

    def join(self, state: mx.array, embedded: mx.array, match: Match | None) -> mx.array:
        """What ``joint`` is given, [B, T, 4 D], or 2 D without matches."""
        parts = [self.state_norm(state), self.token_norm(embedded)]
        if match is None:
            return mx.concatenate(parts, axis=-1)
        same, followed, length = match
        for part in (self.state_norm(same), self.token_norm(followed)):
            parts.append(mx.where(length[..., None] > 0, part, 0))
        joined = mx.concatenate(parts, axis=-1)
        return joined * self.gates.reshape(-1, joined.shape[-1])[length]

    def __call__(
        self,
        state: mx.array,
        embedded: mx.array,
        match: Match | None,
        positions: mx.array,
        memory: Memory,
        attend: Attend = attention,
    ) -> mx.array:
        """State before and embedding of the newest token [B, T, D], at its position [B, T] -> the next state.

        That, [B, T, D], feeds the projection. ``attend`` is how attention is computed; training brings one with a mask
        and a cheaper gradient.
        """
        x = self.joint(self.join(state, embedded, match))
        for layer, (keys, values) in zip(self.layers, memory, strict=True):
            x = layer(x, positions, keys, values, attend)
        return self.norm(x)


class Past:
    """The decided tokens and the verifier's states of all but the last, and what newer tokens match there."""

    def __init__(self, match_length: int):
        self._longest = match_length
        self._states = KVCache(1)  # as keys, [1, 1, S, D]
        self._tokens = self._followed = mx.array([], dtype=mx.int32)

    def __len__(self) -> int:
        return self._states.length

    def add(self, hidden: mx.array, tokens: Sequence[int]) -> None:
        """Add states [1, n, D]; ``tokens`` are all decided ones, of which the last, pending one has no state yet."""
        rows = hidden[:, None]
        self._states.write(0, rows, rows[..., :1])
        self._states.advance(hidden.shape[1])
        decided = mx.array(list(tokens[-1 - len(self) :]), dtype=mx.int32)
        self._tokens, self._followed = decided[:-1], decided[1:]

    def find(self, recent: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """The newest tokens of n rows, [n, match_length], the newest last -> where these came before: (the verifier's
        states [1, n, D], the tokens that followed [1, n], how many tokens are the same [1, n]).

        The longest match counts, of equally long ones the latest. The state is that of its last token.
        """
        count = len(self)
        length = mx.zeros((len(recent), count), dtype=mx.int32)
        so_far = mx.array(True)
        for back in range(min(self._longest, count)):
            same = self._tokens[: count - back] == recent[:, -1 - back, None]
            so_far = so_far & mx.pad(same, [(0, 0), (back, 0)])
            length = length + so_far
        at = mx.argmax(length * count + mx.arange(count), axis=-1)
        found = mx.take_along_axis(length, at[:, None], axis=-1)[:, 0]
        return self._states.rows(0)[0][:, 0, at], self._followed[at][None], found[None]


class CausalDrafter:
    """Causal recurrent heads as a drafter: it keeps the verifier's states, and K and V of them, a row per token."""

    accuracies: list[list[float]] | None = None  # as ``trees.grow`` takes them, where the heads' file tells

    def __init__(self, heads: CausalHeads, embed: Callable[[mx.array], mx.array], guess: Guess):
        """``embed`` takes ids [n] to [n, D], ``guess`` states to ids."""
        self.heads = heads
        self.guess = guess
        self._embed = embed
        self._tokens: Sequence[int] = []
        self._start()

    def _start(self) -> None:
        self._cache = KVCache(self.heads.args.num_layers)
        self._past = Past(self.heads.args.match_length)

    @property
    def max_drafts(self) -> int:
        return self.heads.args.num_heads

    def begin(self, memory: mx.array | None) -> None:
        """Forget the sequence before; the states of this one come with ``propose``."""
        self._start()

    def follow(self, tokens: Sequence[int]) -> None:
        """Be told of the list of decided tokens, which grows; it is read in ``propose``."""
        self._tokens = tokens

    def _read(self, hidden: mx.array, pending: int) -> tuple[Memory, mx.array]:
        """Add the verifier's new states [1, n, D]; (what is attended to, the newest tokens [1, match_length or 1])"""
        positions = mx.arange(self._cache.length, self._cache.length + hidden.shape[1])[None]
        memory = [
            self._cache.write(layer, *found)
            for layer, found in enumerate(self.heads.keys_values(hidden, positions))
        ]
        self._cache.advance(hidden.shape[1])
        longest = self.heads.args.match_length
        if not longest:
            return memory, mx.array([[pending]])
        self._past.add(hidden, self._tokens)
        return memory, mx.array([([-1] * longest + list(self._tokens))[-longest:]])

    def _step(self, states: mx.array, recent: mx.array, depth: int, memory: Memory) -> mx.array:
        """States [1, n, D] before the newest tokens ``recent`` [n, ...], ``depth`` guesses on -> the next states."""
        match = None
        if self.heads.args.match_length:
            states_there, followed, length = self._past.find(recent)
            match = states_there, self._embed(followed), length
        positions = mx.full((1, len(recent)), self._cache.length + depth)
        return self.heads(states, self._embed(recent[:, -1])[None], match, positions, memory)

    def propose(self, hidden: mx.array, pending: int, count: int) -> list[int]:
        """One graph for all guesses: a guess feeds the next one on the device, and the host waits once."""
        memory, recent = self._read(hidden, pending)
        state = hidden[:, -1:]
        guesses = []
        for depth in range(min(count, self.max_drafts)):
            state = self._step(state, recent, depth, memory)
            token = self.guess(state[0])
            recent = mx.concatenate([recent[:, 1:], token[:, None]], axis=1)
            guesses.append(token)
        ids: list[int] = mx.concatenate(guesses).tolist()  # type: ignore[assignment]
        return ids

    def propose_tree(self, hidden: mx.array, pending: int, tree: Tree) -> list[int]:
        """Level by level, the nodes of one that have children as one batch of rows; the host waits once."""
        memory, recent = self._read(hidden, pending)
        states = hidden[:, -1:]
        guesses = []
        for depth, level in enumerate(tree.levels):
            sources, parents = mx.array(level.sources), mx.array(level.parents)
            states, recent = states[:, sources], recent[sources]
            states = self._step(states, recent, depth, memory)
            best = self.guess.top(states[0], 1 + max(level.ranks))
            tokens = best[parents, mx.array(level.ranks)]
            states, recent = (
                states[:, parents],
                mx.concatenate([recent[parents, 1:], tokens[:, None]], axis=1),
            )
            guesses.append(tokens)
        ids: list[int] = mx.concatenate(guesses).tolist()  # type: ignore[assignment]
        return ids
