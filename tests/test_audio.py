"""Reading audio. Signals are made with numpy, except where it says real speech."""

import io
import os
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx_medusa  # noqa: F401  (before mlx, for its BLAS)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest
import soundfile
import soxr

from mlx_medusa.audio import SAMPLE_RATE, read_blocks
from mlx_medusa.errors import AudioError

needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="no ffmpeg on this machine")


def voice(seconds: float = 3.0, rate: int = SAMPLE_RATE) -> np.ndarray:
    """Float32 [n]: a gliding harmonic tone below 3.4 kHz in syllables, so that shifts and losses show."""
    t = np.arange(round(seconds * rate)) / rate
    phase = 2 * np.pi * (120 * t + 15 * np.sin(2 * np.pi * 0.7 * t))
    tone = sum(np.sin(k * phase) / k for k in range(1, 20))
    return (0.2 * tone * np.sin(2 * np.pi * 1.7 * t) ** 2).astype(np.float32)


def read(source: Any) -> np.ndarray:
    blocks = list(read_blocks(source))
    assert all(b.dtype == np.float32 and b.ndim == 1 and 0 < len(b) <= 10 * SAMPLE_RATE for b in blocks)
    return np.concatenate([np.zeros(0, np.float32), *blocks])


def file_bytes(audio: np.ndarray, rate: int = SAMPLE_RATE, **how: str) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, audio, rate, **{"format": "WAV", "subtype": "PCM_16", **how})
    return out.getvalue()


def ffmpeg(source: bytes, target: Path, *options: str) -> Path:
    command = ["ffmpeg", "-v", "error", "-nostdin", "-y", "-i", "pipe:0", *options, str(target)]
    subprocess.run(command, input=source, check=True)
    return target


def assert_same_sound(got: np.ndarray, want: np.ndarray, slack: int = 0) -> None:
    """The lengths differ by at most ``slack`` samples, and the best-aligned correlation is at least 0.98."""
    assert abs(len(got) - len(want)) <= slack
    size = 2 * max(len(got), len(want))
    product = np.fft.irfft(np.fft.rfft(got, size) * np.conj(np.fft.rfft(want, size)), size)
    assert product.max() >= 0.98 * np.linalg.norm(got) * np.linalg.norm(want)
    assert min(product.argmax(), size - product.argmax()) <= slack


# ---- the same sound in every wrapping

LOSSLESS = [
    {"subtype": "PCM_16"},
    {"subtype": "PCM_24"},
    {"subtype": "FLOAT"},
    {"format": "FLAC"},
    {"format": "AIFF"},
    {"format": "W64"},
    {"format": "RF64"},
]


@pytest.mark.parametrize("how", LOSSLESS, ids=lambda how: "-".join(how.values()))
@pytest.mark.parametrize("name", ["a.wav", "b.mp3", "c.raw", "no_extension"])
def test_lossless_files_whatever_their_name(tmp_path: Path, how: dict[str, str], name: str) -> None:
    (tmp_path / name).write_bytes(file_bytes(voice(7), **how))
    np.testing.assert_allclose(read(tmp_path / name), voice(7), atol=4e-5)
    np.testing.assert_array_equal(read(str(tmp_path / name)), read(tmp_path / name))


@pytest.mark.parametrize(
    "how", [{"format": "OGG", "subtype": "VORBIS"}, {"format": "MP3", "subtype": "MPEG_LAYER_III"}]
)
def test_lossy_files_of_libsndfile(tmp_path: Path, how: dict[str, str]) -> None:
    (tmp_path / "a.wav").write_bytes(file_bytes(voice(7), **how))
    assert_same_sound(read(tmp_path / "a.wav"), voice(7), slack=1)


FFMPEG_FORMATS = ["m4a", "mp4", "aac", "webm", "opus", "mkv", "ac3", "wma", "ts"]


