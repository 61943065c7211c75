"""Trees: buffers by hand and by Medusa's published algorithm, the named and grown ones, what drafters put in them.

Random weights; no real model.
"""

import itertools
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
import torch
from test_heads import DIM, VOCAB, expected_logits, random_heads
from test_recurrent import DIM as WHISPER_DIM
from test_recurrent import RECURRENT, random_arrays, random_drafter, torch_chain
from tiny import tiny_whisper

from mlx_medusa.errors import OptionError
from mlx_medusa.medusa import trees
from mlx_medusa.medusa.heads import MedusaDrafter
from mlx_medusa.medusa.trees import Draft
from mlx_medusa.medusa.vocabulary import DraftVocabulary, Vocabulary, ranked

LEVELS = {  # nodes per level in medusa_choices.py
    "mc_sim_7b_63": [10, 28, 23, 2],
    "vicuna_7b_stage1": [10, 32, 20, 1],
    "vicuna_7b_stage1_ablation": [10, 21, 25, 7],
    "vicuna_7b_stage2": [10, 23, 23, 7],
    "vicuna_13b_stage1": [10, 29, 23, 1],
    "vicuna_13b_stage2": [10, 19, 25, 9],
    "vicuna_33b_stage1": [10, 34, 19],
    "vicuna_33b_stage2": [10, 24, 24, 5],
    "zephyr_stage2": [10, 27, 23, 3],
}
MC_SIM = (  # as published, in the order of its growth
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004 005 0000 "
    "011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070"
)


def test_named_trees_are_the_published_ones():
    assert set(trees.NAMED) == set(LEVELS)
    for name, levels in LEVELS.items():
        tree = trees.named(name)
        assert [len(level.ranks) for level in tree.levels] == levels
        assert len(set(tree.paths)) == 63
        assert {rank for path in tree.paths for rank in path} == set(range(10))
    published = [tuple(map(int, word)) for word in MC_SIM.split()]
    assert set(trees.named("mc_sim_7b_63").paths) == set(published)


def test_buffers_by_hand():
    tree = trees.of([[1], [0, 0], [0], [0, 0, 3], [1, 0], [0, 1]])
    assert tree.paths == ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 3))
    assert tree.parents == (0, 0, 1, 1, 2, 3)
    assert tree.depths.tolist() == [0, 1, 1, 2, 2, 2, 3]
    assert tree.routes == ((0,), (0, 1), (0, 2), (0, 1, 3), (0, 1, 4), (0, 2, 5), (0, 1, 3, 6))
    assert tree.mask.astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0],
        [1, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 1, 0, 0, 1],
    ]
    assert [(level.sources, level.parents, level.ranks) for level in tree.levels] == [
        ([0], [0, 0], [0, 1]),
        ([0, 1], [0, 0, 1], [0, 1, 0]),
        ([0], [0], [3]),
    ]
    assert (tree.depth, tree.is_chain) == (3, False)
    assert tree.cut(2).paths == tree.paths[:5]
    assert tree.cut(0).paths == ()
    assert tree.cut(3) is tree
    assert tree.cut(-1).routes == ((0,),)


def published_buffers(choices, top_k=10):
    """Mask, indices into [pending, the first head's 10 best, the second's, ...], positions, and the paths of leaves.

    The algorithm of FasterDecoding/Medusa's generate_medusa_buffers.
    """
    ordered = sorted(choices, key=lambda node: (len(node), node))
    rows = 1 + len(ordered)
    mask, indices, positions = np.eye(rows), np.zeros(rows, int), np.zeros(rows, int)
    mask[:, 0] = 1
    for row, node in enumerate(ordered, 1):
        for length in range(1, len(node)):
            mask[row, 1 + ordered.index(node[:length])] = 1
        indices[row] = 1 + top_k * (len(node) - 1) + node[-1]
        positions[row] = len(node)
    taken, leaves = [], []
    for node in reversed(ordered):
        if node not in taken:
            taken += [node[:length] for length in range(1, len(node) + 1)]
            leaves.append([0] + [1 + ordered.index(node[:length]) for length in range(1, len(node) + 1)])
    return mask, indices, positions, leaves


