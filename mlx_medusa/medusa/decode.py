"""Decoding with drafts: prefill, then rounds of propose, verify, accept.

What comes out is what plain decoding writes: a guess is kept only where it equals the token that the verifier itself
picks there under the rules, the best one or, with a sampler, the one it draws. Plain decoding is the same loop with
width 1, that is without drafts. Drafts are chains, or trees of alternatives.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol, runtime_checkable

import mlx.core as mx

from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.rules import Rule, pick
from mlx_medusa.medusa.sampling import Sampler
from mlx_medusa.medusa.trees import Draft, Path, Tree, chain
from mlx_medusa.models.layers import logsumexp

PIECE = 512  # tokens of a prompt that are read in one pass, which bounds the memory of a long one


class Verifier(Protocol):
    """What the loop needs from a model."""

    @property
    def max_length(self) -> int:
        """Tokens that a sequence may hold, prompt included."""
        ...

    def step(self, tokens: mx.array, positions: mx.array, mask: mx.array | None, cache: KVCache) -> mx.array:
        """Tokens and positions [B, W], mask [B, 1, W, length + W] bool or None (all visible) -> hidden [B, W, D].

        Writes W rows of K/V. ``hidden`` are the vectors that feed the vocabulary projection.
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., D] -> [..., V]"""
        ...


class Drafter(Protocol):
    """Something that guesses the tokens after the pending one."""

    @property
    def max_drafts(self) -> int:
        """How many tokens ahead it can guess."""
        ...

    def begin(self, memory: mx.array | None) -> None:
        """Start a sequence; ``memory`` is what the verifier attends to besides its past (Whisper: encoder output)."""
        ...

    def propose(self, hidden: mx.array, pending: int, count: int) -> list[int]:
        """Guess at most ``count`` tokens after ``pending``.

        ``hidden`` [1, n, D] are the verifier's states of all rows kept since the last call, at the first call those
        that ``prefill`` read; the last one predicted ``pending``.
        """
        ...

    def propose_tree(self, hidden: mx.array, pending: int, tree: Tree) -> list[int]:
        """Guess a token for each node of ``tree``, in the order of its paths. Otherwise as ``propose``."""
        ...


@runtime_checkable
class Follower(Protocol):
    """What a drafter also is that looks at the tokens themselves."""

    def follow(self, tokens: Sequence[int]) -> None:
        """Be told, after ``begin``, of the list of prompt and decided tokens. It grows; the last one is pending."""
        ...


@dataclass(frozen=True)
class Limits:
    """Where a sequence ends: with the first token of ``eos``, or after ``max_tokens`` (eos included)."""

    eos: frozenset[int]
    max_tokens: int


@dataclass
class State:
    """A sequence under way. Its last token is pending: decided, but its K/V are not in the cache yet."""

    tokens: list[int]  # prompt and decided tokens
    begin: int  # length of the prompt
    cache: KVCache
    hidden: mx.array  # [1, n, D] of the last pass, of the kept rows; the last one predicted the pending token


@dataclass(frozen=True)
class Run:
    """Tokens decided by one pass, in order."""

    tokens: list[int]
    logprobs: mx.array  # [len(tokens)] float32, log probabilities under the rules
    finish_reason: str | None  # "stop" (a token of eos), "length" (token or context limit), None: it goes on
    path: Path = ()  # the ranks of the guesses among the tokens; they come first


@dataclass(frozen=True)
class Verdict:
    """What the verifier says to W rows."""

    hidden: mx.array  # [1, W, D]
    picks: list[int]  # the verifier's own next token after each row
    logits: mx.array  # [W, V] float32, under the rules


@dataclass
class Statistics:
    """Counts over the rounds of one or more sequences; the token that prefill decides is not among them."""

    tokens: int = 0  # decided by rounds
    rounds: int = 0  # verifier passes after prefill
    drafted: int = 0  # guesses offered to the verifier
    accepted: int = 0  # guesses among ``tokens``
    accepted_per_head: list[int] = field(default_factory=list)  # by distance from the pending token
    paths: Counter[Path] = field(default_factory=Counter)  # rounds by the ranks of the guesses that were kept
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    @property
    def tokens_per_verify(self) -> float:
        """Mean number of tokens that a verifier pass decides; 0 without a pass."""
        return self.tokens / self.rounds if self.rounds else 0.0

    def count(self, run: Run, draft: Draft) -> None:
        """Add one round."""
        self.tokens += len(run.tokens)
        self.rounds += 1
        self.drafted += len(draft.tokens)
        self.accepted += len(run.path)
        self.paths[run.path] += 1
        self.accepted_per_head += [0] * (draft.tree.depth - len(self.accepted_per_head))
        for head in range(len(run.path)):
            self.accepted_per_head[head] += 1


def chain_pass(verifier: Verifier, tokens: Sequence[int], cache: KVCache) -> mx.array:
    """One pass over W tokens that follow the cached ones, each seeing those before it: hidden [1, W, D]."""
    width, start = len(tokens), cache.length
    positions = mx.arange(start, start + width)
    mask = None
    if width > 1:
        mask = (mx.arange(start + width)[None] <= positions[:, None])[None, None]  # [1, 1, W, start + W]
    return verifier.step(mx.array([list(tokens)]), positions[None], mask, cache)


def draft_pass(verifier: Verifier, pending: int, draft: Draft, cache: KVCache) -> mx.array:
    """One pass over the pending token and the guesses, each seeing only the ones that it follows: [1, 1 + n, D]."""
    tokens, tree = [pending, *draft.tokens], draft.tree
    if tree.is_chain:
        return chain_pass(verifier, tokens, cache)
    positions = mx.array(tree.depths + cache.length)
    past = mx.ones((len(tokens), cache.length), dtype=mx.bool_)
    mask = mx.concatenate([past, mx.array(tree.mask)], axis=1)[None, None]  # [1, 1, 1 + n, length + 1 + n]
    return verifier.step(mx.array([tokens]), positions[None], mask, cache)


def prefill(
    verifier: Verifier,
    prompt: Sequence[int],
    cache: KVCache,
    limits: Limits,
    rules: Sequence[Rule] = (),
    sampler: Sampler | None = None,
) -> tuple[State, Run]:
    """Read the prompt and decide the first token. The same call with and without drafts.

    The rows that ``cache`` holds already must be those of the first tokens of the prompt (a conversation that goes on):
    only the others are read, and ``state.hidden`` holds the states of these. Raises OptionError if the prompt leaves no
    room for a token.
    """
    if not 0 < len(prompt) < verifier.max_length:
        raise OptionError(f"a prompt of {len(prompt)} tokens does not fit a context of {verifier.max_length}")
    if cache.length >= len(prompt):
        raise ValueError(f"the cache holds {cache.length} of {len(prompt)} tokens, so none is left to read")
    pieces = []
    with _undone_if_broken(cache):
        for start in range(cache.length, len(prompt), PIECE):
            pieces.append(chain_pass(verifier, prompt[start : start + PIECE], cache))
            mx.eval(pieces[-1])
        hidden = pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=1)
        picks, logits = pick(rules, [prompt], verifier.logits(hidden[0, -1:]), sampler)
    state = State(list(prompt), len(prompt), cache, hidden)
    return state, _append(verifier, state, picks, logits, limits)


@contextmanager
def _undone_if_broken(cache: KVCache) -> Iterator[None]:
    """An error or an interrupt leaves the cache as it was."""
    kept = cache.length
    try:
        yield
    except BaseException:
        cache.rewind(cache.length - kept)
        raise


def propose(drafter: Drafter | None, state: State, tree: Tree) -> Draft:
    """Guesses after the pending token, for the part of the tree that the drafter reaches."""
    tree = tree.cut(drafter.max_drafts if drafter else 0)
    if drafter is None or not tree.depth:
        return Draft.chain([])
    if tree.is_chain:
        return Draft.chain(drafter.propose(state.hidden, state.tokens[-1], tree.depth))
    return Draft(drafter.propose_tree(state.hidden, state.tokens[-1], tree), tree)


def verify(
    verifier: Verifier, state: State, draft: Draft, rules: Sequence[Rule], sampler: Sampler | None = None
) -> Verdict:
    """One pass over the pending token and the guesses, each row under the rules of its own prefix."""
    with _undone_if_broken(state.cache):
        hidden = draft_pass(verifier, state.tokens[-1], draft, state.cache)
        prefixes = draft.prefixes(state.tokens)
        picks, logits = pick(rules, prefixes, verifier.logits(hidden[0]), sampler, draft)
        return Verdict(hidden, picks, logits)


def accept(verifier: Verifier, state: State, draft: Draft, verdict: Verdict, limits: Limits) -> Run:
    """Keep the longest path of guesses that the verifier picks too, then its own token after that; of the cache, keep
    what this needs.
    """
    path = draft.accepted(verdict.picks)
    picks = [verdict.picks[row] for row in path]
    base = state.cache.length - len(verdict.picks)
    run = _append(verifier, state, picks, _rows(verdict.logits, path), limits)
    kept = path[: len(run.tokens)]
    state.hidden = _rows(verdict.hidden[0], kept)[None]
    state.cache.keep(base, [base + row for row in kept])
    last = path[min(len(path) - 1, len(run.tokens))]  # the row of the last guess among the tokens
    return replace(run, path=draft.tree.paths[last - 1] if last else ())


def _rows(x: mx.array, rows: Sequence[int]) -> mx.array:
    """Rows of [W, ...]; a chain's come first and are not gathered."""
    return x[: len(rows)] if rows[-1] == len(rows) - 1 else x[mx.array(list(rows))]


