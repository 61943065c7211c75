"""What a transcription returns: the result dict of openai/whisper as typed classes."""

from dataclasses import asdict, dataclass
from typing import Any

from mlx_medusa.results import MedusaStatistics


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
