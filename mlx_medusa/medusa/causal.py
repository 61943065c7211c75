"""Causal recurrent heads, for text: one small block that runs once per guess and looks back at the verifier's states.

The state that predicted the pending token and the embedding of the pending token are joined; one Llama block, whose
attention reads the verifier's states of all tokens so far, makes of them the state that predicts the first guess. That
state and the embedding of the first guess give the second one, and so on. It is the recurrence of EAGLE (Li et al.
2024, https://arxiv.org/abs/2401.15077), but keys and values are always of the verifier's own states, so a round needs
no pass to repair those of guesses, and all guesses of a round share them.
"""

from collections.abc import Callable
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
_MAY_BE_ZERO = ("draft_vocabulary", "draft_rank")


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
        self.joint = nn.Linear(2 * dim, dim, bias=False)
        self.layers = [Layer(args) for _ in range(args.num_layers)]
        self.norm = nn.RMSNorm(dim, args.norm_eps)

    def keys_values(self, states: mx.array, positions: mx.array) -> Memory:
        """K and V per layer of the verifier's states [B, S, D], each at the position [B, S] of its token."""
        states = self.state_norm(states)
        return [layer.keys_values(states, positions) for layer in self.layers]

    def __call__(
        self,
        state: mx.array,
        embedded: mx.array,
        positions: mx.array,
        memory: Memory,
        attend: Attend = attention,
    ) -> mx.array:
        """State before and embedding of the newest token [B, T, D], at its position [B, T] -> the next state [B, T, D].

        What feeds the projection is its ``norm``. ``attend`` is how attention is computed; training brings one with a
        mask and a cheaper gradient.
        """
        x = self.joint(mx.concatenate([self.state_norm(state), self.token_norm(embedded)], axis=-1))
        for layer, (keys, values) in zip(self.layers, memory, strict=True):
            x = layer(x, positions, keys, values, attend)
        return x


class CausalDrafter:
    """Causal recurrent heads as a drafter: it keeps K and V of the verifier's states, one row per decided token."""

    def __init__(self, heads: CausalHeads, embed: Callable[[mx.array], mx.array], guess: Guess):
        """``embed`` takes ids [n] to [n, D], ``guess`` states to ids."""
        self.heads = heads
        self.guess = guess
        self._embed = embed
        self._cache = KVCache(heads.args.num_layers)

    @property
    def max_drafts(self) -> int:
        return self.heads.args.num_heads

    def begin(self, memory: mx.array | None) -> None:
        """Forget the states of the sequence before; this one's come with ``propose``."""
        self._cache = KVCache(self.heads.args.num_layers)

    def _read(self, hidden: mx.array) -> Memory:
        """Add the verifier's new states [1, n, D] to those that are attended to."""
        positions = mx.arange(self._cache.length, self._cache.length + hidden.shape[1])[None]
        memory = [
            self._cache.write(layer, *found)
            for layer, found in enumerate(self.heads.keys_values(hidden, positions))
        ]
        self._cache.advance(hidden.shape[1])
        return memory

    def propose(self, hidden: mx.array, pending: int, count: int) -> list[int]:
        """One graph for all guesses: a guess feeds the next one on the device, and the host waits once."""
        memory = self._read(hidden)
        state, token = hidden[:, -1:], mx.array([pending])
        guesses = []
        for step in range(min(count, self.max_drafts)):
            position = mx.array([[self._cache.length + step]])
            state = self.heads(state, self._embed(token)[None], position, memory)
            token = self.guess(self.heads.norm(state)[0])
            guesses.append(token)
        ids: list[int] = mx.concatenate(guesses).tolist()  # type: ignore[assignment]
        return ids

    def propose_tree(self, hidden: mx.array, pending: int, tree: Tree) -> list[int]:
        """Level by level, the nodes of one that have children as one batch of rows; the host waits once."""
        memory = self._read(hidden)
        states, tokens = hidden[:, -1:], mx.array([pending])
        guesses = []
        for depth, level in enumerate(tree.levels):
            sources, parents = mx.array(level.sources), mx.array(level.parents)
            positions = mx.full((1, len(level.sources)), self._cache.length + depth)
            states = self.heads(states[:, sources], self._embed(tokens[sources])[None], positions, memory)
            best = self.guess.top(self.heads.norm(states)[0], 1 + max(level.ranks))
            states, tokens = states[:, parents], best[parents, mx.array(level.ranks)]
            guesses.append(tokens)
        ids: list[int] = mx.concatenate(guesses).tolist()  # type: ignore[assignment]
        return ids
