"""A text model's tokens: prompts out of text or a chat, and text out of what is written."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from mlx_medusa.checkpoint import read_json
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.text.detokenizer import Detokenizer
from mlx_medusa.tokenizer import Message, end_tokens, read_template, read_tokenizer, render


class TextTokenizer:
    """The tokenizer, the chat template and the end tokens of a model folder."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str | None,
        names: dict[str, str],
        stops: frozenset[int],
        vocab_size: int,
        source: str | Path,
    ):
        """``names``: bos_token, eos_token and such, for the template; ``stops``: the tokens that end a text."""
        self._tokenizer, self._template, self._names = tokenizer, template, names
        self._vocab_size, self._source = vocab_size, source
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        self.stops = stops
        if not stops:
            raise CheckpointError(
                f"{source}: no file of the folder names an 'eos_token_id', so no text would end; add it to "
                "generation_config.json"
            )

    @classmethod
    def from_folder(cls, folder: Path, vocab_size: int) -> "TextTokenizer":
        """Read tokenizer.json, the chat template, and the end tokens from wherever mlx-lm looks for them.

        Raises CheckpointError if one is broken, or if the tokenizer or the end tokens are missing.
        """
        tokenizer = read_tokenizer(folder)
        files = {
            name: read_json(folder / name) if (folder / name).is_file() else {}
            for name in ("config.json", "generation_config.json", "special_tokens_map.json", "tokenizer_config.json")
        }  # fmt: skip
        names = {
            name: value["content"] if isinstance(value, dict) else value
            for file in ("special_tokens_map.json", "tokenizer_config.json")
            for name, value in files[file].items()
            if name.endswith("_token") and isinstance(value, str | dict)
        }
        stops = end_tokens(files["generation_config.json"]) or end_tokens(files["config.json"])
        ending = tokenizer.token_to_id(names["eos_token"]) if "eos_token" in names else None
        stops |= {ending} if ending is not None else set()
        return cls(tokenizer, read_template(folder), names, stops, vocab_size, folder / "tokenizer.json")

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder says how a chat is written."""
        return self._template is not None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text as it is, behind a begin token where the tokenizer writes one and the text does not.

        OptionError if the text is empty.
        """
        if not text:
            raise OptionError("the prompt is empty: give some text")
        begun = text.startswith(self._names.get("bos_token") or "\0")
        return self._tokens(text, begin=not begun)

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a chat, up to where the answer to its last message begins.

        OptionError if there is no message with text, or the folder has no chat template.
        """
        if self._template is None:
            raise OptionError(
                f"{self._source}: this model has no chat template, so it may be no chat model: give it plain text "
                "(--ignore-chat-template), or put its template beside the file as chat_template.jinja"
            )
        for message in messages:
            if not {"role", "content"} <= set(message) or not isinstance(message["content"], str):
                raise OptionError(f"message {message!r} is not of the form {{'role': ..., 'content': text}}")
        if not messages or not messages[-1]["content"].strip():
            raise OptionError("the prompt is empty: give some text")
        text = render(self._template, messages, self._names, self._source)
        return self._tokens(text, begin=False)

    def _tokens(self, text: str, *, begin: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # half of a pair, or a byte that the command line could not read
            raise OptionError(f"the prompt is not UTF-8 text ({error.reason} at {error.start})") from error
        return self.checked(self._tokenizer.encode(text, add_special_tokens=begin).ids)

    def checked(self, tokens: list[int]) -> list[int]:
        """The same tokens; CheckpointError if the model does not have one of them."""
        if wrong := [token for token in tokens if not 0 <= token < self._vocab_size]:
            raise CheckpointError(
                f"{self._source}: token {wrong[0]} is not among the model's {self._vocab_size} tokens: "
                "it is not this model's tokenizer"
            )
        return tokens

    def detokenizer(self) -> Detokenizer:
        """A new one, for the tokens of one text; special tokens have no text."""
        return Detokenizer(self._tokenizer.decode, self._special | self.stops)
