"""A Whisper folder of mlx-whisper / mlx-community: openai's names, MLX's layouts, perhaps quantized."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from convert.sources.base import Packed, Source, unite, whisper_config
from convert.sources.openai import hf_name, sinusoids
from mlx_medusa.checkpoint import npz_array, open_npz, read_arrays, weight_files
from mlx_medusa.errors import CheckpointError

ALIGNMENT = "alignment_heads"
POSITIONS = "encoder.positional_embedding"


def open_folder(path: Path, config: dict[str, Any]) -> Source:
    """Open a folder whose config.json is ``config``. Raises CheckpointError if its weights can't be used."""
    try:
        hf_config = whisper_config(config)
    except KeyError as error:
        raise CheckpointError(f"{path / 'config.json'}: setting {error} is missing") from error
    files = weight_files(path)
    names, fetch = _reader(files[0] if len(files) == 1 else path)
    try:
        dtype = fetch("decoder.ln.weight").dtype
    except KeyError as error:
        raise CheckpointError(f"{path}: tensor {error} is missing; not a Whisper of mlx-whisper") from error
    generation = {}
    if ALIGNMENT in names:
        generation[ALIGNMENT] = np.array(fetch(ALIGNMENT)).tolist()
    quantization = _renamed(config.get("quantization"))

    def layout(name: str) -> mx.array:
        array = fetch(name)
        return array.swapaxes(1, 2) if ".conv" in name and array.ndim == 3 else array

    def tensors() -> Iterator[tuple[str, mx.array | Packed]]:
        yield from unite((name for name in names if name != ALIGNMENT), layout, hf_name, quantization, path)
        if POSITIONS not in names:
            table = sinusoids(hf_config["max_source_positions"], hf_config["d_model"])
            yield hf_name(POSITIONS), table.astype(dtype)

    return Source(
        path=path,
        kind="mlx-whisper",
        config=hf_config,
        dtype=dtype,
        tensors=tensors,
        size=sum(file.stat().st_size for file in files),
        quantization=quantization,
        generation=generation or None,
        tokenizer=path if (path / "tokenizer.json").is_file() else None,
    )


def _reader(path: Path) -> tuple[list[str], Any]:
    """The names in a file (or folder of shards), and a function that reads one of them anew."""
    if path.suffix == ".npz":
        file = open_npz(path)
        return list(file.files), lambda name: npz_array(path, file, name)
    lazy = read_arrays(path)
    names = list(lazy)
    return names, lambda name: _fresh(lazy, name)


def _fresh(lazy: dict[str, mx.array], name: str) -> mx.array:
    """Take an array out, so that its memory goes when the caller drops it; the small ones may be asked for
    twice.
    """
    return lazy[name] if lazy[name].nbytes < 1 << 20 else lazy.pop(name)


def _renamed(quantization: dict[str, Any] | None) -> dict[str, Any] | None:
    if quantization is None:
        return None
    return {
        hf_name(f"{key}.weight").removesuffix(".weight") if isinstance(value, dict) else key: value
        for key, value in quantization.items()
    }