def some_trees():
    yield from (trees.named(name) for name in LEVELS)
    yield from (trees.named(name).cut(depth) for name, depth in itertools.product(LEVELS, (1, 2, 3)))
    yield from (trees.grow(trees.PUBLISHED, nodes) for nodes in (1, 2, 4, 8, 16, 32, 64))
    rng = np.random.default_rng(0)
    for _ in range(40):
        paths = [()]
        for _ in range(rng.integers(1, 40)):
            paths.append((*paths[rng.integers(len(paths))], int(rng.integers(10))))
        yield trees.of(list(set(paths[1:])))


def test_buffers_equal_the_published_algorithm():
    for tree in some_trees():
        mask, indices, positions, leaves = published_buffers(list(tree.paths))
        np.testing.assert_array_equal(tree.mask, mask)
        np.testing.assert_array_equal(tree.depths, positions)
        inner = {route[:-1] for route in tree.routes}
        assert sorted(map(list, set(tree.routes) - inner)) == sorted(leaves)
        best = np.random.default_rng(1).permutation(1000)[: 10 * tree.depth]  # what the heads guess
        candidates = np.concatenate([[-1], best])
        tokens = [best.reshape(-1, 10)[len(path) - 1, path[-1]] for path in tree.paths]
        assert candidates[indices].tolist() == [-1, *tokens]


def test_a_tree_that_is_deeper_than_the_heads_is_cut():
    """Three heads and vicuna_7b_stage1: a node of its fourth level would read past the 31 candidates."""
    tree = trees.named("vicuna_7b_stage1")
    assert published_buffers(list(tree.paths))[1].max() == 31
    assert published_buffers(list(trees.choose("vicuna_7b_stage1", 3).paths))[1].max() < 31
    assert len(trees.choose("vicuna_7b_stage1", 3).paths) == 62


@pytest.mark.parametrize("seed", range(20))
def test_grown_trees_are_expected_to_accept_the_most(seed):
    """Against every tree of that many nodes."""
    rng = np.random.default_rng(seed)
    table = rng.random((2, 3)) if seed % 2 else np.round(rng.random((3, 2)), 1)
    depth, ranks = table.shape
    every = [
        path for length in range(1, depth + 1) for path in itertools.product(range(ranks), repeat=length)
    ]

    def value(paths):
        return sum(np.prod([table[level, rank] for level, rank in enumerate(path)]) for path in paths)

    for nodes in (1, 3, 5):
        best = max(
            value(paths)
            for paths in itertools.combinations(every, nodes)
            if all(len(path) == 1 or path[:-1] in paths for path in paths)
        )
        assert value(trees.grow(table.tolist(), nodes).paths) == pytest.approx(best)


def test_grown_trees_stop_where_nothing_is_to_be_had():
    assert trees.grow([[0.9, 0.0], [1.0]], 50).paths == ((0,), (0, 0))
    assert trees.grow([[0.9], [0.8], [0.7]], 3).is_chain
    assert trees.choose(64, 1).paths == tuple((rank,) for rank in range(5))


def test_published_accuracies():
    """Top-1 and top-5 of the five heads for Vicuna-7B in medusa_acc.csv."""
    np.testing.assert_allclose(
        [head[0] for head in trees.PUBLISHED], [0.5604, 0.3164, 0.2010, 0.1474, 0.1175], atol=1e-3
    )
    five = list(map(sum, trees.PUBLISHED))
    np.testing.assert_allclose(five, [0.7799, 0.5625, 0.4169, 0.3397, 0.2998], atol=2e-3)


