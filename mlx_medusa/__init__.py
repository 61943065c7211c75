"""Medusa for MLX: heads guess the next tokens, one wide pass verifies them, the text is that of plain greedy decoding.

>>> import mlx_medusa
>>> transcriber = mlx_medusa.load("mlx_model")
>>> transcriber.transcribe("speech.wav").text
"""

from typing import TYPE_CHECKING, Any

from mlx_medusa import blas

if TYPE_CHECKING:
    from mlx_medusa.speech.meralion import MeralionTranscriber as MeralionTranscriber
    from mlx_medusa.speech.results import MedusaStatistics as MedusaStatistics
    from mlx_medusa.speech.results import Segment as Segment
    from mlx_medusa.speech.results import Transcription as Transcription
    from mlx_medusa.speech.transcriber import Options as Options
    from mlx_medusa.speech.transcriber import Transcriber as Transcriber
    from mlx_medusa.speech.transcriber import load as load

__version__ = "0.1.0"
__all__ = [
    "MedusaStatistics",
    "MeralionTranscriber",
    "Options",
    "Segment",
    "Transcriber",
    "Transcription",
    "load",
]

blas.preload_with_mlx()

_HOME = {
    "MedusaStatistics": "results",
    "MeralionTranscriber": "meralion",
    "Segment": "results",
    "Transcription": "results",
    "Options": "transcriber",
    "Transcriber": "transcriber",
    "load": "transcriber",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``--help`` does not wait for MLX."""
    if name not in _HOME:
        raise AttributeError(f"module 'mlx_medusa' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"mlx_medusa.speech.{_HOME[name]}"), name)
