"""Trees of guesses: several tokens tried at each place in one verifier pass (Cai et al. 2024, section 2.1.2).

A node is named by its path: (0, 2) is the third best guess for the second token after the best guess for the first. A
chain is the tree whose every rank is 0. Row 0 of a pass is the pending token, row i the node ``paths[i - 1]``.
"""

import heapq
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from mlx_medusa.errors import OptionError

Path = tuple[int, ...]

MOST_NODES = 256  # of an own or grown tree: far beyond what pays anywhere

# The trees of FasterDecoding/Medusa (medusa_choices.py), 63 nodes each, as node:number of its children.
NAMED = {
    "mc_sim_7b_63": ":10 0:10 1:7 2:3 3:2 4:1 5:1 6:1 7:1 8:1 9:1 00:10 01:3 02:2 03:1 04:1 05:1 06:1 07:1 10:2 20:1 "
    "000:2",
    "vicuna_7b_stage1": ":10 0:10 1:7 2:4 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 05:1 10:2 20:1 000:1",
    "vicuna_7b_stage1_ablation": ":10 0:10 1:4 2:2 3:2 4:1 5:1 6:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 "
    "000:4 001:1 002:1 010:1",
    "vicuna_7b_stage2": ":10 0:10 1:5 2:2 3:2 4:1 5:1 6:1 7:1 00:9 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:4 001:1 "
    "002:1 010:1",
    "vicuna_13b_stage1": ":10 0:10 1:7 2:4 3:2 4:2 5:1 6:1 7:1 8:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:1",
    "vicuna_13b_stage2": ":10 0:10 1:4 2:2 3:1 4:1 5:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 30:1 000:4 001:2 "
    "002:1 010:1 100:1",
    "vicuna_33b_stage1": ":10 0:10 1:8 2:5 3:3 4:2 5:2 6:1 7:1 8:1 9:1 00:9 01:3 02:2 03:1 04:1 10:2 20:1",
    "vicuna_33b_stage2": ":10 0:10 1:5 2:3 3:2 4:1 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:3 11:1 20:1 000:3 "
    "001:1 010:1",
    "zephyr_stage2": ":10 0:10 1:6 2:4 3:2 4:2 5:1 6:1 7:1 00:10 01:4 02:2 03:1 04:1 05:1 10:2 11:1 20:1 000:2 001:1",
}

# How often guess k of head i is right: Medusa's five heads for Vicuna-7B, from the top-1 to top-5 accuracies that
# FasterDecoding/Medusa publishes (medusa_acc.csv). For heads of which nothing has been measured.
PUBLISHED = (
    (0.560, 0.111, 0.055, 0.033, 0.020),
    (0.316, 0.107, 0.062, 0.043, 0.034),
    (0.201, 0.087, 0.060, 0.036, 0.033),
    (0.147, 0.078, 0.049, 0.037, 0.029),
    (0.118, 0.069, 0.048, 0.038, 0.028),
)


@dataclass(frozen=True)
class Level:
    """How the nodes of one depth follow those of the depth before, for a drafter that guesses level by level."""

    sources: list[
        int
    ]  # those of the level before (before the first: of the pending token alone) that have children
    parents: list[int]  # [n] of each node: its parent's place in ``sources``
    ranks: list[int]  # [n] which guess after the parent it is, 0 the best


@dataclass(frozen=True, eq=False)
class Tree:
    """Where n guesses stand, by depth and then in the order of their paths, with all that a pass needs to know."""

    paths: tuple[Path, ...]
    parents: tuple[int, ...]  # [n] the row that each guess follows
    depths: np.ndarray  # [1 + n] int32, of all rows; 0 for the pending token
    mask: np.ndarray  # [1 + n, 1 + n] bool: a row sees itself and the rows that it follows
    routes: tuple[tuple[int, ...], ...]  # [1 + n] the rows from the pending token down to each row
    levels: tuple[Level, ...]  # by depth

    @property
    def depth(self) -> int:
        """Of the deepest node; 0 for a tree without nodes."""
        return len(self.levels)

    @property
    def is_chain(self) -> bool:
        return len(self.paths) == self.depth and not any(map(any, self.paths))

    def cut(self, depth: int) -> "Tree":
        """The tree without the nodes below ``depth``."""
        if depth >= self.depth:
            return self
        return build(tuple(path for path in self.paths if len(path) <= depth))


@lru_cache(maxsize=256)
def build(paths: tuple[Path, ...]) -> Tree:
    """The tree of these paths, which are sorted by length and then by value, and complete: all its buffers."""
    row = {(): 0} | {path: index + 1 for index, path in enumerate(paths)}
    routes = tuple(tuple(row[path[:depth]] for depth in range(len(path) + 1)) for path in row)
    mask = np.zeros((len(row), len(row)), dtype=bool)
    for index, route in enumerate(routes):
        mask[index, list(route)] = True
    levels: list[Level] = []
    above: list[Path] = [()]
    while nodes := [path for path in paths if len(path) == len(levels) + 1]:
        sources = sorted({above.index(path[:-1]) for path in nodes})
        place = {above[source]: index for index, source in enumerate(sources)}
        levels.append(Level(sources, [place[path[:-1]] for path in nodes], [path[-1] for path in nodes]))
        above = nodes
    depths = np.array([len(path) for path in row], dtype=np.int32)
    parents = tuple(route[-2] for route in routes[1:])
    return Tree(paths, parents, depths, mask, routes, tuple(levels))


def chain(count: int) -> Tree:
    """``count`` guesses, one after the other."""
    return build(tuple((0,) * depth for depth in range(1, count + 1)))


