"""Make clean speech sound as rooms, telephones and microphones leave it. Used by make_speech.py."""

import io
from dataclasses import dataclass
from random import Random

import numpy as np
import soundfile
import soxr

RATE = 16_000


@dataclass(frozen=True)
class Effects:
    """What is done to one file; None leaves a thing out."""

    noise: str | None = None  # "white" or "pink"
    snr: float | None = None  # dB
    reverb: float | None = None  # seconds until it has fallen by 60 dB
    telephone: bool = False
    mp3: bool = False
    peak: float = 0.7


def draw_effects(rng: Random, *, clear: bool = False) -> Effects:
    """Noise on a third, reverb on a sixth, the telephone's band on one in twelve, MP3's traces on a quarter.

    `clear` is for voices that are hard to follow as they are: less noise, no reverb, no telephone.
    """
    noisy = rng.random() < 1 / 3
    return Effects(
        noise=rng.choice(["white", "pink", "pink"]) if noisy else None,
        snr=round(rng.uniform(30 if clear else 15, 40), 1) if noisy else None,
        reverb=round(rng.uniform(0.15, 0.6), 2) if rng.random() < 1 / 6 and not clear else None,
        telephone=rng.random() < 1 / 12 and not clear,
        mp3=rng.random() < 1 / 4,
        peak=round(10 ** rng.uniform(-1.2, -0.05), 3),
    )


def coloured_noise(rng: np.random.Generator, size: int, colour: str) -> np.ndarray:
    """Noise of unit power; pink has 1/f power."""
    noise = rng.standard_normal(size)
    if colour == "pink":
        spectrum = np.fft.rfft(noise)
        spectrum /= np.sqrt(np.maximum(np.arange(len(spectrum)), 20))
        noise = np.fft.irfft(spectrum, size)
    return (noise / np.sqrt(np.mean(noise**2))).astype(np.float32)


def band(samples: np.ndarray, low: float, high: float) -> np.ndarray:
    """Only these frequencies, with edges a sixth as wide as themselves."""
    frequencies = np.fft.rfftfreq(len(samples), 1 / RATE)
    rise = np.clip((frequencies - low * 0.85) / (low * 0.3), 0, 1)
    fall = np.clip((high * 1.15 - frequencies) / (high * 0.3), 0, 1)
    return np.fft.irfft(np.fft.rfft(samples) * rise * fall, len(samples)).astype(np.float32)


def reverberate(samples: np.ndarray, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """The sound with a simple room's tail; the length stays."""
    length = int(seconds * RATE)
    tail = rng.standard_normal(length) * 10 ** (-3 * np.arange(length) / length)
    tail *= 0.5 / np.sqrt(np.sum(tail**2))
    tail[: int(0.004 * RATE)] = 0
    tail[0] = 1
    size = len(samples) + length
    return np.fft.irfft(np.fft.rfft(samples, size) * np.fft.rfft(tail, size), size)[: len(samples)].astype(
        np.float32
    )


def through_mp3(samples: np.ndarray) -> np.ndarray:
    """Coded as MP3 and decoded, as LibriVox's files were; unchanged where libsndfile cannot write MP3."""
    if "MP3" not in soundfile.available_formats():
        return samples
    buffer = io.BytesIO()
    soundfile.write(buffer, np.clip(soxr.resample(samples, RATE, 22_050), -1, 1), 22_050, format="MP3")
    buffer.seek(0)
    decoded, rate = soundfile.read(buffer, dtype="float32")
    decoded = np.pad(soxr.resample(decoded, rate, RATE), (0, len(samples)))
    return decoded[: len(samples)].astype(np.float32)


def apply_effects(samples: np.ndarray, effects: Effects, seed: int) -> np.ndarray:
    """The samples (float32, 16 kHz) with these effects; the same seed gives the same noise."""
    rng = np.random.default_rng(seed)
    if effects.reverb:
        samples = reverberate(samples, effects.reverb, rng)
    power = float(np.mean(samples**2)) or 1e-6
    if effects.noise and effects.snr is not None:
        level = np.sqrt(power / 10 ** (effects.snr / 10))
        samples = samples + np.float32(level) * coloured_noise(rng, len(samples), effects.noise)
    if effects.telephone:
        samples = band(samples, 300, 3_400)
    samples = samples * np.float32(effects.peak / max(float(np.abs(samples).max()), 1e-6))
    return through_mp3(samples) if effects.mp3 else samples