def generate(
    verifier: Verifier,
    state: State,
    first: Run,
    limits: Limits,
    *,
    rules: Sequence[Rule] = (),
    drafter: Drafter | None = None,
    memory: mx.array | None = None,
    width: int = 1,
    tree: Tree | None = None,
    sampler: Sampler | None = None,
    statistics: Statistics | None = None,
) -> Iterator[Run]:
    """Yield the runs of a prefilled sequence, ``first`` included, until one has a finish reason.

    ``width`` is the number of rows of a verifier pass, that is one more than the guesses of a chain; a ``tree`` takes
    its place. Both are cut to what the drafter can guess and what the limits leave room for. ``sampler`` is the one of
    ``prefill``. The caller may stop at any run: the cache then holds every token of ``state`` but the pending one.
    """
    statistics = statistics if statistics is not None else Statistics()
    tree = chain(width - 1) if tree is None else tree
    if not tree.paths or first.finish_reason is not None:
        drafter = None  # nothing will be guessed
    if drafter is not None:
        drafter.begin(memory)
    if isinstance(drafter, Follower):
        drafter.follow(state.tokens)
    run = first
    yield run
    while run.finish_reason is None:
        start = perf_counter()
        draft = propose(drafter, state, tree.cut(_room(verifier, state, limits) - 1))
        middle = perf_counter()
        verdict = verify(verifier, state, draft, rules, sampler)
        run = accept(verifier, state, draft, verdict, limits)
        statistics.count(run, draft)
        statistics.draft_seconds += middle - start
        statistics.verify_seconds += perf_counter() - middle
        yield run


def _room(verifier: Verifier, state: State, limits: Limits) -> int:
    """How many more tokens may be decided."""
    return min(state.begin + limits.max_tokens, verifier.max_length) - len(state.tokens)


def _append(verifier: Verifier, state: State, picks: list[int], logits: mx.array, limits: Limits) -> Run:
    """Append ``picks`` up to the first end; row i of ``logits`` [W, V] decided ``picks[i]``."""
    room = _room(verifier, state, limits)
    end = next((i + 1 for i, token in enumerate(picks) if token in limits.eos), None)
    tokens = picks[: min(end or len(picks), room)]
    reason = "stop" if end == len(tokens) else "length" if len(tokens) == room else None
    state.tokens += tokens
    rows = logits[: len(tokens)]
    chosen = mx.take_along_axis(rows, mx.array(tokens)[:, None], axis=-1)[:, 0]
    logprobs = chosen - logsumexp(rows)
    mx.async_eval(logprobs)  # nobody waits for it, but it must let go of the logits
    return Run(tokens, logprobs, reason)
