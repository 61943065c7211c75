"""The decode loop writes what plain greedy decoding writes. Tiny random float32 models: logic, not numbers.

The expected tokens come from a loop of this file that has no cache and no drafts: one whole forward pass per token,
its logits edited by transformers' processors.
"""

import math
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import pytest
import torch
from tiny import new_cache, tiny_whisper
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, Run, State, Statistics, chain_pass, generate, prefill
from mlx_medusa.medusa.heads import HeadsArgs, MedusaDrafter, MedusaHeads
from mlx_medusa.medusa.rules import Suppress, SuppressAtBegin, Timestamps

VOCAB, STAMPS, NO_STAMPS = 61, 41, 40  # ids from STAMPS on are timestamps


def whole_forward(model, encoded, tokens):
    """Logits [V] after ``tokens``, from one pass over all of them."""
    return np.array(model.logits(chain_pass(model, tokens, new_cache(model, encoded))[0, -1]))


def reference(model, encoded, prompt, eos, max_tokens, processors=()):
    """Plain greedy decoding without a cache."""
    tokens = list(prompt)
    while len(tokens) < min(len(prompt) + max_tokens, model.max_length):
        scores = torch.tensor(whole_forward(model, encoded, tokens))[None]
        for processor in processors:
            scores = processor(torch.tensor([tokens]), scores)
        tokens.append(int(np.argmax(scores[0].numpy())))  # numpy: the first of equals
        if tokens[-1] == eos:
            break
    return tokens[len(prompt) :]


@dataclass
class Scripted:
    """A drafter that knows the right text, and says it, or something else."""

    text: list[int]
    right: bool
    state: State | None = None
    max_drafts: int = 99
    memories: list = field(default_factory=list)

    def begin(self, memory):
        self.memories.append(memory)

    def propose(self, hidden, pending, count):
        assert self.state is not None
        assert self.state.tokens[-1] == pending
        done = len(self.state.tokens) - self.state.begin
        ahead = (self.text[done:] + [0] * count)[:count]
        return ahead if self.right else [(token + 1) % VOCAB for token in ahead]


def random_heads(model, seed, count=7):
    heads = MedusaHeads(
        HeadsArgs(num_heads=count, num_layers=1 + seed % 2, hidden_size=model.args.hidden_size)
    )
    mx.random.seed(seed)
    heads.load_weights([(f"layers.{i}.weight", mx.random.normal(layer.weight.shape) * 0.3)
                        for i, layer in enumerate(heads.layers)], strict=False)  # fmt: skip
    return MedusaDrafter(heads, lambda states: mx.argmax(model.logits(states), axis=-1))


def decode(model, encoded, prompt, limits, width, drafter=None, rules=()):
    """(decided tokens, runs, statistics, state)"""
    cache = new_cache(model, encoded)
    state, first = prefill(model, prompt, cache, limits, rules)
    if isinstance(drafter, Scripted):
        drafter.state = state
    statistics = Statistics()
    runs = list(generate(model, state, first, limits, rules=rules, drafter=drafter, memory=encoded, width=width,
                         statistics=statistics))  # fmt: skip
    assert [token for run in runs for token in run.tokens] == state.tokens[state.begin :]
    assert cache.length == len(state.tokens) - 1
    return state.tokens[state.begin :], runs, statistics, state