@needs_ffmpeg
@pytest.mark.parametrize("kind", FFMPEG_FORMATS)
def test_formats_of_ffmpeg_by_content(tmp_path: Path, kind: str) -> None:
    made = ffmpeg(file_bytes(voice(7)), tmp_path / f"a.{kind}")
    wrong = made.rename(tmp_path / "a.wav")
    assert_same_sound(read(wrong), voice(7), slack=3200)
    np.testing.assert_array_equal(read(wrong.read_bytes()), read(wrong))
    with wrong.open("rb") as file:
        np.testing.assert_array_equal(read(file), read(wrong))
    assert [path.name for path in tmp_path.iterdir()] == ["a.wav"]


@pytest.mark.parametrize("rate", [8_000, 11_025, 22_050, 44_100, 48_000, 96_000])
@pytest.mark.parametrize("channels", [1, 2])
def test_rates_and_channels(rate: int, channels: int) -> None:
    audio = voice(12.34, rate)
    if channels == 2:
        audio = np.stack([1.5 * audio, 0.5 * audio], axis=1)
    got = read(file_bytes(audio, rate, subtype="FLOAT"))
    assert abs(len(got) - 12.34 * SAMPLE_RATE) <= 1
    mono = audio if channels == 1 else audio.mean(axis=1)
    want = soxr.resample(mono, rate, SAMPLE_RATE)
    np.testing.assert_allclose(got, want[: len(got)], atol=1e-4)
    assert_same_sound(got, voice(12.34), slack=1)


def test_bytes_files_streams_and_arrays_are_the_same() -> None:
    data, want = file_bytes(voice(11)), voice(11)
    np.testing.assert_allclose(read(data), want, atol=4e-5)
    np.testing.assert_array_equal(read(bytearray(data)), read(data))
    np.testing.assert_array_equal(read(io.BytesIO(data)), read(data))
    later = io.BytesIO(b"what came before" + data)
    later.seek(16)
    np.testing.assert_array_equal(read(later), read(data))
    np.testing.assert_array_equal(read(want), want)
    np.testing.assert_array_equal(read(want.astype(np.float64)), want)
    np.testing.assert_array_equal(read(want[::-1])[::-1], want)
    np.testing.assert_array_equal(read(mx.array(want)), want)
    np.testing.assert_allclose(read(mx.array(want).astype(mx.bfloat16)), want, atol=1e-2)
    pcm = (want * 32767).astype(np.int16)
    for array in (pcm, pcm.astype(">i2"), mx.array(pcm)):
        np.testing.assert_array_equal(read(array), pcm / np.float32(32768))


def test_a_pipe_as_standard_input_is() -> None:
    data = file_bytes(voice(4))
    end, start = os.pipe()

    def write() -> None:
        with os.fdopen(start, "wb") as pipe:
            pipe.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    with os.fdopen(end, "rb") as pipe:
        np.testing.assert_array_equal(read(pipe), read(data))
    writer.join()


def test_real_speech_in_two_wrappings(speech_dir: Path) -> None:
    """Real speech: a LibriVox sentence as wav and as flac."""
    path = sorted((speech_dir / "librivox").glob("*.wav"))[0]
    audio, rate = soundfile.read(path, dtype="float32")
    assert rate == SAMPLE_RATE
    np.testing.assert_array_equal(read(path), audio)
    np.testing.assert_array_equal(read(file_bytes(audio, format="FLAC")), audio)


# ---- damaged or odd, and still read


def wav(data: bytes, length: int | None = None, riff: int | None = None, extra: bytes = b"") -> bytes:
    """A 16-bit mono WAV whose header may state other lengths than it has."""
    length = len(data) if length is None else length
    riff = 36 + len(extra) + len(data) if riff is None else riff
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, SAMPLE_RATE, 2 * SAMPLE_RATE, 2, 16)
    return (
        b"RIFF"
        + struct.pack("<I", riff)
        + b"WAVE"
        + form
        + extra
        + b"data"
        + struct.pack("<I", length)
        + data
    )


