"""What tells one file of weights from another."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from mlx_medusa.errors import CheckpointError

_BLOCK = 1 << 20  # bytes


def sha256(files: Iterable[Path], *, cure: str) -> str:
    """SHA-256 of the bytes of some files, one after the other. CheckpointError, with ``cure``, if one can't be read."""
    digest = hashlib.sha256()
    for path in files:
        try:
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    digest.update(block)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}; {cure}") from error
    return digest.hexdigest()
