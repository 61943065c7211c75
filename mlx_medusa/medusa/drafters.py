"""From a heads file to a drafter. A new kind of heads is a line in ``KINDS`` and one in ``checkpoint``'s shapes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError
from mlx_medusa.medusa.causal import CausalArgs, CausalDrafter, CausalHeads
from mlx_medusa.medusa.decode import Drafter
from mlx_medusa.medusa.heads import HeadsArgs, MedusaDrafter, MedusaHeads
from mlx_medusa.medusa.recurrent import RecurrentArgs, RecurrentDrafter, RecurrentHeads
from mlx_medusa.medusa.vocabulary import DraftVocabulary, Guess, Vocabulary, check_vocabulary


class Base(Protocol):
    """What drafters borrow from the verifier."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids [...] -> token embeddings [..., D], as the first layer would see them, without positions."""
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., D] -> [..., V]"""
        ...

    def projection_rows(self, tokens: mx.array) -> mx.array:
        """Ids [n] -> their rows of the vocabulary projection, [n, D]."""
        ...


@dataclass(frozen=True)
class Kind:
    """A kind of heads: its settings, its module, and the drafter around that."""

    args: Any
    module: Any
    drafter: Callable[[Any, Base, Guess], Drafter]


KINDS = {  # ``type`` of the medusa config -> kind
    "medusa": Kind(HeadsArgs, MedusaHeads, lambda heads, base, guess: MedusaDrafter(heads, guess)),
    "recurrent": Kind(
        RecurrentArgs,
        RecurrentHeads,
        lambda heads, base, guess: RecurrentDrafter(heads, base.embed, guess),
    ),
    "causal": Kind(
        CausalArgs, CausalHeads, lambda heads, base, guess: CausalDrafter(heads, base.embed, guess)
    ),
}


def kind_of(config: dict[str, Any], source: object) -> Kind:
    """The kind that a medusa config names; CheckpointError if it is not known."""
    name = config.get("type", "medusa")
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise CheckpointError(f"{source}: heads of type {name!r} are not supported (supported: {known})")
    return KINDS[name]


def build_heads(config: dict[str, Any], source: object) -> nn.Module:
    """The module that a medusa config describes, untrained. CheckpointError if the settings are broken."""
    kind = kind_of(config, source)
    return kind.module(kind.args.from_config(config, source))


def load_drafter(
    config: dict[str, Any],
    arrays: dict[str, mx.array],
    base: Base,
    hidden_size: int,
    vocab_size: int,
    *,
    dtype: mx.Dtype | None,
    source: str | Path,
) -> Drafter:
    """A drafter from what ``checkpoint.read_heads`` returns; empties ``arrays``.

    ``hidden_size`` and ``vocab_size`` are the verifier's. Raises CheckpointError if the heads do not fit them.
    """
    heads = build_heads(config, source)
    check_fit(config, arrays, hidden_size, vocab_size, source)
    ids, basis = arrays.pop("draft_vocabulary", None), arrays.pop("draft_basis", None)
    checkpoint.load_into(heads, arrays, quantization=config.get("quantization"), dtype=dtype, source=source)
    if mx.default_device().type == mx.cpu:
        heads.update(tree_map(_by_column, heads.parameters()))
        mx.eval(heads.parameters())
    drafter: Any = new_drafter(config, heads, base, ids, basis, source)
    drafter.accuracies = config.get("accuracies")
    return drafter


def check_fit(
    config: dict[str, Any], arrays: dict[str, mx.array], hidden_size: int, vocab_size: int, source: object
) -> None:
    """CheckpointError unless heads fit a verifier of this hidden size and vocabulary."""
    if config["hidden_size"] != hidden_size:
        raise CheckpointError(
            f"{source}: heads of hidden size {config['hidden_size']} do not fit a model of {hidden_size}: "
            "use its own heads"
        )
    if (ids := arrays.get("draft_vocabulary")) is not None:
        check_vocabulary(ids, vocab_size, source)


def _by_column(weight: mx.array) -> mx.array:
    """The same matrices [..., out, in], laid out by column: BLAS multiplies a single row by their transposes a fourth
    faster so.
    """
    if weight.ndim < 2 or not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    return mx.contiguous(weight.swapaxes(-1, -2)).swapaxes(-1, -2)


def new_drafter(
    config: dict[str, Any],
    heads: nn.Module,
    base: Base,
    ids: mx.array | None = None,
    basis: mx.array | None = None,
    source: object = "heads",
) -> Drafter:
    """The drafter around loaded heads. With ``ids`` [N], and perhaps ``basis`` [D, r], it guesses among those."""
    guess: Guess = Vocabulary(base.logits)
    if ids is not None:
        rows = base.projection_rows(ids)
        guess = DraftVocabulary(ids, rows, None if basis is None else basis.astype(rows.dtype))
    return kind_of(config, source).drafter(heads, base, guess)
