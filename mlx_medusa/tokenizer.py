"""What speech and text share of a folder's tokenizer: its files, and the chat template that makes a prompt."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mlx_medusa.checkpoint import read_json
from mlx_medusa.errors import CheckpointError, OptionError

Message = Mapping[str, str]  # {"role": "system" | "user" | "assistant", "content": text}, as in mlx-lm


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer.json of a model folder. Raises CheckpointError if it is missing or broken."""
    path = needed(folder, "tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises a bare Exception
        raise CheckpointError(
            f"{path}: cannot be read as a tokenizer ({error}); convert the model again"
        ) from error


def needed(folder: Path, name: str) -> Path:
    """A file that a model folder must have. Raises CheckpointError if it is not there."""
    path = folder / name
    if not path.is_file():
        raise CheckpointError(f"{path}: missing from the model folder; convert the model again")
    return path


def end_tokens(config: Mapping[str, Any]) -> frozenset[int]:
    """The ids that ``eos_token_id`` of a generation_config.json or config.json names: one, several or none."""
    found = config.get("eos_token_id")
    return frozenset([found] if isinstance(found, int) else found or [])


def read_template(folder: Path) -> str | None:
    """The chat template of a folder, from the places where transformers keeps it; None if it has none.

    Raises CheckpointError for a file that is broken.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{file}: cannot be read ({error}); fetch the file again") from error
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            found = read_json(folder / name).get("chat_template")
            if isinstance(found, list):  # several by name
                named = {entry.get("name"): entry.get("template") for entry in found}
                found = named.get("default")
            if found:
                return str(found)
    return None


def render(
    template: str,
    messages: Sequence[Message],
    names: Mapping[str, str],
    source: object,
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text that a Jinja chat template makes of ``messages``, as transformers' ``apply_chat_template``.

    ``names``: bos_token and whatever else the template may write; ``add_generation_prompt`` opens the answer. Raises
    OptionError if the template refuses the messages, and CheckpointError if it is broken; ``source`` names it.
    """
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(reason: str) -> None:
        raise OptionError(f"{source}: the chat template refuses these messages: {reason}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **style: json.dumps(value, ensure_ascii=False, **style)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)  # the user's own day
    try:
        return environment.from_string(template).render(
            **names, messages=list(messages), tools=None, documents=None, add_generation_prompt=add_generation_prompt
        )  # fmt: skip
    except (TemplateError, TypeError) as error:
        raise CheckpointError(
            f"{source}: the chat template does not work ({error}); fetch it again"
        ) from error
