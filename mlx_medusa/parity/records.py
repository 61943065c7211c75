"""The format of a record: JSON lines, first what was run, then an entry per input. Neither PyTorch nor MLX is needed.

A head is ``{"format": "mlx-medusa parity 1", "family", "model", "fingerprint" (SHA-256 of the weight files),
"quantization" (settings or null), "device", "dtype", "versions", "width", "heads"}``. An entry has

- ``name``, and ``start`` (seconds) for a later window of a long file; ``input``: the prompt, where it is a text;
- ``sha256`` of the input: of audio the 16 kHz samples as little-endian 16-bit integers, of text its UTF-8 bytes;
- what was asked: the fields of ``Asked`` that differ from their defaults; ``detected`` [code, probability] where the
  model had to tell the language;
- ``prompt``: its tokens; ``tokens``: what was decided, the end included; ``text``: their text;
- ``margins`` and ``logprobs``, per decided token, both under the rules: by how much the best logit leads the second
  best (null: there is no second), and the log probability of the token, rounded to 1e-4;
- ``rounds``, where heads were used too: how many tokens each pass of the verifier then decided, without the prefill.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlx_medusa.errors import OptionError

FORMAT = "mlx-medusa parity 1"
MAX_TOKENS = 100  # of a text, if nothing is asked
DIGITS = 4  # decimals of margins and log probabilities


@dataclass(frozen=True)
class Asked:
    """What is asked of a model, the input aside. Fields that a family does not know stay as they are."""

    language: str | None = None  # None: the model has to tell it, where it knows several
    task: str = "transcribe"
    timestamps: bool = False
    instruction: str | None = None
    max_tokens: int | None = None
    chat: bool = False  # a prompt is the message of a chat


@dataclass(frozen=True)
class Head:
    """What was run."""

    family: str
    model: str
    fingerprint: str
    quantization: dict[str, Any] | None
    device: str
    dtype: str
    versions: dict[str, str]
    width: int = 1
    heads: str | None = None


@dataclass(frozen=True)
class Entry:
    """What was decided for one input."""

    name: str
    sha256: str
    asked: Asked
    prompt: list[int]
    tokens: list[int]
    text: str
    margins: list[float]
    logprobs: list[float]
    rounds: list[int] | None = None
    start: float = 0.0
    input: str | None = None  # the prompt, where that is a text
    detected: tuple[str, float] | None = None

    @property
    def label(self) -> str:
        """The name, and where in the file."""
        return f"{self.name} at {self.start:g} s" if self.start else self.name

    def to_line(self) -> str:
        """One line, without what says nothing."""
        asked = {name: value for name, value in asdict(self.asked).items() if value != getattr(Asked(), name)}
        content: dict[str, Any] = {"name": self.name, "sha256": self.sha256, **asked}
        for name in ("start", "input", "detected"):
            if value := getattr(self, name):
                content[name] = value
        content |= {"prompt": self.prompt, "tokens": self.tokens, "text": self.text}
        content["margins"] = [None if math.isinf(m) else round(m, DIGITS) for m in self.margins]
        content["logprobs"] = [round(p, DIGITS) for p in self.logprobs]
        if self.rounds is not None:
            content["rounds"] = self.rounds
        return json.dumps(content, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def from_line(cls, line: str) -> "Entry":
        """What ``to_line`` made. ValueError, TypeError or KeyError for anything else."""
        content: dict[str, Any] = json.loads(line)
        asked = {name: content.pop(name) for name in Asked.__dataclass_fields__ if name in content}
        margins = [math.inf if margin is None else margin for margin in content.pop("margins")]
        if detected := content.pop("detected", None):
            content["detected"] = (detected[0], detected[1])
        return cls(asked=Asked(**asked), margins=margins, **content)


@dataclass(frozen=True)
class Record:
    head: Head
    entries: list[Entry] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield head_line(self.head)
        yield from (entry.to_line() + "\n" for entry in self.entries)


def head_line(head: Head) -> str:
    """The first line of a record."""
    return json.dumps({"format": FORMAT, **asdict(head)}, ensure_ascii=False) + "\n"


def read(path: str | Path) -> Record:
    """A record. OptionError, with the line, if it is none or was cut short."""
    number = 0
    try:
        with Path(path).open(encoding="utf-8") as file:
            number, line = 1, file.readline()
            head = json.loads(line)
            if head.pop("format", None) != FORMAT:
                raise ValueError("another format")
            entries = []
            for number, line in enumerate(file, 2):  # noqa: B007 - the error below names it
                entries.append(Entry.from_line(line))
            return Record(Head(**head), entries)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}: check the path") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise OptionError(f"{path}: line {number} is not of a parity record: record it again") from error


def hash_samples(samples: np.ndarray) -> str:
    """SHA-256 of 16 kHz samples as 16-bit integers, so that a resampler's last bits do not matter."""
    return hashlib.sha256(np.round(samples * 32767).astype("<i2").tobytes()).hexdigest()


def hash_text(text: str) -> str:
    """SHA-256 of a prompt's UTF-8 bytes."""
    return hashlib.sha256(text.encode()).hexdigest()


def by_input(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """The entries of each input, which is then encoded once for all of them."""
    found: dict[str, list[Entry]] = {}
    for entry in entries:
        found.setdefault(entry.sha256, []).append(entry)
    return found
