"""MERaLiON-2 with Medusa heads writes what plain greedy decoding writes, under the no-repeat rule. Random, float32."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from meralion import hear, pair
from test_decode import Scripted, random_heads
from test_meralion2_model import decode
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, chain_pass, generate, prefill
from mlx_medusa.medusa.rules import NoRepeatNGram
from mlx_medusa.models.meralion2 import Speech

STEPS = 16


def drafter_of(kind, ours, seed, expected, state):
    if kind == 0:
        return random_heads(ours, seed, count=5)
    return Scripted(expected, right=kind == 1, state=state)


def run(ours, prompt, memory, limits, rules, width, kind, expected, seed):
    state, first = prefill(ours, prompt, KVCache(ours.num_layers, memory), limits, rules)
    drafter = drafter_of(kind, ours, seed, expected, state)
    for _ in generate(ours, state, first, limits, rules=rules, drafter=drafter, width=width):
        pass
    return state.tokens[len(prompt) :]


@pytest.mark.parametrize("block", range(5))
def test_equals_plain_greedy_at_every_width(block):
    """200 seeds, widths 1 to 6, drafts of random heads, all right and all wrong; the rule fires, two ids end it."""
    fired = stopped = 0
    for seed in range(block * 40, block * 40 + 40):
        theirs, ours = pair(seed)
        _, _, prompt, memory = hear(theirs, ours, seed, 1)
        rules = [NoRepeatNGram(6 if seed % 2 else 2)]
        free = decode(ours, prompt, memory, STEPS)
        ruled = decode(ours, prompt, memory, STEPS, rules)
        eos = {1, ruled[-4]} if seed % 3 == 0 else {1, 2}
        ends = [i for i, token in enumerate(ruled) if token in eos]
        expected = ruled[: ends[0] + 1] if ends else ruled
        fired += ruled != free
        stopped += bool(ends)
        limits = Limits(frozenset(eos), STEPS)
        for width in range(1, 7):
            found = run(ours, prompt, memory, limits, rules, width, (seed + width) % 3, expected, seed)
            assert found == expected, (seed, width)
    assert fired >= 10
    assert stopped >= 10


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_no_repeat_rule_equals_transformers(size):
    """Many prefixes of one text at once, as a verifier pass has them; short texts, ids past the logits."""
    rng = np.random.default_rng(size)
    theirs, ours = NoRepeatNGramLogitsProcessor(size), NoRepeatNGram(size)
    fired = 0
    for _ in range(60):
        text = rng.integers(0, 3, size=rng.integers(1, 40)).tolist()
        if rng.random() < 0.3:
            text = [token + 10 * (rng.random() < 0.1) for token in text]
        drafts = rng.integers(0, 3, size=5).tolist()
        other = rng.integers(0, 3, size=rng.integers(1, 40)).tolist()  # a batch has other texts too
        prefixes = [text + drafts[:i] for i in range(6)] + [other]
        logits = rng.normal(size=(7, 12)).astype(np.float32)
        found = np.array(ours(prefixes, mx.array(logits)))
        for prefix, row, scores in zip(prefixes, found, logits, strict=True):
            expected = theirs(torch.tensor([prefix]), torch.tensor(scores)[None])[0].numpy()
            np.testing.assert_array_equal(row, expected)
            fired += bool(np.isinf(expected).any())
    assert fired > 10


def test_a_written_speech_token_is_a_word():
    """Only the placeholders of the prompt are speech: later ones are embedded as PyTorch does after its first pass."""
    theirs, ours = pair(5)
    rows, _, prompt, memory = hear(theirs, ours, 5, 1)
    tokens = [*prompt, ours.args.speech_token_index, 3]
    with torch.no_grad():
        hidden, _ = theirs(tokens, rows)
    found = chain_pass(ours, tokens, KVCache(ours.num_layers, memory))
    np.testing.assert_allclose(np.array(found[0]), hidden.numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("chunks", [1, 2])
def test_batch_rows_do_not_mix(chunks):
    """Two clips in one pass equal each alone, past the sliding window too."""
    theirs, ours = next(p for p in map(pair, range(60)) if p[1].args.text.sliding_window == 6)
    rows = [hear(theirs, ours, seed, chunks)[1] for seed in (1, 2)]
    count = rows[0].shape[1]
    tokens = mx.array([[3, *[ours.args.speech_token_index] * count, 4, 5, 6, 7, 8]] * 2)
    positions = mx.broadcast_to(mx.arange(tokens.shape[1]), tokens.shape)
    mask = (mx.arange(tokens.shape[1])[None] <= mx.arange(tokens.shape[1])[:, None])[None, None]

    def run(rows, tokens, positions):
        cache = KVCache(ours.num_layers, Speech(rows, 1))
        return np.array(ours.step(tokens, positions, mask, cache))

    both = run(mx.concatenate(rows), tokens, positions)
    for i in (0, 1):
        alone = run(rows[i], tokens[:1], positions[:1])[0]
        np.testing.assert_allclose(both[i], alone, rtol=1e-4, atol=1e-5)


def test_positions_of_a_tree():
    """Two guesses for the same position, each seeing the prompt and itself: as two chains would have it."""
    theirs, ours = next(p for p in map(pair, range(60)) if p[1].args.text.sliding_window == 6)
    _, _, prompt, memory = hear(theirs, ours, 3, 2)
    alone = []
    for token in (7, 9):
        cache = KVCache(ours.num_layers, memory)
        chain_pass(ours, prompt, cache)
        alone.append(np.array(chain_pass(ours, [token], cache)[0, 0]))
    cache = KVCache(ours.num_layers, memory)
    chain_pass(ours, prompt, cache)
    seen = np.ones((1, 1, 2, len(prompt) + 2), bool)
    seen[0, 0, 0, -1] = seen[0, 0, 1, -2] = False
    positions = mx.array([[len(prompt)] * 2])
    both = np.array(ours.step(mx.array([[7, 9]]), positions, mx.array(seen), cache))[0]
    np.testing.assert_allclose(both, np.stack(alone), rtol=1e-4, atol=1e-5)
