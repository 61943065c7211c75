"""Speech to text: windows of audio through encoder and decode loop into segments."""

import logging
import zlib
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_medusa.audio import SAMPLE_RATE, Source, log_mel, read_blocks
from mlx_medusa.errors import MedusaError, OptionError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Drafter, Limits, Statistics, generate, prefill
from mlx_medusa.medusa.rules import Rule, Suppress, SuppressAtBegin, Timestamps
from mlx_medusa.medusa.width import check_width
from mlx_medusa.results import medusa_statistics
from mlx_medusa.speech import tasks
from mlx_medusa.speech.languages import language_code
from mlx_medusa.speech.results import Segment, Transcription
from mlx_medusa.speech.tokenizer import WhisperTokenizer
from mlx_medusa.speech.windows import Window, windows

logger = logging.getLogger("mlx_medusa")


@dataclass(frozen=True)
class Options:
    """How to transcribe.

    ``language``: code or English name, None to detect it in the first window. ``width``: rows of a verifier pass, one
    more than the guesses; None takes all heads. ``medusa``: False decodes without heads. ``max_tokens``: the most
    tokens of one window (None: half the model's context, as openai/whisper). For MERaLiON only: ``instruction``, the
    question or what else to do, and ``speaker_tags``: True leaves ``<Speaker1>:`` in the text. Each model has its own
    tasks, see its ``check``.
    """

    language: str | None = None
    task: str = "transcribe"
    width: int | None = None
    medusa: bool = True
    max_tokens: int | None = None
    instruction: str | None = None
    speaker_tags: bool = False

    def __post_init__(self) -> None:
        if self.task not in tasks.ALL:
            raise OptionError(f"task {self.task!r} is not known: use one of {', '.join(tasks.ALL)}")
        for name in ("width", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}, but must be at least 1")


class SpeechToText(Protocol):
    """What every family's transcriber offers."""

    model: Any
    tokenizer: Any
    drafter: Drafter | None

    def transcribe(
        self, audio: Source, options: Options | None = None, *, progress: bool = False, **overrides: Any
    ) -> Transcription: ...

    def check(self, options: Options) -> Options: ...

    def encode(self, window: Window, /) -> mx.array: ...

    def opening(self, encoded: mx.array, language: str | None, *, timestamps: bool = False) -> "Opening": ...


@dataclass
class Session:
    """What grows while one input is transcribed."""

    language: str | None
    samples: int = 0
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0
    segments: list[Segment] = field(default_factory=list)
    statistics: Statistics = field(default_factory=Statistics)


@dataclass(frozen=True)
class Opening:
    """What decoding begins with: prompt, a cache with the model's memory, where to end, what edits the logits."""

    prompt: list[int]
    cache: KVCache
    limits: Limits
    rules: list[Rule]


