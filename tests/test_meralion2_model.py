"""The MERaLiON-2 verifier against PyTorch: transformers' encoder and decoder around the adapter. Random, float32."""

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
import torch
from meralion import hear, pair
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, chain_pass, generate, prefill
from mlx_medusa.medusa.rules import NoRepeatNGram

SEEDS = 24  # in turn: gated, first, gated and plain adapters, one to four chunks


def assert_close(ours, theirs):
    """Within 1e-4 of the largest number."""
    theirs = theirs.numpy()
    np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_encoder_adapter_and_decoder_equal_pytorch(seed):
    theirs, ours = pair(seed)
    rows, encoded, prompt, memory = hear(theirs, ours, seed, 1 + seed % 4)
    assert_close(encoded[0], rows)
    with torch.no_grad():
        hidden, logits = theirs(prompt, rows)
    cache = KVCache(ours.num_layers, memory)
    cuts = [0, len(prompt) // 3, len(prompt) // 3 + 1, len(prompt)]
    parts = [chain_pass(ours, prompt[a:b], cache) for a, b in pairwise(cuts) if a < b]
    found = mx.concatenate(parts, axis=1)
    assert_close(found[0], hidden)
    assert_close(ours.logits(found[0]), logits)


def greedy(theirs, prompt, rows, steps, rule=None, free=()):
    """The tokens that plain greedy decoding without a cache writes.

    ``free`` are those without the rule: they are the ruled ones too up to the first that the rule forbids.
    """
    tokens = list(prompt)
    while len(tokens) < len(prompt) + steps:
        ids = torch.tensor([tokens])
        ahead = list(free[len(tokens) - len(prompt) :][:1])
        if ahead and torch.isfinite(rule(ids, torch.zeros(1, theirs.speech_token + 1))[0, ahead[0]]):
            tokens += ahead
            continue
        free = ()
        with torch.no_grad():
            scores = theirs(tokens, rows)[1][-1:]
        scores = rule(ids, scores) if rule else scores
        tokens.append(int(np.argmax(scores[0].numpy())))
    return tokens[len(prompt) :]


def decode(ours, prompt, memory, steps, rules=(), width=1, drafter=None, eos=()):
    cache = KVCache(ours.num_layers, memory)
    limits = Limits(frozenset(eos), steps)
    state, first = prefill(ours, prompt, cache, limits, rules)
    for _ in generate(ours, state, first, limits, rules=rules, drafter=drafter, width=width):
        pass
    return state.tokens[len(prompt) :]


@pytest.mark.parametrize("block", range(4))
def test_greedy_tokens_equal_pytorch(block):
    """128 steps, far past the smaller windows; without the rule, and with it, where it must have had work."""
    fired = 0
    for seed in range(block * SEEDS // 4, (block + 1) * SEEDS // 4):
        theirs, ours = pair(seed)
        rows, _, prompt, memory = hear(theirs, ours, seed, 1 + seed % 4)
        free = greedy(theirs, prompt, rows, 128)
        assert decode(ours, prompt, memory, 128) == free, seed
        ruled = greedy(theirs, prompt, rows, 128, NoRepeatNGramLogitsProcessor(6), free)
        assert decode(ours, prompt, memory, 128, [NoRepeatNGram(6)]) == ruled, seed
        fired += ruled != free
    assert fired >= 2