def of(paths: Sequence[Sequence[int]]) -> Tree:
    """The tree of paths in any order. OptionError if it is empty, or a path comes twice or lacks its parent."""
    wanted = sorted((tuple(path) for path in paths), key=lambda path: (len(path), path))
    if not 0 < len(wanted) <= MOST_NODES:
        raise OptionError(f"a tree of {len(wanted)} nodes: give 1 to {MOST_NODES}")
    known: set[Path] = {()}
    for path in wanted:
        if not path or any(not isinstance(rank, int) or isinstance(rank, bool) or rank < 0 for rank in path):
            raise OptionError(f"tree node {list(path)}: a node is a list of ranks, 0 for the best guess")
        if path in known:
            raise OptionError(f"tree node {list(path)} is there twice: name each node once")
        if path[:-1] not in known:
            raise OptionError(f"tree node {list(path)} has no parent: add {list(path[:-1])}")
        known.add(path)
    return build(tuple(wanted))


def named(name: str) -> Tree:
    """A tree of ``NAMED``; OptionError if there is none of that name."""
    if name not in NAMED:
        raise OptionError(
            f"tree {name!r} is not known: give a number of nodes, a list of paths, or {', '.join(NAMED)}"
        )
    families = (entry.split(":") for entry in NAMED[name].split())
    return of([(*map(int, stem), rank) for stem, children in families for rank in range(int(children))])


def grow(accuracies: Sequence[Sequence[float]], nodes: int) -> Tree:
    """The tree of ``nodes`` nodes that is expected to accept the most (Cai et al. 2024, section 2.3.3).

    ``accuracies[i][k]`` is how often guess k for the token i + 1 places after the pending one is right. A node is
    accepted as often as the product along its path, so the best node is always next to those chosen before. Nodes that
    are never right are left out, and so are those beyond the table. OptionError for numbers that are no accuracies.
    """
    if not 0 < nodes <= MOST_NODES:
        raise OptionError(f"a tree of {nodes} nodes: give 1 to {MOST_NODES}")
    if not accuracies or not all(0 <= value <= 1 for head in accuracies for value in head):
        raise OptionError("accuracies of heads must be numbers from 0 to 1")
    chosen: list[Path] = []
    reachable: list[tuple[float, int, Path]] = []

    def reach(path: Path, chance: float) -> None:
        for rank, accuracy in enumerate(accuracies[len(path)] if len(path) < len(accuracies) else ()):
            if chance * accuracy:
                heapq.heappush(reachable, (-chance * accuracy, len(path), (*path, rank)))

    reach((), 1.0)
    while reachable and len(chosen) < nodes:
        negative, _, path = heapq.heappop(reachable)
        chosen.append(path)
        reach(path, -negative)
    return of(chosen)


def comb(depth: int, ranks: int) -> Tree:
    """The tree that measures a drafter: the chain of its best guesses, and beside each of them the next best ones."""
    return of([(*(0,) * level, rank) for level in range(depth) for rank in range(ranks)])


def measured(paths: Mapping[Path, int], depth: int, ranks: int) -> list[list[float]]:
    """Accuracies as ``grow`` takes them, given that the guesses before are right, from ``Statistics.paths`` of rounds
    with ``comb(depth, ranks)``. 0 where nothing was seen.
    """

    def rounds(start: Path) -> int:
        return sum(count for path, count in paths.items() if path[: len(start)] == start)

    chains = [(0,) * level for level in range(depth)]
    return [[rounds((*start, rank)) / max(1, rounds(start)) for rank in range(ranks)] for start in chains]


def choose(
    wanted: str | int | Sequence[Sequence[int]],
    depth: int,
    accuracies: Sequence[Sequence[float]] | None = None,
) -> Tree:
    """The tree that a user asks for: a name, a number of nodes to grow, or paths (a list, or its JSON).

    ``depth`` is how far the drafter guesses. Named trees are cut to it, grown ones keep to it, own ones must fit it.
    ``accuracies`` as in ``grow``; None takes the published ones. OptionError for what is none of these.
    """
    if depth < 1:
        raise OptionError("a tree needs heads: convert with --heads")
    if isinstance(wanted, str):
        text = wanted.strip()
        if text.lstrip("-").isdecimal():
            wanted = int(text)
        elif not text.startswith("["):
            return named(text).cut(depth)
        else:
            wanted = _paths(text)
    if isinstance(wanted, int):
        return grow((accuracies or PUBLISHED)[:depth], wanted)
    tree = of(wanted)
    if tree.depth > depth:
        raise OptionError(
            f"a tree of depth {tree.depth} needs {tree.depth} heads, and there are {depth}: cut it"
        )
    return tree


def _paths(text: str) -> list[list[int]]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, list) or not all(isinstance(path, list) for path in found):
        raise OptionError(f"tree {text!r} is no list of paths: write it as [[0], [1], [0, 0]]")
    return found


@dataclass(frozen=True)
class Draft:
    """Guesses and where they stand: ``tokens[i]`` at ``tree.paths[i]``."""

    tokens: list[int]
    tree: Tree

    @classmethod
    def chain(cls, tokens: list[int]) -> "Draft":
        return cls(tokens, chain(len(tokens)))

    def prefixes(self, tokens: list[int]) -> list[list[int]]:
        """Of each row, the tokens before it and its own: ``tokens``, the pending one last, then its guesses."""
        return [tokens + [self.tokens[row - 1] for row in route[1:]] for route in self.tree.routes]

    def accepted(self, picks: Sequence[int]) -> tuple[int, ...]:
        """The rows of the longest path whose every guess is what the verifier picks after the one before.

        ``picks`` [1 + n] are the verifier's next tokens after each row. The first row is the pending token's.
        """
        good = [True]
        for token, parent in zip(self.tokens, self.tree.parents, strict=True):
            good.append(good[parent] and token == picks[parent])
        return max((route for route, kept in zip(self.tree.routes, good, strict=True) if kept), key=len)
