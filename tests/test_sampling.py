"""Sampling with drafts draws from the distribution of plain sampling; typical acceptance does not.

The verifier is a Markov chain of 5 tokens, whose exact distribution numpy computes. A trial draws the next 3 tokens:
the sampler sees the rows of a verifier pass, the draft says what is kept, as the decode loop has it, and the rows of
all trials go through the sampler at once. That the loop itself writes what plain sampling writes for a seed is shown on
whole texts, here and for the model families in test_tree_decode.py.
"""

import math
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx_lm.sample_utils import make_logits_processors

from mlx_medusa.errors import MedusaError, OptionError
from mlx_medusa.medusa import trees
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, Statistics, generate, prefill
from mlx_medusa.medusa.rules import Processors, pick
from mlx_medusa.medusa.sampling import Sampler, TypicalSampler, make_sampler
from mlx_medusa.medusa.trees import Draft

VOCAB, TRIALS, DRAWN = 5, 50_000, 3
LOGITS = np.random.default_rng(4).normal(size=(VOCAB, VOCAB)) * 1.3  # of the next token, by the one before
SHAPES = {
    "none": trees.chain(0),
    "chain": trees.chain(3),
    "tree": trees.of([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 2]]),
}


def distribution(temperature, top_p):
    """[V, V] float64: the best tokens whose total before the last one stays below ``top_p``, then the temperature."""
    p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    scaled = np.exp(LOGITS / temperature)
    for row, kept in zip(p, scaled, strict=True):
        order = np.argsort(-row)
        before = np.cumsum(row[order]) - row[order]
        if top_p:
            kept[order[before >= top_p]] = 0
    return scaled / scaled.sum(-1, keepdims=True)


@cache
def guesses(pending, tree):
    """Fixed by the pending token, as a drafter's: the likeliest tokens after each other, by rank."""
    ranked = np.argsort(-LOGITS, axis=-1)
    tokens = {(): pending}
    for path in tree.paths:
        tokens[path] = int(ranked[tokens[path[:-1]], path[-1]])
    return Draft([tokens[path] for path in tree.paths], tree)


def drawn(sampler, tree):
    """[TRIALS, 3]: what follows token 2. Each trial has its own positions, so its numbers are independent."""
    texts = [[2] for _ in range(TRIALS)]
    kept = 0
    while unfinished := [trial for trial, text in enumerate(texts) if len(text) <= DRAWN]:
        drafts = [guesses(texts[trial][-1], tree) for trial in unfinished]
        tokens = np.array(
            [[texts[trial][-1], *draft.tokens] for trial, draft in zip(unfinished, drafts, strict=True)]
        )
        starts = [(DRAWN + tree.depth + 1) * trial + len(texts[trial]) for trial in unfinished]
        positions = np.add.outer(starts, tree.depths)
        logits = LOGITS[tokens].astype(np.float32)
        if isinstance(sampler, TypicalSampler):  # it reads the draft: one trial at a time
            picks = [
                sampler(*row) for row in zip(positions.tolist(), map(mx.array, logits), drafts, strict=True)
            ]
        else:
            flat = sampler(positions.reshape(-1).tolist(), mx.array(logits.reshape(-1, VOCAB)))
            picks = np.array(flat).reshape(tokens.shape).tolist()
        for trial, draft, row in zip(unfinished, drafts, picks, strict=True):
            path = draft.accepted(row)
            kept += len(path) - 1
            texts[trial] += [row[place] for place in path]
    return np.array([text[1 : 1 + DRAWN] for text in texts]), kept / TRIALS


