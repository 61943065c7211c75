"""Text in, text out: a prompt through prefill and decode loop, piece by piece or whole."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Any

import mlx.core as mx

from mlx_medusa.errors import MedusaError, OptionError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Drafter, Limits, Run, Statistics, generate, prefill
from mlx_medusa.results import medusa_statistics
from mlx_medusa.text.options import TextOptions
from mlx_medusa.text.results import TextPiece, TextResult
from mlx_medusa.text.tokenizer import TextTokenizer
from mlx_medusa.tokenizer import Message

Prompt = str | Sequence[Message] | Sequence[int]


class TextGenerator:
    """A loaded text model with, if there are any, its Medusa heads. Load and use it on one thread."""

    def __init__(self, model: Any, tokenizer: TextTokenizer, drafter: Drafter | None = None):
        self.model = model
        self.tokenizer = tokenizer
        self.drafter = drafter

    def generate(self, prompt: Prompt, options: TextOptions | None = None, **overrides: Any) -> TextResult:
        """What the model writes after a prompt.

        ``prompt``: text, which goes in as it is; messages of a chat, [{"role": ..., "content": ...}], which go through
        the model's chat template; or tokens. ``overrides`` are fields of ``TextOptions``. Raises OptionError for
        options that do not fit the model, and for a prompt that is empty or does not fit its context.
        """
        return whole(list(self.stream(prompt, options, **overrides)))

    def stream(
        self, prompt: Prompt, options: TextOptions | None = None, **overrides: Any
    ) -> Iterator[TextPiece]:
        """As ``generate``, but each piece as soon as it is decided, with the statistics so far.

        Errors in the prompt or the options are raised here, before the first piece is asked for.
        """
        tokens, options = self.tokens(prompt), self.check(replace(options or TextOptions(), **overrides))
        return iter(Writing(self, tokens, KVCache(self.model.num_layers), options))

    def tokens(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt. OptionError if it is empty, or a chat and the model has no chat template."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not prompt:
            raise OptionError("the prompt is empty: give some text")
        if isinstance(prompt[0], int):
            return self.tokenizer.checked(list(prompt))  # type: ignore[arg-type]
        return self.tokenizer.chat(prompt)  # type: ignore[arg-type]

    def check(self, options: TextOptions) -> TextOptions:
        """The options as they apply to this model, with a seed where tokens are drawn. OptionError if they cannot."""
        options.shape(self.drafter)
        return options.seeded()


class Writing:
    """A text under way: its prompt is read when this is made, and iterating writes it.

    ``cache`` may hold the K/V of the first tokens of the prompt. Raises OptionError if the prompt does not fit the
    model's context.
    """

    def __init__(self, generator: TextGenerator, prompt: list[int], cache: KVCache, options: TextOptions):
        self._model, self._options = generator.model, options
        self._drafter = generator.drafter if options.medusa else None
        self._tree = options.shape(self._drafter)
        self._rules, self._sampler = options.rules(), options.sampler()
        self._limits = Limits(generator.tokenizer.stops, options.max_tokens)
        self._text = generator.tokenizer.detokenizer()
        self._statistics = Statistics()
        self._prompt_tokens, self._cached_tokens = len(prompt), cache.length
        start = perf_counter()
        self.state, self._first = prefill(
            self._model, prompt, cache, self._limits, self._rules, self._sampler
        )
        self._prompt_seconds, self._seconds = perf_counter() - start, 0.0

    def __iter__(self) -> Iterator[TextPiece]:
        """Yield pieces until one has a finish reason. Raises MedusaError where the numbers are not finite."""
        runs = generate(
            self._model, self.state, self._first, self._limits, rules=self._rules, drafter=self._drafter,
            tree=self._tree, sampler=self._sampler, statistics=self._statistics,
        )  # fmt: skip
        start = perf_counter()
        for run in runs:
            if not mx.isfinite(run.logprobs).all():
                raise MedusaError(
                    "the model computes numbers that are not finite: convert it again, or use --dtype float32"
                )
            text = self._text.add(run.tokens)
            self._seconds += perf_counter() - start
            yield self._piece(text, run)
            start = perf_counter()

    def _piece(self, text: str, run: Run) -> TextPiece:
        return TextPiece(
            text=text,
            tokens=run.tokens,
            finish_reason=run.finish_reason,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generation_tokens=len(self.state.tokens) - self.state.begin,
            seed=self._options.seed if self._sampler else None,
            medusa=medusa_statistics(
                self._statistics,
                self._tree.depth,
                1 + len(self._tree.paths),
                self._prompt_seconds,
                self._seconds,
            ),
        )


def whole(pieces: Sequence[TextPiece]) -> TextResult:
    """The text that all of its pieces make."""
    last = pieces[-1]
    return TextResult(
        text="".join(piece.text for piece in pieces),
        tokens=[token for piece in pieces for token in piece.tokens],
        finish_reason=last.finish_reason or "",
        prompt_tokens=last.prompt_tokens,
        cached_tokens=last.cached_tokens,
        seed=last.seed,
        prompt_tps=last.prompt_tps,
        generation_tps=last.generation_tps,
        medusa=last.medusa,
    )
