"""Read and write MLX model folders, local or from the hub.

A folder holds config.json, safetensors shards with Hugging Face names and layouts, their index, the
tokenizer, and medusa.safetensors if it has heads. Every file is checked before use; every folder is written
under a temporary name and renamed when it is whole.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlx_medusa.errors import CheckpointError, OutputError
from mlx_medusa.shards import ShardWriter, read_header, write_json

__all__ = [
    "ShardWriter", "check_tensors", "load_into", "read_arrays", "read_config", "read_heads", "resolve",
    "staged_folder", "write_json",
]  # fmt: skip

HEADS_FILE = "medusa.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MODEL_PATTERNS = ("*.json", "*.jinja", "*.safetensors", "*.txt")

_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_FILE_ENDINGS = (".safetensors", ".npz", ".pt", ".pth", ".bin", ".gguf", ".json")


# ---------------------------------------------------------------------------------------------- find


def resolve(
    path_or_repo: str | Path,
    *,
    patterns: Iterable[str] = MODEL_PATTERNS,
    otherwise: Iterable[str] = (),
    weights: bool = True,
) -> Path:
    """A local file or folder, or the local copy of the hub repository ``owner/name``.

    What exists locally never touches the network, and neither does a repository that is whole in the hub's
    cache. ``patterns`` name the files to fetch, and ``otherwise`` more of them if there are no weights among those;
    without ``weights`` none are needed. Raises CheckpointError if it is neither here nor to be had.
    """
    text = str(path_or_repo)
    path = Path(text).expanduser()
    if os.path.exists(path):  # noqa: PTH110 - Path.exists raises on too long a name
        return path
    if isinstance(path_or_repo, Path) or not _REPO.fullmatch(text) or text.endswith(_FILE_ENDINGS):
        raise CheckpointError(f"{text}: no such file or folder")
    return _from_hub(text, list(patterns), list(otherwise), weights)


def _from_hub(repo: str, patterns: list[str], otherwise: list[str], weights: bool) -> Path:
    from huggingface_hub import snapshot_download

    reason = "the copy in the cache is not whole"
    for offline in (True, False):  # the cache first: a network that hangs must not delay what is here
        for wanted in (patterns, patterns + otherwise)[: 2 if otherwise else 1]:
            try:
                folder = Path(snapshot_download(repo, allow_patterns=wanted, local_files_only=offline))
            except (
                Exception
            ) as error:  # the hub's library, its HTTP client and the system each have their own
                reason = " ".join(str(error).split())[:160] or type(error).__name__
                break
            if _is_whole(folder) or not weights:
                return folder
    raise CheckpointError(
        f"{repo}: no such folder, not in the hub's cache, and not to be had from the hub ({reason}); "
        f"with a network, fetch it by: hf download {repo}"
    )


def _is_whole(folder: Path) -> bool:
    """Whether a cached snapshot has its weights: an interrupted download leaves only some of the files."""
    index = folder / INDEX_FILE
    if index.is_file():
        return all((folder / name).is_file() for name in set(read_json(index).get("weight_map", {}).values()))
    return any(path.suffix in _FILE_ENDINGS[:-1] for path in folder.iterdir())


# ---------------------------------------------------------------------------------------------- read


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds; CheckpointError if it can't be read or holds something else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found a {type(content).__name__}")
    return content


def read_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model folder. Raises CheckpointError if ``folder`` is no model."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: no such folder; make one with: convert --base MODEL --mlx-path {folder}"
        )
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{folder}: no config.json, so this is not a model folder; make one with `convert`"
        )
    return read_json(folder / "config.json")


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a folder's weights, in order. Raises CheckpointError if there are none."""
    for name in ("model.safetensors", INDEX_FILE, "weights.safetensors", "weights.npz"):
        path = folder / name
        if not path.is_file():
            continue
        if name != INDEX_FILE:
            return [path]
        names = sorted({str(value) for value in read_json(path).get("weight_map", {}).values()})
        if any(Path(shard).name != shard for shard in names):
            raise CheckpointError(f"{path}: names a file outside its folder")
        missing = [shard for shard in names if not (folder / shard).is_file()]
        if missing or not names:
            raise CheckpointError(
                f"{folder}: {', '.join(missing) or 'every shard'} is missing; fetch the folder again"
            )
        return [folder / shard for shard in names]
    hint = (
        " (pytorch_model.bin is not read: save the model as safetensors)"
        if list(folder.glob("*.bin"))
        else ""
    )
    raise CheckpointError(f"{folder}: no model.safetensors or weights.npz{hint}")