def p_value(found, p):
    """Pearson's chi-square of the triples after token 2 against p(a | 2) p(b | a) p(c | b); rare triples as one."""
    expected = TRIALS * (p[2][:, None, None] * p[:, :, None] * p[None]).reshape(-1)
    counts = np.bincount(np.ravel_multi_index(found.T, (VOCAB,) * DRAWN), minlength=len(expected))
    assert not counts[expected == 0].any()  # what the filter removes is never drawn
    common = expected >= 5
    counts, expected = (np.append(x[common], x[~common].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    assert len(expected) > 10
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(*torch.tensor([(len(expected) - 1) / 2, statistic / 2]).double()))


SETTINGS = [(1.0, 0.0), (0.6, 0.0), (0.8, 0.85)]  # temperature, top_p


@pytest.mark.parametrize(
    ("shape", "temperature", "top_p"),
    [("none", *SETTINGS[0])] + [(shape, *how) for shape in ("chain", "tree") for how in SETTINGS],
)
def test_the_distribution_is_that_of_plain_sampling(shape, temperature, top_p):
    found, kept = drawn(Sampler(temperature, top_p, seed=11), SHAPES[shape])
    assert p_value(found, distribution(temperature, top_p)) > 0.001
    assert (kept > 0.5) == (shape != "none")


def test_typical_acceptance_is_told_apart():
    """The same test, so it has the power to see a distribution that is not the one of plain sampling."""
    found, kept = drawn(TypicalSampler(1.0, seed=11), SHAPES["chain"])
    assert p_value(found, distribution(1.0, 0)) < 0.001
    assert kept > 1


def test_typical_acceptance_by_hand():
    """p > min(0.09, 0.3 exp(-H)) along the path; the longest, then the likeliest; after it the sampler's own token."""
    uniform, sharp, skewed = [0.1] * 10, [0.91] + [0.01] * 9, [0.5, 0.3, 0.1, 0.05, 0.05] + [0.0] * 5
    entropy = -sum(x * math.log(x) for x in skewed if x)
    assert 0.3 * math.exp(-math.log(10)) == pytest.approx(0.03)  # below a uniform token's 0.1: any is kept
    assert 0.05 < 0.3 * math.exp(-entropy) < 0.1  # so of the skewed ones, the first three
    tree = trees.of([[0], [1], [2], [0, 0], [1, 0], [1, 1]])
    sampler = TypicalSampler(1.0, seed=3)

    def picks(rows, tokens):
        logits = mx.array(np.log(np.maximum(rows, 1e-30)).astype(np.float32))
        return sampler([7, 8, 8, 8, 9, 9, 9], logits, Draft(tokens, tree))

    plain = picks([skewed, *[uniform] * 6], [3, 4, 9, 0, 0, 0])
    assert plain == Sampler(1.0, seed=3)([7, 8, 8, 8, 9, 9, 9], mx.log(mx.array([skewed, *[uniform] * 6])))
    assert picks([skewed, sharp, *[uniform] * 5], [2, 3, 4, 5, 0, 0])[:1] == [
        2
    ]  # 0.1 is enough, 0.01 after it is not
    found = picks([skewed, sharp, skewed, *[uniform] * 4], [0, 2, 4, 5, 1, 0])
    assert (found[0], found[2]) == (2, 0)  # longer is better than likelier; 0.5 is likelier than 0.3
    assert found[6] == plain[6]
    found = picks([skewed, skewed, skewed, *[uniform] * 4], [1, 0, 4, 1, 2, 2])
    assert (found[0], found[1]) == (1, 1)  # 0.3 * 0.3, against 0.5 * 0.1
    assert picks([[1.0] + [0.0] * 9, *[uniform] * 6], [5, 6, 7, 0, 0, 0])[0] == 0


class Chain:
    """The Markov chain as a verifier: a row's logits are those after its token."""

    max_length = 500

    def step(self, tokens, positions, mask, cache):
        cache.advance(tokens.shape[1])
        return mx.array(LOGITS.astype(np.float32))[tokens]

    def logits(self, hidden):
        return hidden


class Likely:
    """Its drafter."""

    max_drafts = 3

    def begin(self, memory):
        pass

    def propose(self, hidden, pending, count):
        return guesses(pending, trees.chain(count)).tokens

    def propose_tree(self, hidden, pending, tree):
        return guesses(pending, tree).tokens


def text(sampler, tree, max_tokens=60, rules=(), statistics=None):
    limits = Limits(frozenset(), max_tokens)
    state, first = prefill(Chain(), [1, 2], KVCache(0), limits, rules, sampler)
    list(generate(Chain(), state, first, limits, rules=rules, drafter=Likely(), tree=tree, sampler=sampler,
                  statistics=statistics))  # fmt: skip
    return state.tokens[2:]


@pytest.mark.parametrize(
    "filters", [{}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 2}, {"top_k": 99, "top_p": 1.0}]
)
def test_a_seed_gives_one_text_whatever_is_guessed(filters):
    allowed = {  # by definition: of each row, which tokens a filter leaves
        "top_p": lambda row: np.cumsum(np.sort(row)[::-1])[: (row > row.min()).sum() + 1],
        "min_p": lambda row: row[row >= 0.2 * row.max()],
        "top_k": lambda row: np.sort(row)[-2:],
    }
    written = set()
    for seed in range(6):
        sampler = Sampler(0.9, seed=seed, **filters)
        texts = [text(sampler, tree) for tree in SHAPES.values()]
        assert texts[0] == texts[1] == texts[2]
        written.add(tuple(texts[0]))
        p = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
        for before, token in zip([2, *texts[0]], texts[0], strict=False):
            if list(filters) in (["min_p"], ["top_k"]):
                assert p[before, token] in allowed[next(iter(filters))](p[before])
    assert len(written) == 6