PCM = (voice(2) * 32767).astype("<i2").tobytes()
ODD_WAVS = {
    "promises more": wav(PCM, len(PCM) * 10, len(PCM) * 10 + 36),
    "promises more, riff right": wav(PCM, len(PCM) * 10),
    "never closed, zero": wav(PCM, 0, 0),
    "never closed, header only": wav(PCM, 0, 36),
    "never closed, riff right": wav(PCM, 0),
    "never closed, all ones": wav(PCM, 0xFFFFFFFF, 0xFFFFFFFF),
    "never closed, 2 GiB": wav(PCM, 0x7FFFFFFF, 0x7FFFFFFF),
    "never closed, extra chunk": wav(PCM, 0, 0, extra=b"LIST\x05\x00\x00\x00INFOx\x00"),
    "extra chunks": wav(PCM, extra=b"LIST\x05\x00\x00\x00INFOx\x00junk\x02\x00\x00\x00ab"),
    "cut in a sample": wav(PCM + b"\x01", len(PCM) + 100),
}


@pytest.mark.parametrize("data", ODD_WAVS.values(), ids=ODD_WAVS.keys())
def test_wav_with_an_odd_header_gives_what_is_there(data: bytes) -> None:
    np.testing.assert_array_equal(read(data), np.frombuffer(PCM, "<i2") / np.float32(32768))


@pytest.mark.parametrize(
    "source",
    [
        wav(b""),
        wav(b"") + b"LIST\x04\x00\x00\x00INFO",
        file_bytes(np.zeros((0, 2))),
        b"fLaC\x80\x00\x00\x22" + bytes.fromhex("1000100000000000000003e800f0") + bytes(20),
        np.zeros(0, np.float32),
        np.zeros(0, np.int16),
        mx.zeros(0),
    ],
    ids=["wav", "wav-chunk-after", "stereo", "flac", "float", "int16", "mlx"],
)
def test_no_frames_no_blocks(source: Any) -> None:
    assert list(read_blocks(source)) == []


@needs_ffmpeg
def test_mp3_without_a_table_and_joined_files_are_read_to_the_end(tmp_path: Path) -> None:
    quiet_then_loud = np.concatenate(
        [voice(6) * 0.001, np.random.default_rng(0).normal(0, 0.2, 6 * SAMPLE_RATE)]
    )
    mp3 = ffmpeg(file_bytes(quiet_then_loud), tmp_path / "v.mp3", "-q:a", "2", "-write_xing", "0")
    assert len(read(mp3)) >= len(quiet_then_loud)
    ogg = file_bytes(voice(6), format="OGG", subtype="VORBIS")
    assert len(read(ogg + ogg)) >= 12 * SAMPLE_RATE - 100


@needs_ffmpeg
def test_flac_of_unknown_length() -> None:
    command = ["ffmpeg", "-v", "error", "-i", "pipe:0", "-f", "flac", "pipe:1"]
    flac = subprocess.run(command, input=file_bytes(voice(5)), check=True, capture_output=True).stdout
    np.testing.assert_allclose(read(flac), voice(5), atol=4e-5)


# ---- refused, in one line that names the file


def damaged_flac(at: float, length: int) -> bytes:
    flac = file_bytes(np.random.default_rng(0).normal(0, 0.1, 20 * SAMPLE_RATE), format="FLAC")
    at = int(len(flac) * at)
    return flac[:at] + b"\x55" * length


def nan_wav(value: float) -> bytes:
    return file_bytes(np.concatenate([voice(6), [value]]).astype(np.float32), subtype="FLOAT")