def test_what_users_may_ask_for():
    assert trees.choose(" 8 ", 3).paths == trees.grow(trees.PUBLISHED[:3], 8).paths
    assert trees.choose(8, 2, [[0.5, 0.4], [0.9], [0.9]]).paths == ((0,), (1,), (0, 0), (1, 0))
    for wanted in ("[[1], [0], [1, 0]]", [[1], [0], [1, 0]], [(0,), (1,), (1, 0)]):
        assert trees.choose(wanted, 2).paths == ((0,), (1,), (1, 0))


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("mc_sim", "not known: give a number of nodes"),
        ("", "not known"),
        ("0", "a tree of 0 nodes"),
        (-3, "a tree of -3 nodes"),
        ("-3", "a tree of -3 nodes"),
        (100_000, "give 1 to 256"),
        ([], "a tree of 0 nodes"),
        ("[]", "a tree of 0 nodes"),
        ([[0], [0]], r"node \[0\] is there twice"),
        ([[0], [1, 0]], r"node \[1, 0\] has no parent: add \[1\]"),
        ([[0], []], "a node is a list of ranks"),
        ([[0], [-1]], "a node is a list of ranks"),
        ([[0], [0.5]], "a node is a list of ranks"),
        ('[["a"]]', "a node is a list of ranks"),
        ("[[0], [0", "no list of paths"),
        ("[0, 1]", "no list of paths"),
        ([[0], [0, 0], [0, 0, 0]], "needs 3 heads, and there are 2: cut it"),
    ],
)
def test_bad_trees_are_refused(wanted, said):
    with pytest.raises(OptionError, match=said) as error:
        trees.choose(wanted, 2)
    assert "\n" not in str(error.value)


def test_a_tree_needs_heads():
    with pytest.raises(OptionError, match="needs heads"):
        trees.choose("8", 0)


@pytest.mark.parametrize("table", [[], [[1.5]], [[0.5], [-0.1]], [[float("nan")]]])
def test_bad_accuracies_are_refused(table):
    with pytest.raises(OptionError, match="must be numbers from 0 to 1"):
        trees.grow(table, 3)


def test_measured_accuracies_by_hand():
    """10 rounds: 4 keep nothing, 2 the second guess, 1 the best, 2 the best and then the second, 1 the best two."""
    seen = Counter({(): 4, (1,): 2, (0,): 1, (0, 1): 2, (0, 0): 1})
    assert trees.measured(seen, 3, 2) == [[0.4, 0.2], [0.25, 0.5], [0.0, 0.0]]
    assert trees.comb(2, 3).paths == ((0,), (1,), (2,), (0, 0), (0, 1), (0, 2))