class Transcriber:
    """A loaded Whisper model with, if there are any, its Medusa heads. Load and use it on one thread."""

    def __init__(self, model: Any, tokenizer: WhisperTokenizer, drafter: Drafter | None = None):
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter

    def transcribe(
        self, audio: Source, options: Options | None = None, *, progress: bool = False, **overrides: Any
    ) -> Transcription:
        """Transcribe a file, bytes, a binary file object, or 16 kHz mono samples.

        ``overrides`` are fields of ``Options``. Raises AudioError for input that is no audio, OptionError for options
        that do not fit the model. Audio without samples gives an empty text. ``progress`` shows a bar on a terminal.
        """
        options = self.check(replace(options or Options(), **overrides))
        session = Session(options.language)
        with tqdm(unit="s", desc="transcribed", disable=None if progress else True) as bar:
            for window in windows(read_blocks(audio)):
                self._window(window, options, session)
                bar.update(round(session.samples / SAMPLE_RATE) - bar.n)
        return result(session, options)

    def detect_language(self, audio: Source) -> tuple[str, float]:
        """The language code of the first 30 s and its probability among the languages of the model."""
        window = next(windows(read_blocks(audio)), Window(0, np.zeros(0, np.float32)))
        return self.detect(self._cache(self.encode(window)))

    def check(self, options: Options) -> Options:
        """The options as they apply to this model: language a code, width a number. OptionError if they cannot."""
        if options.task not in tasks.WHISPER:
            raise OptionError(f"task {options.task!r} is not one of this model's: {', '.join(tasks.WHISPER)}")
        if options.instruction or options.speaker_tags:
            raise OptionError("instruction and speaker_tags are for MERaLiON: Whisper has none")
        language = options.language
        if language is not None:
            language = language_code(language)
            if language is None:
                raise OptionError(
                    f"language {options.language!r} is not known: use a code such as en, or its English name"
                )
        if not self.tokenizer.is_multilingual:
            if language not in (None, "en") or options.task != "transcribe":
                logger.warning("this model knows English only: it transcribes English")
            language = "en"
        elif language is not None and language not in self.tokenizer.languages:
            raise OptionError(f"language {language!r} is not among those of this model")
        args = self.model.args
        if options.task == "translate" and (args.encoder_layers, args.decoder_layers) == (32, 4):
            logger.warning("whisper-large-v3-turbo was not trained to translate: its text may not be English")
        return replace(
            options,
            language=language,
            width=check_width(options.width, self.drafter if options.medusa else None),
        )

    def _window(self, window: Window, options: Options, session: Session) -> None:
        """Transcribe one window, adding to ``session``."""
        start = perf_counter()
        encoded = self.encode(window)
        cache = self._cache(encoded)
        middle = perf_counter()
        if session.language is None:
            session.language, _ = self.detect(cache)
        segment = self._decode(window, encoded, cache, options, session)
        if segment.text:
            session.segments.append(segment)
        session.samples += len(window.samples)
        session.encode_seconds += middle - start
        session.decode_seconds += perf_counter() - middle

    def encode(self, window: Window) -> mx.array:
        """The encoder output [1, S, D] of a window."""
        encoded = self.model.encode(log_mel(window.samples, self.model.args.num_mel_bins)[None])
        mx.eval(encoded)
        return encoded

    def _cache(self, encoded: mx.array) -> KVCache:
        return KVCache(self.model.num_layers, self.model.attend(encoded))

    def detect(self, cache: KVCache) -> tuple[str, float]:
        """Language and probability, from the token after <|startoftranscript|>; leaves the cache empty."""
        if not self.tokenizer.is_multilingual:
            return "en", 1.0
        codes, ids = zip(*self.tokenizer.languages.items(), strict=True)
        hidden = self.model.step(mx.array([[self.tokenizer.sot]]), mx.array([[0]]), None, cache)
        cache.rewind(1)
        logits = self.model.logits(hidden[0, 0]).astype(mx.float32)[mx.array(ids)]
        best = int(mx.argmax(logits))
        return codes[best], float(mx.softmax(logits)[best])

    def _decode(
        self, window: Window, encoded: mx.array, cache: KVCache, options: Options, session: Session
    ) -> Segment:
        """Decode one window with its cross-attention K/V in ``cache``."""
        prompt = self.tokenizer.prompt(session.language, options.task)
        limits = Limits(self.tokenizer.stops, options.max_tokens or self.model.max_length // 2)
        rules = self.rules(len(prompt))
        start = window.start / SAMPLE_RATE
        drafter = self.drafter if options.medusa else None
        begin_hidden, written, logprobs = decode(
            self.model, prompt, cache, limits, rules, drafter, encoded, options.width or 1, session, start
        )
        no_speech = mx.softmax(self.model.logits(begin_hidden).astype(mx.float32))[self.tokenizer.no_speech]
        tokens = [token for token in written if token != self.tokenizer.eot]
        text = self.tokenizer.decode(tokens)
        return Segment(
            id=len(session.segments),
            seek=round(start * 100),
            start=start,
            end=start + len(window.samples) / SAMPLE_RATE,
            text=text,
            tokens=tokens,
            temperature=0.0,
            avg_logprob=logprobs / (len(tokens) + 1),
            compression_ratio=compression_ratio(text.strip()),
            no_speech_prob=float(no_speech),
        )

    def opening(self, encoded: mx.array, language: str | None, *, timestamps: bool = False) -> Opening:
        """How the texts of encoder outputs [B, S, D] begin; for the training of heads."""
        prompt = self.tokenizer.prompt(language, "transcribe", timestamps=timestamps)
        limits = Limits(self.tokenizer.stops, self.model.max_length // 2)
        return Opening(prompt, self._cache(encoded), limits, self.rules(len(prompt), timestamps=timestamps))

    def rules(self, begin: int, *, timestamps: bool = False) -> list[Rule]:
        """What edits the logits after a prompt of ``begin`` tokens."""
        tokenizer, size = self.tokenizer, self.model.args.vocab_size
        rules: list[Rule] = [
            Suppress(tokenizer.suppressed, size),
            SuppressAtBegin(tokenizer.suppressed_at_begin, size, begin),
        ]
        if timestamps:
            rules.append(
                Timestamps(
                    tokenizer.timestamp_begin,
                    tokenizer.eot,
                    tokenizer.no_timestamps,
                    begin,
                    tokenizer.max_initial_timestamp,
                )
            )
        return rules


def decode(
    model: Any,
    prompt: list[int],
    cache: KVCache,
    limits: Limits,
    rules: list[Rule],
    drafter: Drafter | None,
    memory: mx.array,
    width: int,
    session: Session,
    start: float,
) -> tuple[mx.array, list[int], float]:
    """(state [D] of the prompt's first token, tokens written, the sum of their log probabilities), eos included.

    Counts into ``session``. A text that was cut, of the audio at ``start`` seconds, is told as a warning. Raises
    MedusaError where the numbers are not finite.
    """
    state, first = prefill(model, prompt, cache, limits, rules)
    begin_hidden = state.hidden[0, 0]
    runs = list(
        generate(
            model, state, first, limits, rules=rules, drafter=drafter, memory=memory, width=width,
            statistics=session.statistics,
        )
    )  # fmt: skip
    logprobs = float(mx.concatenate([run.logprobs for run in runs]).sum())
    if not np.isfinite(logprobs):
        raise MedusaError(
            "the model computes numbers that are not finite: convert it again, or use --dtype float32"
        )
    written = state.tokens[state.begin :]
    if runs[-1].finish_reason == "length":
        logger.warning("the window at %.1f s was cut at %d tokens", start, len(written))
    return begin_hidden, written, logprobs


def result(session: Session, options: Options) -> Transcription:
    """What a session has come to."""
    width = options.width or 1
    return Transcription(
        text="".join(segment.text for segment in session.segments),
        language=session.language or "en",
        segments=session.segments,
        medusa=medusa_statistics(
            session.statistics, width - 1, width, session.encode_seconds, session.decode_seconds
        ),
        duration=session.samples / SAMPLE_RATE,
    )


def compression_ratio(text: str) -> float:
    """Bytes of the text over its zlib-compressed bytes; high values mean repetition (openai/whisper)."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
