"""MERaLiON's tokens: a chat prompt with places for speech, and text out of what is written."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlx_medusa.errors import CheckpointError, OptionError

# What a folder without a chat template gets: Gemma's, for one turn.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_CONTENT = "Instruction: {query} \nFollow the text instruction based on the following audio: {speech}"
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
        stops = generation_config.get("eos_token_id")
        self.stops = frozenset([stops] if isinstance(stops, int) else stops or [])
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
        path, settings = folder / "tokenizer.json", folder / "generation_config.json"
        for needed in (path, settings):
            if not needed.is_file():
                raise CheckpointError(f"{needed}: missing from the model folder; convert the model again")
        try:
            config = json.loads(settings.read_text(encoding="utf-8"))
            tokenizer = Tokenizer.from_file(str(path))
            template = _read_template(folder)
        except Exception as error:  # tokenizers raises a bare Exception
            raise CheckpointError(
                f"{path}: cannot be read as a tokenizer ({error}); convert the model again"
            ) from error
        if not isinstance(config, dict):
            raise CheckpointError(f"{settings}: expected a JSON object; convert the model again")
        return cls(tokenizer, template, config, speech_token, path)

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
        text = render(self._template, content, self._source)
        return self._tokenizer.encode(text, add_special_tokens=False).ids  # the template brings the <bos>

    def _check(self, tokens: list[int], error: type[Exception], what: str) -> None:
        for name, token in ((self._speech, self.speech_token), ("<bos>", self._bos)):
            if (count := tokens.count(token)) != 1:
                raise error(f"{what} has {count} tokens {name}, but it must have one")

    def decode(self, tokens: Sequence[int], *, speakers: bool = False) -> str:
        """Text of the tokens, special ones left out; ``<Speaker1>:`` stays with ``speakers`` only."""
        text = self._tokenizer.decode([token for token in tokens if token not in self.stops])
        return (text if speakers else _SPEAKER.sub("", text)).strip()


def render(template: str, content: str, source: object) -> str:
    """The chat of one user turn that a Jinja template makes. Raises CheckpointError if the template is broken."""
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)  # as transformers
    try:
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": content}], add_generation_prompt=True, bos_token="<bos>",
            eos_token="<eos>",
        )  # fmt: skip
    except (TemplateError, TypeError) as error:
        raise CheckpointError(
            f"{source}: the chat template does not work ({error}); fetch it again"
        ) from error


def _read_template(folder: Path) -> str:
    """The chat template, from the places where transformers keeps it."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found = json.loads((folder / name).read_text(encoding="utf-8")).get("chat_template")
            if isinstance(found, list):  # several by name
                found = next((entry["template"] for entry in found if entry["name"] == "default"), None)
            if found:
                return str(found)
    return TEMPLATE
