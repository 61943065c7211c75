"""A Llama folder of transformers (safetensors, or PyTorch shards as Vicuna has), of mlx-lm, or one that holds Medusa
heads beside the model: ``medusa_head.*`` with ``base_model.*`` (the trainer's) or with ``model.*`` (Medusa-2).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from convert.sources.base import Packed, Source, unite
from convert.sources.huggingface import check_quantization
from convert.weights import HEADS_PREFIXES, Weights, open_weights
from mlx_medusa.checkpoint import read_json, resolve
from mlx_medusa.errors import CheckpointError

WRAPPED = "base_model."
PROJECTION, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
EXTRAS = (
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json",
    "tokenizer.model",
)  # fmt: skip
_HEADS_ONLY = "holds Medusa heads and no model; name the model with --base and this with --heads"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model")
_SMALL = ("*.json", "*.jinja", "*.txt", "tokenizer.model")


def open_folder(path: Path, config: dict[str, Any]) -> Source:
    """Open a folder whose config.json is ``config``. Raises CheckpointError if its weights can't be used."""
    weights = _open(path)
    quantization = check_quantization(path, config)
    heads = [name for name in weights.shapes if name.startswith(HEADS_PREFIXES)]
    base = {name: _hf_name(name, weights) for name in weights.shapes if not _is_left_out(name)}
    if heads and not base:
        raise CheckpointError(f"{path}: {_HEADS_ONLY}")
    small = path
    if "hidden_size" not in config:
        small, config = _described_elsewhere(path, config)
    back = {new: name for name, new in base.items()}
    tied = _is_tied(path, weights, back, config)
    rows, notes = _rows(weights, back, config, bool(heads))
    if "medusa" in str(config.get("model_type", "medusa")):
        names = " ".join([str(config.get("model_type")), *(config.get("architectures") or [])]).lower()
        config = {**config, "model_type": "mistral" if "mistral" in names else "llama"}

    def fetch(name: str) -> mx.array:
        array = weights.take(name)
        return array[:rows] if rows and base[name] in (EMBEDDING, PROJECTION) else array

    def tensors() -> Iterator[tuple[str, mx.array | Packed]]:
        kept = [name for name in base if not (tied and base[name] == PROJECTION)]
        yield from unite(kept, fetch, base.__getitem__, quantization, path)

    generation = small / "generation_config.json"
    found = next(
        (folder for folder in (path, small) if any((folder / n).is_file() for n in _TOKENIZERS)), None
    )
    return Source(
        path=path,
        kind="MLX folder" if quantization else weights.kind,
        config={**config, "tie_word_embeddings": tied},
        dtype=weights.dtype,
        tensors=tensors,
        size=weights.size,
        quantization=quantization,
        generation=read_json(generation) if generation.is_file() else None,
        tokenizer=found or path,
        extras=[file for name in EXTRAS if (file := (found or path) / name).is_file()],
        heads=bool(heads),
        notes=notes,
    )


def _open(path: Path) -> Weights:
    try:
        return open_weights(path)
    except CheckpointError as error:
        if any(path.glob("medusa_lm_head.*")):
            raise CheckpointError(f"{path}: {_HEADS_ONLY}") from error
        raise


def _is_left_out(name: str) -> bool:
    """Heads are read on their own, and rotary tables, which old checkpoints store, are computed."""
    return name.startswith(HEADS_PREFIXES) or name.endswith("rotary_emb.inv_freq")


def _hf_name(name: str, weights: Weights) -> str:
    """The name in LlamaForCausalLM; the folder may hold that within another module, or only what is in it."""
    if any(other.startswith(WRAPPED) for other in weights.shapes):
        return name.removeprefix(WRAPPED)
    bare = not any(other.startswith("model.") for other in weights.shapes)
    return f"model.{name}" if bare and not name.startswith("lm_head.") else name


def _described_elsewhere(path: Path, config: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """(folder, config) of the base model that a heads' config names."""
    name = config.get("base_model_name_or_path")
    try:
        if not name:
            raise CheckpointError("config.json names no base model")
        folder = resolve(name, patterns=_SMALL, weights=False)
        return folder, {**read_json(folder / "config.json"), **config}
    except CheckpointError as error:
        raise CheckpointError(
            f"{path}: config.json does not describe the model ({error}); convert its parts apart: --base with the "
            f"model that the heads are for, --heads {path}"
        ) from error


def _is_tied(path: Path, weights: Weights, back: dict[str, str], config: dict[str, Any]) -> bool:
    """Whether the embedding is the projection too: there is no other, or the settings say so.

    Raises CheckpointError where they say so and the weights do not.
    """
    if PROJECTION not in back:
        return True
    if f"{PROJECTION.removesuffix('weight')}scales" in back or not config.get("tie_word_embeddings", False):
        return False
    if EMBEDDING not in back or not weights.equal(back[PROJECTION], back[EMBEDDING]):
        raise CheckpointError(
            f"{path}: {PROJECTION} differs from {EMBEDDING}, but config.json says that they are tied"
        )
    return True


def _rows(
    weights: Weights, back: dict[str, str], config: dict[str, Any], with_heads: bool
) -> tuple[int | None, list[str]]:
    """How many rows of the vocabulary to keep, None: all; with a note.

    Training of heads may have added tokens ("Human:", "Assistant:") that no tokenizer has when the heads are used.
    """
    vocab_size = config.get("vocab_size")
    shape = weights.shapes.get(back.get(EMBEDDING, ""), (0,))
    if not with_heads or not isinstance(vocab_size, int) or shape[0] <= vocab_size:
        return None, []
    extra = shape[0] - vocab_size
    return vocab_size, [
        f"{extra} rows of the vocabulary left out: the base model's {vocab_size} tokens have the others"
    ]
