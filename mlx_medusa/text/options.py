"""How to write a text; names as in mlx-lm."""

from dataclasses import dataclass

from mlx_medusa.errors import OptionError


@dataclass(frozen=True)
class TextOptions:
    """How to write.

    ``max_tokens``: the most tokens that are written. ``width``: rows of a verifier pass, one more than the guesses;
    None takes all heads. ``medusa``: False decodes without heads.
    """

    max_tokens: int = 256
    width: int | None = None
    medusa: bool = True

    def __post_init__(self) -> None:
        for name in ("width", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}, but must be at least 1")
