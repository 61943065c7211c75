"""Any source of audio -> blocks of 16 kHz mono float32, with memory bounded by a block and not by the file.

libsndfile reads wav, flac, ogg, mp3 and its other formats; ffmpeg, if it is on the path, reads the rest. The
content decides which, never the name.
"""

import codecs
import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Union

import numpy as np
import soundfile
import soxr

from ..errors import AudioError
from . import SAMPLE_RATE, ffmpeg

if TYPE_CHECKING:
    import mlx.core as mx

Source = Union[str, Path, bytes, BinaryIO, np.ndarray, "mx.array"]

BLOCK_SECONDS = 5
_CHUNK_VALUES = 1 << 20  # frames x channels decoded at once: many channels cost no more memory
_LOUDEST = 100.0  # full scale is 1; above +40 dB the samples were never scaled (or are inf or NaN)
_RATES = (1_000, 768_000)  # Hz; outside, the header is broken and resampling it would multiply the work
_TAIL = 2048  # bytes of tags that may follow the last frame of an mp3
_INSTALL = "install ffmpeg (apt-get install ffmpeg, or brew install ffmpeg)"


def read_blocks(source: Source) -> Iterator[np.ndarray]:
    """Yield ``source`` as float32 arrays [n], 16 kHz mono, full scale 1, 0 < n <= 160,000, gapless, in order.

    ``source`` is a path, the bytes of an audio file, a binary file object (read from where it stands; it need
    not seek), or a 1-D array that is 16 kHz mono already (floating point, or int16, which is scaled).
    Channels are averaged. Audio without a frame, and an empty file, yield nothing. Do not write to the blocks
    of an array: they may share its memory.

    Raises AudioError, at the first block or later: a damaged file may fail after some of it was yielded.
    """
    if _is_array(source):
        yield from _checked(_array_blocks(source), "audio array")
        return
    with ExitStack() as stack:  # closes the file, the decoder and ffmpeg also when the caller stops early
        file, name = _open(source, stack)
        try:
            if not file.read(1):
                return
            file.seek(0)
            rate, chunks = _decode(file, name, stack)
            if not _RATES[0] <= rate <= _RATES[1]:
                raise AudioError(
                    f"{name}: a sample rate of {rate} Hz: the header is broken, write the file anew"
                )
            yield from _checked(_resampled(chunks, rate), name)
        except OSError as error:
            raise AudioError(f"{name}: cannot be read: {error.strerror or error}") from error


# ---- what comes in


def _is_array(source: Any) -> bool:
    mlx = sys.modules.get("mlx.core")  # an mx.array cannot exist before this import
    return isinstance(source, np.ndarray) or (mlx is not None and isinstance(source, mlx.array))


def _array_blocks(source: Any) -> Iterator[np.ndarray]:
    if source.ndim != 1:
        raise AudioError(f"audio array has shape {tuple(source.shape)}: pass one channel, 1-D, 16 kHz")
    kind = getattr(source.dtype, "name", str(source.dtype)).removeprefix("mlx.core.")
    if kind not in ("int16", "float16", "bfloat16", "float32", "float64"):
        raise AudioError(f"audio array has dtype {kind}: pass float32 with full scale 1, or int16")
    if not isinstance(source, np.ndarray):
        source = np.array(source if kind == "int16" else source.astype(sys.modules["mlx.core"].float32))
    size = BLOCK_SECONDS * SAMPLE_RATE
    for at in range(0, len(source), size):
        block = np.asarray(source[at : at + size], dtype=np.float32)
        yield block / np.float32(32768) if kind == "int16" else block


