"""Inputs of a record or a check: windows of audio files, and prompts from text or JSON-lines files."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlx_medusa.audio import ENDINGS, SAMPLE_RATE
from mlx_medusa.errors import OptionError
from mlx_medusa.parity.records import hash_samples, hash_text

SECONDS = {"whisper": 30, "meralion2": 300}  # model_type -> the longest audio that it hears as one
PROMPT_ENDINGS = (".txt", ".jsonl")


@dataclass(frozen=True)
class Input:
    """A window of audio, or a prompt."""

    name: str
    content: np.ndarray | str  # 16 kHz mono float32 [n], or a text
    start: float = 0.0  # seconds into the file

    @property
    def sha256(self) -> str:
        return hash_text(self.content) if isinstance(self.content, str) else hash_samples(self.content)


def read_inputs(paths: Iterable[str], family: str) -> Iterator[Input]:
    """The inputs in files and folders, in order; prompts for a family that hears nothing.

    AudioError or OptionError for a file that cannot be read.
    """
    hears = family in SECONDS
    for path in _files(paths, ENDINGS if hears else PROMPT_ENDINGS):
        yield from _windows(path, SECONDS[family]) if hears else _prompts(path)


def _files(paths: Iterable[str], endings: tuple[str, ...]) -> Iterator[Path]:
    """The files, and of folders those with these endings."""
    for path in map(Path, paths):
        if path.is_dir():
            yield from (file for file in sorted(path.rglob("*")) if file.suffix.lower() in endings)
        else:
            yield path


def _windows(path: Path, seconds: int) -> Iterator[Input]:
    from mlx_medusa.audio import read_blocks
    from mlx_medusa.speech.windows import windows

    for window in windows(read_blocks(path), seconds * SAMPLE_RATE):
        yield Input(str(path), window.samples, window.start / SAMPLE_RATE)


def _prompts(path: Path) -> Iterator[Input]:
    """A prompt a line: the line itself, or in JSON lines the field "prompt" (and "name")."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path}: cannot be read as text ({error}): check the path") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        name, prompt = f"{path}:{number}", line
        if path.suffix == ".jsonl":
            try:
                content = json.loads(line)
                prompt, name = content["prompt"], str(content.get("name", name))
            except (ValueError, TypeError, KeyError) as error:
                raise OptionError(f'{path}: line {number} is no JSON object with a "prompt"') from error
        yield Input(name, prompt)