def case(seed):
    """Random model, prompt, rules (transformers' and ours), and an end that falls somewhere inside the text."""
    rng = np.random.default_rng(1000 + seed)
    model, encoded = tiny_whisper(seed)
    prompt = rng.integers(0, NO_STAMPS, size=rng.integers(1, 5)).tolist()
    begin = len(prompt)
    processors, rules = [], []
    if seed % 4:
        banned = rng.choice(STAMPS, size=12, replace=False).tolist()
        processors.append(SuppressTokensLogitsProcessor(banned))
        rules.append(Suppress(banned, VOCAB))
        at_begin = rng.choice(VOCAB, size=20, replace=False).tolist()
        processors.append(SuppressTokensAtBeginLogitsProcessor(at_begin, begin))
        rules.append(SuppressAtBegin(at_begin, VOCAB, begin))
    max_tokens = int(rng.integers(1, 24))
    eos = int(rng.integers(1, NO_STAMPS))  # transformers takes 0 for none
    if seed % 4 >= 2:
        config = GenerationConfig(
            no_timestamps_token_id=NO_STAMPS, eos_token_id=eos, max_initial_timestamp_index=6
        )
        processors.append(WhisperTimeStampLogitsProcessor(config, begin_index=begin))
        rules.append(Timestamps(STAMPS, eos, NO_STAMPS, begin, max_initial=6))
    elif seed % 2:  # an end that the text is known to reach
        free = reference(model, encoded, prompt, None, max_tokens, processors)
        eos = free[int(rng.integers(0, len(free)))]
    expected = reference(model, encoded, prompt, eos, max_tokens, processors)
    return model, encoded, prompt, Limits(frozenset([eos]), max_tokens), rules, expected


@pytest.mark.parametrize("block", range(8))
def test_equals_plain_greedy_at_every_width(block):
    """208 seeds, widths 1 to 8, drafts of random heads, all right and all wrong; ends and rules inside the runs."""
    accepted = cut_by_eos = 0
    for seed in range(block * 26, block * 26 + 26):
        model, encoded, prompt, limits, rules, expected = case(seed)
        cut_by_eos += expected[-1] in limits.eos
        for width in range(1, 9):
            drafters = [None] if width == 1 else [
                random_heads(model, seed), Scripted(expected, right=True), Scripted(expected, right=False)]  # fmt: skip
            drafter = drafters[seed % len(drafters)]
            tokens, runs, statistics, _ = decode(model, encoded, prompt, limits, width, drafter, rules)
            assert tokens == expected, (seed, width, drafter)
            assert runs[-1].finish_reason == ("stop" if expected[-1] in limits.eos else "length")
            assert all(run.finish_reason is None for run in runs[:-1])
            check_counts(expected, width, drafter, statistics)
            accepted += statistics.accepted
    assert accepted > 100  # the cases do reach what they are for
    assert cut_by_eos >= 4


def a_drafter(seed, model, expected):
    kind = seed % 3
    return random_heads(model, seed) if kind == 0 else Scripted(expected, right=kind == 1)


