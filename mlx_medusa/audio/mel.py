"""The log-mel spectrogram of one Whisper window, on MLX."""

from functools import lru_cache

import mlx.core as mx
import numpy as np

from . import SAMPLE_RATE

WINDOW_SAMPLES = 30 * SAMPLE_RATE
FRAME = 400  # samples of one spectrum
HOP = 160  # samples from one spectrum to the next
FRAMES = WINDOW_SAMPLES // HOP


def log_mel(samples: np.ndarray, n_mels: int) -> mx.array:
    """``samples`` [n <= 480,000] float32, 16 kHz, padded with zeros to 30 s -> [3000, n_mels] float32, lazy.

    Equal to transformers' WhisperFeatureExtractor (transposed) for 80 and 128 mels.
    Raises ValueError on any other shape: longer audio is cut into windows first.
    """
    if samples.ndim != 1 or len(samples) > WINDOW_SAMPLES:
        raise ValueError(f"one window is 1-D and at most {WINDOW_SAMPLES} samples, not {samples.shape}")
    padded = np.zeros(WINDOW_SAMPLES, dtype=np.float32)
    padded[: len(samples)] = samples
    return window_mel(mx.array(padded), n_mels)


def window_mel(samples: mx.array, n_mels: int) -> mx.array:
    """A whole window [480,000] float32 -> [3000, n_mels] float32, lazy: arrays only, so that it can be exported."""
    edge = FRAME // 2
    reflected = [samples[1 : edge + 1][::-1], samples, samples[-edge - 1 : -1][::-1]]
    frames = mx.as_strided(mx.concatenate(reflected), (FRAMES, FRAME), (HOP, 1))
    spectrum = mx.fft.rfft(frames * _hann())  # [3000, 201] complex64
    parts = mx.view(spectrum, mx.float32)  # [3000, 402]: real and imaginary parts in turn
    power = mx.square(parts) @ _filters(n_mels)
    log_power = mx.log10(mx.maximum(power, 1e-10))
    return mx.maximum(log_power, log_power.max() - 8.0) / 4.0 + 1.0


@lru_cache
def _hann() -> mx.array:
    """The periodic Hann window [FRAME]."""
    return mx.array((0.5 - 0.5 * np.cos(2 * np.pi * np.arange(FRAME) / FRAME)).astype(np.float32))


@lru_cache
def _filters(n_mels: int) -> mx.array:
    """Filter weights [402, n_mels] float32: each bin's row twice, for its real and its imaginary part."""
    return mx.array(np.repeat(mel_filters(n_mels), 2, axis=0).astype(np.float32))


def mel_filters(n_mels: int) -> np.ndarray:
    """Triangles of equal area, even on the Slaney mel scale from 0 to 8 kHz: [201, n_mels] float64."""
    bins = np.linspace(0, SAMPLE_RATE / 2, FRAME // 2 + 1)[:, None]
    edges = _mel_to_hz(np.linspace(0, _hz_to_mel(SAMPLE_RATE / 2), n_mels + 2))
    low, peak, high = edges[:-2], edges[1:-1], edges[2:]
    triangle = np.minimum((bins - low) / (peak - low), (high - bins) / (high - peak))
    return np.maximum(triangle, 0) * 2 / (high - low)


# The Slaney scale: 3 mels for each 200 Hz up to 1 kHz (15 mels), then 27 mels for each factor of 6.4.
def _hz_to_mel(hz: float) -> float:
    return float(15 + np.log(hz / 1000) * 27 / np.log(6.4))


def _mel_to_hz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, mel * 200 / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))