def test_the_longest_path_is_accepted():
    tree = trees.of([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    draft = Draft([5, 6, 7, 8, 9, 4], tree)
    assert draft.prefixes([1, 2]) == [
        [1, 2], [1, 2, 5], [1, 2, 6], [1, 2, 5, 7], [1, 2, 5, 8], [1, 2, 6, 9], [1, 2, 5, 7, 4]]  # fmt: skip
    assert draft.accepted([3, 7, 9, 4, 0, 0, 0]) == (0,)  # what follows a wrong guess does not count
    assert draft.accepted([6, 7, 9, 4, 0, 0, 0]) == (0, 2, 5)
    assert draft.accepted([6, 7, 1, 4, 0, 0, 0]) == (0, 2)
    assert draft.accepted([5, 8, 9, 4, 0, 0, 0]) == (0, 1, 4)
    assert draft.accepted([5, 7, 9, 4, 0, 0, 0]) == (0, 1, 3, 6)
    twice = Draft([5, 5, 7, 8, 9, 4], tree)  # a guess that stands there twice: the twin that leads further
    assert twice.accepted([5, 1, 9, 4, 0, 0, 0]) == (0, 2, 5)


@pytest.mark.parametrize("size", [1, 3, 63, 64, 65, 700])
@pytest.mark.parametrize("kind", ["any", "ties"])
def test_the_highest_few(size, kind):
    """As a stable sort finds them: of equal logits the lowest id first."""
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(5, size)) if kind == "any" else rng.integers(0, 4, size=(5, size))
    expected = np.argsort(-logits, axis=-1, kind="stable")
    for count in (1, 2, 10):
        found = np.array(ranked(mx.array(logits.astype(np.float32)), count))
        assert found.shape == (5, count)
        np.testing.assert_array_equal(found[:, : min(count, size)], expected[:, :count])
        assert found.max() < size


def test_the_highest_few_of_a_draft_vocabulary():
    """All rows: the true best. A screen that sees all directions: each block's best, in order."""
    rng = np.random.default_rng(3)
    ids = np.sort(rng.choice(4000, size=700, replace=False)).astype(np.int32)
    rows, states = rng.normal(size=(700, 16)).astype(np.float32), rng.normal(size=(6, 16)).astype(np.float32)
    order = np.argsort(-(states @ rows.T), axis=-1)
    whole = DraftVocabulary(mx.array(ids), mx.array(rows))
    np.testing.assert_array_equal(np.array(whole.top(mx.array(states), 10)), ids[order[:, :10]])
    screened = DraftVocabulary(mx.array(ids), mx.array(rows), mx.eye(16))
    found = np.array(screened.top(mx.array(states), 10))
    np.testing.assert_array_equal(found[:, 0], ids[order[:, 0]])
    np.testing.assert_array_equal(found[:, 0], np.array(screened(mx.array(states))))
    for row, best in zip(found, order, strict=True):
        places = [list(ids[best]).index(token) for token in row]
        assert places == sorted(set(places))
        assert places[-1] < 30


@pytest.mark.parametrize("tied", [True, False])
def test_plain_heads_fill_a_tree_with_each_heads_best(tied):
    module, arrays = random_heads(tied)
    rng = np.random.default_rng(6)
    shared = rng.normal(size=(VOCAB, DIM)).astype(np.float32)
    drafter = MedusaDrafter(module, Vocabulary(lambda states: states @ mx.array(shared).T))
    for tree in (trees.choose("mc_sim_7b_63", 4), trees.choose("zephyr_stage2", 2), trees.of([[2], [2, 7]])):
        hidden = rng.normal(size=(1, 3, DIM)).astype(np.float32)
        scores = [expected_logits(arrays, hidden[0, -1], shared, head) for head in range(tree.depth)]
        expected = [int(np.argsort(-scores[len(path) - 1])[path[-1]]) for path in tree.paths]
        assert drafter.propose_tree(mx.array(hidden), 3, tree) == expected


@pytest.mark.parametrize("seed", range(3))
def test_recurrent_heads_fill_a_tree_node_by_node(seed):
    """Each node's guess: of that rank after its parent's token and state, by the block in torch."""
    model, encoded = tiny_whisper(seed)
    arrays = random_arrays(RECURRENT, seed)
    drafter = random_drafter(RECURRENT, model, seed)
    drafter.begin(encoded)
    embeddings = torch.tensor(np.array(model.model.decoder.embed_tokens.weight))
    weight, bias = (torch.tensor(np.array(arrays[f"layer_norm.{name}"])) for name in ("weight", "bias"))

    def step(state, token):
        """(next state, ids from the best on)"""
        _, states = torch_chain(
            RECURRENT, arrays, embeddings, embeddings, torch.tensor(np.array(encoded[0])), state, token, 1)  # fmt: skip
        normed = torch.nn.functional.layer_norm(states[0], (WHISPER_DIM,), weight, bias)
        return states[0], torch.argsort((normed @ embeddings.T)[0], descending=True).tolist()

    hidden = np.random.default_rng(seed).normal(size=(1, 2, WHISPER_DIM)).astype(np.float32)
    tree = trees.of([[0], [3], [1], [3, 0], [3, 2], [0, 1], [3, 2, 0], [0, 1, 4], [0, 1, 0], [0, 1, 4, 0]])
    nodes = {(): (torch.tensor(hidden[:, -1]), 5)}
    for path in tree.paths:
        state, ids = step(*nodes[path[:-1]])
        nodes[path] = state, ids[path[-1]]
    assert drafter.propose_tree(mx.array(hidden), 5, tree) == [nodes[path][1] for path in tree.paths]
    chain = trees.chain(7)
    assert drafter.propose_tree(mx.array(hidden), 5, chain) == drafter.propose(mx.array(hidden), 5, 7)
