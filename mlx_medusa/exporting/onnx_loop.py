"""Transcribe with exported ONNX files: a decode loop that drafts and verifies, on numpy and onnxruntime alone.

It is short so that it can be taken over into other programs: beside this file it needs the grammar of timestamps
(``mlx_medusa/medusa/grammar.py``) where those are wanted, and what cuts long audio into windows.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from tokenizers import Tokenizer

from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.exporting import description
from mlx_medusa.medusa.grammar import TimestampGrammar

logger = logging.getLogger("mlx_medusa")

TIMESTAMP = 0.02  # seconds from one timestamp token to the next

Arrays = dict[str, np.ndarray]


@dataclass
class Written:
    """What was transcribed, and what it took."""

    language: str
    tokens: list[int] = field(default_factory=list)  # without prompt and end
    decided: int = 0  # tokens that passes after the prompt's decided, ends included
    rounds: int = 0  # those passes
    accepted_per_head: list[int] = field(default_factory=list)  # by distance from the pending token

    @property
    def tokens_per_verify(self) -> float:
        return self.decided / self.rounds if self.rounds else 0.0


class OnnxTranscriber:
    """The functions of an exported folder, and the loop around them."""

    def __init__(self, folder: Path):
        """CheckpointError if the folder is no whole export."""
        content = description.read(folder, "onnx")
        self.settings: dict[str, Any] = content["decoding"]
        self._sessions = {name: _session(folder / f["file"]) for name, f in content["functions"].items()}
        self._outputs = {name: [p["name"] for p in f["outputs"]] for name, f in content["functions"].items()}
        self._inputs = {name: [p.name for p in s.get_inputs()] for name, s in self._sessions.items()}
        self._past = [p for p in content["functions"]["step"]["inputs"] if p["name"].startswith("past_")]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def transcribe(
        self,
        samples: np.ndarray,
        language: str | None = None,
        task: str = "transcribe",
        *,
        width: int | None = None,
        timestamps: bool = False,
        start: float = 0.0,
    ) -> Written:
        """16 kHz mono samples [n] float32 of at most 30 s -> their text's tokens.

        ``language`` is a code; None detects it. ``width``: rows of a pass, one more than the guesses (default: all).
        ``start``: seconds at which the samples begin, for the warning that a text was cut.
        """
        s = self.settings
        most = s["width"]
        if width is not None and not 1 <= width <= most:
            raise OptionError(f"width is {width}, but these heads allow 1 to {most}")
        window = np.zeros(s["window_samples"], np.float32)
        window[: len(samples)] = samples
        memory = self._run("encoder", {"samples": window})
        language = language or self.detect(memory)
        prompt = self.prompt(language, task, timestamps=timestamps)
        written = Written(language, accepted_per_head=[0] * ((width or most) - 1))
        if not self._decode(memory, prompt, Rules(s, len(prompt), timestamps), written):
            logger.warning("the window at %.1f s was cut at %d tokens", start, len(written.tokens))
        return written

    def prompt(self, language: str, task: str, *, timestamps: bool) -> list[int]:
        """The tokens before the text. OptionError for a language or task that the model has not."""
        s = self.settings
        start = [s["sot"]]
        if s["languages"]:
            if language not in s["languages"] or task not in s["tasks"]:
                raise OptionError(f"language {language!r}, task {task!r}: not among those of this model")
            start += [s["languages"][language], s["tasks"][task]]
        elif (language, task) != ("en", "transcribe"):
            raise OptionError("this model only transcribes English: leave --language and --task out")
        return start if timestamps else [*start, s["no_timestamps"]]

    def detect(self, memory: Arrays) -> str:
        """The likeliest language after the start token."""
        languages: dict[str, int] = self.settings["languages"]
        if not languages:
            return "en"
        logits = self._step([self.settings["sot"]], self._empty(), memory)["logits"][0, 0]
        return max(languages, key=lambda code: logits[languages[code]])

    def text(self, tokens: Sequence[int], *, timestamps: bool = False) -> str:
        """Text of the tokens; timestamps as <|0.00|> or left out."""
        first, text = self.settings["timestamp_begin"], ""
        for stamped, run in groupby(tokens, key=lambda token: token >= first):
            if not stamped:
                text += self._tokenizer.decode([token for token in run if token < self.settings["eot"]])
            elif timestamps:
                text += "".join(f"<|{(token - first) * TIMESTAMP:.2f}|>" for token in run)
        return text

    def _decode(self, memory: Arrays, prompt: list[int], rules: "Rules", written: Written) -> bool:
        """Prefill, then rounds of draft, verify, accept, until the end (True) or the limit; adds to ``written``."""
        s, width = self.settings, len(written.accepted_per_head) + 1
        end = min(len(prompt) + s["max_tokens"], s["max_length"])
        out = self._step(prompt, self._empty(), memory)
        tokens = [*prompt, rules.pick([prompt], out["logits"][0, -1:])[0]]
        at = (
            len(prompt) - 1
        )  # the row of the last pass that predicted the pending token, which is not cached yet
        while tokens[-1] != s["eot"] and len(tokens) < end:
            hidden = out["hidden"][:, at : at + 1]
            drafts = self._draft(hidden, tokens[-1], memory)[: min(width, end - len(tokens)) - 1]
            past = {p["name"]: self._kept(out, p["name"], len(tokens) - 1) for p in self._past}
            out = self._step([tokens[-1], *drafts], past, memory)
            picks = rules.pick([tokens + drafts[:row] for row in range(len(drafts) + 1)], out["logits"][0])
            at = next((i for i, draft in enumerate(drafts) if picks[i] != draft), len(drafts))
            if s["eot"] in picks[: at + 1]:
                at = picks.index(s["eot"])
            tokens += picks[: at + 1]
            written.rounds, written.decided = written.rounds + 1, written.decided + at + 1
            for i in range(min(at + 1, len(drafts))):
                written.accepted_per_head[i] += picks[i] == drafts[i]
        written.tokens = [token for token in tokens[len(prompt) :] if token != s["eot"]]
        return tokens[-1] == s["eot"]

    def _draft(self, hidden: np.ndarray, pending: int, memory: Arrays) -> list[int]:
        if "heads" not in self._sessions:
            return []
        given = {"hidden": hidden, "token": np.array([pending]), **memory}
        ids: list[int] = self._run("heads", given)["guesses"].tolist()
        return ids

    def _step(self, tokens: Sequence[int], past: Arrays, memory: Arrays) -> Arrays:
        return self._run("step", {"tokens": np.array([tokens]), **past, **memory})

    def _run(self, name: str, given: Arrays) -> Arrays:
        """Call a function with those of the arrays that it takes."""
        values = self._sessions[name].run(None, {key: given[key] for key in self._inputs[name]})
        return dict(zip(self._outputs[name], values, strict=True))

    def _empty(self) -> Arrays:
        return {p["name"]: np.zeros([s if isinstance(s, int) else 0 for s in p["shape"]], np.float32)
                for p in self._past}  # fmt: skip

    @staticmethod
    def _kept(out: Arrays, name: str, length: int) -> np.ndarray:
        """The first ``length`` rows of K or V: what was written for drafts that were wrong is dropped."""
        return np.ascontiguousarray(out[name.replace("past", "present")][:, :, :length])


class Rules:
    """What edits logits, in openai/whisper's order, and the pick: the highest, of equal ones the lowest id."""

    def __init__(self, settings: dict[str, Any], begin: int, timestamps: bool):
        self._suppressed, self._at_begin = settings["suppressed"], settings["suppressed_at_begin"]
        self._begin = begin  # length of the prompt
        self._grammar = TimestampGrammar(
            settings["timestamp_begin"], settings["eot"], settings["no_timestamps"],
            settings["max_initial_timestamp"],
        ) if timestamps else None  # fmt: skip

    def pick(self, prefixes: Sequence[Sequence[int]], logits: np.ndarray) -> list[int]:
        """Logits [W, V], row i after ``prefixes[i]`` -> W ids."""
        logits = logits.copy()
        logits[:, self._suppressed] = -np.inf
        for prefix, row in zip(prefixes, logits, strict=True):
            if len(prefix) == self._begin:
                row[self._at_begin] = -np.inf
            if self._grammar is not None:
                self._stamp(prefix[self._begin :], row, self._grammar)
        ids: list[int] = logits.argmax(-1).tolist()
        return ids

    @staticmethod
    def _stamp(written: Sequence[int], row: np.ndarray, grammar: TimestampGrammar) -> None:
        """Edit ``row`` [V]: ban by the grammar, then all text if a timestamp is likelier than every single token."""
        row[grammar.banned(written, len(row))] = -np.inf
        text, stamps = row[: grammar.first], row[grammar.first :]
        highest = stamps.max()
        if highest > -np.inf and highest + np.log(np.exp(stamps - highest).sum()) > text.max():
            text[:] = -np.inf


def _session(path: Path) -> Any:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(path, options, providers=onnxruntime.get_available_providers())
    except Exception as error:  # onnxruntime has many kinds
        first = str(error).splitlines()[0]
        raise CheckpointError(f"{path}: cannot be loaded ({first}); export the model again") from error
