"""The demo model and the speech clips: found, checked, converted or unpacked once, and whole."""

import dataclasses
import hashlib
import io
import json
import multiprocessing
import sys
import tarfile
import types
import wave
from multiprocessing.synchronize import Barrier
from pathlib import Path

import fetch_speech
import pytest

from mlx_medusa import demo
from mlx_medusa.errors import CheckpointError, MedusaError, OutputError

CONTENT = b"not a model, but its bytes are known"


@pytest.fixture(params=[demo.SPEECH, demo.TEXT], ids=["speech", "text"])
def which(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> demo.Demo:
    """A demo model with a stand-in for its package, which must never be imported."""
    found = dataclasses.replace(request.param, package="stand_in", sha256=hashlib.sha256(CONTENT).hexdigest())
    folder = tmp_path / "site" / found.package
    weights = folder.joinpath(*found.weights)
    weights.parent.mkdir(parents=True)
    weights.write_bytes(CONTENT)
    (folder / "__init__.py").write_text("raise SystemExit('the package was imported')")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("MLX_MEDUSA_CACHE", str(tmp_path / "cache"))
    return found


def file_of(which: demo.Demo, parts: tuple[str, ...]) -> Path:
    path = demo.package_file(which.package, *parts)
    assert path is not None
    return path


@pytest.fixture
def conversions(which: demo.Demo, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A stand-in for the converter; the list of what it was asked to convert."""
    asked: list[Path] = []

    def convert(base: Path, mlx_path: Path, heads: Path | None) -> None:
        asked.append(base)
        assert heads == which.heads
        mlx_path.mkdir()
        (mlx_path / "config.json").write_text("{}")

    monkeypatch.setitem(sys.modules, "convert", types.SimpleNamespace(convert=convert))
    return asked


def test_the_model_is_converted_once(
    which: demo.Demo, conversions: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = demo.demo_model(which)
    assert folder is not None
    assert folder.parent == tmp_path / "cache" / "models"
    assert (folder / "config.json").read_text() == "{}"
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert demo.demo_model(which) == folder
    assert conversions == [file_of(which, which.base)]
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    assert capsys.readouterr().err == ""
    assert which.package not in sys.modules


def test_shipped_heads_have_a_place(which: demo.Demo) -> None:
    assert which.heads in (None, which.shipped / which.kind)
    assert demo.SPEECH.heads == Path(demo.__file__).parent / "heads" / "whisper-tiny.en" / "recurrent"
    assert dataclasses.replace(which, name="without").heads is None


def test_no_package_means_no_model(which: demo.Demo) -> None:
    assert demo.demo_model(dataclasses.replace(which, package="a_package_that_is_not_installed")) is None


def test_a_changed_model_is_refused(which: demo.Demo, conversions: list[Path], tmp_path: Path) -> None:
    weights = file_of(which, which.weights)
    weights.write_bytes(CONTENT + b"!")
    with pytest.raises(CheckpointError, match=r"SHA-256 is .*pip install") as error:
        demo.demo_model(which)
    assert str(error.value).startswith(str(weights))
    assert "\n" not in str(error.value)
    assert conversions == []
    assert not (tmp_path / "cache").exists()


def test_a_model_that_is_gone_is_refused(which: demo.Demo, conversions: list[Path]) -> None:
    file_of(which, which.weights).unlink()
    with pytest.raises(CheckpointError, match=f"{which.weights[-1]}: No such file"):
        demo.demo_model(which)


def test_a_failed_conversion_leaves_nothing(
    which: demo.Demo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def convert(base: Path, mlx_path: Path, heads: Path | None) -> None:
        mlx_path.mkdir()
        (mlx_path / "model.safetensors").write_bytes(b"half")
        raise CheckpointError("broken half way")

    monkeypatch.setitem(sys.modules, "convert", types.SimpleNamespace(convert=convert))
    with pytest.raises(CheckpointError, match="half way"):
        demo.demo_model(which, progress=False)
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_cache_that_cannot_be_written_is_one_line(
    which: demo.Demo, conversions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_MEDUSA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OutputError, match="MLX_MEDUSA_CACHE"):
        demo.demo_model(which, progress=False)


def _race(target: Path, barrier: Barrier, results: "multiprocessing.Queue[str]") -> None:
    def convert(base: Path, mlx_path: Path, heads: Path | None) -> None:
        mlx_path.mkdir()
        (mlx_path / "config.json").write_text("{}")
        barrier.wait(timeout=60)  # every process has converted before one of them renames

    sys.modules["convert"] = types.SimpleNamespace(convert=convert)  # type: ignore[assignment]
    try:
        demo.convert_into(Path("source"), target)
        results.put("done")
    except MedusaError as error:
        results.put(str(error))


def test_processes_that_race_end_with_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    target = tmp_path / "models" / "model"
    processes = [context.Process(target=_race, args=(target, barrier, results)) for _ in range(3)]
    for process in processes:
        process.start()
    assert [results.get(timeout=90) for _ in processes] == ["done"] * 3
    for process in processes:
        process.join(timeout=60)
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    assert [path.name for path in target.iterdir()] == ["config.json"]


def test_the_cache_folder_follows_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("MLX_MEDUSA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert demo.cache_dir() == Path("/home/someone/.cache/mlx-medusa")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache/someone")
    assert demo.cache_dir() == Path("/var/cache/someone/mlx-medusa")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert demo.cache_dir() == Path("/home/someone/Library/Caches/mlx-medusa")
    monkeypatch.setenv("MLX_MEDUSA_CACHE", "~/elsewhere")
    assert demo.cache_dir() == Path("/home/someone/elsewhere")


def test_the_demo_model_is_a_model_folder(tiny_en: Path) -> None:
    config = json.loads((tiny_en / "config.json").read_text())
    assert (config["model_type"], config["d_model"], config["vocab_size"]) == ("whisper", 384, 51864)
    assert (tiny_en / "tokenizer.json").exists()


def test_speech_is_what_it_says(speech_dir: Path) -> None:
    texts = json.loads((speech_dir / "librivox" / "transcripts.json").read_text())
    assert texts["sense_and_sensibility_01_austen_64kb-0880"] == "he was not an ill disposed young man"
    assert sorted(texts) == sorted(path.stem for path in (speech_dir / "librivox").glob("*.wav"))
    assert len(texts) == 5
    cards = json.loads((speech_dir / "cards" / "transcripts.json").read_text())
    assert cards["005"] == "eight of spades four of clubs seven of hearts"
    with wave.open(str(speech_dir / "digits" / "dhd.2934z.wav")) as clip:  # was raw: 76800 bytes
        assert (clip.getnchannels(), clip.getsampwidth(), clip.getframerate(), clip.getnframes()) == (
            1,
            2,
            16000,
            38400,
        )
    assert sorted(path.name for path in (speech_dir / "broken").iterdir()) == [
        "awful.wav",
        "bad.wav",
        "evil.wav",
        "null.wav",
    ]


def test_languages_are_what_they_say(languages_dir: Path) -> None:
    found = {folder.name: len(list(folder.glob("*.wav"))) for folder in languages_dir.iterdir()}
    assert found == dict.fromkeys(["en", "es", "fr", "hi", "it", "ja", "pl", "pt", "zh"], 3)
    assert (languages_dir / "fr" / "bonjour_monde.txt").read_text(encoding="utf-8") == "Bonjour le monde."
    for clip in languages_dir.glob("*/*.wav"):
        assert clip.with_suffix(".txt").read_text(encoding="utf-8").strip()


def archive(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(f"pocketsphinx-5.1.1/{name}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("sha256", "message"),
    [(None, "test/data/librivox"), ("0" * 64, "SHA-256")],  # an archive without the clips; another archive
)
def test_a_wrong_archive_leaves_nothing(
    sha256: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = archive({"README.md": b"no speech here"})

    def download(requirement: str, options: list[str], folder: Path) -> Path:
        folder.mkdir()
        (folder / "pocketsphinx-5.1.1.tar.gz").write_bytes(data)
        return folder / "pocketsphinx-5.1.1.tar.gz"

    monkeypatch.setattr(fetch_speech, "_download", download)
    monkeypatch.setattr(
        fetch_speech, "SPEECH", ("pocketsphinx==5.1.1", sha256 or hashlib.sha256(data).hexdigest(), [])
    )
    assert fetch_speech.main(["--cache", str(tmp_path / "cache")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
    assert list((tmp_path / "cache").iterdir()) == []


def test_no_network_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert fetch_speech.main(["--cache", str(tmp_path / "cache")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines[1:]] == ["fetch_speech"]
    assert "pocketsphinx==5.1.1 cannot be fetched" in lines[1]
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_there_is_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(*_: object) -> Path:
        raise AssertionError("asked the network")

    monkeypatch.setattr(fetch_speech, "_download", download)
    (tmp_path / "speech-1").mkdir()
    assert fetch_speech.main(["--cache", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'speech-1'}\n"
