"""Trees write what plain decoding writes, for every family of models. Tiny random float32 models: logic, not numbers.

What plain greedy decoding would have written is told by one pass over the whole text, without cache and drafts, in
which every token must be the one that transformers' rules and numpy's argmax pick.
"""

from dataclasses import dataclass
from functools import cache

import llama
import mlx.core as mx
import numpy as np
import pytest
import torch
from meralion import hear, pair
from test_decode import VOCAB, Table, case, new_cache, random_heads
from test_recurrent import RECURRENT, random_drafter
from tiny import tiny_whisper
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

from mlx_medusa.medusa import trees
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, State, Statistics, chain_pass, generate, prefill
from mlx_medusa.medusa.heads import HeadsArgs, MedusaDrafter, MedusaHeads
from mlx_medusa.medusa.rules import NoRepeatNGram
from mlx_medusa.medusa.sampling import Sampler
from mlx_medusa.medusa.vocabulary import Vocabulary

SHAPES = [
    *map(trees.named, ("mc_sim_7b_63", "vicuna_7b_stage2")),
    *(trees.grow(trees.PUBLISHED, nodes) for nodes in (4, 8, 16, 32, 64)),
    trees.named("vicuna_13b_stage2"),
    trees.of([[3], [3, 1], [3, 1, 0], [3, 1, 0, 0], [0], [0, 0], [0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]]),
]


@dataclass
class Knowing:
    """It knows the text and hides it: of the children of a right node one is right, the others are not."""

    text: list[int]
    vocab: int
    rng: np.random.Generator
    state: State | None = None
    max_drafts: int = 5

    def begin(self, memory):
        pass

    def propose(self, hidden, pending, count):
        return self.propose_tree(hidden, pending, trees.chain(count))

    def propose_tree(self, hidden, pending, tree):
        done = len(self.state.tokens) - self.state.begin
        ahead = [*self.text[done:], *[0] * tree.depth]
        right, tokens = {()}, []
        lucky = {}  # node -> which of its children is right, if one is
        for path in tree.paths:
            children = [
                other[-1] for other in tree.paths if other[:-1] == path[:-1] and len(other) == len(path)
            ]
            lucky.setdefault(path[:-1], self.rng.choice(children) if self.rng.random() < 0.9 else -1)
            token = ahead[len(path) - 1]
            if path[:-1] in right and lucky[path[:-1]] == path[-1]:
                right.add(path)
            elif path[:-1] in right:
                token = (token + 1 + path[-1]) % self.vocab
            tokens.append(int(token))
        return tokens


def plain_heads(model, seed, vocab, dim, count=4):
    """Random heads that are not tied."""
    rng = np.random.default_rng(seed)
    heads = MedusaHeads(HeadsArgs(count, 1, dim, tied=False, vocab_size=vocab))
    heads.layers[0].weight = mx.array(rng.normal(size=(count, dim, dim)).astype(np.float32) * 0.3)
    heads.projection.weight = mx.array(rng.normal(size=(count, vocab, dim)).astype(np.float32))
    return MedusaDrafter(heads, None)


def tied_heads(model, seed, dim, count=3):
    heads = MedusaHeads(HeadsArgs(count, 1, dim))
    weight = np.random.default_rng(seed).normal(size=(count, dim, dim)) * 0.2
    heads.layers[0].weight = mx.array(weight.astype(np.float32))
    return MedusaDrafter(heads, Vocabulary(model.logits))


def write(model, memory, encoded, prompt, limits, rules=(), drafter=None, tree=None, width=1, sampler=None):
    """(text, statistics)"""
    state, first = prefill(model, prompt, KVCache(model.num_layers, memory, block=8), limits, rules, sampler)
    if isinstance(drafter, Knowing):
        drafter.state = state
    seen = Statistics()
    for _ in generate(model, state, first, limits, rules=rules, drafter=drafter, memory=encoded, tree=tree,
                      width=width, sampler=sampler, statistics=seen):  # fmt: skip
        assert state.cache.length == len(state.tokens) - 1
        assert state.hidden.shape[1] <= 1 + (tree.depth if tree else 0) or seen.rounds == 0
    text = state.tokens[len(prompt) :]
    assert seen.tokens == len(text) - 1
    assert seen.accepted == sum(seen.accepted_per_head) <= seen.tokens
    return text, seen


