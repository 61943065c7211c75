"""Greedy decoding in PyTorch, one token at a time and with Medusa drafts; both note what a comparison needs.

The rules are transformers' own logits processors. Of equal logits the lowest id wins. The Medusa loop is written from
the paper (https://arxiv.org/abs/2401.10774, greedy acceptance, a chain of guesses), not from ours.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from mlx_medusa.reference.runtime import Place

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (ids [1, n], scores [1, V]) -> scores


class Sentence(Protocol):
    """A sequence under way: its K/V and what it attends to."""

    @property
    def memory(self) -> torch.Tensor | None: ...

    def step(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Read W tokens: (hidden [W, D], logits [W, V] float32)."""
        ...

    def rewind(self, count: int) -> None:
        """Forget the last tokens."""
        ...


class Drafter(Protocol):
    """Heads in PyTorch."""

    max_drafts: int

    def begin(self, reference: "Reference", memory: torch.Tensor | None) -> None: ...

    def read(self, tokens: Sequence[int], states: torch.Tensor) -> None:
        """Be told of tokens [n] that are decided and read, and of the verifier's states [n, D] of them."""
        ...

    def propose(self, hidden: torch.Tensor, pending: int, count: int) -> list[int]:
        """The state [D] that predicted ``pending`` -> at most ``count`` guesses."""
        ...


@dataclass(frozen=True)
class Task:
    """A prompt, what edits the logits after it, and where the text ends."""

    prompt: list[int]
    processors: list[Processor]
    eos: frozenset[int]
    max_tokens: int


class Reference(Protocol):
    """What every family's oracle offers."""

    where: Place
    max_length: int
    drafter: Drafter | None

    def encode(self, content: Any) -> Any:
        """An input -> what the decoder attends to: 16 kHz samples [n] -> [1, S, D]; a text, as it is."""
        ...

    def ask(
        self, memory: Any, *, language: str | None = None, task: str = "transcribe", timestamps: bool = False,
        instruction: str | None = None, max_tokens: int | None = None, chat: bool = False,
    ) -> tuple[Task, tuple[str, float] | None]:  # fmt: skip
        """The prompt and rules; and (language, probability) where the language had to be told."""
        ...

    def decode(self, memory: Any, task: Task, width: int = 1) -> "Decoded":
        """Plain greedy decoding; at a width above 1 with the heads."""
        ...

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Ids [n] -> embeddings [n, D] as the first layer takes them, without positions."""
        ...

    @property
    def projection(self) -> torch.Tensor:
        """The rows [V, D] that states are multiplied by."""
        ...

    def text(self, tokens: list[int]) -> str:
        """The text of decided tokens, special ones left out."""
        ...


@dataclass
class Decoded:
    """Decided tokens, the end included, and of each the margin of the best logit to the second best and the log
    probability, both under the rules. ``rounds``: the tokens that each verifier pass decided.
    """

    tokens: list[int] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    def append(self, chosen: "Choice") -> None:
        self.tokens.append(chosen.token)
        self.margins.append(chosen.margin)
        self.logprobs.append(chosen.logprob)


@dataclass(frozen=True)
class Choice:
    token: int
    margin: float
    logprob: float


def choose(prefix: Sequence[int], logits: torch.Tensor, processors: Iterable[Processor]) -> Choice:
    """The best token after ``prefix`` under the rules; ``logits`` [V]."""
    ids = torch.tensor([list(prefix)], device=logits.device)
    scores = logits.float()[None]
    for processor in processors:
        scores = processor(ids, scores)
    row = scores[0].cpu()
    best, second = row.topk(2).values.tolist()
    token = int((row == best).nonzero()[0])  # argmax does not say which of equal ones it takes
    return Choice(token, best - second, float(row[token] - row.logsumexp(-1)))


@torch.inference_mode()
def greedy(sequence: Sentence, task: Task, max_length: int) -> Decoded:
    """One token a pass."""
    found = Decoded()
    tokens = list(task.prompt)
    ahead = tokens
    room = min(task.max_tokens, max_length - len(tokens))
    while len(found.tokens) < room and not task.eos.intersection(found.tokens[-1:]):
        _, logits = sequence.step(ahead)
        found.append(choose(tokens, logits[-1], task.processors))
        ahead = found.tokens[-1:]
        tokens += ahead
    found.rounds = [1] * (len(found.tokens) - 1)
    return found


@torch.inference_mode()
def medusa(sequence: Sentence, task: Task, max_length: int, drafter: Drafter, width: int) -> Decoded:
    """Up to ``width`` tokens a pass: the guesses that the model would have chosen too, and one of its own."""
    found = Decoded()
    tokens = list(task.prompt)
    room = min(task.max_tokens, max_length - len(tokens))
    hidden, logits = sequence.step(tokens)
    state = hidden[-1]
    drafter.read(tokens, hidden)
    found.append(choose(tokens, logits[-1], task.processors))
    tokens.append(found.tokens[-1])
    while len(found.tokens) < room and found.tokens[-1] not in task.eos:
        count = min(width - 1, room - len(found.tokens) - 1)
        drafts = drafter.propose(state, tokens[-1], count) if count > 0 else []
        ahead = [tokens[-1], *drafts]
        hidden, logits = sequence.step(ahead)
        decided = 0
        for row, draft in enumerate([*drafts, None]):
            chosen = choose(tokens, logits[row], task.processors)
            found.append(chosen)
            tokens.append(chosen.token)
            decided += 1
            if chosen.token != draft or chosen.token in task.eos:
                break
        state = hidden[decided - 1]
        drafter.read(ahead[:decided], hidden[:decided])
        sequence.rewind(len(drafts) + 1 - decided)
        found.rounds.append(decided)
    return found


def decode(reference: Reference, sequence: Sentence, task: Task, width: int = 1) -> Decoded:
    """Plain greedy decoding, or with the reference's heads at a width above 1."""
    if width == 1 or reference.drafter is None:
        return greedy(sequence, task, reference.max_length)
    reference.drafter.begin(reference, sequence.memory)
    return medusa(sequence, task, reference.max_length, reference.drafter, width)


def cache_name(model: Any) -> str:
    """What a model's ``forward`` calls its K/V cache: transformers has renamed it."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
