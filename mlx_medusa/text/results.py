"""What writing a text returns: all of it, or piece by piece; names as in mlx-lm's ``GenerationResponse``."""

from dataclasses import asdict, dataclass
from typing import Any

from mlx_medusa.results import MedusaStatistics


@dataclass(frozen=True)
class TextPiece:
    """What one pass of the model has added to a text.

    ``text`` holds whole characters and may be empty: the pieces of a text join to the whole. ``tokens`` were decided by
    this pass. ``finish_reason`` is None until the last piece: then "stop" (the model ended its text) or "length"
    (``max_tokens``, or the model's context is full).
    """

    text: str
    tokens: list[int]
    finish_reason: str | None
    prompt_tokens: int  # of the prompt
    cached_tokens: int  # of them, what the K/V cache held already: these were not read anew
    generation_tokens: int  # written so far
    seed: int | None  # with which the same text is drawn again; None for greedy decoding
    medusa: MedusaStatistics  # so far

    @property
    def prompt_tps(self) -> float:
        """Tokens of the prompt that were read in a second."""
        return (self.prompt_tokens - self.cached_tokens) / max(self.medusa.encode_seconds, 1e-9)

    @property
    def generation_tps(self) -> float:
        """Tokens that were written in a second, the first one, which comes with the prompt, not counted."""
        return self.medusa.tokens / max(self.medusa.decode_seconds, 1e-9)


@dataclass(frozen=True)
class TextResult:
    """A text, its tokens (the end token included), why it ended, and statistics."""

    text: str
    tokens: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    seed: int | None
    prompt_tps: float
    generation_tps: float
    medusa: MedusaStatistics

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON has them."""
        return asdict(self)
