"""What a transcription returns: the result dict of openai/whisper as typed classes."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Segment:
    """A stretch of speech. Times in seconds; fields as in openai/whisper."""

    id: int
    seek: int  # where its window begins, in frames of 10 ms
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float


@dataclass(frozen=True)
class MedusaStatistics:
    """How the decode loop did.

    ``tokens`` were decided in ``rounds`` verifier passes (the token that each window's prefill decides is not counted),
    ``accepted`` of ``drafted`` guesses were right, ``accepted_per_head`` by distance from the last sure token. Encoding
    takes from samples to cross-attention K/V, decoding includes the prefill and the drafting.
    """

    tokens: int
    rounds: int
    drafted: int
    accepted: int
    accepted_per_head: list[int]
    tokens_per_verify: float
    width: int
    encode_seconds: float
    decode_seconds: float
    draft_seconds: float = 0.0


@dataclass(frozen=True)
class Transcription:
    """Text, language (a code) and segments of one input, with statistics."""

    text: str
    language: str
    segments: list[Segment]
    medusa: MedusaStatistics
    duration: float  # seconds of audio

    def to_dict(self) -> dict[str, Any]:
        """The result dict of openai/whisper, plus ``medusa``."""
        result = asdict(self)
        del result["duration"]
        return result
