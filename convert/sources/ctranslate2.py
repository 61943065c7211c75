"""A faster-whisper / CTranslate2 folder: model.bin (binary version 6) and config.json.
 model.bin, little-endian: version uint32, spec name, spec revision uint32, count uint32; per variable:
name, rank uint8, dimensions uint32 each, type uint8, byte count uint32, bytes; then count uint32 and pairs
(alias, variable). A string is its length as uint16, with a closing zero byte counted.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import numpy as np

from convert.sources.base import Packed, Source
from mlx_medusa.checkpoint import read_json
from mlx_medusa.errors import CheckpointError

VERSION, SPEC, REVISION = 6, "WhisperSpec", 3
TYPES = ("float32", "int8", "int16", "int32", "float16", "bfloat16")
_BYTES = {"float32": 4, "int8": 1, "int16": 2, "int32": 4, "float16": 2, "bfloat16": 2}
_FLOATS = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
EMBEDDING, PROJECTION = "decoder/embeddings/weight", "decoder/projection/weight"

_TOP = {
    "encoder/conv1": "model.encoder.conv1",
    "encoder/conv2": "model.encoder.conv2",
    "encoder/layer_norm": "model.encoder.layer_norm",
    "decoder/layer_norm": "model.decoder.layer_norm",
    "decoder/embeddings": "model.decoder.embed_tokens",
    "encoder/position_encodings": "model.encoder.embed_positions",
    "decoder/position_encodings": "model.decoder.embed_positions",
}
# A layer's module -> the Hugging Face modules that its rows hold, one after the other.
_LAYER = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_KINDS = {"gamma": "weight", "beta": "bias", "encodings": "weight", "weight": "weight", "bias": "bias"}


@dataclass(frozen=True)
class Variable:
    shape: tuple[int, ...]
    type: str
    offset: int
    size: int


class ModelFile:
    """The index of a model.bin; the variables' bytes stay in the file until asked for."""

    def __init__(self, path: Path):
        self.path = path
        self.variables: dict[str, Variable] = {}
        self.aliases: dict[str, str] = {}
        try:
            self.size = path.stat().st_size
            with path.open("rb") as file:
                self._read_index(file)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror or error}") from error
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise CheckpointError(
                f"{path}: not a CTranslate2 model, or cut short; fetch the file again"
            ) from error

    def _read_index(self, file: BinaryIO) -> None:
        def number(code: str) -> int:
            return int(struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0])

        def string() -> str:
            length = number("H")
            text, end = struct.unpack(f"<{max(0, length - 1)}ss", file.read(length))
            if end != b"\0":
                raise IndexError
            return str(text, "utf-8")

        version = number("I")
        if version != VERSION:
            raise CheckpointError(
                f"{self.path}: binary version {version}, but only CTranslate2's {VERSION} is read"
            )
        spec, revision = string(), number("I")
        if (spec, revision) != (SPEC, REVISION):
            raise CheckpointError(
                f"{self.path}: holds {spec} revision {revision}, expected {SPEC} {REVISION}"
            )
        for _ in range(number("I")):
            name = string()
            shape = tuple(number("I") for _ in range(number("B")))
            kind, size = TYPES[number("B")], number("I")
            if size != int(np.prod(shape, dtype=np.int64)) * _BYTES[kind]:
                raise CheckpointError(f"{self.path}: variable {name!r} does not fit its shape")
            self.variables[name] = Variable(shape, kind, file.tell(), size)
            if file.seek(size, 1) > self.size:
                raise CheckpointError(f"{self.path}: cut short in {name!r}; fetch the file again")
        self.aliases = {string(): string() for _ in range(number("I"))}
        if file.tell() != self.size:
            raise CheckpointError(
                f"{self.path}: {self.size - file.tell()} bytes after the end; fetch the file again"
            )

    def array(self, name: str) -> mx.array:
        """A variable as it is stored."""
        variable = self.variables[name]
        stored = "uint16" if variable.type == "bfloat16" else variable.type
        try:
            values = np.fromfile(
                self.path, dtype=stored, count=variable.size // _BYTES[variable.type], offset=variable.offset
            )
            array = mx.array(values.reshape(variable.shape))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{self.path}: variable {name!r} cannot be read; fetch the file again"
            ) from error
        return array.view(mx.bfloat16) if variable.type == "bfloat16" else array

    def weight(self, name: str, dtype: mx.Dtype) -> mx.array:
        """A variable as floats: int8 and int16 are divided by the scale of their row, or of the whole
        tensor.
        """
        array = self.array(name)
        scales = f"{name}_scale"
        if scales not in self.variables:
            return array
        scale = self.array(scales).astype(mx.float32)
        scale = scale.reshape(-1, *[1] * (array.ndim - 1)) if scale.size > 1 else scale.reshape(())
        return (array.astype(mx.float32) / scale).astype(dtype)


