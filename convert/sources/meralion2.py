"""A MERaLiON-2 folder of the hub (safetensors shards), or an MLX model folder that this converter wrote."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from convert.sources.base import Packed, Source, unite
from convert.sources.huggingface import check_quantization, folder_source
from mlx_medusa.checkpoint import read_arrays, weight_files
from mlx_medusa.errors import CheckpointError
from mlx_medusa.shards import read_header

TIED = "text_decoder.lm_head.weight"  # some checkpoints store the projection beside the embedding that it is tied to
EMBEDDING = "text_decoder.model.embed_tokens.weight"
EXTRAS = (
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "chat_template.json", "processor_config.json", "preprocessor_config.json",
)  # fmt: skip
_STEP = 1 << 26  # bytes that are compared at once


def open_folder(path: Path, config: dict[str, Any]) -> Source:
    """Open a folder whose config.json is ``config``. Raises CheckpointError if its weights can't be used."""
    quantization = check_quantization(path, config)
    files = weight_files(path)
    places = {name: (file, info) for file in files for name, info in read_header(file)[0].items()}
    text = config.get("text_config")
    text = dict(text) if isinstance(text, dict) else {}
    tied = TIED.removesuffix("weight") + "scales" not in places and _is_tied(path, places, text)
    if text:  # the model says what is missing otherwise
        config = {**config, "text_config": {**text, "tie_word_embeddings": tied}}
    if any(name.startswith("speech_audio_adapter.speech_llm_proj.") for name in places):
        config["speech_adapter"] = "v1"

    def tensors() -> Iterator[tuple[str, mx.array | Packed]]:
        arrays = read_arrays(path)
        if tied:
            arrays.pop(TIED, None)
        yield from unite(list(arrays), arrays.pop, str, quantization, path)

    return folder_source(path, config, files, tensors, quantization, EXTRAS)


def _is_tied(path: Path, places: dict[str, Any], text: dict[str, Any]) -> bool:
    """Whether the embedding is the projection: there is no other, or it is the same bytes.

    Raises CheckpointError where the settings say so and the weights do not.
    """
    if TIED not in places:
        return True
    if EMBEDDING in places and _equal_bytes(places[TIED], places[EMBEDDING]):
        return True
    if text.get("tie_word_embeddings", True):  # transformers' default, which would overwrite the projection
        raise CheckpointError(
            f"{path}: {TIED} differs from {EMBEDDING}, but text_config says that they are tied"
        )
    return False


def _equal_bytes(one: tuple[Path, dict[str, Any]], two: tuple[Path, dict[str, Any]]) -> bool:
    """Whether two tensors on disk are equal, without more than a piece of them in memory."""
    if any(one[1][key] != two[1][key] for key in ("dtype", "shape")):
        return False
    a, b = (_bytes(*place) for place in (one, two))
    return all(np.array_equal(a[i : i + _STEP], b[i : i + _STEP]) for i in range(0, len(a), _STEP))


def _bytes(file: Path, info: dict[str, Any]) -> np.ndarray:
    """A tensor's bytes, mapped."""
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
    first, last = info["data_offsets"]
    return np.memmap(file, np.uint8, "r", offset=8 + header + first, shape=(last - first,))
