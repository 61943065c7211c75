"""Turn Whisper checkpoints of other tools, and Medusa heads, into an MLX model folder.

>>> from convert import convert
>>> convert("openai/whisper-tiny.en", mlx_path="mlx_model", q_bits=4)
"""

from typing import TYPE_CHECKING, Any

import mlx_medusa  # noqa: F401 - loads a fast BLAS, which must be there before MLX

if TYPE_CHECKING:
    from convert.pipeline import Report as Report
    from convert.pipeline import convert as convert

__all__ = ["Report", "convert"]


def __getattr__(name: str) -> Any:
    """Import the converter when it is first used, so that ``--help`` does not wait for MLX."""
    if name not in __all__:
        raise AttributeError(f"module 'convert' has no attribute {name!r}")
    from convert import pipeline

    return getattr(pipeline, name)
