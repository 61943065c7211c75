"""Audio-aware recurrent heads: one small block that runs once per guess and listens while it guesses.

The state that predicted the pending token and the embedding of the pending token are joined; the block attends to the
verifier's memory (Whisper: the encoder output) and has one MLP; what comes out is the state that predicts the first
guess. That state and the embedding of the first guess give the second one, and so on. Plain Medusa heads see only what
the verifier's state holds, which for a small Whisper is little of the audio that is still to come.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa.errors import CheckpointError
from mlx_medusa.medusa.trees import Tree
from mlx_medusa.medusa.vocabulary import Guess
from mlx_medusa.models.layers import attention, gelu

Memory = list[tuple[mx.array, mx.array]]  # K and V [B, heads, S, d], per layer
Attend = Callable[[mx.array, mx.array, mx.array, float], mx.array]  # Q, K, V, scale -> softmax(scale Q K^T) V


@dataclass(frozen=True)
class RecurrentArgs:
    """The ``medusa`` part of a folder's config, where its ``type`` is "recurrent"."""

    num_heads: int  # guesses that the block was trained for
    num_layers: int
    hidden_size: int
    attention_heads: int
    ffn_dim: int
    memory_pool: int = 1  # so many neighbouring rows of the memory are averaged
    draft_vocabulary: int = 0  # number of tokens that it can guess; 0: all
    draft_rank: int = 0  # directions in which these are screened; 0: all are read in full

    @classmethod
    def from_config(cls, config: dict[str, Any], source: object) -> "RecurrentArgs":
        """Read the settings; CheckpointError if one is missing or impossible."""
        optional = {"memory_pool": 1, "draft_vocabulary": 0, "draft_rank": 0}
        values: dict[str, Any] = {
            field.name: config.get(field.name, optional.get(field.name)) for field in fields(cls)
        }
        for name, value in values.items():
            least = 0 if name.startswith("draft_") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise CheckpointError(f"{source}: medusa setting {name!r} is {value!r}, expected a number")
        args = cls(**values)
        if args.hidden_size % args.attention_heads:
            raise CheckpointError(f"{source}: 'attention_heads' does not divide 'hidden_size'")
        return args


class CrossAttention(nn.Module):
    """Attention to a memory whose K and V the caller keeps; parameters are named as in Whisper's decoder."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def _split(self, x: mx.array) -> mx.array:
        """[B, T, D] -> [B, heads, T, D / heads]"""
        return x.reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)

    def keys_values(self, memory: mx.array) -> tuple[mx.array, mx.array]:
        """Memory [B, S, D] -> K and V [B, heads, S, D / heads]"""
        return self._split(self.k_proj(memory)), self._split(self.v_proj(memory))

    def __call__(self, x: mx.array, keys: mx.array, values: mx.array, attend: Attend) -> mx.array:
        queries = self._split(self.q_proj(x))
        out = attend(queries, keys, values, queries.shape[-1] ** -0.5)
        return self.out_proj(out.swapaxes(1, 2).reshape(x.shape))


class Layer(nn.Module):
    """Whisper's decoder layer without the self-attention."""

    def __init__(self, dim: int, heads: int, ffn_dim: int):
        super().__init__()
        self.encoder_attn = CrossAttention(dim, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def __call__(self, x: mx.array, keys: mx.array, values: mx.array, attend: Attend) -> mx.array:
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), keys, values, attend)
        return x + self.fc2(gelu(self.fc1(self.final_layer_norm(x))))


