"""What MLX writes for an input, with the engine of the package, noted as the oracle's is."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx

from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Drafter, Limits, Verifier, generate, prefill
from mlx_medusa.medusa.rules import Prefix, Rule
from mlx_medusa.medusa.trees import Tree
from mlx_medusa.parity.records import MAX_TOKENS, Asked
from mlx_medusa.speech.meralion import MeralionTranscriber
from mlx_medusa.speech.transcriber import Transcriber
from mlx_medusa.speech.windows import Window
from mlx_medusa.text.generator import TextGenerator


@dataclass(frozen=True)
class Decoded:
    """As an entry of a record has it."""

    prompt: list[int]
    tokens: list[int]
    margins: list[float]
    logprobs: list[float]
    rounds: list[int]
    detected: tuple[str, float] | None = None


@dataclass(frozen=True)
class Job:
    """A sequence to decode: prompt, cache with what it attends to, rules and end."""

    prompt: list[int]
    cache: KVCache
    rules: list[Rule]
    limits: Limits
    memory: mx.array | None = None
    detected: tuple[str, float] | None = None


class Candidate(Protocol):
    """A model of ours under test."""

    @property
    def model(self) -> Verifier: ...

    @property
    def drafter(self) -> Drafter | None: ...

    def encode(self, content: Any) -> Any:
        """What the decoder attends to; once for all that is asked of an input."""
        ...

    def job(self, memory: Any, asked: Asked) -> Job: ...


class Margins:
    """A rule, the last one, that changes nothing and notes by how much each row's best logit leads the second.

    A row is noted under the length of its prefix. Rows of guesses that were not accepted are noted too, and then
    overwritten by the later pass that decides that place.
    """

    def __init__(self) -> None:
        self._noted: dict[int, mx.array] = {}

    def __call__(self, prefixes: Sequence[Prefix], logits: mx.array) -> mx.array:
        best = mx.argmax(logits, axis=-1, keepdims=True)
        first = mx.take_along_axis(logits, best, axis=-1)
        others = mx.put_along_axis(logits, best, mx.array(-mx.inf), axis=-1)
        margins = (first - mx.max(others, axis=-1, keepdims=True))[:, 0]
        mx.eval(margins)
        for row, prefix in enumerate(prefixes):
            self._noted[len(prefix)] = margins[row]
        return logits

    def of(self, begin: int, count: int) -> list[float]:
        """Of the ``count`` tokens decided after a prompt of ``begin``."""
        return [float(self._noted[begin + place]) for place in range(count)]


class Recorded:
    """A drafter whose guesses are the recorded tokens: all right, as long as the model writes what was recorded."""

    def __init__(self, tokens: Sequence[int]):
        self._tokens = list(tokens)
        self._at = 1  # the prefill decides the first

    @property
    def max_drafts(self) -> int:
        return len(self._tokens)

    def begin(self, memory: mx.array | None) -> None:
        """Nothing is needed."""

    def propose(self, hidden: mx.array, pending: int, count: int) -> list[int]:
        guesses = self._tokens[self._at : self._at + count]
        self._at += len(guesses) + 1  # if one was wrong, the text is another one anyway
        return guesses

    def propose_tree(self, hidden: mx.array, pending: int, tree: Tree) -> list[int]:
        raise NotImplementedError("what is recorded is a chain")


def decode(
    candidate: Candidate, memory: Any, asked: Asked, width: int, recorded: Sequence[int] = ()
) -> Decoded:
    """Decode what is asked. The guesses of a ``width`` above 1 are those of the heads, else the ``recorded`` tokens."""
    job = candidate.job(memory, asked)
    margins = Margins()
    rules = [*job.rules, margins]
    state, first = prefill(candidate.model, job.prompt, job.cache, job.limits, rules)
    drafter = (candidate.drafter or Recorded(recorded)) if width > 1 else None
    runs = list(
        generate(
            candidate.model,
            state,
            first,
            job.limits,
            rules=rules,
            drafter=drafter,
            memory=job.memory,
            width=width,
        )
    )
    tokens = state.tokens[state.begin :]
    return Decoded(
        prompt=job.prompt,
        tokens=tokens,
        margins=margins.of(state.begin, len(tokens)),
        logprobs=mx.concatenate([run.logprobs for run in runs]).tolist(),  # type: ignore[arg-type]
        rounds=[len(run.tokens) for run in runs[1:]],
        detected=job.detected,
    )


class WhisperCandidate:
    """Whisper on one window."""

    def __init__(self, transcriber: Transcriber):
        self._transcriber = transcriber
        self.model, self.drafter = transcriber.model, transcriber.drafter

    def encode(self, content: Any) -> Any:
        encoded = self._transcriber.encode(Window(0, content))
        return encoded, self.model.attend(encoded)

    def job(self, memory: Any, asked: Asked) -> Job:
        encoded, attended = memory
        tokenizer = self._transcriber.tokenizer
        cache = KVCache(self.model.num_layers, attended)
        language, detected = asked.language, None
        if tokenizer.is_multilingual and language is None:
            detected = self._transcriber.detect(cache)
            language = detected[0]
        prompt = tokenizer.prompt(language, asked.task, timestamps=asked.timestamps)
        rules = self._transcriber.rules(len(prompt), timestamps=asked.timestamps)
        limits = Limits(frozenset([tokenizer.eot]), asked.max_tokens or self.model.max_length // 2)
        return Job(prompt, cache, rules, limits, encoded, detected)


class MeralionCandidate:
    """MERaLiON-2 on one part."""

    def __init__(self, transcriber: MeralionTranscriber):
        self._transcriber = transcriber
        self.model, self.drafter = transcriber.model, transcriber.drafter

    def encode(self, content: Any) -> Any:
        return self._transcriber.encode(Window(0, content))

    def job(self, memory: Any, asked: Asked) -> Job:
        at = self._transcriber.prepare(memory, asked.instruction or "", asked.max_tokens)
        return Job(at.prompt, at.cache, at.rules, at.limits, memory)


class TextCandidate:
    """A text model on one prompt."""

    def __init__(self, generator: TextGenerator):
        self._generator = generator
        self.model, self.drafter = generator.model, generator.drafter

    def encode(self, content: Any) -> Any:
        return content

    def job(self, memory: Any, asked: Asked) -> Job:
        messages = [{"role": "user", "content": memory}]
        prompt = self._generator.tokens(messages if asked.chat else memory)
        limits = Limits(self._generator.tokenizer.stops, asked.max_tokens or MAX_TOKENS)
        return Job(prompt, KVCache(self.model.num_layers), [], limits)


def candidate_of(loaded: Any) -> Candidate:
    """The candidate around what ``mlx_medusa.load`` returns."""
    if isinstance(loaded, Transcriber):
        return WhisperCandidate(loaded)
    return MeralionCandidate(loaded) if isinstance(loaded, MeralionTranscriber) else TextCandidate(loaded)
