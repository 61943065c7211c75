"""Medusa heads: small residual MLPs that guess the tokens after the pending one, all from one state.

Head i (from 0) maps the state that predicted token t + 1 to a state that predicts token t + i + 2. Each block is
h + SiLU(W h + b) (Cai et al. 2024, https://arxiv.org/abs/2401.10774, section 2.1.1).
"""

from dataclasses import dataclass, fields
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa.errors import CheckpointError
from mlx_medusa.medusa.trees import Tree
from mlx_medusa.medusa.vocabulary import Guess, best, ranked


@dataclass(frozen=True)
class HeadsArgs:
    """The ``medusa`` part of a folder's config."""

    num_heads: int
    num_layers: int
    hidden_size: int
    tied: bool = True  # the verifier's own vocabulary projection serves all heads
    vocab_size: int = 0  # of the heads' own projections, where they are not tied
    draft_vocabulary: int = 0  # number of tokens that tied heads can guess; 0: all
    draft_rank: int = 0  # directions in which these are screened; 0: all are read in full

    @classmethod
    def from_config(cls, config: dict[str, Any], source: object) -> "HeadsArgs":
        """Read the settings; CheckpointError if one is missing."""
        for name in ("num_heads", "num_layers", "hidden_size"):
            if not isinstance(config.get(name), int) or config[name] < 1:
                raise CheckpointError(
                    f"{source}: medusa setting {name!r} is {config.get(name)!r}, expected a number"
                )
        if config.get("draft_vocabulary") and not config.get("tied", True):
            raise CheckpointError(
                f"{source}: heads with their own projection have no draft vocabulary: train them again"
            )
        names = (f.name for f in fields(cls) if f.name in config)
        return cls(**{name: config[name] for name in names})


class StackedLinear(nn.Module):
    """The first n of K linear maps as one batched matmul: [n, rows, in] -> [n, rows, out]."""

    def __init__(self, heads: int, inputs: int, outputs: int, bias: bool = True):
        super().__init__()
        self.weight = mx.zeros((heads, outputs, inputs))
        if bias:
            self.bias = mx.zeros((heads, outputs))

    def _multiply(self, x: mx.array) -> mx.array:
        return x @ self.weight[: len(x)].swapaxes(-1, -2)

    def __call__(self, x: mx.array) -> mx.array:
        out = self._multiply(x)
        return out + self.bias[: len(x), None] if "bias" in self else out

    def to_quantized(
        self, group_size: int, bits: int, mode: str = "affine", **_: Any
    ) -> "QuantizedStackedLinear":
        """Called by ``nn.quantize``."""
        return QuantizedStackedLinear(self, group_size, bits, mode)


class QuantizedStackedLinear(StackedLinear):
    """``StackedLinear`` with its weights quantized along the inputs."""

    def __init__(self, linear: StackedLinear, group_size: int, bits: int, mode: str):
        nn.Module.__init__(self)
        self.weight, self.scales, *biases = mx.quantize(linear.weight, group_size, bits, mode)
        self.biases = biases[0] if biases else None
        if "bias" in linear:
            self.bias = linear.bias
        self.settings: dict[str, Any] = {"group_size": group_size, "bits": bits, "mode": mode}
        self.freeze()

    def _multiply(self, x: mx.array) -> mx.array:
        n = len(x)
        biases = None if self.biases is None else self.biases[:n]
        return mx.quantized_matmul(
            x, self.weight[:n], self.scales[:n], biases, transpose=True, **self.settings
        )


class MedusaHeads(nn.Module):
    """K heads of L blocks; ``projection`` only where they do not use the verifier's."""

    def __init__(self, args: HeadsArgs):
        super().__init__()
        self.args = args
        dim = args.hidden_size
        self.layers = [StackedLinear(args.num_heads, dim, dim) for _ in range(args.num_layers)]
        if not args.tied:
            self.projection = StackedLinear(args.num_heads, dim, args.vocab_size, bias=False)

    def __call__(self, hidden: mx.array, count: int) -> mx.array:
        """States [n, D] that predicted pending tokens -> states [count, n, D] of the first ``count`` heads."""
        x = mx.broadcast_to(hidden, (count, *hidden.shape))
        for layer in self.layers:
            x = x + nn.silu(layer(x))
        return x


class MedusaDrafter:
    """Medusa heads as a drafter: all guesses at once, from the one state that predicted the pending token."""

    accuracies: list[list[float]] | None = None  # as ``trees.grow`` takes them, where the heads' file tells

    def __init__(self, heads: MedusaHeads, guess: Guess):
        """``guess`` takes states to ids; heads with their own projection do not use it."""
        self.heads = heads
        self.guess = guess

    @property
    def max_drafts(self) -> int:
        return self.heads.args.num_heads

    def begin(self, memory: mx.array | None) -> None:
        """Nothing to keep: each guess depends on one state alone."""

    def propose(self, hidden: mx.array, pending: int, count: int) -> list[int]:
        ids: list[int] = self.guesses(hidden, min(count, self.max_drafts)).tolist()  # type: ignore[assignment]
        return ids

    def guesses(self, hidden: mx.array, count: int) -> mx.array:
        """States [1, n, D], of which the last counts -> ids [count], lazily."""
        states = self.heads(hidden[0, -1:], count)
        return self.guess(states[:, 0]) if self.heads.args.tied else best(self.heads.projection(states)[:, 0])

    def propose_tree(self, hidden: mx.array, pending: int, tree: Tree) -> list[int]:
        """Each head's best guesses, whatever the guesses before them are."""
        states = self.heads(hidden[0, -1:], tree.depth)
        count = 1 + max(map(max, tree.paths))
        if self.heads.args.tied:
            guesses = self.guess.top(states[:, 0], count)
        else:
            guesses = ranked(self.heads.projection(states)[:, 0], count)
        ids: list[list[int]] = guesses.tolist()  # type: ignore[assignment]
        return [ids[len(path) - 1][path[-1]] for path in tree.paths]
