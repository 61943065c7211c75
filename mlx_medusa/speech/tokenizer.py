"""Whisper's tokens: the text ones through ``tokenizers``, the special ones by name."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlx_medusa.checkpoint import read_json
from mlx_medusa.errors import CheckpointError
from mlx_medusa.tokenizer import needed, read_tokenizer


class WhisperTokenizer:
    """The tokenizer and the generation settings of a model folder."""

    def __init__(self, tokenizer: Tokenizer, generation_config: dict[str, Any], source: str | Path):
        self._tokenizer = tokenizer
        self._source = source
        self.is_multilingual: bool = generation_config["is_multilingual"]
        self.suppressed: list[int] = generation_config.get("suppress_tokens") or []
        self.max_initial_timestamp: int | None = generation_config.get("max_initial_timestamp_index")
        self.suppressed_at_begin: list[int] = generation_config.get("begin_suppress_tokens") or []
        self.eot = self._id("<|endoftext|>")
        self.stops = frozenset([self.eot])
        self.sot = self._id("<|startoftranscript|>")
        self.no_timestamps = self._id("<|notimestamps|>")
        self.timestamp_begin = self.no_timestamps + 1
        self.no_speech = self._id("<|nospeech|>", "<|nocaptions|>")
        self.tasks = {task: self._id(f"<|{task}|>") for task in ("transcribe", "translate")}
        languages = (generation_config.get("lang_to_id") or {}) if self.is_multilingual else {}
        self.languages: dict[str, int] = {name.strip("<|>"): token for name, token in languages.items()}

    @classmethod
    def from_folder(cls, folder: Path) -> "WhisperTokenizer":
        """Read tokenizer.json and generation_config.json; CheckpointError if one is missing or broken."""
        settings = needed(folder, "generation_config.json")
        config = read_json(settings)
        if not isinstance(config.get("is_multilingual"), bool):
            raise CheckpointError(f"{settings}: 'is_multilingual' is missing; convert the model again")
        return cls(read_tokenizer(folder), config, folder / "tokenizer.json")

    def _id(self, *names: str) -> int:
        for name in names:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return token
        raise CheckpointError(f"{self._source}: has no token {names[0]}, so it is no Whisper tokenizer")

    def prompt(self, language: str | None, task: str, *, timestamps: bool = False) -> list[int]:
        """The tokens before the text; ``language`` is a code and needed when multilingual."""
        start = [self.sot]
        if self.is_multilingual:
            assert language is not None
            start += [self.languages[language], self.tasks[task]]
        return start if timestamps else [*start, self.no_timestamps]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special ones."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, special ones left out."""
        return self._tokenizer.decode([token for token in tokens if token < self.eot])
