"""Medusa heads and the recurrent blocks in PyTorch, from the description of their files."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from mlx_medusa.errors import CheckpointError
from mlx_medusa.reference.decode import Drafter, Reference
from mlx_medusa.reference.folder import read_heads
from mlx_medusa.reference.runtime import Place

_GROUP = 32  # tokens of which the screen of a draft vocabulary lets one pass

Tensors = dict[str, torch.Tensor]


def load_drafter(path: Path, where: Place) -> Drafter:
    """The heads in a folder or a medusa.safetensors, in float32 or the place's precision."""
    config, tensors = read_heads(path)
    moved = {
        name: t.to(where.device, where.dtype if t.is_floating_point() else None)
        for name, t in tensors.items()
    }
    kinds: dict[str, Any] = {"medusa": MedusaHeads, "recurrent": RecurrentHeads, "causal": CausalHeads}
    kind = config.get("type", "medusa")
    if kind not in kinds:
        raise CheckpointError(f"{path}: heads of type {kind!r} are not known to the reference")
    return kinds[kind](config, moved)


class _Guesser:
    """From states to tokens: the whole vocabulary, or the heads' draft vocabulary.

    With a basis [D, r] the draft vocabulary is screened: its N tokens (filled up to a multiple of 32 with the last)
    form N / 32 groups, group j has the tokens j, j + N / 32, j + 2 N / 32 and so on, and only the best of each group
    in the r directions of the basis is looked at in full.
    """

    def __init__(self, tensors: Tensors):
        self._ids, self._basis = tensors.get("draft_vocabulary"), tensors.get("draft_basis")
        self._rows: torch.Tensor | None = None
        self._coarse = torch.empty(0)

    def begin(self, reference: Reference) -> None:
        if self._rows is not None:
            return
        self._rows = reference.projection
        if self._ids is None:
            return
        if self._basis is not None:
            self._ids = torch.cat([self._ids, self._ids[-1:].expand(-len(self._ids) % _GROUP)])
        self._rows = self._rows[self._ids.long()]
        if self._basis is not None:
            self._coarse = self._rows @ self._basis

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        """State [D] -> the guess, []."""
        assert self._rows is not None, "begin comes first"
        if self._ids is None:
            return (self._rows @ state).argmax()
        if self._basis is None:
            return self._ids[(self._rows @ state).argmax()]
        rivals = (self._coarse @ (self._basis.T @ state)).reshape(_GROUP, -1)  # column j is group j
        groups = rivals.shape[1]
        passed = rivals.argmax(0) * groups + torch.arange(groups, device=state.device)
        return self._ids[passed[(self._rows[passed] @ state).argmax()]]


