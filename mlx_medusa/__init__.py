"""Medusa for MLX: heads guess the next tokens, one wide pass verifies them, the text is that of plain greedy decoding.

>>> import mlx_medusa
>>> transcriber = mlx_medusa.load("whisper_model")
>>> transcriber.transcribe("speech.wav").text
>>> generator = mlx_medusa.load("text_model")
>>> generator.generate([{"role": "user", "content": "What is the capital of France?"}]).text
"""

from typing import TYPE_CHECKING, Any

from mlx_medusa import blas

if TYPE_CHECKING:
    from mlx_medusa.loading import load as load
    from mlx_medusa.results import MedusaStatistics as MedusaStatistics
    from mlx_medusa.speech.meralion import MeralionTranscriber as MeralionTranscriber
    from mlx_medusa.speech.results import Segment as Segment
    from mlx_medusa.speech.results import Transcription as Transcription
    from mlx_medusa.speech.transcriber import Options as Options
    from mlx_medusa.speech.transcriber import Transcriber as Transcriber
    from mlx_medusa.text.conversation import Conversation as Conversation
    from mlx_medusa.text.generator import TextGenerator as TextGenerator
    from mlx_medusa.text.options import TextOptions as TextOptions
    from mlx_medusa.text.results import TextPiece as TextPiece
    from mlx_medusa.text.results import TextResult as TextResult

__version__ = "0.1.0"
__all__ = [
    "Conversation",
    "MedusaStatistics",
    "MeralionTranscriber",
    "Options",
    "Segment",
    "TextGenerator",
    "TextOptions",
    "TextPiece",
    "TextResult",
    "Transcriber",
    "Transcription",
    "load",
]

blas.preload_with_mlx()

_HOME = {
    "Conversation": "text.conversation",
    "MedusaStatistics": "results",
    "MeralionTranscriber": "speech.meralion",
    "Options": "speech.transcriber",
    "Segment": "speech.results",
    "TextGenerator": "text.generator",
    "TextOptions": "text.options",
    "TextPiece": "text.results",
    "TextResult": "text.results",
    "Transcriber": "speech.transcriber",
    "Transcription": "speech.results",
    "load": "loading",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``--help`` does not wait for MLX."""
    if name not in _HOME:
        raise AttributeError(f"module 'mlx_medusa' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"mlx_medusa.{_HOME[name]}"), name)
