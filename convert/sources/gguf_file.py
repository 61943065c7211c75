"""The GGUF format of llama.cpp, versions 2 and 3: a header that is checked before use, and tensors read one by one.

Little-endian: "GGUF", version uint32, counts of tensors and of settings uint64; per setting its name, type uint32 and
value; per tensor its name, rank uint32, dimensions uint64 (innermost first), type uint32, offset uint64; then,
aligned, the data. A string is its length as uint64 and its bytes. Blocks of 32 numbers, of which d and m are float16:
Q8_0 d, 32 int8: d q. Q4_0 d, 16 bytes: d (q - 8). Q4_1 d, m, 16 bytes: d q + m; low halves of the bytes come first.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from convert.sources.base import Packed
from mlx_medusa.errors import CheckpointError

_NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_FLOATS = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
GROUP = 32  # numbers per block
_STEP = 1 << 25  # bytes that are read at once
_READ = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20)}
_READ |= {8: ("Q8_0", 32, 34)}  # type -> name, numbers and bytes per block
_OTHERS = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...]  # outermost first
    type: str
    offset: int  # in the file
    size: int  # bytes

    @property
    def bits(self) -> int | None:
        """Of a quantized tensor."""
        return _BITS.get(self.type)

    @property
    def block(self) -> int:
        """Bytes of a block."""
        return next(size for name, _, size in _READ.values() if name == self.type)


class GGUFFile:
    """Settings and index of a GGUF file; the tensors stay in the file until asked for.

    Raises CheckpointError unless the header is sound, every tensor lies within the file, and every type is known.
    """

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, Tensor] = {}
        self._at = 0
        try:
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":
                    raise CheckpointError(f"{path}: not a GGUF file; fetch the file again")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        except (struct.error, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path}: the GGUF header is broken or cut short; fetch the file again"
            ) from error

    def _read_header(self) -> None:
        self._at = 4
        (version,) = struct.unpack("<I", self._take(4))
        if version not in (2, 3):
            order = " (or its byte order)" if version >= 1 << 16 else ""
            raise CheckpointError(f"{self.path}: GGUF version {version}{order} is not read; only 2 and 3 are")
        tensors, settings = self._number("<u8"), self._number("<u8")
        for _ in range(settings):
            name = self._string()
            self.metadata[name] = self._value(self._number("<u4"))
        infos = [self._info() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError
        start = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            self._add(name, shape, kind, start, offset, alignment)

    def _add(
        self, name: str, shape: tuple[int, ...], kind: int, start: int, offset: int, alignment: int
    ) -> None:
        if kind not in _READ:
            known = ", ".join(sorted(name for name, *_ in _READ.values()))
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is of type {_OTHERS.get(kind, kind)}, which is not read "
                f"(read: {known}); take a file of one of those types, or make one: "
                "llama-quantize --allow-requantize IN.gguf OUT.gguf Q8_0"
            )
        kind_name, numbers, size = _READ[kind]
        if name in self.tensors or offset % alignment or prod(shape) < 1 or shape[-1] % numbers:
            raise CheckpointError(
                f"{self.path}: the header does not fit tensor {name!r}; fetch the file again"
            )
        tensor = Tensor(shape, kind_name, start + offset, prod(shape) // numbers * size)
        if tensor.offset + tensor.size > len(self._data):
            raise CheckpointError(f"{self.path}: cut short within tensor {name!r}; fetch the file again")
        self.tensors[name] = tensor

    def _take(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise ValueError
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, code: str) -> Any:
        return np.frombuffer(self._take(np.dtype(code).itemsize), code)[0].item()

    def _string(self) -> str:
        return self._take(self._number("<u8")).decode("utf-8", "replace")  # tokens may be half a character

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_NUMBERS[kind])
        kind, count = self._number("<u4"), self._number("<u8")
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        code = _NUMBERS[kind]
        return np.frombuffer(self._take(count * np.dtype(code).itemsize), code).tolist()

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self._string(), self._number("<u4")
        if not 1 <= rank <= 4:
            raise ValueError
        shape = tuple(self._number("<u8") for _ in range(rank))[::-1]
        return name, shape, self._number("<u4"), self._number("<u8")

    def read(self, name: str) -> mx.array | Packed:
        """A copy of a tensor: an array of floats, or a quantized matrix in MLX's form, the numbers unchanged."""
        tensor = self.tensors[name]
        if tensor.bits:
            return self._packed(tensor, name)
        raw = next(self._rows(tensor, tensor.shape[0]))
        if tensor.type == "BF16":  # numpy has none
            return mx.array(raw.view(np.uint16)).view(mx.bfloat16).reshape(tensor.shape)
        return mx.array(raw.view(np.float16 if tensor.type == "F16" else np.float32)).reshape(tensor.shape)

    def _rows(self, tensor: Tensor, count: int) -> Iterator[np.ndarray]:
        """The bytes of ``count`` rows at a time, read and not mapped: mapped ones would stay in memory."""
        size = tensor.size // tensor.shape[0]
        with self.path.open("rb") as file:
            file.seek(tensor.offset)
            for start in range(0, tensor.shape[0], count):
                yield np.fromfile(file, np.uint8, size * min(count, tensor.shape[0] - start))

    def _packed(self, tensor: Tensor, name: str) -> Packed:
        rows = max(1, _STEP * tensor.shape[0] // tensor.size)
        parts = [_repacked(raw, tensor) for raw in self._rows(tensor, rows)]
        words, scales, biases = (mx.concatenate(list(part)) for part in zip(*parts, strict=True))
        if not (mx.all(mx.isfinite(scales)).item() and mx.all(mx.isfinite(biases)).item()):
            raise CheckpointError(
                f"{self.path}: tensor {name!r} holds scales that are not finite; fetch the file again"
            )
        return Packed(words, scales, biases, {"group_size": GROUP, "bits": tensor.bits, "mode": "affine"})

    def dtype(self, name: str) -> mx.Dtype:
        """The type of a tensor's floats; of a quantized one, of its scales."""
        return _FLOATS.get(self.tensors[name].type, mx.float16)


def _repacked(raw: np.ndarray, tensor: Tensor) -> tuple[mx.array, mx.array, mx.array]:
    """Rows of blocks as MLX has them: the numbers, lowest bits first; scale and bias of each 32."""
    blocks = raw.reshape(-1, *tensor.shape[1:-1], tensor.shape[-1] // GROUP, tensor.block)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    if tensor.type == "Q8_0":
        numbers = blocks[..., 2:] ^ 0x80  # from signed to offset 128
        biases = scales * np.float16(-128)
    else:
        halves = blocks[..., -16:]
        numbers = np.concatenate(
            [part[..., ::2] | part[..., 1::2] << 4 for part in (halves & 15, halves >> 4)], axis=-1
        )
        if tensor.type == "Q4_1":
            biases = np.ascontiguousarray(blocks[..., 2:4]).view(np.float16)[..., 0]
        else:
            biases = scales * np.float16(-8)
    words = np.ascontiguousarray(numbers).view(np.uint32).reshape(*blocks.shape[:-2], -1)
    return mx.array(words), mx.array(scales), mx.array(biases)