class MedusaHeads:
    """h + SiLU(W h + b) per block, K heads beside each other, all from the state that predicted the pending token."""

    def __init__(self, config: dict[str, Any], tensors: Tensors):
        self.max_drafts = int(config["num_heads"])
        self._blocks = int(config["num_layers"])
        self._tensors = tensors
        self._guess = _Guesser(tensors)

    def begin(self, reference: Reference, memory: torch.Tensor | None) -> None:
        self._guess.begin(reference)

    def read(self, tokens: Sequence[int], states: torch.Tensor) -> None:
        """Nothing of earlier tokens is kept."""

    def propose(self, hidden: torch.Tensor, pending: int, count: int) -> list[int]:
        return self.guesses(hidden, min(count, self.max_drafts)).tolist()

    def guesses(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """State [D] -> ids [count]: tensors only, so that it can be exported."""
        guesses = []
        for head in range(count):
            state = hidden
            for block in range(self._blocks):
                weight, bias = (self._tensors[f"layers.{block}.{part}"][head] for part in ("weight", "bias"))
                state = state + F.silu(F.linear(state, weight, bias))
            own = self._tensors.get("projection.weight")
            guesses.append(self._guess(state) if own is None else (own[head] @ state).argmax())
        return torch.stack(guesses)


class RecurrentHeads:
    """One block, run once per guess: it joins state and token, attends to the encoder output, and has one MLP."""

    def __init__(self, config: dict[str, Any], tensors: Tensors):
        self.max_drafts = int(config["num_heads"])
        self.num_layers, self.attention_heads = int(config["num_layers"]), int(config["attention_heads"])
        self.memory_pool = int(config.get("memory_pool", 1))
        self._tensors = tensors
        self._guess = _Guesser(tensors)
        self._embed: Any = None
        self._memory: list[tuple[torch.Tensor, ...]] = []  # K and V per layer

    def begin(self, reference: Reference, memory: torch.Tensor | None) -> None:
        assert memory is not None, "recurrent heads attend to the encoder output"
        self._guess.begin(reference)
        self._embed = reference.embed
        self._memory = self.keys_values(memory[0])

    def read(self, tokens: Sequence[int], states: torch.Tensor) -> None:
        """Nothing of earlier tokens is kept."""

    def keys_values(self, memory: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """[S, D] -> K and V [heads, S / memory_pool, d] per layer"""
        memory = F.avg_pool1d(memory.T[None], min(self.memory_pool, len(memory)))[0].T
        names = [f"layers.{layer}.encoder_attn" for layer in range(self.num_layers)]
        return [
            tuple(self._split(self._linear(f"{name}.{part}_proj", memory)) for part in "kv") for name in names
        ]

    def propose(self, hidden: torch.Tensor, pending: int, count: int) -> list[int]:
        token = torch.tensor(pending, device=hidden.device)
        return self.guesses(hidden, token, self._memory, min(count, self.max_drafts)).tolist()

    def guesses(
        self, state: torch.Tensor, token: torch.Tensor, memory: list[tuple[torch.Tensor, ...]], count: int
    ) -> torch.Tensor:
        """State [D] and pending token [] -> ids [count]: tensors only, so that it can be exported."""
        guesses = []
        for _ in range(count):
            state = self._next(state, self._embed(token[None])[0], memory)
            token = self._guess(self._norm("layer_norm", state))
            guesses.append(token)
        return torch.stack(guesses)

    def _next(
        self, state: torch.Tensor, embedded: torch.Tensor, memory: list[tuple[torch.Tensor, ...]]
    ) -> torch.Tensor:
        joined = torch.cat([self._norm("state_norm", state), self._norm("token_norm", embedded)])
        x = self._linear("joint", joined)
        for layer, (keys, values) in enumerate(memory):
            name = f"layers.{layer}"
            query = self._linear(
                f"{name}.encoder_attn.q_proj", self._norm(f"{name}.encoder_attn_layer_norm", x)
            )
            query = query.reshape(self.attention_heads, 1, -1)
            weights = torch.softmax(query @ keys.transpose(1, 2) / math.sqrt(query.shape[-1]), -1)
            x = x + self._linear(f"{name}.encoder_attn.out_proj", (weights @ values).reshape(-1))
            inner = F.gelu(self._linear(f"{name}.fc1", self._norm(f"{name}.final_layer_norm", x)))
            x = x + self._linear(f"{name}.fc2", inner)
        return x

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        """[S, D] -> [heads, S, d]"""
        return x.reshape(len(x), self.attention_heads, -1).transpose(0, 1)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])


