"""The rules against transformers' logits processors and openai/whisper's definitions. No model."""

import math

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from mlx_medusa.medusa.rules import Suppress, SuppressAtBegin, Timestamps, pick

VOCAB, EOS, NO_STAMPS, STAMPS = 50, 20, 29, 30


def rows(rng, count):
    return rng.normal(size=(count, VOCAB)).astype(np.float32)


def random_text(rng, begin):
    """A prompt and some written tokens, timestamps among them, never going back."""
    stamps = sorted(rng.integers(STAMPS, VOCAB, size=6).tolist())
    written = [
        stamps.pop(0) if stamps and rng.random() < 0.4 else int(rng.integers(0, EOS)) for _ in range(8)
    ]
    return rng.integers(0, EOS, size=begin).tolist() + written[: rng.integers(0, 9)]


@pytest.mark.parametrize("max_initial", [None, 5])
@pytest.mark.parametrize("seed", range(60))
def test_timestamps_equal_transformers(seed, max_initial):
    """Many prefixes at once, each row under its own: the same tokens are banned, the others untouched."""
    rng = np.random.default_rng(seed)
    begin = 3
    prefixes = [random_text(rng, begin) for _ in range(5)]
    logits = rows(rng, 5)
    logits[:, STAMPS:] += rng.normal() * 2  # now and then the timestamps win
    config = GenerationConfig(
        no_timestamps_token_id=NO_STAMPS, eos_token_id=EOS, max_initial_timestamp_index=max_initial
    )
    processor = WhisperTimeStampLogitsProcessor(config, begin_index=begin)
    theirs = [
        processor(torch.tensor([p]), torch.tensor(row)[None])[0]
        for p, row in zip(prefixes, logits, strict=True)
    ]
    ours = Timestamps(STAMPS, EOS, NO_STAMPS, begin, max_initial)(prefixes, mx.array(logits))
    np.testing.assert_array_equal(np.array(ours), torch.stack(theirs).numpy())


def allowed(written, logits=None):
    row = np.zeros((1, VOCAB), np.float32) if logits is None else logits
    edited = np.array(Timestamps(STAMPS, EOS, NO_STAMPS, 1)([[0, *written]], mx.array(row)))[0]
    return set(np.flatnonzero(np.isfinite(edited)).tolist())


def test_timestamps_never_go_back():
    """After 8.0 s was written, 5.0 s may not come, whatever the logits say (openai/whisper compares values)."""
    prefers_5 = np.zeros((1, VOCAB), np.float32)
    prefers_5[0, STAMPS + 5] = 50
    assert not allowed([STAMPS, 1, STAMPS + 8, STAMPS + 8, 2], prefers_5) & set(range(STAMPS, STAMPS + 9))


def test_a_segment_has_a_length():
    assert STAMPS + 3 not in allowed([STAMPS + 3, 1])  # <|3|> text <|3|>
    assert STAMPS + 3 in allowed(
        [STAMPS, 1, STAMPS + 3]
    )  # but the next segment may begin where this one ended


def test_suppress_and_first_token():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[:, 4], logits[:, 6], logits[:, 8] = 3, 2, 1
    rules = [Suppress([4], VOCAB), SuppressAtBegin([6], VOCAB, begin=2)]
    picks, edited = pick(rules, [[0, 0], [0, 0, 9]], mx.array(logits))
    assert picks == [8, 6]
    assert edited[0, 4].item() == edited[0, 6].item() == -math.inf
    assert edited[1, 6].item() == 2


def test_the_lowest_of_equal_ids_wins():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[0, [7, 30]] = 1
    logits[2, [49, 48]] = 5
    assert pick([], [[], [], []], mx.array(logits))[0] == [7, 0, 48]


def test_half_precision_logits_are_compared_exactly():
    logits = mx.array([[1.0, 1.0009765625, 1.0]], dtype=mx.float16)
    assert pick([], [[]], logits)[0] == [1]
