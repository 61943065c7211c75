"""How to write a text; names as in mlx-lm."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import SystemRandom

import mlx.core as mx

from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.decode import Drafter
from mlx_medusa.medusa.rules import Processors, Rule
from mlx_medusa.medusa.sampling import Sampler, make_sampler
from mlx_medusa.medusa.trees import Tree, chain, choose
from mlx_medusa.medusa.width import check_width

ACCEPTANCE = ("exact", "typical")


@dataclass(frozen=True)
class TextOptions:
    """How to write; the defaults are exact greedy decoding with all heads.

    ``max_tokens``: the most tokens that are written.

    ``temp``: 0 takes the best token, more draws from the distribution at this temperature; ``top_p``, ``top_k``,
    ``min_p`` leave unlikely tokens out, in mlx-lm's way. ``seed``: the same seed draws the same text, with and without
    heads; None takes another each time. ``repetition_penalty`` of the last ``repetition_context_size`` tokens, and
    ``logits_processors``: as in mlx-lm.

    ``medusa``: False decodes without heads. ``width``: rows of a verifier pass, one more than the guesses in a chain;
    None takes all heads. ``tree``: guess alternatives too: a name (``mc_sim_7b_63``), a number of nodes, or paths, as
    ``mlx_medusa.medusa.trees.choose`` says. ``acceptance``: "exact", or with a temperature "typical", Medusa's rule,
    which keeps likely guesses though others were drawn: faster, and texts of another distribution.
    """

    max_tokens: int = 256
    temp: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float | None = None
    repetition_context_size: int = 20
    logits_processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = ()
    medusa: bool = True
    width: int | None = None
    tree: str | int | Sequence[Sequence[int]] | None = None
    acceptance: str = "exact"

    def __post_init__(self) -> None:
        for name in ("width", "max_tokens", "repetition_context_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise OptionError(f"{name} is {value}, but must be at least 1")
        if self.repetition_penalty is not None and not self.repetition_penalty > 0:
            raise OptionError(
                f"repetition_penalty is {self.repetition_penalty}, but must be a positive number"
            )
        if self.acceptance not in ACCEPTANCE:
            raise OptionError(
                f"acceptance {self.acceptance!r} is not known: use one of {', '.join(ACCEPTANCE)}"
            )
        if self.width is not None and self.tree is not None:
            raise OptionError("width is for a chain of guesses: give it or a tree, not both")
        if not self.medusa and (self.tree is not None or (self.width or 1) > 1):
            raise OptionError(
                "width and tree are for guesses, and without Medusa there are none: leave them out"
            )
        # what cannot be is refused, though at temperature 0 it would change nothing
        Sampler(self.temp or 1.0, self.top_p, self.min_p, self.top_k, self.seed or 0)
        self.sampler()

    def sampler(self) -> Sampler | None:
        """What draws the tokens; None for greedy decoding."""
        return make_sampler(
            self.temp, self.top_p, self.min_p, self.top_k, self.seed or 0, typical=self.acceptance == "typical"
        )  # fmt: skip

    def seeded(self) -> "TextOptions":
        """The same with a seed: where tokens are drawn and none is given, a new one."""
        if self.seed is not None or not self.temp:
            return self
        return replace(self, seed=SystemRandom().getrandbits(32))

    def rules(self) -> list[Rule]:
        """What edits the logits."""
        processors = list(self.logits_processors)
        if self.repetition_penalty not in (None, 1):
            from mlx_lm.sample_utils import make_repetition_penalty

            processors.append(make_repetition_penalty(self.repetition_penalty, self.repetition_context_size))
        return [Processors(processors)] if processors else []

    def shape(self, drafter: Drafter | None) -> Tree:
        """Where the guesses of a pass stand. OptionError if ``drafter`` cannot guess so far."""
        drafter = drafter if self.medusa else None
        if self.tree is None:
            return chain(check_width(self.width, drafter) - 1)
        accuracies = getattr(drafter, "accuracies", None)  # of these heads, if their file tells
        return choose(self.tree, drafter.max_drafts if drafter else 0, accuracies)
