"""Read Medusa heads in the layouts that are around, and write medusa.safetensors.
 Layouts (i: head, l: block): ``medusa_head_{i}.{l}.linear.*`` in a wrapper dict (jburtoft),
``heads.{i}.mlp.{l}.linear.*`` with adapter_config.json or ``head_{i}: {mlp.{l}.linear.*}`` under
"heads_state" (MERaLiON), ``{i}.{l}.linear.*`` with or without the head's own projection ``{i}.{L}.weight``,
also under ``medusa_head.`` (FasterDecoding), where the whole model may be beside them, and our own file.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

from convert import torch_files
from convert.quantize import Recipe
from convert.weights import BASE_PREFIXES, TORCH_FILE, TORCH_INDEX, TorchTensors, open_weights
from mlx_medusa import checkpoint
from mlx_medusa.checkpoint import HEADS_FILE, INDEX_FILE, ShardWriter, read_arrays, read_json, resolve
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.medusa.vocabulary import check_vocabulary
from mlx_medusa.shards import read_header

PATTERNS = ("*.json", "*.safetensors", "*.pt")
FILES = (HEADS_FILE, "medusa_heads.safetensors", "medusa_lm_head.safetensors", "medusa_lm_head.pt")
WRAPPERS = ("heads", "heads_state")

_HEAD = r"(?:medusa_heads?[._]|heads?[._])?(\d+)\."
_BLOCK = re.compile(_HEAD + r"(?:mlp\.)?(\d+)\.linear\.(weight|bias)")
_PROJECTION = re.compile(_HEAD + r"(\d+)\.weight")

Arrays = dict[str, mx.array]
Take = Callable[[str], mx.array]  # reads a tensor, once


def read_heads(path_or_repo: str | Path) -> tuple[dict[str, Any], Arrays]:
    """(``medusa`` config, arrays stacked over the heads) of a file, a folder or a hub repository.

    Arrays: layers.{l}.weight [K, D, D], layers.{l}.bias [K, D], and projection.weight [K, V, D] if the
    heads have their own; those of recurrent heads are their parameters. Raises CheckpointError, which names
    the file and the tensor, for keys that are unknown, missing or of unequal shapes, and for weights that are
    not finite.
    """
    path = _find_file(resolve(path_or_repo, patterns=PATTERNS, otherwise=("pytorch_model*.bin",)))
    if path.suffix == ".safetensors" and "medusa" in read_header(path)[1]:
        ours = checkpoint.read_heads(path)
        assert ours is not None  # only a folder can be without heads
        config, arrays = ours
    else:
        arrays = _stack(*_flatten(path), path)
        heads, dim = arrays["layers.0.bias"].shape
        layers = sum(name.endswith(".bias") for name in arrays)
        own = arrays.get("projection.weight")
        config = {
            "type": "medusa",
            "num_heads": heads,
            "num_layers": layers,
            "hidden_size": dim,
            "tied": own is None,
        }
        if own is not None:
            config["vocab_size"] = own.shape[1]
    _check_adapter((path if path.is_dir() else path.parent) / "adapter_config.json", config)
    for name, array in arrays.items():
        if mx.issubdtype(array.dtype, mx.floating) and not _is_finite(array):
            raise CheckpointError(f"{path}: {name} holds NaN or infinity; the training of these heads failed")
    return config, arrays


def _is_finite(array: mx.array) -> bool:
    """Whether it holds no infinity and no NaN; one head at a time, so that what is made for that is small."""
    return all(mx.all(mx.isfinite(part)).item() for part in array)


def _find_file(path: Path) -> Path:
    """The file that holds the heads, or the folder if that holds a whole model."""
    if path.is_file():
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    if any((path / name).is_file() for name in (INDEX_FILE, "model.safetensors", TORCH_FILE, TORCH_INDEX)):
        return path
    found = [file for file in sorted(path.iterdir()) if file.suffix in (".pt", ".safetensors")]
    if len(found) == 1:
        return found[0]
    raise CheckpointError(
        f"{path}: {len(found) or 'no'} files may hold heads; name one, or call it {FILES[1]}"
    )


def _flatten(path: Path) -> tuple[dict[str, tuple[int, ...]], Take]:
    """(shapes, a function that reads one) of a heads file's tensors by full name; of a whole model's, of its heads."""
    if path.is_dir() or path.suffix == ".bin":
        weights = open_weights(path)
        return _heads_only(weights.shapes), weights.take
    if path.suffix in (".safetensors", ".npz"):
        arrays = read_arrays(path)
        return _heads_only({name: array.shape for name, array in arrays.items()}), arrays.pop
    content = torch_files.load(path)
    if isinstance(content, Mapping):
        content = next((content[key] for key in WRAPPERS if isinstance(content.get(key), Mapping)), content)
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, part in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), part)
        elif hasattr(value, "untyped_storage"):
            flat[prefix] = value
        else:
            raise CheckpointError(
                f"{path}: {prefix or 'the file'} is a {type(value).__name__}, not a tensor of heads"
            )

    walk("", content)
    tensors = TorchTensors(flat, set(flat) if torch_files.can_map(path) else ())
    return _heads_only(tensors.shapes), tensors.take


def _heads_only(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in shapes.items() if not name.startswith(BASE_PREFIXES)}


def _stack(shapes: Mapping[str, tuple[int, ...]], take: Take, path: Path) -> Arrays:
    """Sort tensors into [head][part] by their names, then stack the heads."""
    parts: dict[str, dict[int, str]] = {}
    projections: dict[int, dict[int, str]] = {}
    for name in shapes:
        if match := _BLOCK.fullmatch(name):
            head, layer, kind = match.groups()
            parts.setdefault(f"layers.{int(layer)}.{kind}", {})[int(head)] = name
        elif match := _PROJECTION.fullmatch(name):
            head, layer = match.groups()
            projections.setdefault(int(layer), {})[int(head)] = name
        else:
            raise CheckpointError(f"{path}: tensor {name!r} is in no layout of Medusa heads that is known")
    layers = 1 + max((int(part.split(".")[1]) for part in parts), default=-1)
    if projections and set(projections) != {layers}:
        raise CheckpointError(
            f"{path}: the heads' projections are not block {layers}, after their last block"
        )
    if projections:
        parts["projection.weight"] = projections[layers]
    heads = 1 + max((max(found) for found in parts.values()), default=-1)
    if not heads or not layers:
        raise CheckpointError(f"{path}: holds no Medusa heads")
    wanted = [f"layers.{layer}.{kind}" for layer in range(layers) for kind in ("weight", "bias")]
    wanted += ["projection.weight"] if projections else []
    for part in wanted:
        _check_part(part, parts.get(part, {}), heads, shapes, path)
    return {part: _stack_part(part, parts[part], take, path) for part in wanted}


def _check_part(
    part: str, names: dict[int, str], heads: int, shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """CheckpointError unless each head has it, in one shape."""
    missing = sorted(set(range(heads)) - names.keys())
    if missing:
        raise CheckpointError(
            f"{path}: {part} of head {missing[0]} is missing, though there are {heads} heads"
        )
    for head in range(heads):
        if shapes[names[head]] != shapes[names[0]]:
            raise CheckpointError(f"{path}: {part} of head {head} has another shape than that of head 0")


def _stack_part(part: str, names: dict[int, str], take: Take, path: Path) -> mx.array:
    """[K, ...] out of the heads' arrays, of which one is in memory beside it."""
    stacked: mx.array | None = None
    for head in range(len(names)):
        array = take(names[head])
        if stacked is None:
            stacked = mx.zeros((len(names), *array.shape), array.dtype)
        if array.dtype != stacked.dtype:
            raise CheckpointError(f"{path}: {part} of head {head} has another type than that of head 0")
        stacked[head] = array
        mx.eval(stacked)
        del array
        mx.clear_cache()
    assert stacked is not None
    return stacked