def read_arrays(path: Path) -> dict[str, mx.array]:
    """The arrays of one file, or of all weight files of a folder; medusa.safetensors is not among those.

    Safetensors are lazy: an array's bytes are read when it is evaluated, so memory is bounded by what the
    caller keeps. Raises CheckpointError for a file that is broken, cut short or missing.
    """
    path = Path(path)
    arrays: dict[str, mx.array] = {}
    for file in weight_files(path) if path.is_dir() else [path]:
        for name, array in (_read_npz(file) if file.suffix == ".npz" else _read_safetensors(file)).items():
            if name in arrays:
                raise CheckpointError(f"{file}: tensor {name!r} is in another file of the folder too")
            arrays[name] = array
    return arrays


def _read_safetensors(path: Path) -> dict[str, mx.array]:
    header, _ = read_header(path)
    if not header:
        return {}
    try:
        loaded = mx.load(str(path), format="safetensors")
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}") from error
    assert isinstance(loaded, dict)
    return loaded


def _read_npz(path: Path) -> dict[str, mx.array]:
    with open_npz(path) as file:
        return {name: npz_array(path, file, name) for name in file.files}


def open_npz(path: Path) -> Any:
    """An npz archive, its members still unread. Raises CheckpointError if it is none."""
    try:
        file = np.load(path, allow_pickle=False)
    except Exception as error:  # zipfile, zlib and numpy each have their own
        raise CheckpointError(f"{path}: not an npz archive, or cut short; fetch the file again") from error
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise CheckpointError(f"{path}: not an npz archive")
    return file


def npz_array(path: Path, file: Any, name: str) -> mx.array:
    """One member of an npz archive. Raises CheckpointError if its bytes are broken."""
    try:
        array = file[name]
    except Exception as error:
        raise CheckpointError(f"{path}: tensor {name!r} cannot be read; fetch the file again") from error
    if (
        array.dtype.kind == "V" and array.dtype.itemsize == 2
    ):  # numpy has no bfloat16, so MLX writes raw bytes
        return mx.array(array.view(np.uint16)).view(mx.bfloat16)
    return mx.array(array)


# ---------------------------------------------------------------------------------------------- load


def load_into(
    module: nn.Module,
    weights: dict[str, mx.array],
    *,
    quantization: dict[str, Any] | None,
    dtype: mx.Dtype | None,
    source: str | Path,
) -> None:
    """Put ``weights`` (names and layouts of ``module``) into ``module`` and evaluate them; empties
    ``weights``.

    With ``dtype`` None on a CPU backend, quantized weights are dequantized and floats become float32.
    Otherwise quantized layers stay quantized, by ``quantization`` ({group_size, bits, mode, and per layer a
    dict or False}), and floats are cast to ``dtype`` if one is given. Raises CheckpointError for a missing,
    extra or misshapen tensor.
    """
    quantization = quantization or {}
    layers = {name[: -len(".scales")] for name in weights if name.endswith(".scales")}
    if layers and not quantization:
        raise CheckpointError(f"{source}: {min(layers)} is quantized, but config.json has no 'quantization'")
    on_cpu = dtype is None and mx.default_device().type == mx.DeviceType.cpu
    try:
        if on_cpu:
            dtype = mx.float32
            for layer in sorted(layers):
                _dequantize_layer(weights, layer, settings_for(quantization, layer))
        elif layers:
            nn.quantize(
                module,
                **_only_settings(quantization),
                class_predicate=lambda path, _: settings_for(quantization, path) if path in layers else False,
            )
    except (ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{source}: the quantization settings do not fit: {' '.join(str(error).split())}"
        ) from error

    parameters: Any = tree_flatten(module.parameters())
    check_tensors(weights, {name: array.shape for name, array in parameters}, source)
    ready = []
    for name in list(weights):
        array = weights.pop(name)
        if dtype is not None and mx.issubdtype(array.dtype, mx.floating):
            array = array.astype(dtype)
        mx.eval(array)
        ready.append((name, array))
    module.load_weights(ready)


