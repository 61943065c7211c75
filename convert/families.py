"""What differs between the families of models: the tokenizer and the small files of a folder, and the usual recipe."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from convert import generation, llama, meralion, tokenizer
from convert.sources import Source
from mlx_medusa.errors import CheckpointError

Files = dict[str, dict[str, Any]]  # name in the folder -> JSON content


@dataclass(frozen=True)
class Family:
    """``tokenizer`` returns the tokenizer.json of (source, config), or a CheckpointError. ``files`` makes the other
    JSON files of (source, config, that tokenizer, dtype); what the source has beside them is copied.
    """

    title: str
    tokenizer: Callable[[Source, dict[str, Any]], dict[str, Any]]
    files: Callable[[Source, dict[str, Any], dict[str, Any], str], Files]
    encoder: str = ""  # where its speech encoder is, if it has one
    encoder_bits: int | None = (
        None  # of a quantized folder's encoder, if nothing is said; None: as other layers
    )
    float16: bool = True  # whether its numbers stay within the range of float16


def _whisper_tokenizer(source: Source, config: dict[str, Any]) -> dict[str, Any]:
    return tokenizer.tokenizer_json(source.tokenizer, config["vocab_size"])


def _whisper_files(source: Source, config: dict[str, Any], tokens: dict[str, Any], dtype: str) -> Files:
    decoding = generation.generation_config(source.generation, config, tokenizer.load(tokens, source.path))
    return {
        "config.json": generation.model_config(config, decoding, dtype),
        "generation_config.json": decoding,
        "preprocessor_config.json": generation.preprocessor_config(config),
        "tokenizer_config.json": generation.tokenizer_config(),
    }


_LLAMA = Family("Llama", llama.tokenizer_json, llama.files)
FAMILIES = {  # model_type -> family
    "whisper": Family("Whisper", _whisper_tokenizer, _whisper_files, "model.encoder"),
    "meralion2": Family(
        "MERaLiON-2",
        meralion.tokenizer_json,
        meralion.files,
        "speech_encoder",
        encoder_bits=16,
        float16=False,
    ),
    "llama": _LLAMA,
    "mistral": replace(_LLAMA, title="Mistral"),
}


def family_of(config: dict[str, Any], source: Source) -> Family:
    """The family of a config; CheckpointError if there is none."""
    name = config["model_type"]
    if name not in FAMILIES:
        raise CheckpointError(
            f"{source.path}: model_type {name!r} is not supported (supported: {', '.join(FAMILIES)})"
        )
    return FAMILIES[name]