def _open(source: Any, stack: ExitStack) -> tuple[BinaryIO, str]:
    """A seekable binary file at its start, and a name for messages."""
    file: BinaryIO
    if isinstance(source, (bytes, bytearray, memoryview)):
        file, name = io.BytesIO(source), "audio bytes"
    elif isinstance(source, (str, os.PathLike)):
        name = _label(os.fspath(source))
        try:
            file = stack.enter_context(Path(os.fsdecode(source)).open("rb"))  # noqa: SIM115
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "strerror", None) or error).lower()
            raise AudioError(f"{name}: {reason}: check the path") from error
    elif hasattr(source, "read") and not isinstance(source, io.TextIOBase):
        file, name = source, _label(getattr(source, "name", None))
    else:
        kind = type(source).__name__
        raise AudioError(f"no audio in a {kind}: pass a path, bytes, a binary file, or a 1-D array")
    try:
        if not _stands_at_start(file):
            file = _copy(file, stack)
        file.seek(0)
    except OSError as error:
        raise AudioError(f"{name}: cannot be read: {error.strerror or error}") from error
    return file, name


def _label(name: Any) -> str:
    if not isinstance(name, (str, bytes)):
        return "audio stream"
    return "".join(c if c.isprintable() else "?" for c in os.fsdecode(name))


def _stands_at_start(file: BinaryIO) -> bool:
    try:
        return file.seekable() and file.tell() == 0
    except (AttributeError, OSError):
        return False


def _copy(file: BinaryIO, stack: ExitStack) -> BinaryIO:
    """The rest of ``file`` in an unnamed temporary file, for decoders seek; it vanishes when closed."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the stack closes it
    stack.callback(copy.close)
    shutil.copyfileobj(file, copy, 1 << 20)
    copy.flush()
    copy.seek(0)
    return copy


# ---- what decodes it


def _decode(file: BinaryIO, name: str, stack: ExitStack) -> tuple[int, Iterator[np.ndarray]]:
    """(sample rate in Hz, mono chunks at that rate) by the first decoder that reads all of the content."""
    sound, view, reason = _open_soundfile(file)
    if sound is not None:
        stack.callback(sound.close)
        return sound.samplerate, _soundfile_chunks(sound, view, name)
    file.seek(0)
    head = file.read(512)
    if _is_text(head):
        raise AudioError(f"{name}: is text, not audio")
    if head.startswith(b"fLaC"):  # ffmpeg would patch over the damage and lose speech without a word
        raise AudioError(f"{name}: damaged flac ({reason}): write the file anew")
    if shutil.which("ffmpeg") is None:
        raise AudioError(f"{name}: {reason}; for m4a, aac, webm, mp4 and more {_INSTALL}")
    if not ffmpeg.can_take(file):
        file.seek(0)
        file = _copy(file, stack)
    return ffmpeg.decode(file, name, stack, _chunk_frames)


def _chunk_frames(rate: int, channels: int) -> int:
    """Frames to decode at once: at most BLOCK_SECONDS, fewer where there are many channels."""
    return max(1, min(BLOCK_SECONDS * rate, _CHUNK_VALUES // channels))


class _View:
    """``file`` without its name, for libsndfile: a name ending in .raw would overrule the content.

    ``head`` replaces the first bytes. An OSError becomes the end of the file and is kept: an exception cannot
    pass through the C library.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.head = b""
        self.error: OSError | None = None

    def seek(self, offset: int, whence: int = 0) -> int:
        with suppress(OSError, ValueError):  # a damaged header asks for places before the start
            self.file.seek(offset, whence)
        return self.file.tell()

    def tell(self) -> int:
        return self.file.tell()

    def read(self, count: int) -> bytes:
        at = self.file.tell()
        try:
            data = self.file.read(count)
        except OSError as error:
            self.error = error
            return b""
        new = self.head[at : at + len(data)]
        return new + data[len(new) :]


class _SoundFile(soundfile.SoundFile):
    """Reads on from where it stands: the base class seeks after each read, which fails in a flac without a length."""

    def seekable(self) -> bool:
        return False