def open_folder(path: Path) -> Source:
    """Open a CTranslate2 Whisper folder. Raises CheckpointError if it is none."""
    file = ModelFile(path / "model.bin")
    settings = read_json(path / "config.json") if (path / "config.json").is_file() else {}
    try:
        config = _config(file)
    except KeyError as error:
        raise CheckpointError(f"{file.path}: variable {error} is missing; not a Whisper model") from error
    dtype = _FLOATS.get(file.variables["decoder/layer_norm/gamma"].type, mx.float32)
    keys = {
        "suppress_ids": "suppress_tokens",
        "suppress_ids_begin": "begin_suppress_tokens",
        "alignment_heads": "alignment_heads",
    }
    return Source(
        path=path,
        kind="CTranslate2",
        config=config,
        dtype=dtype,
        tensors=lambda: _tensors(file, dtype),
        size=file.size,
        generation={
            ours: settings[theirs] for theirs, ours in keys.items() if settings.get(theirs) is not None
        }
        or None,
        tokenizer=path if (path / "tokenizer.json").is_file() else None,
        extras=[
            path / name for name in ("tokenizer_config.json", "normalizer.json") if (path / name).is_file()
        ],
    )


def _config(file: ModelFile) -> dict[str, Any]:
    """The transformers config, read off the variables. Raises KeyError if one is missing."""
    shapes = {name: variable.shape for name, variable in file.variables.items()}
    config: dict[str, Any] = {
        "vocab_size": shapes[EMBEDDING][0],
        "num_mel_bins": shapes["encoder/conv1/weight"][1],
        "d_model": shapes[EMBEDDING][1],
        "max_source_positions": shapes["encoder/position_encodings/encodings"][0],
        "max_target_positions": shapes["decoder/position_encodings/encodings"][0],
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
    }
    for stack in ("encoder", "decoder"):
        config[f"{stack}_attention_heads"] = np.array(file.array(f"{stack}/num_heads")).item()
        config[f"{stack}_ffn_dim"] = shapes[f"{stack}/layer_0/ffn/linear_0/weight"][0]
        config[f"{stack}_layers"] = len(
            {n.split("/")[1] for n in shapes if n.startswith(f"{stack}/layer_")} - {"layer_norm"}
        )
    return config


def _tensors(file: ModelFile, dtype: mx.Dtype) -> Iterator[tuple[str, mx.array | Packed]]:
    if file.aliases.get(PROJECTION) != EMBEDDING and PROJECTION in file.variables:
        raise CheckpointError(
            f"{file.path}: {PROJECTION} is not tied to the embedding, which is not supported"
        )
    for name, variable in file.variables.items():
        if not variable.shape or name.endswith(("_scale", "/alignment_heads")):
            continue  # settings, and what `weight` reads beside a tensor
        module, _, kind = name.rpartition("/")
        targets = _targets(module)
        if not targets or kind not in _KINDS:
            raise CheckpointError(f"{file.path}: unexpected variable {name!r}; the model is not a Whisper")
        rows = file.weight(name, dtype)
        if rows.shape[0] % len(targets):
            raise CheckpointError(
                f"{file.path}: variable {name!r} has {rows.shape[0]} rows, not {len(targets)} parts"
            )
        for target, part in zip(targets, mx.split(rows, len(targets)), strict=True):
            if (
                target.endswith(".k_proj") and kind == "bias"
            ):  # Whisper's keys have none, so the fused one is zero
                if mx.any(part != 0).item():
                    raise CheckpointError(
                        f"{file.path}: variable {name!r} has a bias for keys; not a Whisper model"
                    )
                continue
            yield f"{target}.{_KINDS[kind]}", part


def _targets(module: str) -> list[str]:
    if module in _TOP:
        return [_TOP[module]]
    stack, _, rest = module.partition("/layer_")
    index, _, rest = rest.partition("/")
    return [f"model.{stack}.layers.{index}.{part}" for part in _LAYER.get(rest, ())]