def _check_adapter(path: Path, config: Mapping[str, Any]) -> None:
    if not path.is_file():
        return
    said = read_json(path)
    for key in ("num_heads", "num_layers", "hidden_size"):
        if key in said and said[key] != config[key]:
            raise CheckpointError(f"{path}: says {key} {said[key]}, but the weights have {config[key]}")


def check_fit(config: Mapping[str, Any], arrays: Arrays, base: Mapping[str, Any], name: str | Path) -> None:
    """Raise a CheckpointError unless the heads fit a base model with this config."""
    dim = config["hidden_size"]
    if dim != base["d_model"]:
        raise CheckpointError(
            f"{name}: the heads are for hidden size {dim}, but the base model has {base['d_model']}"
        )
    if not config.get("tied", True) and config["vocab_size"] != base["vocab_size"]:
        raise CheckpointError(
            f"{name}: the heads' projections are for {config['vocab_size']} tokens, but the base model has "
            f"{base['vocab_size']}"
        )
    checkpoint.check_tensors(arrays, checkpoint.heads_shapes(config), name)
    if "draft_vocabulary" in arrays:
        check_vocabulary(arrays["draft_vocabulary"], base["vocab_size"], name)


def unquantized(config: dict[str, Any], arrays: Arrays, dtype: mx.Dtype) -> tuple[dict[str, Any], Arrays]:
    """The same heads with their quantized weights expanded."""
    settings = config.get("quantization")
    if not settings:
        return config, arrays
    layers = [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]
    packed = {f"{layer}.{part}" for layer in layers for part in ("weight", "scales", "biases")}
    full = {name: array for name, array in arrays.items() if name not in packed}
    for layer in layers:
        full[f"{layer}.weight"] = checkpoint.dequantize(
            arrays[f"{layer}.weight"],
            arrays[f"{layer}.scales"],
            arrays.get(f"{layer}.biases"),
            settings,
            dtype,
        )
    return {key: value for key, value in config.items() if key != "quantization"}, full