BAD = {
    "text": b"This is text that somebody named .wav.\n" * 50,
    "utf-8 text": "Tämä on tekstiä 😀\n".encode() * 100,
    "noise": np.random.default_rng(1).bytes(20_000),
    "zeros": bytes(5_000),
    "picture": b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR" + bytes(500),
    "playlist": b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n",
    "riff only": b"RIFF",
    "wav cut in the header": wav(PCM)[:30],
    "wav without data": wav(PCM)[:36] + b"HURF\x99\x99\x99\x99xxxx",
    "wav with a huge fmt": wav(PCM).replace(b"fmt \x10\x00\x00\x00", b"fmt ffff"),
    "wav at 1 MHz": file_bytes(voice(1), 1_092_676),
    "wav at 1 Hz": file_bytes(voice(1), 1),
    "wav with NaN": nan_wav(np.nan),
    "wav with inf": nan_wav(np.inf),
    "wav not scaled": nan_wav(-20_000),
    "flac cut at half": damaged_flac(0.5, 0),
    "flac cut in its header": damaged_flac(0.0, 0) + file_bytes(voice(1), format="FLAC")[:30],
    "flac cut, then filled": damaged_flac(0.5, 100_000),
}


def error_of(source: Any) -> str:
    with pytest.raises(AudioError) as caught:
        list(read_blocks(source))
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("ffmpeg_there", [True, False])
@pytest.mark.parametrize("kind", BAD)
def test_bad_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    kind: str,
    ffmpeg_there: bool,
) -> None:
    path = tmp_path / "interview.wav"
    path.write_bytes(BAD[kind])
    if not ffmpeg_there:
        monkeypatch.setenv("PATH", str(tmp_path))
    assert "interview.wav" in error_of(path)
    assert "audio bytes" in error_of(BAD[kind])
    if kind != "noise":  # libmpg123 itself prints notes where bytes look like mp3
        assert capfd.readouterr() == ("", "")


def test_text_is_called_text(tmp_path: Path) -> None:
    assert "is text" in error_of(BAD["text"])


def test_an_empty_file_yields_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.wav").touch()
    assert list(read_blocks(tmp_path / "empty.wav")) == list(read_blocks(b"")) == []


def test_flac_cut_anywhere() -> None:
    flac = file_bytes(voice(3), format="FLAC")
    for length in range(50, len(flac) - 1, 997):
        assert "flac" in error_of(flac[:length]).lower()
    with_tag = flac + b"TAG" + bytes(125)
    assert len(read(with_tag)) == 3 * SAMPLE_RATE


def test_a_damaged_file_may_fail_late() -> None:
    blocks = read_blocks(BAD["flac cut at half"])
    assert len(next(blocks)) > 0
    with pytest.raises(AudioError):
        list(blocks)


def test_paths_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no such file" in error_of(tmp_path / "missing.wav")
    assert "missing?.wav" in error_of(str(tmp_path / "missing\n.wav"))
    assert "directory" in error_of(tmp_path)
    error_of("nul\0.wav")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "secret.wav: permission denied" in error_of(tmp_path / "secret.wav")


@pytest.mark.parametrize(
    ("source", "word"),
    [
        (np.zeros((2, 100), np.float32), "1-D"),
        (np.zeros((100, 1), np.float32), "1-D"),
        (np.float32(1) * np.ones(()), "1-D"),
        (mx.zeros((1, 100)), "1-D"),
        (np.zeros(100, np.int32), "int32"),
        (np.zeros(100, np.complex64), "complex64"),
        (mx.zeros(100, dtype=mx.uint8), "uint8"),
        (np.array(["a"]), "dtype"),
        (np.array([0, np.nan]), "finite"),
        (np.array([0, np.inf]), "finite"),
        (mx.array([0, float("nan")]), "finite"),
        (np.array([0, 32000.0]), "finite"),
        (io.StringIO("text"), "StringIO"),
        (None, "NoneType"),
        (7, "int"),
    ],
)
def test_arrays_and_objects_that_are_no_audio(source: Any, word: str) -> None:
    assert word in error_of(source)


