"""Real models on real speech: Whisper tiny.en and base against transformers' greedy decoding, token for token.

What is expected is in tests/golden, written by tests/record_golden.py; a sample of it is recorded anew here. The word
error rate shows that the weights are where they belong.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import jiwer
import pytest
from clips import english, librivox_texts, nine_languages, samples_of
from golden import FLOAT32, HEADS, QUANTIZED, failures, golden, is_recorded

from convert import convert
from mlx_medusa import load
from mlx_medusa.parity.candidate import candidate_of
from mlx_medusa.parity.check import check
from mlx_medusa.parity.inputs import Input
from mlx_medusa.parity.records import Entry
from mlx_medusa.reference.folder import heads_fingerprint

HERE = Path(__file__).parent


def words(text):
    """As the transcripts write it: all lower case, no punctuation."""
    return re.sub(r"[^a-z ]+", " ", text.lower().replace("'", ""))


@pytest.fixture(scope="module")
def tiny(tiny_en):
    return load(tiny_en)


@pytest.fixture(scope="module")
def quantized(tiny_en_ct2, tmp_path_factory):
    """Name of the settings -> model folder."""
    folder = tmp_path_factory.mktemp("quantized")
    for name, settings in QUANTIZED.items():
        convert(base=tiny_en_ct2, mlx_path=folder / name, **settings)
    return folder


def word_error_rate(transcriber, speech_dir):
    """Over the five LibriVox clips."""
    texts = librivox_texts(speech_dir)
    assert len(texts) == 5
    return jiwer.wer(
        [words(t) for t in texts.values()], [words(transcriber.transcribe(path).text) for path in texts]
    )


def test_word_error_rate_of_the_librivox_clips(tiny, speech_dir):
    assert word_error_rate(tiny, speech_dir) <= 0.06


@pytest.mark.parametrize(("name", "most"), [("8bit", 0.06), ("4bit", 0.12)])
def test_word_error_rate_of_quantized_models(quantized, speech_dir, name, most):
    assert word_error_rate(load(quantized / name), speech_dir) <= most


def test_tiny_en_equals_transformers(tiny_en, speech_dir, languages_dir):
    """At four widths with the shipped heads, and at the full one each pass decides as many tokens as PyTorch's."""
    record = golden("whisper-tiny.en")
    assert is_recorded(record, tiny_en)
    assert record.head.heads == heads_fingerprint(HEADS / "recurrent")
    clips = (Input(name, samples) for name, samples in english(speech_dir, languages_dir))
    candidate = candidate_of(load(tiny_en, heads=HEADS / "recurrent"))
    results = list(check(candidate, record.entries, clips, FLOAT32, [1, 3, 5, 6], rounds_width=6))
    assert len(results) == 4 * 37
    assert not failures(results)


def test_plain_heads_accept_as_in_pytorch(tiny_en, speech_dir):
    record = golden("whisper-tiny.en-plain-heads")
    assert record.head.heads == heads_fingerprint(HEADS / "medusa")
    candidate = candidate_of(load(tiny_en, heads=HEADS / "medusa"))
    clips = [Input(f"librivox/{path.name}", samples_of(path)) for path in librivox_texts(speech_dir)]
    entries = [entry for entry in record.entries if entry.name in {clip.name for clip in clips}]
    results = list(check(candidate, entries, clips, FLOAT32, [5], rounds_width=5))
    assert len(results) == 10
    assert not failures(results)


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_models_equal_the_quantized_oracle(quantized, speech_dir, name):
    """The weights dequantized at load, and on one clip MLX's kernels for quantized matrices."""
    record = golden(f"whisper-tiny.en-{name}")
    assert len(record.entries) == 37
    if not is_recorded(record, quantized / name):
        pytest.skip("this machine rounds to other quantized weights than those recorded")
    names = ["cards/002.wav", "vad/leak-test.wav"]
    clips = [Input(clip, samples_of(speech_dir / clip)) for clip in names]
    entries = [entry for entry in record.entries if entry.name in names]
    for dtype, inputs in ((None, clips), ("float32", clips[:1])):
        wanted = [entry for entry in entries if entry.name in {clip.name for clip in inputs}]
        candidate = candidate_of(load(quantized / name, dtype=dtype))
        results = list(check(candidate, wanted, inputs, FLOAT32))
        assert len(results) == len(inputs)
        assert not failures(results)


def test_base_equals_transformers_in_nine_languages(base, languages_dir):
    """The language given and detected, and translation into English."""
    record = golden("whisper-base")
    assert is_recorded(record, base)
    clips = [Input(name, samples) for name, samples in nine_languages(languages_dir)]
    results = list(check(candidate_of(load(base)), record.entries, clips, FLOAT32))
    assert len(clips) == 27
    assert len(results) == len(record.entries) >= 54
    assert not failures(results)


def recorded_anew(name, folder, clip, *options) -> list[Entry]:
    """What tests/record_golden.py writes in a process of its own, where no MLX is imported."""
    path = [str(HERE), str(HERE.parent), str(HERE.parent / "examples")]
    run = subprocess.run(
        [sys.executable, HERE / "record_golden.py", name, folder, "--only", clip, *options],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    return [Entry.from_line(line) for line in run.stdout.splitlines()[1:]]


@pytest.mark.parametrize(
    ("record", "model", "clip", "options"),
    [
        ("whisper-tiny.en", "tiny.en", "librivox/sense_and_sensibility_01_austen_64kb-0880.wav", "recurrent"),
        ("whisper-tiny.en-6bit", "tiny.en", "cards/005.wav", None),
        ("whisper-base", "base", "fr/bonjour_monde.wav", None),
    ],
)
def test_golden_records_are_what_transformers_writes(record, model, clip, options, request):
    """Another processor may round the last decimal otherwise."""
    folder = request.getfixturevalue("quantized") / "6bit" if "6bit" in record else None
    folder = folder or request.getfixturevalue("tiny_en" if model == "tiny.en" else "base")
    fresh = recorded_anew(model, folder, clip, *(["--heads", options] if options else []))
    recorded = [entry for entry in golden(record).entries if entry.name == clip]
    assert len(fresh) == len(recorded) > 0
    for ours, theirs in zip(fresh, recorded, strict=True):
        for part in ("sha256", "asked", "prompt", "tokens", "text", "rounds"):
            assert getattr(ours, part) == getattr(theirs, part)
        assert ours.margins == pytest.approx(theirs.margins, abs=1e-3)
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)
        if theirs.detected:
            assert ours.detected[0] == theirs.detected[0]
            assert ours.detected[1] == pytest.approx(theirs.detected[1], abs=1e-3)
