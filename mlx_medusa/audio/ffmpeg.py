"""ffmpeg as a decoder in a pipe, for the formats that libsndfile does not read."""

import io
import os
import re
import stat
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import IO, BinaryIO

import numpy as np

from ..errors import AudioError
from . import SAMPLE_RATE

# Containers of recorded sound only: no playlists (they name other files), no text or image "demuxers".
_FORMATS = (
    "mov,matroska,aac,mp3,ogg,flac,wav,w64,aiff,caf,au,asf,avi,mpegts,mpeg,flv,amr,amrnb,amrwb,"
    "ac3,eac3,dts,ape,wv,tta,mpc,mpc8,loas,rm,voc,gsm,dsf,tak,mlp,truehd"
)
_COMMAND = (
    "ffmpeg -v error -nostdin -protocol_whitelist file -format_whitelist " + _FORMATS + " -i file:/dev/stdin "
    "-map 0:a:0 -vn -c:a pcm_f32be -f au pipe:1"
)


def can_take(file: BinaryIO) -> bool:
    """Whether ``file`` is a plain file of the system, which ffmpeg can open and seek by its descriptor."""
    raw = getattr(file, "raw", None)
    return isinstance(raw, io.FileIO) and stat.S_ISREG(os.fstat(raw.fileno()).st_mode)


def decode(
    file: BinaryIO, name: str, stack: ExitStack, chunk_frames: Callable[[int, int], int]
) -> tuple[int, Iterator[np.ndarray]]:
    """(sample rate in Hz, mono float32 chunks of ``chunk_frames(rate, channels)``) of the first audio stream.

    ``file`` satisfies ``can_take``. ``stack`` ends ffmpeg when it is closed, however much was read.
    Raises AudioError, with ffmpeg's reason, now or from the chunks.
    """
    os.lseek(file.fileno(), 0, os.SEEK_SET)  # macOS shares the offset, and file.seek may stay in its buffer
    process = subprocess.Popen(_COMMAND.split(), stdin=file, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    stack.callback(_stop, process)
    assert process.stdout is not None
    said: deque[bytes] = deque(maxlen=4)
    # a pipe that nobody empties would block ffmpeg once it is full
    listener = threading.Thread(target=said.extend, args=(process.stderr,), daemon=True)
    listener.start()

    def finish() -> None:
        code = process.wait()
        listener.join()
        reason = _reason(said)
        if code or "partial file" in reason:
            raise AudioError(f"{name}: ffmpeg finds no whole audio in it: {reason or f'exit status {code}'}")

    head = process.stdout.read(24)
    if len(head) < 24:
        finish()
        return SAMPLE_RATE, iter(())
    offset, rate, channels = struct.unpack(">4xI8xII", head)
    process.stdout.read(offset - 24)
    return rate, _chunks(process.stdout, channels, chunk_frames(rate, channels), finish)


def _chunks(pipe: IO[bytes], channels: int, frames: int, finish: Callable[[], None]) -> Iterator[np.ndarray]:
    while data := pipe.read(frames * channels * 4):
        whole = len(data) // (channels * 4) * channels
        yield np.frombuffer(data, ">f4", whole).reshape(-1, channels).mean(axis=1, dtype=np.float32)
    finish()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()  # does nothing to one that has ended
    process.wait()
    for pipe in (process.stdout, process.stderr):
        if pipe:
            pipe.close()


def _reason(said: deque[bytes]) -> str:
    """The last lines of ffmpeg's complaint as one, without addresses and without the name it was given."""
    text = "; ".join(line.decode(errors="replace").strip() for line in said)
    return re.sub(r"\[[^\]]* @ 0x[0-9a-f]+\] |file:/dev/stdin: ", "", text)
