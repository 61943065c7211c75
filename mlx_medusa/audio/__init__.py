"""Any audio source -> 16 kHz mono float32 blocks -> log-mel windows. Heavy imports wait for first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

SAMPLE_RATE = 16_000  # Hz; every block, window and mel of this project
# What is taken for audio in a folder; a file that is named is read whatever its name.
ENDINGS = (".wav", ".flac", ".ogg", ".mp3", ".m4a", ".opus", ".aac", ".webm", ".mp4")

_HOME = {"Source": "read", "read_blocks": "read", "log_mel": "mel"}
__all__ = ["ENDINGS", "SAMPLE_RATE", "Source", "log_mel", "read_blocks"]

if TYPE_CHECKING:
    from .mel import log_mel
    from .read import Source, read_blocks


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