def check_counts(expected, width, drafter, statistics):
    after_first = len(expected) - 1
    assert statistics.tokens == after_first
    assert sum(statistics.accepted_per_head) == statistics.accepted
    if drafter is None:
        assert (statistics.rounds, statistics.drafted) == (after_first, 0)
    elif isinstance(drafter, Scripted) and drafter.right:
        assert statistics.rounds == math.ceil(after_first / width)
        assert statistics.accepted >= after_first - statistics.rounds
    elif isinstance(drafter, Scripted):
        assert (statistics.rounds, statistics.accepted) == (after_first, 0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("right", [True, False])
def test_cache_equals_a_fresh_run(seed, right):
    """After acceptance or rejection the K/V are those of one pass over the kept tokens."""
    model, encoded = tiny_whisper(seed)
    limits = Limits(frozenset(), 20)
    expected = reference(model, encoded, [1, 2], None, 20)
    _, _, _, state = decode(model, encoded, [1, 2], limits, 5, Scripted(expected, right))
    fresh = new_cache(model, encoded)
    chain_pass(model, state.tokens[:-1], fresh)
    assert fresh.length == state.cache.length == 21
    for layer in range(model.num_layers):
        for ours, theirs in zip(state.cache.rows(layer), fresh.rows(layer), strict=True):
            np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_caller_may_leave_early_and_go_on(stop_after):
    model, encoded = tiny_whisper(3)
    limits = Limits(frozenset(), 25)
    expected = reference(model, encoded, [5], None, 25)
    state, first = prefill(model, [5], new_cache(model, encoded), limits)
    drafter = Scripted(expected, right=True, state=state)
    for count, _ in enumerate(generate(model, state, first, limits, drafter=drafter, width=4), 1):
        if count == stop_after:
            break
    assert state.cache.length == len(state.tokens) - 1
    again = Run([], mx.zeros(0), None)
    for _ in generate(model, state, again, limits, drafter=drafter, width=3):
        pass
    assert state.tokens[1:] == expected


def test_an_interrupt_leaves_the_cache_as_it_was():
    model, encoded = tiny_whisper(4)
    limits = Limits(frozenset(), 20)
    state, first = prefill(model, [5, 6], new_cache(model, encoded), limits)
    runs = generate(model, state, first, limits)
    next(runs), next(runs)
    length = state.cache.length

    class Interrupted:
        max_length = model.max_length
        step = staticmethod(model.step)

        def logits(self, hidden):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(generate(Interrupted(), state, Run([], mx.zeros(0), None), limits))
    assert state.cache.length == length


class Table:
    """A verifier whose logits are small integers, a function of the tokens so far: exact ties at nearly every step."""

    max_length = 64

    def __init__(self, seed):
        self.seed = seed
        self.at = {}  # position -> token, as a cache would hold it

    def row(self, tokens):
        return np.random.default_rng([self.seed, *tokens]).integers(0, 3, size=12)

    def step(self, tokens, positions, mask, cache):
        ids = []
        for token, position in zip(tokens[0].tolist(), positions[0].tolist(), strict=True):
            self.at[position] = token
            ids.append(self.row([self.at[i] for i in range(position + 1)]))
        rows = mx.zeros((1, 1, len(ids), 1))
        cache.write(0, rows, rows)
        cache.advance(len(ids))
        return mx.array(np.stack(ids))[None].astype(mx.float32)

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize("width", range(1, 9))
def test_of_equal_logits_the_lowest_id_wins(width):
    for seed in range(40):
        table = Table(seed)
        expected, tied = [7], 0
        while len(expected) < 31:
            row = table.row(expected)
            tied += (row == row.max()).sum() > 1
            expected.append(int(np.flatnonzero(row == row.max())[0]))
        assert tied > 20
        limits = Limits(frozenset(), 30)
        state, first = prefill(table, [7], KVCache(1), limits)
        drafter = Scripted(expected[1:], right=bool(seed % 2), state=state)
        list(generate(table, state, first, limits, drafter=drafter, width=width))
        assert state.tokens == expected


def test_ties_of_a_real_projection():
    """Tokens with equal embeddings tie exactly, in passes of any width; the lower id is written."""
    model, encoded = tiny_whisper(9)
    table = model.model.decoder.embed_tokens.weight
    model.model.decoder.embed_tokens.weight = mx.concatenate([table[:30], table[:30], table[60:]])
    limits = Limits(frozenset(), 30)
    expected = reference(model, encoded, [3], None, 30)
    assert max(expected) < 30 or 60 in expected
    for width in range(1, 9):
        assert decode(model, encoded, [3], limits, width, Scripted(expected, right=True))[0] == expected


def test_stops_where_the_context_ends():
    """max_target_positions tokens, the last one decided but never fed: as transformers' max_length."""
    model, encoded = tiny_whisper(11)
    expected = reference(model, encoded, [1, 2, 3], None, 500)
    assert len(expected) == 40 - 3
    for width in (1, 4, 8):
        tokens, runs, _, _ = decode(
            model, encoded, [1, 2, 3], Limits(frozenset(), 500), width, Scripted(expected, True)
        )
        assert tokens == expected
        assert runs[-1].finish_reason == "length"


@pytest.mark.parametrize("piece", [1, 3, 7])
def test_a_long_prompt_is_read_in_pieces(piece, monkeypatch):
    """The same states, cache and tokens as in one pass."""
    monkeypatch.setattr("mlx_medusa.medusa.decode.PIECE", piece)
    model, encoded = tiny_whisper(6)
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    tokens, _, _, state = decode(model, encoded, prompt, Limits(frozenset(), 9), 3, random_heads(model, 6))
    assert tokens == reference(model, encoded, prompt, None, 9)
    state, _ = prefill(model, prompt, new_cache(model, encoded), Limits(frozenset(), 9))
    whole = chain_pass(model, prompt, new_cache(model, encoded))
    np.testing.assert_allclose(np.array(state.hidden), np.array(whole), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("prompt", [[], [1] * 40])
def test_a_prompt_that_does_not_fit_is_refused(prompt):
    model, encoded = tiny_whisper(0)
    with pytest.raises(OptionError, match="does not fit a context of 40"):
        prefill(model, prompt, new_cache(model, encoded), Limits(frozenset(), 5))


def test_log_probabilities():
    """Those of torch's log_softmax over the edited logits, for every decided token."""
    model, encoded = tiny_whisper(21)
    banned = list(range(30))
    limits = Limits(frozenset(), 12)
    drafter = random_heads(model, 21)
    tokens, runs, _, state = decode(model, encoded, [40], limits, 4, drafter, [Suppress(banned, VOCAB)])
    ours = np.concatenate([np.array(run.logprobs) for run in runs])
    for i, token in enumerate(tokens):
        scores = torch.tensor(whole_forward(model, encoded, state.tokens[: 1 + i]))
        scores[banned] = -math.inf
        assert ours[i] == pytest.approx(torch.log_softmax(scores, -1)[token].item(), abs=1e-4)


def test_the_drafter_is_told_of_the_sequence_once():
    model, encoded = tiny_whisper(2)
    drafter = Scripted([0] * 20, right=True)
    decode(model, encoded, [1], Limits(frozenset(), 10), 3, drafter)
    assert len(drafter.memories) == 1
    assert drafter.memories[0] is encoded


def test_keep_makes_a_path_contiguous():
    """Rows of a tree: the kept slots move up behind the base, in order."""
    cache = KVCache(1, block=4)
    rows = mx.arange(6, dtype=mx.float32).reshape(1, 1, 6, 1)
    cache.write(0, rows, -rows)
    cache.advance(6)
    cache.keep(2, [3, 5])
    assert cache.length == 4
    assert cache.rows(0)[0].flatten().tolist() == [0, 1, 3, 5]
    assert cache.rows(0)[1].flatten().tolist() == [0, -1, -3, -5]


def test_a_drafter_sees_every_kept_state_once():
    """First those of the prompt, then those of each round's kept rows: in order, what one pass over the text gives."""
    model, encoded = tiny_whisper(7)
    limits = Limits(frozenset(), 20)
    expected = reference(model, encoded, [1, 2, 3], None, 20)

    class Listening(Scripted):
        def propose(self, hidden, pending, count):
            seen.append(np.array(hidden))
            guesses = super().propose(hidden, pending, count)
            return guesses[:2] + [(token + 1) % VOCAB for token in guesses[2:]]  # the third is wrong

    seen = []
    _, _, _, state = decode(model, encoded, [1, 2, 3], limits, 5, Listening(expected, right=True))
    assert [rows.shape[1] for rows in seen[:3]] == [3, 3, 3]
    whole = chain_pass(model, state.tokens, new_cache(model, encoded))
    seen = np.concatenate(seen, axis=1)
    np.testing.assert_allclose(seen, np.array(whole)[:, : seen.shape[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("width", [1, 4])
def test_a_conversation_goes_on_from_its_cache(width):
    """A second prompt reads only what the cache lacks, and the text is that of a fresh cache."""
    model, encoded = tiny_whisper(8)
    cache, prompt = new_cache(model, encoded), [1, 2, 3]
    for _ in range(3):
        kept, limits = cache.length, Limits(frozenset(), 5)
        expected = reference(model, encoded, prompt, None, 5)
        state, first = prefill(model, prompt, cache, limits)
        assert state.hidden.shape[1] == len(prompt) - kept
        drafter = Scripted(expected, right=True, state=state)
        list(generate(model, state, first, limits, drafter=drafter, width=width))
        assert state.tokens == prompt + expected
        prompt = [*state.tokens, 7, 9]
    with pytest.raises(ValueError, match="none is left to read"):
        prefill(model, prompt[: cache.length], cache, limits)
