"""A chat that keeps its K/V cache: each turn reads only what is new."""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.text.generator import TextGenerator, Writing
from mlx_medusa.text.options import TextOptions
from mlx_medusa.text.results import TextPiece


class Conversation:
    """A chat with a model: ``messages`` so far, and the K/V of their tokens.

    Each answer is the one that the model would give to all of the messages at once. Of these only the tokens behind the
    longest part that the cache holds already are read: usually the last answer's end and the new question.
    """

    def __init__(
        self, generator: TextGenerator, system_prompt: str | None = None, options: TextOptions | None = None
    ):
        self.generator, self.system_prompt = generator, system_prompt
        self.options = options or TextOptions()
        self._answer: Generator[TextPiece, None, None] | None = None  # the one under way
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self._stop()
        self.messages: list[dict[str, str]] = []
        if self.system_prompt is not None:
            self.messages.append({"role": "system", "content": self.system_prompt})
        self._cache = KVCache(self.generator.model.num_layers)
        self._tokens: list[int] = []  # what the cache holds

    def ask(self, question: str, **overrides: Any) -> Generator[TextPiece, None, None]:
        """Read a question, and return its answer piece by piece; ``overrides`` are fields of ``TextOptions``.

        An answer that is left early or interrupted stays in the conversation as far as it was given. OptionError for a
        question that is empty or does not fit the context behind what was said; it is not remembered.
        """
        self._stop()
        options = self.generator.check(replace(self.options, **overrides))
        asked = {"role": "user", "content": question}
        prompt = self.generator.tokenizer.chat([*self.messages, asked])
        self._keep(self._tokens, shared(self._tokens, prompt[:-1]))  # one token at least must be read
        writing = Writing(self.generator, prompt, self._cache, options)
        self._tokens = prompt
        self._answer = self._write(asked, writing)
        return self._answer

    def _write(self, asked: dict[str, str], writing: Writing) -> Generator[TextPiece, None, None]:
        answer, between = "", False
        try:
            for piece in writing:
                answer += piece.text
                yield piece
            between = True
        except GeneratorExit:
            between = True
            raise
        finally:
            # an interrupt within a pass leaves rows that nobody vouches for, but those of the prompt are sure
            tokens = writing.state.tokens
            self._keep(tokens, len(tokens) - 1 if between else writing.state.begin)
            self.messages += [asked, {"role": "assistant", "content": answer}]

    def _keep(self, tokens: list[int], count: int) -> None:
        """Keep the K/V of the first ``count`` of ``tokens``, which the cache holds."""
        self._cache.rewind(self._cache.length - min(count, self._cache.length))
        self._tokens = tokens[: self._cache.length]

    def _stop(self) -> None:
        """End an answer that was left without a word: it must not go on in a cache that has gone on."""
        if self._answer is not None:
            self._answer.close()
            self._answer = None


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The length of the longest common beginning."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