def settings_for(quantization: Mapping[str, Any], layer: str) -> dict[str, Any]:
    """{group_size, bits, mode} of one quantized layer: its own entry in ``quantization`` or the common
    settings.
    """
    own = quantization.get(layer)
    return _only_settings(own if isinstance(own, Mapping) else quantization)


def _only_settings(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("group_size", "bits", "mode") if key in entry}


def dequantize(
    weight: mx.array, scales: mx.array, biases: mx.array | None, settings: Mapping[str, Any], dtype: mx.Dtype
) -> mx.array:
    """Quantized rows [..., packed] back to [..., in] of ``dtype``; computed in float32 where the scales are
    floats.
    """
    if mx.issubdtype(scales.dtype, mx.floating):
        scales = scales.astype(mx.float32)
        biases = None if biases is None else biases.astype(mx.float32)
    return mx.dequantize(weight, scales, biases, **settings).astype(dtype)


def _dequantize_layer(weights: dict[str, mx.array], layer: str, settings: Mapping[str, Any]) -> None:
    weight = weights.get(f"{layer}.weight")
    if weight is None:
        return  # check_tensors names it
    scales, biases = weights.pop(f"{layer}.scales"), weights.pop(f"{layer}.biases", None)
    try:
        weights[f"{layer}.weight"] = dequantize(weight, scales, biases, settings, mx.float32)
    except (ValueError, RuntimeError, TypeError) as error:
        raise ValueError(f"{layer}: {error}") from error


def check_tensors(
    found: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], source: str | Path
) -> None:
    """Raise a CheckpointError that names the first tensor that is missing, extra or of another shape.

    ``found`` holds arrays or anything else with a ``shape``; ``expected`` maps names to shapes.
    """
    for kind, names in (
        ("missing", expected.keys() - found.keys()),
        ("unexpected", found.keys() - expected.keys()),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise CheckpointError(
                f"{source}: {kind} tensor {min(names)!r}{more}; the weights are not of this model"
            )
    for name, shape in expected.items():
        if tuple(found[name].shape) != tuple(shape):
            raise CheckpointError(
                f"{source}: tensor {name!r} has shape {list(found[name].shape)}, expected {list(shape)}"
            )


# ---------------------------------------------------------------------------------------------- heads


def read_heads(path: Path) -> tuple[dict[str, Any], dict[str, mx.array]] | None:
    """(medusa config, lazy arrays) of a model folder or of a lone medusa.safetensors; None if a folder has
    no heads.

    Arrays of plain heads: layers.{l}.weight [K, D, D], layers.{l}.bias [K, D], projection.weight [K, V, D] if
    not tied. Of recurrent ones: the parameters of ``RecurrentHeads``. Of both: draft_vocabulary [N] int32 if the
    config names its size, and draft_basis [D, r] if it names a rank. Quantized ones have .scales and .biases
    beside .weight. Raises CheckpointError if the file and its config do not agree.
    """
    path = Path(path)
    file = path / HEADS_FILE if path.is_dir() else path
    if path.is_dir() and not file.exists():
        if (path / "config.json").is_file() and "medusa" in read_json(path / "config.json"):
            raise CheckpointError(f"{path}: config.json describes Medusa heads, but {HEADS_FILE} is missing")
        return None
    _, metadata = read_header(file)
    try:
        config = json.loads(metadata["medusa"])
        expected = heads_shapes(config)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: not Medusa heads of this package; make them with: convert --base MODEL --heads {file}"
        ) from error
    arrays = read_arrays(file)
    check_tensors(arrays, expected, file)
    return config, arrays


