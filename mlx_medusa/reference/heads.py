"""Medusa heads and the recurrent block in PyTorch, from the description of their files."""

import math
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
    kinds: dict[str, Any] = {"medusa": MedusaHeads, "recurrent": RecurrentHeads}
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
