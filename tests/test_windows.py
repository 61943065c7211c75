"""Cutting long audio at quiet points. All signals are made with numpy; no real speech."""

import numpy as np
import pytest

from mlx_medusa.speech.windows import Window, windows

RATE = 16_000
SIZE = 30 * RATE


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


def cut_up(audio: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    return np.split(audio, np.cumsum(sizes)[np.cumsum(sizes) < len(audio)])


def check(audio: np.ndarray, found: list[Window], size: int = SIZE) -> None:
    np.testing.assert_array_equal(np.concatenate([w.samples for w in found]), audio)
    assert [w.start for w in found] == [0, *np.cumsum([len(w.samples) for w in found])[:-1]]
    assert all(0 < len(w.samples) <= size for w in found)


@pytest.mark.parametrize("seconds", [1 / RATE, 1, 29.9, 30, 30 + 1 / RATE, 34.99, 35, 35.1, 61, 200.3])
def test_nothing_is_lost_or_repeated_and_no_window_is_tiny(seconds: float) -> None:
    audio = noise(seconds)
    found = list(windows(cut_up(audio, [80_000] * 50)))
    check(audio, found)
    assert len(found) == 1 or min(len(w.samples) for w in found) >= SIZE // 6


def test_no_samples_no_window() -> None:
    assert list(windows([])) == []
    assert list(windows([np.zeros(0, np.float32)])) == []


def test_cuts_lie_in_the_pauses() -> None:
    audio = noise(100)
    pauses = [(24.0, 24.4), (46.5, 46.9), (72.2, 72.6)]
    for begin, end in pauses:
        audio[int(begin * RATE) : int(end * RATE)] *= 0.01
    audio[int(10 * RATE) : int(12 * RATE)] = 0  # quieter, but a cut here would waste two thirds of a window
    found = list(windows([audio]))
    check(audio, found)
    cuts = [w.start / RATE for w in found[1:]]
    assert len(cuts) == 3
    assert all(begin < cut < end for cut, (begin, end) in zip(cuts, pauses, strict=True)), cuts


def test_silence_takes_the_longest_windows_that_leave_speech_unharmed() -> None:
    audio = np.zeros(60 * RATE, np.float32)
    found = list(windows([audio]))
    check(audio, found)
    assert len(found[0].samples) > 29.8 * RATE


@pytest.mark.parametrize("seed", range(5))
def test_cuts_do_not_depend_on_the_blocks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    audio = noise(rng.uniform(30, 120), seed)
    want = [w.start for w in windows([audio])]
    for sizes in ([RATE * 5] * 30, [1_000_000] * 3, rng.integers(0, 50_000, 500).tolist()):
        found = list(windows(cut_up(audio, sizes)))
        check(audio, found)
        assert [w.start for w in found] == want


@pytest.mark.parametrize("size", [1, 7, 1000, 16_000])
def test_any_size(size: int) -> None:
    audio = noise(0.3 if size < 1000 else 10)
    check(audio, list(windows([audio], size)), size)


def test_reads_no_further_ahead_than_it_needs() -> None:
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield np.zeros(RATE, np.float32)

    found = windows(endless())
    next(found)
    assert taken == 35
    next(found)
    assert taken <= 65