def heads_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the arrays that heads with this ``medusa`` config have.

    KeyError if a setting is missing or the type is unknown.
    """
    full = _HEADS_SHAPES[config.get("type", "medusa")](config)
    settings = config.get("quantization")
    shapes = {}
    for name, shape in full.items():
        if not settings or len(shape) == 1 or name.endswith(".bias"):
            shapes[name] = shape
            continue
        for part, size in quantized_sizes(shape[-1], settings).items():
            shapes[f"{name[: -len('weight')]}{part}"] = (*shape[:-1], size)
    if size := int(config.get("draft_vocabulary") or 0):
        shapes["draft_vocabulary"] = (size,)
        if rank := int(config.get("draft_rank") or 0):
            shapes["draft_basis"] = (int(config["hidden_size"]), rank)
    return shapes


def _medusa_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    heads, dim = int(config["num_heads"]), int(config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(int(config["num_layers"])):
        shapes[f"layers.{layer}.weight"] = (heads, dim, dim)
        shapes[f"layers.{layer}.bias"] = (heads, dim)
    if not config["tied"]:
        shapes["projection.weight"] = (heads, int(config["vocab_size"]), dim)
    return shapes


def _recurrent_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, ffn_dim = int(config["hidden_size"]), int(config["ffn_dim"])
    linear = {"joint": (dim, 2 * dim)}
    norms = ["state_norm", "token_norm", "layer_norm"]
    for layer in range(int(config["num_layers"])):
        prefix = f"layers.{layer}"
        linear |= {f"{prefix}.encoder_attn.{part}_proj": (dim, dim) for part in ("q", "k", "v", "out")}
        linear |= {f"{prefix}.fc1": (ffn_dim, dim), f"{prefix}.fc2": (dim, ffn_dim)}
        norms += [f"{prefix}.encoder_attn_layer_norm", f"{prefix}.final_layer_norm"]
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in linear.items()}
    shapes |= {f"{name}.bias": shape[:1] for name, shape in linear.items() if not name.endswith("k_proj")}
    return shapes | {f"{name}.{part}": (dim,) for name in norms for part in ("weight", "bias")}


def _causal_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    dim, ffn_dim, size = (int(config[name]) for name in ("hidden_size", "ffn_dim", "head_dim"))
    inner, shared = int(config["attention_heads"]) * size, int(config["key_value_heads"]) * size
    match_length = int(config.get("match_length") or 0)
    parts = 4 if match_length else 2
    shapes: dict[str, tuple[int, ...]] = {"joint": (dim, parts * dim)}
    shapes |= dict.fromkeys(("state_norm", "token_norm", "norm"), (dim,))
    for layer in range(int(config["num_layers"])):
        prefix = f"layers.{layer}"
        rows = {"q": inner, "k": shared, "v": shared}
        shapes |= {f"{prefix}.self_attn.{part}_proj": (size, dim) for part, size in rows.items()}
        shapes |= {f"{prefix}.self_attn.o_proj": (dim, inner), f"{prefix}.mlp.down_proj": (dim, ffn_dim)}
        shapes |= {f"{prefix}.mlp.{part}_proj": (ffn_dim, dim) for part in ("gate", "up")}
        shapes |= {f"{prefix}.{part}_layernorm": (dim,) for part in ("input", "post_attention")}
    gates = {"gates": ((match_length + 1) * parts * dim,)} if match_length else {}
    return {**{f"{name}.weight": shape for name, shape in shapes.items()}, **gates}


_HEADS_SHAPES = {  # by the config's ``type``
    "medusa": _medusa_shapes,
    "recurrent": _recurrent_shapes,
    "causal": _causal_shapes,
}


def quantized_sizes(dim: int, settings: Mapping[str, Any]) -> dict[str, int]:
    """Last dimension of weight, scales and (affine only) biases of a quantized row of ``dim`` numbers."""
    sizes = {"weight": dim * settings["bits"] // 32, "scales": dim // settings["group_size"]}
    if settings.get("mode", "affine") == "affine":
        sizes["biases"] = sizes["scales"]
    return sizes


# ---------------------------------------------------------------------------------------------- write


@contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside ``target``, renamed to it when the block ends well and removed when it
    doesn't.

    Raises OutputError if ``target`` exists or can't be written.
    """
    target = Path(os.path.abspath(Path(target).expanduser()))  # noqa: PTH100 - resolve() would follow links
    if os.path.lexists(target):
        raise OutputError(f"{target}: exists already; remove it or choose another folder")
    made = [parent for parent in target.parents if not parent.exists()]  # innermost first
    staging: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        umask = os.umask(0)
        os.umask(umask)
        staging.chmod(0o777 & ~umask)
        yield staging
        staging.rename(target)
    except BaseException as error:
        if staging is not None:
            shutil.rmtree(staging, ignore_errors=True)
        for parent in made:
            _remove_if_empty(parent)
        if isinstance(error, OSError):
            raise OutputError(f"{target}: cannot be written: {error.strerror or error}") from error
        raise


def _remove_if_empty(folder: Path) -> None:
    """Remove a folder if it is there and empty."""
    with suppress(OSError):
        folder.rmdir()
