"""Speech to text with MERaLiON-2: parts of up to 300 s, each heard whole and answered as its instruction asks."""

import logging
from dataclasses import replace
from time import perf_counter
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_medusa.audio import SAMPLE_RATE, Source, log_mel, read_blocks
from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Drafter, Limits
from mlx_medusa.medusa.rules import NoRepeatNGram, Rule
from mlx_medusa.medusa.width import check_width
from mlx_medusa.models.meralion2 import Speech
from mlx_medusa.speech.chat import ChatTokenizer
from mlx_medusa.speech.languages import language_code
from mlx_medusa.speech.results import Segment, Transcription
from mlx_medusa.speech.tasks import HEADS_QUERY, QUERY
from mlx_medusa.speech.tasks import MERALION as TASKS
from mlx_medusa.speech.transcriber import (
    Opening,
    Options,
    Session,
    compression_ratio,
    decode,
    result,
)
from mlx_medusa.speech.windows import Window, windows

logger = logging.getLogger("mlx_medusa")

CHUNK = 30 * SAMPLE_RATE  # samples that the encoder takes at once
MAX_CHUNKS = 10  # of one part: what the model was trained to hear
TOKENS_PER_CHUNK = 400  # most that are written for 30 s, if nothing is said: three times fast speech


class MeralionTranscriber:
    """A loaded MERaLiON-2 with, if there are any, its Medusa heads. Load and use it on one thread."""

    def __init__(
        self, model: Any, tokenizer: ChatTokenizer, drafter: Drafter | None = None, query: str = QUERY
    ):
        """``query`` is the instruction of the task transcribe."""
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter
        self.query = query

    def transcribe(
        self, audio: Source, options: Options | None = None, *, progress: bool = False, **overrides: Any
    ) -> Transcription:
        """Transcribe or answer a file, bytes, a binary file object, or 16 kHz mono samples.

        As ``Transcriber.transcribe``, but a segment is a part of up to 300 s; longer audio is cut at quiet points,
        and the texts of the parts are joined. The language of the result is that of ``options``, or of the
        translation, else "und" (undetermined).
        """
        options = self.check(replace(options or Options(), **overrides))
        if options.language:
            logger.warning(
                "MERaLiON hears the language itself: language %r changes nothing", options.language
            )
        target = options.task.removeprefix("translate-") if options.task.startswith("translate-") else None
        session = Session(target or options.language or "und")
        with tqdm(unit="s", desc="transcribed", disable=None if progress else True) as bar:
            for part in windows(read_blocks(audio), MAX_CHUNKS * CHUNK):
                self._part(part, options, session)
                bar.update(round(session.samples / SAMPLE_RATE) - bar.n)
        return result(session, options)

    def check(self, options: Options) -> Options:
        """The options as they apply to this model: language a code, width a number. OptionError if they cannot."""
        if options.task not in TASKS:
            raise OptionError(f"task {options.task!r} is not one of this model's: {', '.join(TASKS)}")
        wants = "{}" in TASKS[options.task] or options.task == "transcribe"
        if bool(options.instruction) > wants or (options.instruction is None and "{}" in TASKS[options.task]):
            raise OptionError(
                f"task {options.task!r} {'takes no' if not wants else 'needs an'} instruction: "
                "give one with the task question or instruction"
            )
        language = None
        if options.language is not None and (language := language_code(options.language)) is None:
            raise OptionError(f"language {options.language!r} is not known: use a code such as en")
        self.tokenizer.prompt(self.instruction(options), 1)  # an instruction that cannot be is refused here
        return replace(
            options,
            language=language,
            width=check_width(options.width, self.drafter if options.medusa else None),
        )

    def instruction(self, options: Options) -> str:
        """What the model is asked to do."""
        if options.task == "transcribe":
            return options.instruction or self.query
        return TASKS[options.task].format(options.instruction)

    def encode(self, part: Window) -> mx.array:
        """Rows of speech [1, N, D] of a part, 100 for each 30 s begun."""
        rows = []
        for start in range(0, max(1, len(part.samples)), CHUNK):
            mel = log_mel(normalized(part.samples[start : start + CHUNK]), self.model.args.num_mel_bins)
            rows.append(self.model.encode(mel[None])[0])
            mx.eval(rows[-1])  # one chunk after the other: their activations are large
        return mx.concatenate(rows)[None]

    def opening(self, encoded: mx.array, language: str | None, *, timestamps: bool = False) -> Opening:
        """How the texts of rows of speech [B, N, D] begin when this model has heads; for their training.

        OptionError for timestamps, which this model does not write.
        """
        if timestamps:
            raise OptionError("MERaLiON writes no timestamps: use --prompts text")
        return self.prepare(encoded, HEADS_QUERY)

    def prepare(self, rows: mx.array, instruction: str, max_tokens: int | None = None) -> Opening:
        """What decoding begins with for an instruction about ``rows`` [1, N, D]."""
        prompt, begin = self.tokenizer.prompt(instruction, rows.shape[1])
        chunks = -(-rows.shape[1] // self.model.args.rows_per_chunk)
        limits = Limits(self.tokenizer.stops, max_tokens or TOKENS_PER_CHUNK * chunks)
        rules: list[Rule] = [NoRepeatNGram(self.tokenizer.no_repeat)] if self.tokenizer.no_repeat else []
        return Opening(prompt, KVCache(self.model.num_layers, Speech(rows, begin)), limits, rules)

    def _part(self, part: Window, options: Options, session: Session) -> None:
        """Transcribe one part, adding to ``session``."""
        start = perf_counter()
        rows = self.encode(part)
        middle = perf_counter()
        segment = self._decode(part, rows, options, session)
        if segment.text:
            session.segments.append(segment)
        session.samples += len(part.samples)
        session.encode_seconds += middle - start
        session.decode_seconds += perf_counter() - middle

    def _decode(self, part: Window, rows: mx.array, options: Options, session: Session) -> Segment:
        at = self.prepare(rows, self.instruction(options), options.max_tokens)
        drafter = self.drafter if options.medusa else None
        start = part.start / SAMPLE_RATE
        _, written, logprobs = decode(
            self.model,
            at.prompt,
            at.cache,
            at.limits,
            at.rules,
            drafter,
            rows,
            options.width or 1,
            session,
            start,
        )
        tokens = [token for token in written if token not in self.tokenizer.stops]
        text = self.tokenizer.decode(tokens, speakers=options.speaker_tags)
        return Segment(
            id=len(session.segments),
            seek=round(start * 100),
            start=start,
            end=start + len(part.samples) / SAMPLE_RATE,
            text=f" {text}" if text and session.segments else text,
            tokens=tokens,
            temperature=0.0,
            avg_logprob=logprobs / (len(tokens) + 1),
            compression_ratio=compression_ratio(text),
            no_speech_prob=0.0,  # the model has no token for it
        )


def normalized(samples: np.ndarray) -> np.ndarray:
    """Samples [n] with mean 0 and variance 1, as transformers' WhisperFeatureExtractor with ``do_normalize``."""
    if not len(samples):
        return samples
    return ((samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)).astype(np.float32)
