"""export.json: what an exported folder holds, for the program that runs it. Needs neither MLX nor PyTorch."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_medusa import __version__
from mlx_medusa.audio import SAMPLE_RATE
from mlx_medusa.errors import CheckpointError

if TYPE_CHECKING:
    from mlx_medusa.speech.tokenizer import WhisperTokenizer

FILE = "export.json"
VERSION = 1  # raised when an older reader would misread the folder
WINDOW_SAMPLES = 30 * SAMPLE_RATE
COPIED = ("tokenizer.json", "generation_config.json")

Shape = tuple[int | str, ...]  # a name is a size that differs from call to call


@dataclass(frozen=True)
class Port:
    """An input or output of a function."""

    name: str
    shape: Shape
    dtype: str  # as numpy names it


@dataclass(frozen=True)
class Function:
    """A function in a file of its own; inputs and outputs are in the order of the call."""

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]


def pairs(prefix: str, layers: int, shape: Shape, dtype: str) -> list[Port]:
    """K and V of each layer in turn: <prefix>key_0, <prefix>value_0, <prefix>key_1, ..."""
    return [Port(f"{prefix}{part}_{i}", shape, dtype) for i in range(layers) for part in ("key", "value")]


def decoding(tokenizer: "WhisperTokenizer", max_length: int, vocab_size: int, drafts: int) -> dict[str, Any]:
    """Every number that a decode loop needs besides the functions. ``drafts`` is what heads guess, 0 without any."""
    return {
        "sample_rate": SAMPLE_RATE,
        "window_samples": WINDOW_SAMPLES,
        "max_length": max_length,  # tokens of a sequence, prompt included
        "max_tokens": max_length // 2,  # written in one window, as openai/whisper
        "width": 1 + drafts,  # most rows of a pass that verifies
        "vocab_size": vocab_size,
        "sot": tokenizer.sot,
        "eot": tokenizer.eot,
        "no_timestamps": tokenizer.no_timestamps,
        "timestamp_begin": tokenizer.timestamp_begin,
        "max_initial_timestamp": tokenizer.max_initial_timestamp,
        "suppressed": tokenizer.suppressed,
        "suppressed_at_begin": tokenizer.suppressed_at_begin,
        "languages": tokenizer.languages,  # empty: English only, and the prompt names no language and no task
        "tasks": tokenizer.tasks,
    }


def write(
    folder: Path, source: Path, form: str, functions: dict[str, Function], settings: dict[str, Any]
) -> None:
    """Write export.json beside the functions, and copy from the model folder ``source`` what turns tokens to text."""
    content = {
        "format": form,
        "version": VERSION,
        "made_by": f"mlx-medusa {__version__}",
        "functions": {name: asdict(function) for name, function in functions.items()},
        "decoding": settings,
    }
    (folder / FILE).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in COPIED:
        shutil.copyfile(source / name, folder / name)


def read(folder: Path, form: str) -> dict[str, Any]:
    """The content of export.json; CheckpointError unless the folder is a whole export of format ``form``."""
    path = folder / FILE
    cure = f"make one with: python -m mlx_medusa.export --model MODEL --format {form} -o {folder}"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        found, version = content["format"], content["version"]
        files = [function["file"] for function in content["functions"].values()]
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{folder}: no {FILE}, so this is no exported folder: {cure}") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: broken; export the model again") from error
    if (found, version) != (form, VERSION):
        raise CheckpointError(
            f"{path}: format {found!r}, version {version!r}; expected {form!r}, {VERSION}: {cure}"
        )
    for name in (*files, *COPIED):
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: missing; export the model again")
    return content