class CausalHeads:
    """One Llama block, run once per guess: it joins state and token with the state and the next token of the place
    where the newest tokens came before, and attends to the verifier's states of all tokens so far.
    """

    def __init__(self, config: dict[str, Any], tensors: Tensors):
        self.max_drafts = int(config["num_heads"])
        self._longest = int(config.get("match_length", 0))
        self._layers = [f"layers.{layer}" for layer in range(int(config["num_layers"]))]
        self._groups, self._size = int(config["key_value_heads"]), int(config["head_dim"])
        half = torch.arange(0, self._size, 2) / self._size
        self._frequencies = float(config["rope_theta"]) ** -half.double()
        self._eps = float(config.get("norm_eps", 1e-5))
        self._tensors = tensors
        self._guess = _Guesser(tensors)
        self._embed: Any = None

    def begin(self, reference: Reference, memory: torch.Tensor | None) -> None:
        self._guess.begin(reference)
        self._embed = reference.embed
        self._tokens: list[int] = []
        self._states: list[torch.Tensor] = []  # [D] each
        self._memory: list[list[tuple[torch.Tensor, torch.Tensor]]] = [
            [] for _ in self._layers
        ]  # K, V per token

    def read(self, tokens: Sequence[int], states: torch.Tensor) -> None:
        """Keep the verifier's states [n, D] of tokens that are decided and read."""
        for token, state in zip(tokens, states, strict=True):
            normed = self._norm("state_norm", state)
            for name, kept in zip(self._layers, self._memory, strict=True):
                row = self._norm(f"{name}.input_layernorm", normed)
                keys = self._split(f"{name}.self_attn.k_proj", row)
                values = self._split(f"{name}.self_attn.v_proj", row)
                kept.append((self._turn(keys, len(self._states)), values))
            self._tokens.append(token)
            self._states.append(state)

    def propose(self, hidden: torch.Tensor, pending: int, count: int) -> list[int]:
        recent, guesses = [*self._tokens, pending], []
        memory = [tuple(torch.stack(rows, 1) for rows in zip(*kept, strict=True)) for kept in self._memory]
        state = hidden
        for depth in range(min(count, self.max_drafts)):
            state = self._next(state, recent, len(self._tokens) + depth, memory)
            recent.append(int(self._guess(state)))
            guesses.append(recent[-1])
        return guesses

    def _next(self, state: torch.Tensor, recent: list[int], position: int, memory: Any) -> torch.Tensor:
        joined = [self._norm("state_norm", state), self._norm("token_norm", self._embedded(recent[-1]))]
        if self._longest:
            place, length = self._place(recent)
            for part in ("state_norm", "token_norm"):
                found = self._states[place] if part == "state_norm" else self._embedded(recent[place + 1])
                joined.append(self._norm(part, found) if length else torch.zeros_like(state))
            gates = self._tensors["gates"].reshape(self._longest + 1, -1)
            x = self._linear("joint", torch.cat(joined) * gates[length])
        else:
            x = self._linear("joint", torch.cat(joined))
        for name, (keys, values) in zip(self._layers, memory, strict=True):
            row = self._norm(f"{name}.input_layernorm", x)
            query = self._turn(self._split(f"{name}.self_attn.q_proj", row), position)
            query = query.reshape(self._groups, -1, self._size)
            weights = torch.softmax(query @ keys.transpose(1, 2) / math.sqrt(self._size), -1)
            x = x + self._linear(f"{name}.self_attn.o_proj", (weights @ values).reshape(-1))
            row = self._norm(f"{name}.post_attention_layernorm", x)
            gate, up = (self._linear(f"{name}.mlp.{part}_proj", row) for part in ("gate", "up"))
            x = x + self._linear(f"{name}.mlp.down_proj", F.silu(gate) * up)
        return self._norm("norm", x)

    def _place(self, recent: list[int]) -> tuple[int, int]:
        """Where among the tokens read the newest ones came before, and how many are the same: the longest, then the
        latest.
        """
        best = (0, -1)
        for place in range(len(self._tokens)):
            length = 0
            while (
                length < min(self._longest, place + 1) and self._tokens[place - length] == recent[-1 - length]
            ):
                length += 1
            best = max(best, (length, place))
        return best[1], best[0]

    def _embedded(self, token: int) -> torch.Tensor:
        return self._embed(torch.tensor([token], device=self._states[-1].device))[0]

    def _split(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """[D] -> [heads, d]"""
        return self._linear(name, x).reshape(-1, self._size)

    def _turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """Rotary positions of [heads, d]: number i of the first half turns with number i of the second."""
        angles = (position * self._frequencies).to(x.device, torch.float32)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape, self._tensors[f"{name}.weight"], self._eps)
