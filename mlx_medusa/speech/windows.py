"""Cut audio of any length into windows, at quiet points, with memory bounded by about two windows."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

_HOP = 160  # samples (10 ms): the grid on which quiet is looked for
_QUIET = 25  # hops (0.25 s): the length of the stretch whose middle is cut


@dataclass(frozen=True)
class Window:
    """``samples`` float32 [n], 16 kHz mono, that begin at sample ``start`` of the audio."""

    start: int
    samples: np.ndarray


def windows(blocks: Iterable[np.ndarray], size: int = 480_000) -> Iterator[Window]:
    """Yield the audio of ``blocks`` (float32 [n]) as consecutive windows of at most ``size`` samples.

    Longer audio is cut in the middle of the quietest 0.25 s of the last third of each window, and so that
    a sixth of a window (5 s of 30) is left for the last one. Nothing is lost or repeated, and the cuts do
    not depend on the sizes of the blocks. No samples, no window.
    """
    rest = size // 6
    held: list[np.ndarray] = []
    start = length = 0
    for block in blocks:
        held.append(block)
        length += len(block)
        if length < size + rest:
            continue
        audio = np.concatenate(held)
        while len(audio) >= size + rest:
            cut = _quietest(audio[:size], size * 2 // 3)
            yield Window(start, audio[:cut].copy())  # a view would keep all of the audio in memory
            audio, start = audio[cut:], start + cut
        held, length = [audio.copy()], len(audio)
    audio = np.concatenate(held) if held else np.zeros(0, dtype=np.float32)
    if len(audio) > size:
        cut = _quietest(audio[: len(audio) - rest], size * 2 // 3)
        yield Window(start, audio[:cut])
        audio, start = audio[cut:], start + cut
    if len(audio):
        yield Window(start, audio)


def _quietest(audio: np.ndarray, begin: int) -> int:
    """The sample amid the 0.25 s of least energy in ``audio[begin:]``; the last such place in a tie."""
    hops = (len(audio) - begin) // _HOP
    if hops < _QUIET:
        return len(audio)
    tail = audio[begin : begin + hops * _HOP].astype(np.float64)
    energy = np.square(tail).reshape(hops, _HOP).sum(axis=1)
    stretches = np.lib.stride_tricks.sliding_window_view(energy, _QUIET).sum(axis=1)
    last = len(stretches) - 1 - int(np.argmin(stretches[::-1]))
    return begin + (2 * last + _QUIET) * _HOP // 2
