"""What the command lines share: options, the model to use, and an error as one line and an exit status."""

import argparse
import io
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlx_medusa.demo import Demo, demo_model
from mlx_medusa.errors import MedusaError, OptionError

DEFAULT_MODEL = Path("mlx_model")  # where convert writes


def add(p: argparse.ArgumentParser, flag: str, *more: str, **settings: object) -> None:
    """Add an option in both spellings, --output-dir and --output_dir."""
    p.add_argument(flag, "--" + flag[2:].replace("-", "_"), *more, **settings)  # type: ignore[arg-type]


def add_model(p: argparse.ArgumentParser) -> None:
    """Add the options that say what is loaded, and --debug."""
    p.add_argument(
        "--model",
        help="folder made by convert, or hub repository (default: ./mlx_model, else the demo model)",
    )
    p.add_argument(
        "--heads", help="heads to use instead of the model's own: a file or folder that convert reads"
    )
    p.add_argument("--dtype", choices=("float16", "bfloat16", "float32"),
                   help="precision (default: the model's; on a CPU float32)")  # fmt: skip
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")


def chosen(kind: Any, args: argparse.Namespace, **others: Any) -> Any:
    """An options object from the arguments that have the names of its fields."""
    names = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in vars(args).items() if name in names} | others)


def find_model(name: str | None, demo: Demo, example: str) -> str | Path:
    """The model to use: the one named, else ./mlx_model, else the demo model.

    OptionError if there is none; ``example`` is what `convert --base` might be given.
    """
    if name is not None:
        return name
    if DEFAULT_MODEL.exists():
        return DEFAULT_MODEL
    folder = demo_model(demo)
    if folder is None:
        raise OptionError(
            f"no model: make one with `convert --base {example} -q` (it writes ./mlx_model), "
            f"or install the demo model with `{demo.install}`"
        )
    return folder


def log_to_stderr(name: str) -> None:
    """Show warnings of command ``name`` on standard error, a line each."""
    logging.basicConfig(format=f"{name}: %(levelname)s: %(message)s", stream=sys.stderr, force=True)
    logging.addLevelName(logging.WARNING, "warning")


def guarded(name: str, action: Callable[[], int], debug: bool) -> int:
    """The exit status of ``action``; of command ``name`` an error is printed, or with ``debug`` let through.

    Standard output is UTF-8, whatever the terminal says of itself.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")
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
