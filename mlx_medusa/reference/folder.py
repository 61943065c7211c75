"""Read a model folder without MLX: settings, tensors (dequantized) and the fingerprint of its weights."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_medusa.digest import sha256
from mlx_medusa.errors import CheckpointError
from mlx_medusa.reference.quantized import dequantize

WEIGHTS, INDEX, HEADS = "model.safetensors", "model.safetensors.index.json", "medusa.safetensors"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; CheckpointError if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error}); convert the model again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object; convert the model again")
    return content


@dataclass(frozen=True)
class Folder:
    """A model folder that `convert` made."""

    path: Path
    config: dict[str, Any]

    @classmethod
    def find(cls, name: str | Path) -> "Folder":
        """A local folder, or the copy of a hub repository that the cache holds; never the network."""
        path = Path(name).expanduser()
        if not path.is_dir():
            from huggingface_hub import snapshot_download

            try:
                path = Path(snapshot_download(str(name), local_files_only=True))
            except Exception as error:  # the hub's library has many kinds
                raise CheckpointError(f"{name}: no such folder, and not in the hub's cache") from error
        return cls(path, read_json(path / "config.json"))

    @property
    def settings(self) -> dict[str, Any]:
        """config.json without what transformers would take for a way to quantize of its own."""
        ours = ("quantization", "quantization_config", "medusa")
        return {name: value for name, value in self.config.items() if name not in ours}

    @property
    def generation(self) -> dict[str, Any]:
        """generation_config.json; empty if there is none."""
        path = self.path / "generation_config.json"
        return read_json(path) if path.exists() else {}

    @property
    def quantization(self) -> dict[str, Any] | None:
        """{group_size, bits, mode, and per layer a dict of its own}; None if the folder is not quantized."""
        return self.config.get("quantization") or None

    def files(self) -> list[Path]:
        """The weight files, in order."""
        if (self.path / WEIGHTS).is_file():
            return [self.path / WEIGHTS]
        names = sorted(set(read_json(self.path / INDEX).get("weight_map", {}).values()))
        return [self.path / name for name in names]

    def tensors(self) -> dict[str, Any]:
        """Every weight as a torch tensor under its Hugging Face name; quantized ones as float32."""
        return read_tensors(self.files(), self.quantization)

    def fingerprint(self) -> str:
        """SHA-256 of the bytes of the weight files, as the cards of heads have it."""
        return sha256(self.files(), cure="convert the model again")


def heads_file(path: Path) -> Path:
    """The heads in a folder, or the file itself."""
    return path / HEADS if path.is_dir() else path


def heads_fingerprint(path: Path) -> str:
    """SHA-256 of the file of the heads in a folder, or of the file itself."""
    return sha256([heads_file(path)], cure="convert the model again")


def read_tensors(files: list[Path], quantization: dict[str, Any] | None) -> dict[str, Any]:
    """All tensors of safetensors files; each layer that has ``.scales`` is dequantized to float32."""
    import torch
    from safetensors import SafetensorError, safe_open

    found: dict[str, Any] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: cannot be read ({error}); convert the model again") from error
    for layer in _quantized(found):
        if quantization is None:
            raise CheckpointError(f"{files[0]}: {layer} is quantized, but no setting says how")
        own = quantization.get(layer)
        weight, scales = found[f"{layer}.weight"], found.pop(f"{layer}.scales")
        biases = found.pop(f"{layer}.biases", None)
        values = dequantize(
            weight.numpy(), _array(scales), None if biases is None else _array(biases),
            **_settings(own if isinstance(own, dict) else quantization),
        )  # fmt: skip
        found[f"{layer}.weight"] = torch.from_numpy(values)
    return found


def _quantized(names: dict[str, Any]) -> Iterator[str]:
    yield from [name.removesuffix(".scales") for name in names if name.endswith(".scales")]


def _array(tensor: Any) -> np.ndarray:
    """Floats as float32, bytes as they are."""
    return tensor.float().numpy() if tensor.is_floating_point() else tensor.numpy()


def _settings(entry: dict[str, Any]) -> dict[str, Any]:
    return {"group_size": entry["group_size"], "bits": entry["bits"], "mode": entry.get("mode", "affine")}


def read_heads(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(``medusa`` settings, torch tensors) of a folder or of a medusa.safetensors; CheckpointError if it has none."""
    from safetensors import SafetensorError, safe_open

    file = heads_file(path)
    try:
        with safe_open(file, framework="pt") as opened:
            config = json.loads((opened.metadata() or {})["medusa"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{file}: holds no Medusa heads of this package: train or convert them"
        ) from error
    return config, read_tensors([file], config.get("quantization"))
