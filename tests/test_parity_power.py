"""What the check must catch: small faults in a real model, Whisper tiny.en, against the golden records."""

from dataclasses import replace

import mlx.core as mx
import pytest
from clips import samples_of
from golden import FLOAT32, HEADS, failures, golden
from mlx.utils import tree_flatten

from mlx_medusa import load
from mlx_medusa.medusa.rules import Suppress, SuppressAtBegin, Timestamps
from mlx_medusa.parity.candidate import candidate_of
from mlx_medusa.parity.check import check
from mlx_medusa.parity.inputs import Input

CLIPS = ["cards/002.wav", "librivox/sense_and_sensibility_01_austen_64kb-0880.wav"]
MOST = 30  # tokens of a clip, so that a broken model does not talk on


class Encoded:
    """A candidate that encodes each input once, however often it is checked; its decoder may have changed since."""

    def __init__(self, candidate):
        self._candidate, self._known = candidate, {}
        self.model, self.drafter = candidate.model, candidate.drafter
        self.drop = ()  # kinds of rules to leave out

    def encode(self, content):
        key = content.tobytes()
        if key not in self._known:
            self._known[key] = self._candidate.encode(content)[0]
        return self._known[key], self.model.attend(self._known[key])

    def job(self, memory, asked):
        job = self._candidate.job(memory, asked)
        job.rules[:] = [rule for rule in job.rules if not isinstance(rule, self.drop)]
        return job


@pytest.fixture(scope="module")
def inputs(speech_dir):
    clips = [Input(name, samples_of(speech_dir / name)) for name in CLIPS]
    return [*clips, Input("very short", clips[1].content[:1600])]


@pytest.fixture(scope="module")
def entries(inputs):
    """Of the passes with plain heads; the second clip with timestamps too."""
    record = golden("whisper-tiny.en-plain-heads")
    names = {clip.name for clip in inputs}
    found = [entry for entry in record.entries if entry.name in names]
    assert max(len(entry.tokens) for entry in found) < MOST
    return [replace(entry, asked=replace(entry.asked, max_tokens=MOST)) for entry in found]


@pytest.fixture(scope="module")
def candidate(tiny_en):
    return Encoded(candidate_of(load(tiny_en, heads=HEADS / "medusa")))


def faults(candidate, entries, inputs, width=1):
    return failures(list(check(candidate, entries, inputs, FLOAT32, [width], rounds_width=5)))


def test_the_model_as_it_is_passes(candidate, entries, inputs):
    assert len(entries) == 4
    assert not faults(candidate, entries, inputs)
    assert not faults(candidate, entries, inputs, 5)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.embed_tokens",
        "decoder.layers.0.self_attn.v_proj",
        "decoder.layers.1.fc2",
        "decoder.layers.2.encoder_attn.v_proj",
        "decoder.layers.3.fc1",
        "decoder.layers.3.self_attn_layer_norm",
        "decoder.layer_norm",
    ],
)
def test_a_tensor_that_is_a_thousandth_too_large(candidate, entries, inputs, name):
    name = f"model.{name}.weight"
    right = dict(tree_flatten(candidate.model.parameters()))[name]
    try:
        candidate.model.load_weights([(name, right * 1.001)], strict=False)
        assert faults(candidate, entries, inputs)
    finally:
        candidate.model.load_weights([(name, right)], strict=False)


def test_swapped_heads_keep_the_text_and_are_caught(candidate, entries, inputs):
    """By the number of tokens that each pass decides."""
    heads = candidate.drafter.heads
    right = tree_flatten(heads.parameters())
    order = mx.array([1, 0, 2, 3])
    try:
        heads.load_weights([(name, w[order]) for name, w in right])
        found = faults(candidate, entries, inputs, 5)
        assert found
        assert all(line.startswith("rounds") for line in found)
    finally:
        heads.load_weights(right)


def test_positions_that_are_off_by_one(candidate, entries, inputs, monkeypatch):
    step = type(candidate.model).step
    monkeypatch.setattr(
        type(candidate.model),
        "step",
        lambda self, tokens, positions, mask, cache: step(self, tokens, positions + 1, mask, cache),
    )
    assert len(faults(candidate, entries, inputs)) == len(entries)


@pytest.mark.parametrize("rule", [Suppress, SuppressAtBegin, Timestamps])
def test_a_dropped_rule(candidate, entries, inputs, monkeypatch, rule):
    monkeypatch.setattr(candidate, "drop", rule)
    assert faults(candidate, entries, inputs)
