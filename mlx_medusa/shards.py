"""The safetensors format: check a file before use, and write one without holding all of it in memory."""

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from mlx_medusa.errors import CheckpointError

_HEADER_LIMIT = 100_000_000  # as in the safetensors library
_ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
_CODES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.int64: "I64",
    mx.int32: "I32",
    mx.int16: "I16",
    mx.int8: "I8",
    mx.uint64: "U64",
    mx.uint32: "U32",
    mx.uint16: "U16",
    mx.uint8: "U8",
    mx.bool_: "BOOL",
}


def read_header(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """({tensor: {dtype, shape, data_offsets}}, metadata) of a safetensors file.

    Raises CheckpointError unless the header is sound and the file is exactly as long as it says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start == b"version ":
                raise CheckpointError(
                    f"{path}: a Git LFS pointer, not the file itself; fetch it with: git lfs pull"
                )
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
            if length > min(size - 8, _HEADER_LIMIT):
                raise CheckpointError(f"{path}: not a safetensors file, or cut short; fetch the file again")
            header = json.loads(file.read(length))
        metadata = header.pop("__metadata__", {})
        end = 0
        for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            first, last = info["data_offsets"]
            if first != end or last - first != math.prod(info["shape"]) * _ITEM_BYTES[info["dtype"]]:
                raise CheckpointError(
                    f"{path}: the header does not fit tensor {name!r}; fetch the file again"
                )
            end = last
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path}: the safetensors header is broken; fetch the file again") from error
    if 8 + length + end != size:
        raise CheckpointError(
            f"{path}: {size} bytes, but its header asks for {8 + length + end}; fetch the file again"
        )
    return header, metadata


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as mlx-lm does: keys sorted, four spaces."""
    path.write_text(
        json.dumps(content, indent=4, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8"
    )


class ShardWriter:
    """Write tensors one by one into safetensors shards, so that only one of them is in memory.

    The header goes in front of the data but is known only at the end, so ``header_bytes`` are kept free and
    the rest of them is filled with blanks, which the format allows. A shard ends at ``shard_bytes``, or
    when its header is full. ``close`` gives the files their names and writes the index.
    """

    def __init__(
        self,
        folder: Path,
        stem: str = "model",
        *,
        metadata: Mapping[str, str] | None = None,
        header_bytes: int = 1 << 18,
        shard_bytes: int = 5 << 30,
    ):
        self.folder, self.stem = folder, stem
        self.metadata = {"format": "mlx", **(metadata or {})}
        self.header_bytes = max(4096, (header_bytes + 7) // 8 * 8)
        self.shard_bytes = shard_bytes
        self.total_size = 0  # bytes of all tensors
        self.total_parameters = 0
        self._shards: list[list[str]] = []
        self._file: BinaryIO | None = None
        self._header: dict[str, Any] = {}
        self._room = 0
        self._offset = 0

    def add(self, name: str, array: mx.array, parameters: int | None = None) -> None:
        """Append a tensor; ``parameters`` is how many numbers of the model it stands for, if not its size."""
        entry = {"dtype": _CODES[array.dtype], "shape": list(array.shape), "data_offsets": [0, 0]}
        room = len(json.dumps({name: entry})) + 40  # the offsets take at most 2 x 19 digits
        if self._file and (self._offset + array.nbytes > self.shard_bytes or room > self._room):
            self._finish_shard()
        if self._file is None:
            self._start_shard()
        assert self._file is not None
        entry["data_offsets"] = [self._offset, self._offset + array.nbytes]
        _write_array(self._file, array)
        self._header[name] = entry
        self._room -= room
        self._offset += array.nbytes
        self.total_size += array.nbytes
        self.total_parameters += array.size if parameters is None else parameters

    def close(self, *, index: bool = True) -> None:
        """Finish the last shard, name the files (``model.safetensors`` if there is one) and write the
        index.
        """
        if self._file is None:
            self._start_shard()
        self._finish_shard()
        weight_map = {}
        count = len(self._shards)
        for number, names in enumerate(self._shards, 1):
            name = (
                f"{self.stem}.safetensors"
                if count == 1
                else f"{self.stem}-{number:05}-of-{count:05}.safetensors"
            )
            self._path(number).rename(self.folder / name)
            weight_map.update(dict.fromkeys(names, name))
        if index:
            sizes = {"total_size": self.total_size, "total_parameters": self.total_parameters}
            write_json(
                self.folder / f"{self.stem}.safetensors.index.json",
                {"metadata": sizes, "weight_map": weight_map},
            )

    def _path(self, number: int) -> Path:
        return self.folder / f"{self.stem}-{number:05}.part"

    def _start_shard(self) -> None:
        self._header = {"__metadata__": self.metadata}
        self._room = self.header_bytes - len(json.dumps(self._header))
        self._offset = 0
        self._shards.append([])
        self._file = self._path(len(self._shards)).open("wb")
        self._file.write(struct.pack("<Q", self.header_bytes) + b" " * self.header_bytes)

    def _finish_shard(self) -> None:
        assert self._file is not None
        self._shards[-1] = [name for name in self._header if name != "__metadata__"]
        with self._file as file:
            file.seek(8)
            file.write(json.dumps(self._header, separators=(",", ":")).encode().ljust(self.header_bytes))
        self._file = None


def _write_array(file: BinaryIO, array: mx.array) -> None:
    array = mx.contiguous(array)
    if array.dtype == mx.bfloat16:  # numpy has none
        array = array.view(mx.uint16)
    file.write(np.asarray(array).data)