class RecurrentHeads(nn.Module):
    """The block. Its vocabulary projection and token embedding are the verifier's."""

    def __init__(self, args: RecurrentArgs):
        super().__init__()
        self.args = args
        dim = args.hidden_size
        self.state_norm = nn.LayerNorm(dim)
        self.token_norm = nn.LayerNorm(dim)
        self.joint = nn.Linear(2 * dim, dim)
        self.layers = [Layer(dim, args.attention_heads, args.ffn_dim) for _ in range(args.num_layers)]
        self.layer_norm = nn.LayerNorm(dim)

    def attend(self, memory: mx.array) -> Memory:
        """K and V per layer of a memory [B, S, D]: once per sequence, contiguous as attention reads them."""
        pooled = self.pooled(memory)
        found = [layer.encoder_attn.keys_values(pooled) for layer in self.layers]
        return [(mx.contiguous(keys), mx.contiguous(values)) for keys, values in found]

    def pooled(self, memory: mx.array) -> mx.array:
        """Memory [B, S, D] -> [B, S / memory_pool, D].

        A guess needs to know which word comes, not where its sounds begin to 20 ms, so neighbouring rows are averaged
        first, and every guess reads that much less.
        """
        if (pool := min(self.args.memory_pool, memory.shape[1])) > 1:
            rows = memory.shape[1] // pool
            memory = memory[:, : rows * pool].reshape(len(memory), rows, pool, -1).mean(axis=2)
        return memory

    def __call__(
        self, state: mx.array, embedded: mx.array, memory: Memory, attend: Attend = attention
    ) -> mx.array:
        """State and embedding of the newest token [B, T, D] -> the next state [B, T, D], for ``layer_norm``.

        ``attend`` is how attention is computed; training brings one with a cheaper gradient.
        """
        x = self.joint(mx.concatenate([self.state_norm(state), self.token_norm(embedded)], axis=-1))
        for layer, (keys, values) in zip(self.layers, memory, strict=True):
            x = layer(x, keys, values, attend)
        return x


class RecurrentDrafter:
    """Recurrent heads as a drafter: a chain, each guess made from the one before."""

    accuracies: list[list[float]] | None = None  # as ``trees.grow`` takes them, where the heads' file tells

    def __init__(self, heads: RecurrentHeads, embed: Callable[[mx.array], mx.array], guess: Guess):
        """``embed`` takes ids [n] to [n, D], ``guess`` states to ids."""
        self.heads = heads
        self.guess = guess
        self._embed = embed
        self._memory: Memory = []

    @property
    def max_drafts(self) -> int:
        return self.heads.args.num_heads

    def begin(self, memory: mx.array | None) -> None:
        """Project the memory [1, S, D] to K and V, which serve all guesses of the sequence."""
        assert memory is not None, "recurrent heads attend to the verifier's memory"
        self._memory = self.heads.attend(memory)
        mx.eval(self._memory)

    def propose(self, hidden: mx.array, pending: int, count: int) -> list[int]:
        count = min(count, self.max_drafts)
        guesses = []
        for token in self.chain(hidden, mx.array([pending]), self._memory, count):
            mx.async_eval(token)  # it is computed while the graph of the next one is built
            guesses.append(token)
        ids: list[int] = mx.concatenate(guesses).tolist()  # type: ignore[assignment]
        return ids

    def chain(self, hidden: mx.array, token: mx.array, memory: Memory, count: int) -> Iterator[mx.array]:
        """States [1, n, D], of which the last counts, and pending token [1] -> ``count`` guesses [1], lazily.

        A guess feeds the next one on the device, and the host waits once.
        """
        state = hidden[:, -1:]
        for _ in range(count):
            state = self.heads(state, self._embed(token)[None], memory)
            token = self.guess(self.heads.layer_norm(state)[0])
            yield token

    def propose_tree(self, hidden: mx.array, pending: int, tree: Tree) -> list[int]:
        """Level by level, the nodes of one that have children as one batch of rows; the host waits once."""
        states, tokens = hidden[:, -1:], mx.array([pending])
        guesses = []
        for level in tree.levels:
            sources, parents = mx.array(level.sources), mx.array(level.parents)
            states = self.heads(states[:, sources], self._embed(tokens[sources])[None], self._memory)
            best = self.guess.top(self.heads.layer_norm(states)[0], 1 + max(level.ranks))
            states, tokens = states[:, parents], best[parents, mx.array(level.ranks)]
            guesses.append(tokens)
        ids: list[int] = mx.concatenate(guesses).tolist()  # type: ignore[assignment]
        return ids