def _open_soundfile(file: BinaryIO) -> tuple[_SoundFile | None, _View, str]:
    """(open file, its view, "") or (None, view, why not), where libsndfile cannot read all of ``file``."""
    view = _View(file)
    try:
        file.seek(0)
        sound = _SoundFile(view)
        if sound.frames == 0 and sound.format.startswith("WAV"):
            view.head = _closed_wav_head(file)
            if view.head:
                file.seek(0)
                sound = _SoundFile(view)
        if sound.format in ("MP3", "OGG") and not _reaches_end(sound, file):
            sound.close()
            return None, view, "only partly readable by libsndfile"
        return sound, view, ""
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(getattr(error, "error_string", "not readable")).rstrip(".")
        return None, view, f"{reason[:1].lower()}{reason[1:]} by libsndfile"


def _reaches_end(sound: _SoundFile, file: BinaryIO) -> bool:
    """Whether the last frame lies at the end of the file.

    libsndfile guesses the length of a variable-bitrate mp3 without a table from its first frame, and stops
    after the first of several mp3 or ogg streams in one file; what follows would be lost without a word.
    """
    sound.seek(max(0, sound.frames - 1))
    sound.read(1)
    at = file.tell()
    left = file.seek(0, os.SEEK_END) - at
    file.seek(at)
    sound.seek(0)
    return left <= _TAIL


def _closed_wav_head(file: BinaryIO) -> bytes:
    """The head of a WAV whose writer never came back to fill in the length, with the length filled in.

    Empty if the data chunk is truly empty: nothing, or another whole chunk, follows it.
    """
    size = file.seek(0, os.SEEK_END)
    at = 12
    while at + 8 <= size:
        file.seek(at)
        kind, length = file.read(4), int.from_bytes(file.read(4), "little")
        at += 8
        if kind == b"data":
            break
        at += length + length % 2
    else:
        return b""
    file.seek(at)
    rest = file.read(8)
    if length or len(rest) < 8 or at + 8 + int.from_bytes(rest[4:], "little") in (size, size - 1):
        return b""
    file.seek(0)
    head = file.read(at - 4)
    length = min(size - at, 0xFFFFFFFF - at)
    return head[:4] + (length + at - 8).to_bytes(4, "little") + head[8:] + length.to_bytes(4, "little")


def _soundfile_chunks(sound: _SoundFile, view: _View, name: str) -> Iterator[np.ndarray]:
    buffer = np.empty((_chunk_frames(sound.samplerate, sound.channels), sound.channels), dtype=np.float32)
    total = 0
    while total < sound.frames:  # and not one more: a tag behind the last frame of a flac is no damage
        try:
            frames = sound.read(out=buffer[: sound.frames - total])
        except RuntimeError as error:
            raise AudioError(f"{name}: damaged {sound.format}: {error}: write the file anew") from error
        if view.error:
            raise AudioError(f"{name}: cannot be read: {view.error.strerror}") from view.error
        if len(frames) == 0:
            break
        total += len(frames)
        yield frames.mean(axis=1)
    if sound.format == "FLAC" and total < sound.frames < 1 << 62:  # more than that: the writer did not know
        raise AudioError(f"{name}: truncated flac: {total} of {sound.frames} samples: copy or record it anew")


def _is_text(head: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c in "\t\n\r\f\ufeff" for c in text)


# ---- what goes out


def _resampled(chunks: Iterable[np.ndarray], rate: int) -> Iterator[np.ndarray]:
    if rate == SAMPLE_RATE:
        yield from chunks
        return
    stream = soxr.ResampleStream(rate, SAMPLE_RATE, 1, dtype="float32")
    for chunk in chunks:
        yield stream.resample_chunk(chunk)
    yield stream.resample_chunk(np.zeros(0, dtype=np.float32), last=True)


def _checked(blocks: Iterable[np.ndarray], name: str) -> Iterator[np.ndarray]:
    for block in blocks:
        if len(block) == 0:
            continue
        peak = max(block.max(), -block.min())  # NaN stays NaN and fails the test below
        if not peak <= _LOUDEST:
            raise AudioError(f"{name}: holds a sample of {peak:g}: floating-point audio needs finite -1 .. 1")
        yield block