def write_heads(
    folder: Path, config: dict[str, Any], arrays: Arrays, dtype: mx.Dtype, recipe: Recipe | None
) -> dict[str, Any]:
    """Write medusa.safetensors, floats as ``dtype`` and matrices quantized by ``recipe``; empties ``arrays``.

    Returns the config that now holds. Raises OptionError if the heads can't be quantized so.
    """
    config = {**config, "dtype": str(dtype).rpartition(".")[2]}
    if recipe is not None:
        if config.get("quantization"):
            raise OptionError(
                "--q-heads: these heads are quantized already; drop the option, or use the original heads"
            )
        for size in (config["hidden_size"], config.get("ffn_dim", 0)):
            if size % recipe.group_size:
                raise OptionError(f"--q-heads: hidden size {size} is no multiple of {recipe.group_size}")
        config["quantization"] = recipe.high_settings  # few parameters, so a mixed recipe spares them
    about = json.dumps(config)
    writer = ShardWriter(
        folder,
        "medusa",
        metadata={"medusa": about},
        header_bytes=4096 + 2 * len(about) + 600 * len(arrays),  # up to three tensors for each
        shard_bytes=1 << 62,
    )
    for name in sorted(arrays):
        array = arrays.pop(name)
        if mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(dtype)
            if not _is_finite(array):
                raise CheckpointError(
                    f"heads: {name} holds values that {config['dtype']} cannot; use --dtype bfloat16"
                )
        if recipe is None or array.ndim == 1 or not name.endswith(".weight"):
            writer.add(name, array)
            continue
        layer = name.removesuffix("weight")
        for part, value in zip(
            ("weight", "scales", "biases"), mx.quantize(array, **recipe.high_settings), strict=False
        ):
            writer.add(layer + part, value)
    writer.close(index=False)
    return config
