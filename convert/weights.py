"""The weights of a folder, one tensor at a time: safetensors, or PyTorch shards where there are no others."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from convert import torch_files
from mlx_medusa.checkpoint import INDEX_FILE, read_arrays, read_json, weight_files
from mlx_medusa.errors import CheckpointError
from mlx_medusa.shards import read_header

DTYPES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
TORCH_FILE, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# Of a file that holds a model and its Medusa heads: the names of either.
HEADS_PREFIXES = ("medusa_head.", "medusa_heads.")
BASE_PREFIXES = ("base_model.", "model.", "lm_head.")
_STEP = 1 << 26  # bytes that are compared at once


class Weights(Protocol):
    """Names, shapes and the type of most floats of a folder's tensors, and a way to read them."""

    kind: str
    shapes: dict[str, tuple[int, ...]]
    dtype: mx.Dtype
    size: int  # bytes on disk

    def take(self, name: str) -> mx.array:
        """A tensor, once: nothing of it stays here."""
        ...

    def equal(self, one: str, two: str) -> bool:
        """Whether two tensors are the same numbers; both may still be taken."""
        ...


def open_weights(path: Path) -> Weights:
    """The weights of a folder, or of one file. Raises CheckpointError if there are none, or they are broken."""
    if path.is_file():
        return SafetensorsWeights([path]) if path.suffix == ".safetensors" else TorchWeights([path])
    if torch_shards := _torch_shards(path):
        return TorchWeights(torch_shards)
    return SafetensorsWeights(weight_files(path))


def _torch_shards(path: Path) -> list[Path]:
    """PyTorch's files of a folder, if it has no others."""
    if any((path / name).is_file() for name in ("model.safetensors", INDEX_FILE)):
        return []
    if (path / TORCH_FILE).is_file():
        return [path / TORCH_FILE]
    if not (path / TORCH_INDEX).is_file():
        return []
    names = sorted({str(value) for value in read_json(path / TORCH_INDEX).get("weight_map", {}).values()})
    missing = [name for name in names if Path(name).name != name or not (path / name).is_file()]
    if missing or not names:
        raise CheckpointError(
            f"{path}: {', '.join(missing) or 'every shard'} is missing; fetch the folder again"
        )
    return [path / name for name in names]


@dataclass(frozen=True)
class _Place:
    file: Path
    dtype: str
    first: int  # byte in the file
    size: int


class SafetensorsWeights:
    def __init__(self, files: list[Path]):
        self.kind = "Hugging Face"
        self.size = sum(file.stat().st_size for file in files)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, _Place] = {}
        self._arrays: dict[str, mx.array] = {}
        for file in files:
            with file.open("rb") as opened:
                start = 8 + int.from_bytes(opened.read(8), "little")
            for name, info in read_header(file)[0].items():
                if name in self.shapes:
                    raise CheckpointError(f"{file}: tensor {name!r} is in another file of the folder too")
                first, last = info["data_offsets"]
                self.shapes[name] = tuple(info["shape"])
                self._places[name] = _Place(file, info["dtype"], start + first, last - first)
            self._arrays |= read_arrays(file)
        self.dtype = most_common([DTYPES[p.dtype] for p in self._places.values() if p.dtype in DTYPES])

    def take(self, name: str) -> mx.array:
        return self._arrays.pop(name)

    def equal(self, one: str, two: str) -> bool:
        a, b = self._places[one], self._places[two]
        if a.dtype != b.dtype or self.shapes[one] != self.shapes[two]:
            return False
        x, y = (np.memmap(p.file, np.uint8, "r", offset=p.first, shape=(p.size,)) for p in (a, b))
        return all(np.array_equal(x[i : i + _STEP], y[i : i + _STEP]) for i in range(0, a.size, _STEP))


class TorchTensors:
    """Torch tensors by name; those that are mapped from a file are read when they are taken."""

    def __init__(self, tensors: dict[str, Any], mapped: Collection[str]):
        self._tensors, self._mapped = tensors, mapped
        self.shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}

    def take(self, name: str) -> mx.array:
        tensor = self._tensors.pop(name)
        array = torch_files.to_mlx(tensor)
        if name in self._mapped:
            torch_files.release(tensor)
        return array


class TorchWeights(TorchTensors):
    def __init__(self, files: list[Path]):
        self.kind = "PyTorch"
        self.size = sum(file.stat().st_size for file in files)
        tensors: dict[str, Any] = {}
        mapped: set[str] = set()
        for file in files:
            content = torch_files.load(file)
            if not isinstance(content, dict) or not all(
                hasattr(t, "untyped_storage") for t in content.values()
            ):
                raise CheckpointError(f"{file}: holds more than named tensors; save a plain state dict")
            tensors |= content
            mapped |= content.keys() if torch_files.can_map(file) else set()
        super().__init__(tensors, mapped)
        known = {f"torch.{str(dtype).rpartition('.')[2]}": dtype for dtype in DTYPES.values()}
        names = [str(tensor.dtype) for tensor in tensors.values()]
        self.dtype = most_common([known[name] for name in names if name in known])

    def equal(self, one: str, two: str) -> bool:
        import torch

        return torch.equal(self._tensors[one], self._tensors[two])


def most_common(dtypes: list[mx.Dtype]) -> mx.Dtype:
    """The type of most tensors, float32 if there are none."""
    names = [str(dtype) for dtype in dtypes]
    return max(dtypes, key=lambda dtype: names.count(str(dtype))) if dtypes else mx.float32
