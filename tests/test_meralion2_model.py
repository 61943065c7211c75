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

SEEDS = 24  # six of each kind of adapter order, one to four chunks


def close(ours, theirs):
    """Within 1e-4 of the largest number."""
    theirs = theirs.numpy()
    np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.mark.parametrize("seed", range(SEEDS))
def test_encoder_adapter_and_decoder_equal_pytorch(seed):
    theirs, ours = pair(seed)
    rows, encoded, prompt, memory = hear(theirs, ours, seed, 1 + seed % 4)
    close(encoded[0], rows)
    with torch.no_grad():
        hidden, logits = theirs(prompt, rows)
    cache = KVCache(ours.num_layers, memory)
    cuts = [0, len(prompt) // 3, len(prompt) // 3 + 1, len(prompt)]
    parts = [chain_pass(ours, prompt[a:b], cache) for a, b in pairwise(cuts) if a < b]
    found = mx.concatenate(parts, axis=1)
    close(found[0], hidden)
    close(ours.logits(found[0]), logits)


def greedy(theirs, prompt, rows, steps, size=0):
    """(tokens that plain greedy decoding without a cache writes, whether the rule of ``size``-grams changed one)"""
    rule = NoRepeatNGramLogitsProcessor(size) if size else None
    tokens, fired = list(prompt), 0
    for _ in range(steps):
        with torch.no_grad():
            scores = theirs(tokens, rows)[1][-1:]
        free = int(np.argmax(scores[0].numpy()))
        if rule:
            scores = rule(torch.tensor([tokens]), scores)
        tokens.append(int(np.argmax(scores[0].numpy())))
        fired += tokens[-1] != free
    return tokens[len(prompt) :], fired


def decode(ours, prompt, memory, steps, rules=(), width=1, drafter=None, eos=()):
    cache = KVCache(ours.num_layers, memory)
    limits = Limits(frozenset(eos), steps)
    state, first = prefill(ours, prompt, cache, limits, rules)
    for _ in generate(ours, state, first, limits, rules=rules, drafter=drafter, width=width):
        pass
    return state.tokens[len(prompt) :]


@pytest.mark.parametrize("size", [0, 6])
def test_greedy_tokens_equal_pytorch(size):
    """128 steps, far past the smaller windows; without the rule, and with it, where it must have had work."""
    total = 0
    for seed in range(SEEDS):
        theirs, ours = pair(seed)
        rows, _, prompt, memory = hear(theirs, ours, seed, 1 + seed % 4)
        expected, fired = greedy(theirs, prompt, rows, 128, size)
        rules = [NoRepeatNGram(size)] if size else []
        assert decode(ours, prompt, memory, 128, rules) == expected, seed
        total += bool(fired)
    assert total >= SEEDS // 3 if size else total == 0
