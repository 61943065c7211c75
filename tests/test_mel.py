"""The log-mel spectrogram against transformers. Signals are made with numpy, except where it says real speech."""

from pathlib import Path

import mlx_medusa  # noqa: F401  (before mlx, for its BLAS)

import mlx.core as mx  # isort: skip
import numpy as np
import pytest

from mlx_medusa.audio import SAMPLE_RATE, log_mel, read_blocks


def voice(seconds: float) -> np.ndarray:
    """Float32 [n]: a gliding harmonic tone in syllables."""
    t = np.arange(round(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * np.pi * (120 * t + 15 * np.sin(2 * np.pi * 0.7 * t))
    tone = sum(np.sin(k * phase) / k for k in range(1, 20))
    return (0.2 * tone * np.sin(2 * np.pi * 1.7 * t) ** 2).astype(np.float32)


def mel_signals() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    t = np.arange(30 * SAMPLE_RATE) / SAMPLE_RATE
    return {
        "voice-30": voice(30),
        "voice-3": voice(3),
        "voice-0.1": voice(0.1),
        "voice-29.99": voice(29.99),
        "noise": rng.normal(0, 0.1, len(t)),
        "faint": rng.normal(0, 1e-5, 5 * SAMPLE_RATE),
        "tone": 0.9 * np.sin(2 * np.pi * 1001.3 * t),
        "sweep": np.sin(2 * np.pi * 130 * t * t),
        "click": np.eye(1, len(t), len(t) - 10)[0],
        "one-sample": np.ones(1),
        "silence": np.zeros(SAMPLE_RATE),
        "nothing": np.zeros(0),
    }


@pytest.mark.parametrize("n_mels", [80, 128])
def test_log_mel_equals_transformers(n_mels: int) -> None:
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=n_mels)
    for name, signal in mel_signals().items():
        signal = signal.astype(np.float32)
        want = extractor(
            signal if len(signal) else np.zeros(1), sampling_rate=SAMPLE_RATE, return_tensors="np"
        )
        got = log_mel(signal, n_mels)
        assert got.shape == (3000, n_mels)
        assert got.dtype == mx.float32
        np.testing.assert_allclose(np.array(got), want["input_features"][0].T, atol=1e-4, err_msg=name)


def test_log_mel_equals_transformers_on_real_speech(speech_dir: Path) -> None:
    """Real speech: the LibriVox sentences."""
    extractor = pytest.importorskip("transformers").WhisperFeatureExtractor(feature_size=80)
    for path in sorted((speech_dir / "librivox").glob("*.wav")):
        samples = np.concatenate(list(read_blocks(path)))
        want = extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np")["input_features"][0].T
        np.testing.assert_allclose(np.array(log_mel(samples, 80)), want, atol=1e-4)


@pytest.mark.parametrize("samples", [np.zeros(480_001, np.float32), np.zeros((2, 10), np.float32)])
def test_log_mel_takes_one_window(samples: np.ndarray) -> None:
    with pytest.raises(ValueError, match="one window"):
        log_mel(samples, 80)
