"""A Whisper folder of transformers (safetensors), or an MLX model folder that this converter wrote."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from convert.sources.base import Packed, Source, unite
from mlx_medusa.checkpoint import read_arrays, read_json, weight_files
from mlx_medusa.errors import CheckpointError
from mlx_medusa.shards import read_header

TIED = "proj_out.weight"  # some checkpoints store the projection beside the embedding that it is tied to
EMBEDDING = "model.decoder.embed_tokens.weight"
DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
EXTRAS = ("tokenizer_config.json", "special_tokens_map.json", "normalizer.json")


def open_folder(path: Path, config: dict[str, Any]) -> Source:
    """Open a folder whose config.json is ``config``. Raises CheckpointError if its weights can't be used."""
    quantization = check_quantization(path, config)
    files = weight_files(path)
    names = [name for file in files for name in read_header(file)[0]]
    prefix = "" if any(name.startswith("model.") for name in names) else "model."  # saved from WhisperModel

    def rename(name: str) -> str:
        return name if name == TIED else prefix + name

    def tensors() -> Iterator[tuple[str, mx.array | Packed]]:
        arrays = read_arrays(path)
        if TIED in arrays:
            _check_tied(path, arrays[TIED], arrays.get(EMBEDDING.removeprefix(prefix)))
            # both were evaluated for that, so start again with arrays that are not in memory
            arrays = read_arrays(path)
            del arrays[TIED]
        yield from unite(list(arrays), arrays.pop, rename, quantization, path)

    return folder_source(path, config, files, tensors, quantization, EXTRAS)


def folder_source(
    path: Path,
    config: dict[str, Any],
    files: list[Path],
    tensors: Callable[[], Iterator[tuple[str, mx.array | Packed]]],
    quantization: dict[str, Any] | None,
    extras: Iterable[str],
) -> Source:
    """A safetensors folder of any family; the files that are named in ``extras`` are copied where there are any."""
    generation = path / "generation_config.json"
    return Source(
        path=path,
        kind="MLX folder" if quantization else "Hugging Face",
        config=config,
        dtype=float_type(files),
        tensors=tensors,
        size=sum(file.stat().st_size for file in files),
        quantization=quantization,
        generation=read_json(generation) if generation.is_file() else None,
        tokenizer=path,
        extras=[path / name for name in extras if (path / name).is_file()],
    )


def check_quantization(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """MLX's ``quantization`` settings, if any. Raises CheckpointError for those of other libraries."""
    quantization = config.get("quantization")
    if quantization is None and config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "an unknown method")
        raise CheckpointError(
            f"{path}: quantized by {method}, which is not read; use the original checkpoint"
        )
    return quantization


def float_type(files: list[Path]) -> mx.Dtype:
    """The type of most of the floats."""
    counts: dict[str, int] = {}
    for file in files:
        for info in read_header(file)[0].values():
            counts[info["dtype"]] = counts.get(info["dtype"], 0) + 1
    floats = {code: count for code, count in counts.items() if code in DTYPES}
    return DTYPES[max(floats, key=lambda code: floats[code])] if floats else mx.float32


def _check_tied(path: Path, projection: mx.array, embedding: mx.array | None) -> None:
    if (
        embedding is None
        or projection.shape != embedding.shape
        or not mx.array_equal(projection, embedding).item()
    ):
        raise CheckpointError(f"{path}: {TIED} differs from {EMBEDDING}; only tied projections are supported")
