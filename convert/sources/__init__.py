"""Where a base model comes from: one module per kind of checkpoint, told apart by content."""

from pathlib import Path

from convert.sources import ctranslate2, gguf, huggingface, llama, meralion2, mlx_whisper, openai
from convert.sources.base import Packed, Source
from mlx_medusa.checkpoint import read_json, resolve
from mlx_medusa.errors import CheckpointError

__all__ = ["Packed", "Source", "open_source"]

# What a folder of any kind may hold; other frameworks' weights are left on the hub.
PATTERNS = ("*.json", "*.jinja", "*.txt", "*.safetensors", "*.npz", "model.bin", "tokenizer.model")
OTHERWISE = ("pytorch_model*.bin",)  # fetched where a repository has no weights of those kinds
LLAMAS = ("llama", "mistral")


def open_source(base: str | Path) -> Source:
    """Open a local checkpoint or a hub repository, without reading its tensors yet.

    Raises CheckpointError if it is none that the converter reads.
    """
    path = resolve(base, patterns=PATTERNS, otherwise=OTHERWISE)
    if path.is_file():
        return _open_file(path)
    if (path / "model.bin").is_file():
        return ctranslate2.open_folder(path)
    if (path / "config.json").is_file():
        config = read_json(path / "config.json")
        if "n_audio_state" in config:
            return mlx_whisper.open_folder(path, config)
        if config.get("model_type") == "whisper":
            return huggingface.open_folder(path, config)
        if config.get("model_type") == "meralion2":
            return meralion2.open_folder(path, config)
        if config.get("model_type") in LLAMAS or "medusa_num_heads" in config:
            return llama.open_folder(path, config)
        raise CheckpointError(
            f"{path}: config.json has model_type {config.get('model_type')!r}, expected one of 'whisper', 'meralion2', "
            "'llama', 'mistral'"
        )
    for ending, open_file in ((".pt", openai.open_file), (".gguf", gguf.open_file)):
        checkpoints = sorted(path.glob(f"*{ending}"))
        if len(checkpoints) == 1:
            return open_file(checkpoints[0])
    raise CheckpointError(
        f"{path}: no checkpoint: expected config.json with safetensors (Hugging Face, mlx-community),"
        " model.bin (faster-whisper), one .pt file (openai) or one .gguf file (llama.cpp)"
    )


def _open_file(path: Path) -> Source:
    if path.name == "model.bin":
        return ctranslate2.open_folder(path.parent)
    if path.suffix == ".pt":
        return openai.open_file(path)
    if path.suffix == ".gguf":
        return gguf.open_file(path)
    raise CheckpointError(
        f"{path}: not a checkpoint: name the folder that it is in, an openai .pt file or a .gguf file"
    )