def check_greedy(model, memory, prompt, text, limits, processors):
    """Every token is what plain greedy decoding picks after those before it, and the text ends where it must."""
    tokens = [*prompt, *text]
    hidden = chain_pass(model, tokens[:-1], KVCache(model.num_layers, memory))
    scores = torch.tensor(np.array(model.logits(hidden[0, len(prompt) - 1 :]).astype(mx.float32)))
    for place, token in enumerate(text):
        row = scores[place : place + 1]
        for processor in processors:
            row = processor(torch.tensor([tokens[: len(prompt) + place]]), row)
        assert token == int(np.argmax(row[0].numpy()))
    ends = [place for place, token in enumerate(text) if token in limits.eos]
    full = len(text) == limits.max_tokens or len(tokens) == model.max_length
    assert ends == [len(text) - 1] or (not ends and full)


def whisper(seed):
    model, encoded, prompt, limits, rules, expected = case(seed)
    heads = [
        lambda: random_heads(model, seed, count=4),
        lambda: random_drafter(RECURRENT, model, seed),
        lambda: plain_heads(model, seed, VOCAB, model.args.hidden_size),
    ][seed % 3]()
    if seed % 3 == 0:
        heads.guess = Vocabulary(model.logits)
    return model, model.attend(encoded), encoded, prompt, limits, rules, heads, expected


@cache
def meralion_model(seed):
    return pair(seed)


def meralion(seed):
    theirs, ours = meralion_model(seed % 40)
    _, encoded, prompt, memory = hear(theirs, ours, seed, 1)
    size = 2 + seed % 2
    rules, processors = [NoRepeatNGram(size)], [NoRepeatNGramLogitsProcessor(size)]
    return ours, memory, encoded, prompt, rules, processors


@cache
def llama_model(seed):
    return llama.ours_of(llama.reference(seed, max_position_embeddings=40))


