"""What the command lines share: an error is one line on standard error and an exit status."""

import os
import sys
from collections.abc import Callable

from mlx_medusa.errors import MedusaError


def guarded(name: str, action: Callable[[], int], debug: bool) -> int:
    """The exit status of ``action``; of command ``name`` an error is printed, or with ``debug`` let through."""
    try:
        return action()
    except MedusaError as error:
        return report(name, error, debug)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output went away; nothing more can be said to it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def report(name: str, error: MedusaError, debug: bool) -> int:
    """Print an error as one line, or with ``debug`` let it through; returns the exit status."""
    if debug:
        raise error
    print(f"{name}: error: {error}", file=sys.stderr)
    return 1