def test_statistics_of_a_tree():
    """Every round keeps what its path says, and counts it by depth."""
    seen = Statistics()
    written = text(Sampler(1.0, seed=5), SHAPES["tree"], 200, statistics=seen)
    assert seen.tokens == len(written) - 1 == 199
    assert seen.rounds == sum(seen.paths.values())
    assert seen.accepted == sum(len(path) * count for path, count in seen.paths.items())
    assert seen.accepted_per_head == [
        sum(count for path, count in seen.paths.items() if len(path) > depth) for depth in range(3)
    ]
    assert set(seen.paths) <= {(), *SHAPES["tree"].paths}
    assert seen.tokens == seen.accepted + seen.rounds
    assert seen.tokens_per_verify > 1.5
    table = trees.measured(seen.paths, 3, 3)
    assert table[0][0] > table[0][1] > 0


def test_typical_acceptance_writes_in_fewer_passes():
    exact, typical = Statistics(), Statistics()
    text(Sampler(1.0, seed=5), SHAPES["chain"], 200, statistics=exact)
    text(TypicalSampler(1.0, seed=5), SHAPES["chain"], 200, statistics=typical)
    assert typical.rounds < exact.rounds


def test_mlx_lms_processors_see_each_rows_own_prefix():
    """A penalty of repetition, row by row as mlx-lm applies it to one text."""
    processors = make_logits_processors(
        repetition_penalty=1.7, repetition_context_size=3, logit_bias={1: 0.5}
    )
    prefixes = [[1, 2, 3, 4], [1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 0]]
    logits = LOGITS[:3].astype(np.float32)
    _, found = pick([Processors(processors)], prefixes, mx.array(logits))
    for prefix, row, edited in zip(prefixes, logits, np.array(found), strict=True):
        expected = row.copy()
        expected[1] += 0.5
        for token in set(prefix[-3:]):
            expected[token] *= 1.7 if expected[token] < 0 else 1 / 1.7
        np.testing.assert_allclose(edited, expected, rtol=1e-6)
    penalised = [Processors(make_logits_processors(repetition_penalty=1.7, repetition_context_size=8))]
    texts = [text(Sampler(1.0, seed=1), tree, 40, penalised) for tree in SHAPES.values()]
    assert texts[0] == texts[1] == texts[2] != text(Sampler(1.0, seed=1), None, 40)


def test_a_token_without_probability_is_never_drawn(monkeypatch):
    """Not even at the ends of the range of random numbers."""
    logits = mx.array([[-mx.inf, 0.0, -mx.inf, 1.0, -mx.inf]])
    for number, token in ((2.0**-53, 1), (1.0, 3)):
        monkeypatch.setattr("mlx_medusa.medusa.sampling.uniform", lambda seed, at, number=number: number)
        assert Sampler(1.0)([0], logits) == [token]


def test_greedy_is_no_sampler():
    assert make_sampler(0.0, top_p=0.9) is None
    assert make_sampler(0.5, 0.9, 0.1, 4, 7) == Sampler(0.5, 0.9, 0.1, 4, 7)
    assert type(make_sampler(0.5, typical=True)) is TypicalSampler
    with pytest.raises(OptionError, match="needs a temperature above 0"):
        make_sampler(0.0, typical=True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"temperature": 1, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 1, "min_p": -0.1}, "min_p is -0.1"),
        ({"temperature": 1, "top_k": -2}, "top_k is -2"),
        ({"temperature": 1, "seed": -2}, "seed is -2"),
    ],
)
def test_bad_settings_are_refused(settings, said):
    with pytest.raises(OptionError, match=said):
        make_sampler(**settings)


def test_numbers_that_are_not_finite_are_an_error():
    with pytest.raises(MedusaError, match="not finite"):
        Sampler(1.0)([0], mx.array([[0.0, float("nan")]]))
