"""The clips of the real-model tests: name -> 16 kHz mono samples of at most 30 s."""

import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import make_small_models
import numpy as np

from mlx_medusa.audio import read_blocks
from mlx_medusa.parity.inputs import Input


def samples_of(path: Path) -> np.ndarray:
    return np.concatenate(list(read_blocks(path)))[:480_000]


def librivox_texts(speech_dir: Path) -> dict[Path, str]:
    """What is said in the five LibriVox clips."""
    texts = json.loads((speech_dir / "librivox" / "transcripts.json").read_text())
    return {speech_dir / "librivox" / f"{name}.wav": text for name, text in texts.items()}


def english(speech_dir: Path, languages_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    """LibriVox, digits, cards, other speakers, synthesized speech, altered speech, and what is no speech at all."""
    for path in sorted(speech_dir.rglob("*.wav")):
        if path.parent.name != "broken":
            yield path.relative_to(speech_dir).as_posix(), samples_of(path)
    for path in sorted((languages_dir / "en").glob("*.wav")):
        yield f"en/{path.name}", samples_of(path)
    first, second = (samples_of(path) for path in list(librivox_texts(speech_dir))[:2])
    noise = np.random.default_rng(0).normal(size=480_000).astype(np.float32)
    yield "silence", np.zeros(480_000, np.float32)
    yield "faint noise", noise * np.float32(0.001)
    yield "loud noise", noise * np.float32(0.3)
    yield "tone", (0.3 * np.sin(np.arange(160_000) * 2 * np.pi * 440 / 16_000)).astype(np.float32)
    yield "noisy speech", first + noise[: len(first)] * np.float32(0.02)
    yield "faint speech", second * np.float32(0.02)
    yield "two voices", first[: len(second)] + second
    yield "backwards", second[::-1].copy()
    yield "fast", first[::2].copy()
    yield "very short", second[:1600]


def sounds() -> Iterator[Input]:
    """The sounds that examples/make_small_models.py makes for its models."""
    with TemporaryDirectory() as folder:
        make_small_models.make_inputs(Path(folder))
        for path in sorted(Path(folder, "speech").iterdir()):
            yield Input(path.name, samples_of(path))


def nine_languages(languages_dir: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Three synthesized clips in each of nine languages; the name begins with the language code."""
    for path in sorted(languages_dir.glob("*/*.wav")):
        yield path.relative_to(languages_dir).as_posix(), samples_of(path)
