"""Real models on real speech: Whisper tiny.en and base against transformers' greedy decoding, token for token.

The expected tokens are in tests/golden, written by tests/record_golden.py; a sample of them is recorded anew here.
The word error rate shows that the weights are where they belong.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jiwer
import pytest
from clips import english, librivox_texts, nine_languages
from record_golden import fingerprint

from convert import convert
from mlx_medusa import Transcriber, load
from mlx_medusa.speech.transcriber import Options, Session
from mlx_medusa.speech.windows import Window

HERE = Path(__file__).parent
MAX_TOKENS = 224


def golden(model):
    return json.loads((HERE / "golden" / f"whisper-{model}.json").read_text())["clips"]


def words(text):
    """As the transcripts write it: all lower case, no punctuation."""
    return re.sub(r"[^a-z ]+", " ", text.lower().replace("'", ""))


@pytest.fixture(scope="module")
def tiny(tiny_en):
    return load(tiny_en)


def word_error_rate(transcriber, speech_dir):
    """Over the five LibriVox clips."""
    texts = librivox_texts(speech_dir)
    assert len(texts) == 5
    return jiwer.wer(
        [words(t) for t in texts.values()], [words(transcriber.transcribe(path).text) for path in texts]
    )


def test_word_error_rate_of_the_librivox_clips(tiny, speech_dir):
    assert word_error_rate(tiny, speech_dir) <= 0.06


@pytest.mark.parametrize(("bits", "most"), [(8, 0.06), (4, 0.12)])
def test_word_error_rate_of_quantized_models(tiny_en_ct2, speech_dir, tmp_path, bits, most):
    convert(base=tiny_en_ct2, q_bits=bits, mlx_path=tmp_path / "model")
    assert word_error_rate(load(tmp_path / "model"), speech_dir) <= most


def test_tiny_en_equals_transformers(tiny, speech_dir, languages_dir):
    expected = golden("tiny.en")
    different = {}
    for name, samples in english(speech_dir, languages_dir):
        assert fingerprint(samples) == expected[name]["samples"], (
            f"{name}: not the samples that were recorded"
        )
        result = tiny.transcribe(samples, max_tokens=MAX_TOKENS)
        got = [token for segment in result.segments for token in segment.tokens]
        if got != (want := expected.pop(name)["transcribe"]):
            different[name] = (got, want)
    assert not expected
    assert not different


class OneWindow:
    """Our decoding of one window, which is encoded once for several questions."""

    def __init__(self, transcriber: Transcriber, samples):
        self.transcriber = transcriber
        self.window = Window(0, samples)
        self.encoded = transcriber.encode(self.window)
        self.cache = transcriber._cache(self.encoded)

    def detect(self):
        return self.transcriber.detect(self.cache)

    def tokens(self, language, task):
        self.cache.rewind(self.cache.length)
        options = self.transcriber.check(Options(language, task, max_tokens=MAX_TOKENS))
        return self.transcriber._decode(
            self.window, self.encoded, self.cache, options, Session(language)
        ).tokens


def test_base_equals_transformers_in_nine_languages(base, languages_dir):
    """The language given and detected, and translation into English."""
    transcriber, expected = load(base), golden("base")
    assert len(expected) == 27
    different = {}
    for name, samples in nine_languages(languages_dir):
        entry = expected.pop(name)
        assert fingerprint(samples) == entry["samples"], f"{name}: not the samples that were recorded"
        session = OneWindow(transcriber, samples)
        language, probability = session.detect()
        assert (name, language) == (name, entry["language"])
        assert probability == pytest.approx(entry["probability"], abs=1e-3), name
        given = name.split("/")[0]
        tasks = [("transcribe", given, "transcribe"), ("translate", given, "translate")]
        if language != given:
            tasks.append(("transcribe_detected", language, "transcribe"))
        for key, spoken, task in tasks:
            if (got := session.tokens(spoken, task)) != entry[key]:
                different[name, key] = (got, entry[key])
    assert not expected
    assert not different


@pytest.mark.parametrize(("model", "clip"), [("tiny.en", "cards/005.wav"), ("base", "fr/bonjour_monde.wav")])
def test_golden_records_are_what_transformers_writes(model, clip, request):
    folder = request.getfixturevalue("tiny_en" if model == "tiny.en" else "base")
    path = [str(HERE), str(HERE.parent), str(HERE.parent / "examples")]
    run = subprocess.run(
        [sys.executable, HERE / "record_golden.py", model, folder, "--only", clip],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=True,
    )
    (fresh,) = json.loads(run.stdout)["clips"].values()
    recorded = golden(model)[clip]
    if "probability" in recorded:
        assert fresh.pop("probability") == pytest.approx(recorded.pop("probability"), abs=1e-3)
    assert fresh == recorded
