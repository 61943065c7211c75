"""Hold MLX against a record: the same tokens, margins and rounds, or where and by how much they part."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from mlx_medusa.parity.candidate import Candidate, Decoded, decode
from mlx_medusa.parity.inputs import Input
from mlx_medusa.parity.records import Entry, by_input


@dataclass(frozen=True)
class Bounds:
    """What may differ. ``margin``: a record's lead, in logits, up to which another token counts as a near-tie.
    ``drift``: how far margins and log probabilities may lie from the record's; None: they are not held against it.
    """

    margin: float
    drift: float | None


# By the precision of the record and of MLX, the coarser of the two. float32 from measurements (see the README): sums of
# the same numbers in another order; half precisions keep 11 and 8 bits of logits of about 30.
BOUNDS = {
    "float32": Bounds(1e-3, 2e-3),
    "float16": Bounds(0.1, None),
    "bfloat16": Bounds(0.5, None),
}


@dataclass(frozen=True)
class Result:
    """How one entry fared. ``step`` is the first at which the tokens part, with both tokens (None: the text ends there)
    and the record's margin there.
    """

    label: str
    width: int
    verdict: str  # equal, near-tie, different, drift (equal tokens, other numbers), rounds, prompt, language, missing
    tokens: int = 0
    step: int | None = None
    ours: int | None = None
    reference: int | None = None
    margin: float | None = None
    drift: float = 0.0  # the largest difference of margins and log probabilities up to there
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.verdict not in ("equal", "near-tie")

    def line(self) -> str:
        """For people."""
        start = f"{self.verdict:9s} {self.label} (width {self.width}): "
        if self.verdict == "equal":
            return start + f"{self.tokens} tokens, numbers within {self.drift:.1e}"
        if self.step is None:
            return start + self.detail
        ours, theirs = ("the end" if token is None else token for token in (self.ours, self.reference))
        return (
            start
            + f"step {self.step}: token {ours}, reference {theirs}, reference's margin {self.margin:.4g}"
        )


@dataclass
class Total:
    """Counts over the entries of a check."""

    results: list[Result] = field(default_factory=list)

    def count(self, verdict: str) -> int:
        return sum(result.verdict == verdict for result in self.results)

    @property
    def failed(self) -> int:
        return sum(result.failed for result in self.results)

    @property
    def drift(self) -> float:
        return max((result.drift for result in self.results), default=0.0)

    def line(self) -> str:
        """For people: the last line."""
        ties = [
            result.margin
            for result in self.results
            if result.verdict == "near-tie" and result.margin is not None
        ]
        tokens = sum(result.tokens for result in self.results)
        parts = [f"{self.count('equal')} of {len(self.results)} equal ({tokens} tokens)"]
        parts.append(f"{len(ties)} near-ties" + (f" (margins up to {max(ties):.4g})" if ties else ""))
        parts.append(f"{self.failed} failed")
        return ", ".join(parts) + f"; numbers within {self.drift:.1e}"


def check(
    candidate: Candidate,
    entries: Iterable[Entry],
    inputs: Iterable[Input],
    bounds: Bounds,
    widths: Sequence[int] = (1,),
    rounds_width: int | None = None,
) -> Iterator[Result]:
    """A result per entry and width, in the order of the inputs; entries without an input come last, as missing.

    ``rounds_width`` is the width at which the record's heads were used, if these are the same heads: there the number
    of tokens that each pass decided is held against the record's too.
    """
    wanted = by_input(entries)
    for given in inputs:
        questions = wanted.pop(given.sha256, [])
        memory = candidate.encode(given.content) if questions else None
        for entry in questions:
            for width in widths:
                found = decode(candidate, memory, entry.asked, width, entry.tokens)
                yield compare(entry, found, bounds, width, rounds=width == rounds_width)
    for questions in wanted.values():
        for entry in questions:
            detail = f"no input has the SHA-256 {entry.sha256[:12]}..."
            yield Result(entry.label, widths[0], "missing", detail=detail)


def compare(entry: Entry, found: Decoded, bounds: Bounds, width: int, rounds: bool = False) -> Result:
    """Hold one decoded sequence against its entry."""
    refused = partial(Result, entry.label, width)
    if entry.detected and found.detected and entry.detected[0] != found.detected[0]:
        pair = [f"{code} ({chance:.3f})" for code, chance in (found.detected, entry.detected)]
        return refused("language", detail=f"{pair[0]}, reference {pair[1]}")
    if found.prompt != entry.prompt:
        return refused("prompt", detail=f"tokens {found.prompt}, reference {entry.prompt}")
    pairs = zip(found.tokens, entry.tokens, strict=False)
    shorter = min(len(found.tokens), len(entry.tokens))
    step = next((place for place, (ours, theirs) in enumerate(pairs) if ours != theirs), shorter)
    drift = _drift(found, entry, step)
    if found.tokens != entry.tokens:
        margin = entry.margins[step] if step < len(entry.margins) else math.inf
        verdict = "near-tie" if margin <= bounds.margin else "different"
        ours, theirs = (row[step] if step < len(row) else None for row in (found.tokens, entry.tokens))
        return refused(verdict, step, step, ours, theirs, margin, drift)
    if bounds.drift is not None and not drift <= bounds.drift:
        return refused(
            "drift", step, drift=drift, detail=f"equal tokens, but numbers are up to {drift:.2g} apart"
        )
    if rounds and entry.rounds is not None and found.rounds != entry.rounds:
        detail = f"equal tokens, but by pass {found.rounds}, reference {entry.rounds}"
        return refused("rounds", step, drift=drift, detail=detail)
    return refused("equal", step, drift=drift)


def _drift(found: Decoded, entry: Entry, count: int) -> float:
    """The largest difference of the margins and log probabilities of the first ``count`` tokens."""
    ours = [*found.margins[:count], *found.logprobs[:count]]
    theirs = [*entry.margins[:count], *entry.logprobs[:count]]
    apart = [_apart(a, b) for a, b in zip(ours, theirs, strict=True)]
    return math.nan if any(map(math.isnan, apart)) else max(apart, default=0.0)


def _apart(a: float, b: float) -> float:
    """The difference of two numbers of which both may be infinite."""
    return 0.0 if a == b else abs(a - b)


def bounds_for(record_dtype: str, our_dtype: str, margin: float | None, drift: float | None) -> Bounds:
    """The bounds of the coarser of two precisions, or those that are given."""
    order: list[str] = list(BOUNDS)
    base = BOUNDS[order[max(order.index(record_dtype), order.index(our_dtype))]]
    return Bounds(base.margin if margin is None else margin, base.drift if drift is None else drift)