def ended(seed, model, memory, encoded, prompt, rules, max_tokens):
    """Limits whose end falls inside the text, every other time."""
    free, _ = write(model, memory, encoded, prompt, Limits(frozenset(), max_tokens), rules)
    eos = {free[len(free) * 2 // 3], -1} if seed % 2 else {-1}
    return Limits(frozenset(eos), max_tokens)


@pytest.fixture(scope="module")
def reached():
    """By family, what the cases have come to; the last block of each looks."""
    return {}


def compare(seed, family, model, memory, encoded, prompt, limits, rules, heads, expected, vocab, reached):
    """A tree of heads, one of a drafter that is right often, and every other time a chain."""
    counts = reached.setdefault(family, {"deep": 0, "off": 0, "stopped": 0, "heads": 0})
    knowing = Knowing(expected, vocab, np.random.default_rng(seed))
    a, b = (SHAPES[(seed + step) % len(SHAPES)] for step in (0, 4))
    for drafter, tree in ((heads, a), (knowing, b), (heads, trees.chain(3)))[: 2 + seed % 2]:
        text, seen = write(model, memory, encoded, prompt, limits, rules, drafter, tree)
        assert text == expected, (family, seed, tree.paths)
        counts["deep"] += sum(count for path, count in seen.paths.items() if len(path) >= 3)
        counts["off"] += sum(count for path, count in seen.paths.items() if any(path))
        counts["heads"] += seen.accepted if drafter is heads else 0
    counts["stopped"] += expected[-1] in limits.eos


@pytest.mark.parametrize("block", range(4))
def test_whisper(block, reached):
    """208 seeds; plain, own-projection and recurrent heads; rules, ends and limits inside the paths."""
    for seed in range(block * 52, block * 52 + 52):
        compare(seed, "whisper", *whisper(seed), VOCAB, reached)


@pytest.mark.parametrize("block", range(4))
def test_meralion(block, reached):
    """200 seeds, sliding windows, under the no-repeat rule."""
    for seed in range(block * 50, block * 50 + 50):
        model, memory, encoded, prompt, rules, processors = meralion(seed)
        limits = ended(seed, model, memory, encoded, prompt, rules, 4 + seed % 13)
        expected, _ = write(model, memory, encoded, prompt, limits, rules)
        check_greedy(model, memory, prompt, expected, limits, processors)
        dim, vocab = model.args.text.hidden_size, model.args.text.vocab_size
        heads = tied_heads(model, seed, dim) if seed % 2 else plain_heads(model, seed, vocab, dim)
        compare(
            seed, "meralion", model, memory, encoded, prompt, limits, rules, heads, expected, vocab, reached
        )


@pytest.mark.parametrize("block", range(4))
def test_llama(block, reached):
    """200 seeds, every kind of rotation; some texts end with the context."""
    for seed in range(block * 50, block * 50 + 50):
        model = llama_model(seed % 40)
        prompt = llama.prompt_of(model, seed, 1 + seed % 7 + (24 if seed % 5 == 0 else 0))
        limits = ended(seed, model, None, None, prompt, (), 4 + seed % 13)
        expected, _ = write(model, None, None, prompt, limits)
        check_greedy(model, None, prompt, expected, limits, [])
        dim, vocab = model.args.hidden_size, model.args.vocab_size
        heads = tied_heads(model, seed, dim) if seed % 2 else plain_heads(model, seed, vocab, dim)
        compare(seed, "llama", model, None, None, prompt, limits, (), heads, expected, vocab, reached)


def test_the_cases_reach_what_they_are_for(reached):
    """Long paths, paths beside the best guesses, guesses of heads, ends inside the text."""
    for family, counts in reached.items():
        assert counts["deep"] > 50, family
        assert counts["off"] > 200, family
        assert counts["heads"] > 50, family
        assert counts["stopped"] > 40, family


@pytest.mark.parametrize("tree", SHAPES[:3])
def test_of_equal_logits_the_lowest_id_wins(tree):
    """Exact ties at nearly every step: a guess that ties with the lowest id, but is not it, is refused."""

    class Branching(Table):
        num_layers = 1

        def step(self, tokens, positions, mask, cache):
            """By its mask, each row finds the tokens that it follows."""
            kept, ids = cache.length, tokens[0].tolist()
            seen = np.array(mask)[0, 0] if mask is not None else np.ones((1, kept + 1), bool)
            self.past = [*getattr(self, "past", [])[:kept], *ids]
            rows = [self.row([self.past[slot] for slot in np.flatnonzero(row)]) for row in seen]
            self.kept = kept
            cache.write(0, *[mx.array(np.array(ids, np.float32).reshape(1, 1, -1, 1))] * 2)
            cache.advance(len(ids))
            return mx.array(np.stack(rows))[None].astype(mx.float32)

    class Compacting(KVCache):
        def keep(self, base, slots):
            super().keep(base, slots)
            model.past = [int(x) for x in self.rows(0)[0].flatten().tolist()]

    for seed in range(20):
        model = Branching(seed)
        expected = [7]
        while len(expected) < 25:
            expected.append(int(np.argmax(model.row(expected))))
        limits = Limits(frozenset(), 24)
        state, first = prefill(model, [7], Compacting(1), limits)
        drafter = Knowing(expected[1:], 12, np.random.default_rng(seed), state)
        seen = Statistics()
        list(generate(model, state, first, limits, drafter=drafter, tree=tree, statistics=seen))
        assert state.tokens == expected
        assert seen.accepted > 5


@pytest.mark.parametrize("seed", range(6))
def test_the_cache_after_a_path_is_that_of_a_fresh_pass(seed):
    """K/V of the kept rows, and the states that drafters get, whatever path was kept."""
    model, encoded = tiny_whisper(seed)
    limits = Limits(frozenset(), 20)
    expected, _ = write(model, model.attend(encoded), encoded, [1, 2], limits)
    state, first = prefill(model, [1, 2], new_cache(model, encoded), limits)
    states = []

    class Listening(Knowing):
        def propose_tree(self, hidden, pending, tree):
            states.append(np.array(hidden))
            return super().propose_tree(hidden, pending, tree)

    drafter = Listening(expected, VOCAB, np.random.default_rng(seed), state)
    list(generate(model, state, first, limits, drafter=drafter, tree=SHAPES[seed]))
    fresh = new_cache(model, encoded)
    hidden = np.array(chain_pass(model, state.tokens[:-1], fresh))
    for layer in range(model.num_layers):
        for ours, theirs in zip(state.cache.rows(layer), fresh.rows(layer), strict=True):
            np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=1e-4, atol=1e-5)
    seen = np.concatenate(states, axis=1)
    np.testing.assert_allclose(seen, hidden[:, : seen.shape[1]], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("room", range(1, 7))
def test_nodes_past_the_end_are_not_verified(room):
    """With room for n more tokens, no node is deeper than n - 1: neither rows nor positions leave the context."""
    model, encoded = tiny_whisper(1)
    depths = []

    class Watching(Knowing):
        def propose_tree(self, hidden, pending, tree):
            depths.append(tree.depth)
            return super().propose_tree(hidden, pending, tree)

    for prompt, limits in (
        ([3] * (40 - room - 1), Limits(frozenset(), 99)),
        ([3], Limits(frozenset(), room + 1)),
    ):
        expected, _ = write(model, model.attend(encoded), encoded, prompt, limits)
        assert len(expected) == room + 1
        drafter = Watching(expected, VOCAB, np.random.default_rng(0))
        text, _ = write(model, model.attend(encoded), encoded, prompt, limits, (), drafter, SHAPES[8])
        assert text == expected
    assert max(depths, default=0) <= max(0, room - 1)


def test_an_interrupt_leaves_the_cache_as_it_was():
    model, encoded = tiny_whisper(4)
    limits = Limits(frozenset(), 20)
    state, first = prefill(model, [5, 6], new_cache(model, encoded), limits)
    drafter = Knowing([0] * 20, VOCAB, np.random.default_rng(0), state)
    next(generate(model, state, first, limits, drafter=drafter, tree=SHAPES[0]))
    length = state.cache.length

    def interrupted(rows, logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(generate(model, state, first, limits, drafter=drafter, tree=SHAPES[0], rules=[interrupted]))
    assert state.cache.length == length


@pytest.mark.parametrize("family", ["whisper", "meralion", "llama"])
def test_a_seed_draws_one_text_whatever_is_guessed(family):
    """Plain, with a chain, with trees, of heads and of a drafter that is right often: the same text."""
    texts = set()
    for seed in range(30):
        if family == "whisper":
            model, memory, encoded, prompt, _, rules, heads, _ = whisper(seed)
            vocab = VOCAB
        elif family == "meralion":
            model, memory, encoded, prompt, rules, _ = meralion(seed)
            vocab = model.args.text.vocab_size
            heads = tied_heads(model, seed, model.args.text.hidden_size)
        else:
            model, memory, encoded, rules = llama_model(seed), None, None, ()
            prompt, vocab = llama.prompt_of(model, seed, 4), model.args.vocab_size
            heads = tied_heads(model, seed, model.args.hidden_size)
        limits = Limits(frozenset([5]), 16)
        sampler = Sampler(
            1.5, seed=seed
        )  # no filter: two tokens that nearly tie at its edge may change places
        plain, _ = write(model, memory, encoded, prompt, limits, rules, sampler=sampler)
        knowing = Knowing(plain, vocab, np.random.default_rng(seed))
        a, b = SHAPES[seed % 9], SHAPES[(seed + 4) % 9]
        for drafter, tree in ((heads, trees.chain(3)), (heads, a), (knowing, b)):
            text, _ = write(model, memory, encoded, prompt, limits, rules, drafter, tree, sampler=sampler)
            assert text == plain, seed
        texts.add(tuple(plain))
    assert len(texts) == 30
