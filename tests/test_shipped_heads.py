"""The heads that come with the package, on real speech that they were not trained on: Whisper tiny.en.

Heads that failed to load look exactly like heads that guess badly, so acceptance is tested, not loading alone.
"""

from pathlib import Path

import pytest
from clips import english, librivox_texts, samples_of
from golden import golden

from mlx_medusa import load
from mlx_medusa.demo import SPEECH

HEADS = SPEECH.shipped
SHIPPED = sorted(path.name for path in HEADS.iterdir() if path.is_dir())


def count(transcriber, clips, expected) -> tuple[int, int]:
    """(tokens, verifier passes) over all clips; the text must be that of plain greedy decoding."""
    tokens = rounds = 0
    for name, samples in clips.items():
        result = transcriber.transcribe(samples)
        assert result.text == expected[Path(name).name], name
        tokens, rounds = tokens + result.medusa.tokens, rounds + result.medusa.rounds
    return tokens, rounds


@pytest.fixture(scope="module")
def clips(speech_dir, languages_dir):
    """(the five LibriVox clips, 22 or more other recordings and distorted ones)"""
    books = {path.name: samples_of(path) for path in librivox_texts(speech_dir)}
    others = {name: samples for name, samples in english(speech_dir, languages_dir) if "librivox" not in name}
    for name in ("silence", "faint noise", "loud noise", "tone", "very short"):  # a word or none
        del others[name]
    assert len(others) >= 20
    return books, others


@pytest.fixture(scope="module")
def plain():
    """Name -> text that transformers' greedy decoding writes, by the golden records."""
    entries = golden("whisper-tiny.en").entries
    return {Path(entry.name).name: entry.text for entry in entries if not entry.asked.timestamps}


def test_recurrent_heads(tiny_en, clips, plain):
    transcriber = load(tiny_en, heads=HEADS / "recurrent")
    books, others = clips
    tokens, rounds = count(transcriber, books, plain)
    assert tokens / rounds >= 2.8
    more_tokens, more_rounds = count(transcriber, others, plain)
    assert (tokens + more_tokens) / (rounds + more_rounds) >= 2.3


def test_plain_heads(tiny_en, clips, plain):
    tokens, rounds = count(load(tiny_en, heads=HEADS / "medusa"), clips[0], plain)
    assert tokens / rounds >= 1.2


def test_they_are_small_and_have_cards():
    assert SHIPPED == ["medusa", "recurrent"]
    files = [path for path in HEADS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8_000_000
    for kind in SHIPPED:
        card = Path(HEADS / kind / "README.md").read_text()
        for part in ("licence", "python -m mlx_medusa.train fit", "tokens per verify", "seed"):
            assert part in card, (kind, part)