def test_a_failing_disk_is_an_error_and_not_the_end() -> None:
    class Failing(io.BytesIO):
        def read(self, count: int | None = -1) -> bytes:
            if self.tell() > 200_000:
                raise OSError(5, "Input/output error")
            return super().read(count)

    assert "Input/output error" in error_of(Failing(file_bytes(voice(20))))


@pytest.mark.parametrize("name", ["awful", "bad", "evil", "null"])
def test_broken_wavs_of_pocketsphinx(speech_dir: Path, name: str) -> None:
    """The broken files of that test suite (no speech in them) end in blocks or in one line."""
    path = next(speech_dir.rglob(f"{name}.wav"))
    if name == "null":
        assert list(read_blocks(path)) == []
    else:
        assert path.name in error_of(path)


# ---- ffmpeg: absent, failing, left early


@needs_ffmpeg
def test_without_ffmpeg_only_its_formats_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m4a = ffmpeg(file_bytes(voice()), tmp_path / "a.m4a")
    monkeypatch.setenv("PATH", str(tmp_path))
    message = error_of(m4a)
    assert "a.m4a" in message
    assert "install ffmpeg" in message
    assert len(read(file_bytes(voice(1)))) == SAMPLE_RATE
    assert len(read(file_bytes(voice(1), format="MP3", subtype="MPEG_LAYER_III"))) >= SAMPLE_RATE


@needs_ffmpeg
@pytest.mark.parametrize("keep", [0.05, 0.5])
@pytest.mark.parametrize("options", [["-movflags", "+faststart"], []], ids=["index-first", "index-last"])
def test_truncated_m4a(tmp_path: Path, keep: float, options: list[str]) -> None:
    m4a = ffmpeg(file_bytes(voice(20)), tmp_path / "a.m4a", *options)
    m4a.write_bytes(m4a.read_bytes()[: int(m4a.stat().st_size * keep)])
    assert "a.m4a" in error_of(m4a)


@needs_ffmpeg
def test_video_without_sound(tmp_path: Path) -> None:
    video = tmp_path / "silent.mp4"
    command = f"ffmpeg -v error -nostdin -f lavfi -i color=s=16x16:d=1 -c:v mpeg4 {video}"
    subprocess.run(command.split(), check=True)
    assert "silent.mp4" in error_of(video)


@needs_ffmpeg
def test_leaving_early_ends_ffmpeg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    m4a = ffmpeg(file_bytes(voice(60)), tmp_path / "a.m4a")
    started = []
    popen: Callable[..., Any] = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    blocks = read_blocks(m4a)
    next(blocks)
    assert started[0].poll() is None
    blocks.close()  # type: ignore[attr-defined]
    assert started[0].poll() is not None
    assert started[0].stdout.closed


# ---- memory

MEASURE = """
import resource, sys
from mlx_medusa.audio import read_blocks
import soundfile, soxr
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(sum(len(block) for block in read_blocks(sys.argv[1])))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """3 hours of 16 kHz, as a file with a hole for its silence."""
    path, seconds = tmp_path / "long.wav", 3 * 3600
    size = seconds * SAMPLE_RATE * 2
    with path.open("wb") as file:
        file.write(wav(b"", size, size + 36))
        file.truncate(44 + size)
    out = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True
    )
    samples, growth = map(int, out.stdout.split())
    assert samples == seconds * SAMPLE_RATE
    assert growth * (1 if sys.platform == "darwin" else 1024) < 40e6


def test_many_channels_and_low_rates_keep_blocks_small() -> None:
    assert len(read(file_bytes(np.zeros((3000, 200)), 8000))) == 6000
    assert len(read(file_bytes(voice(10)[:20_000], 1000))) == 20 * SAMPLE_RATE


def test_importing_the_room_is_cheap() -> None:
    code = (
        "import sys, mlx_medusa.audio; print([m for m in ('numpy', 'mlx', 'soundfile') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "[]\n"
