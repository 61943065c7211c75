"""How many rows a verifier pass has."""

from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.decode import Drafter


def check_width(width: int | None, drafter: Drafter | None) -> int:
    """Rows of a pass that verifies a chain, one more than the guesses; None takes all that ``drafter`` can guess.

    OptionError if it cannot guess so many.
    """
    most = 1 + (drafter.max_drafts if drafter else 0)
    width = width or most
    if width > most:
        cure = "convert with --heads" if most == 1 else "use fewer rows"
        raise OptionError(f"width {width} needs {width - 1} heads, and there are {most - 1}: {cure}")
    return width
