"""MERaLiON's tokens: a chat prompt with places for speech, and text out of what is written."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlx_medusa.checkpoint import read_json
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.tokenizer import end_tokens, needed, read_template, read_tokenizer, render

# What a folder without a chat template gets: Gemma's, for one turn.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_CONTENT = "Instruction: {query} \nFollow the text instruction based on the following audio: {speech}"
_NAMES = {"bos_token": "<bos>", "eos_token": "<eos>"}
_SPEAKER = re.compile(r"<Speaker\s*\d+>:?\s*")


class ChatTokenizer:
    """The tokenizer, chat template and generation settings of a MERaLiON-2 folder."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        generation_config: dict[str, Any],
        speech_token: int,
        source: str | Path,
    ):
        """Raises CheckpointError unless the template keeps one place for speech and gives one <bos>."""
        self._tokenizer, self._template, self._source = tokenizer, template, source
        self.stops = end_tokens(generation_config)
        self.no_repeat: int = generation_config.get("no_repeat_ngram_size") or 0
        self.speech_token = speech_token
        name, bos = tokenizer.id_to_token(speech_token), tokenizer.token_to_id("<bos>")
        if name is None or bos is None:
            raise CheckpointError(
                f"{source}: has no token {speech_token} for speech, or no <bos>; convert again"
            )
        self._speech, self._bos = name, bos
        if not self.stops:
            raise CheckpointError(f"{source}: generation_config.json names no 'eos_token_id'; convert again")
        self._check(self._encode("Transcribe."), CheckpointError, f"{source}: the chat template")

    @classmethod
    def from_folder(cls, folder: Path, speech_token: int) -> "ChatTokenizer":
        """Read tokenizer.json, generation_config.json and the chat template; CheckpointError if one is broken."""
        config = read_json(needed(folder, "generation_config.json"))
        template = read_template(folder) or TEMPLATE
        return cls(read_tokenizer(folder), template, config, speech_token, folder / "tokenizer.json")

    def prompt(self, query: str, rows: int) -> tuple[list[int], int]:
        """(tokens with ``rows`` speech tokens in a row, position of the first of them). OptionError for a query that
        holds control tokens.
        """
        tokens = self._encode(query)
        self._check(tokens, OptionError, f"instruction {query!r}: the prompt")
        start = tokens.index(self.speech_token)
        return tokens[:start] + [self.speech_token] * rows + tokens[start + 1 :], start

    def _encode(self, query: str) -> list[int]:
        content = _CONTENT.format(query=query, speech=self._speech)
        messages = [{"role": "user", "content": content}]
        text = render(self._template, messages, _NAMES, self._source)
        return self._tokenizer.encode(text, add_special_tokens=False).ids  # the template brings the <bos>

    def _check(self, tokens: list[int], error: type[Exception], what: str) -> None:
        for name, token in ((self._speech, self.speech_token), ("<bos>", self._bos)):
            if (count := tokens.count(token)) != 1:
                raise error(f"{what} has {count} tokens {name}, but it must have one")

    def decode(self, tokens: Sequence[int], *, speakers: bool = False) -> str:
        """Text of the tokens, special ones left out; ``<Speaker1>:`` stays with ``speakers`` only."""
        text = self._tokenizer.decode([token for token in tokens if token not in self.stops])
        return (text if speakers else _SPEAKER.sub("", text)).strip()
