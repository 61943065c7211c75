"""Convert: open a source, stream its tensors one by one into a staged folder, rename the folder when it is
whole.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from convert import heads as heads_files
from convert import meralion
from convert.card import model_card
from convert.families import family_of
from convert.quantize import Plan, Recipe, plan, recipe
from convert.sources import Packed, Source, open_source
from mlx_medusa import checkpoint
from mlx_medusa.checkpoint import ShardWriter, quantized_sizes, staged_folder, write_json
from mlx_medusa.errors import CheckpointError, OptionError, OutputError
from mlx_medusa.models import build

_Settings = tuple[int | None, int | None, str, str | None]  # bits, group size, mode, mixed recipe
_BLOCK = 1 << 25  # numbers that are quantized at once
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


@dataclass
class Report:
    """What a conversion did."""

    folder: Path
    kind: str  # of the source
    title: str  # of the family of models
    dtype: str
    tensors: int = 0
    parameters: int = 0
    bits_per_weight: float = 0.0
    quantized: int = 0  # layers
    skipped: dict[str, list[str]] = field(default_factory=dict)  # reason -> layers left unquantized
    heads: dict[str, Any] | None = None
    hears: bool = True  # whether it is a model of speech
    notes: list[str] = field(default_factory=list)  # what else there is to say of the source
    size_before: int = 0  # bytes of the source's weights
    size_after: int = 0  # bytes of the folder

    def lines(self) -> Iterator[str]:
        """The report in words."""
        millions = self.parameters / 1e6
        yield f"{self.title}, {self.kind} source, {self.tensors} tensors, {millions:.1f} M parameters, {self.dtype}"
        if self.quantized:
            yield f"{self.quantized} layers quantized, {self.bits_per_weight:.3f} bits per weight"
            for reason, names in self.skipped.items():
                yield f"  left unquantized ({reason}): {', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        if self.heads:
            kind = "tied" if self.heads.get("tied", True) else "with their own projections"
            bits = self.heads.get("quantization", {}).get("bits")
            yield f"{self.heads['num_heads']} Medusa heads, {kind}, {f'{bits} bits' if bits else self.heads['dtype']}"
        yield from self.notes
        yield f"{self.size_before / 1e6:.1f} MB -> {self.size_after / 1e6:.1f} MB in {self.folder}"


def convert(
    base: str | Path | None = None,
    mlx_path: str | Path = "mlx_model",
    heads: str | Path | None = None,
    *,
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    q_heads: bool = False,
    q_encoder_bits: int | None = None,
    quant_predicate: str | None = None,
    dtype: str | None = None,
    dequantize: bool = False,
    progress: bool = False,
) -> Report:
    """Write an MLX model folder ``mlx_path`` from the checkpoint ``base`` and, if given, Medusa ``heads``.

    ``base`` is a folder or hub id of transformers (Whisper, MERaLiON-2, Llama), faster-whisper (CTranslate2),
    mlx-whisper or mlx-lm, an openai .pt file or a llama.cpp .gguf file; for ``heads`` see ``convert.heads``.
    Without a base they are MERaLiON-2-3B's, both from the hub. ``q_bits``, another ``q_mode`` and
    ``quant_predicate`` imply ``quantize``.
    ``q_encoder_bits`` are those of a quantized model's speech encoder, 16 leaves it as it is; if nothing is said,
    MERaLiON-2's stays and Whisper's is as its decoder. Floats keep the type of the source unless ``dtype``
    ("float16", "bfloat16", "float32") is given. Memory holds one or two tensors.

    Raises OptionError, CheckpointError or OutputError, and leaves nothing behind then.
    """
    quantize = quantize or q_bits is not None or q_mode != "affine" or quant_predicate is not None
    if base is None:
        base, heads = meralion.BASE, heads or meralion.HEADS
    if q_encoder_bits is not None and not quantize:
        raise OptionError("--q-encoder-bits does nothing without quantizing: add -q or --q-bits")
    chosen = _check_options(
        quantize, dequantize, q_heads, dtype, (q_bits, q_group_size, q_mode, quant_predicate)
    )
    target = Path(mlx_path).expanduser()
    if target.exists() or target.is_symlink():
        raise OutputError(f"{target}: exists already; remove it or choose another folder with --mlx-path")
    source = open_source(base)
    if quantize and source.quantization:
        raise OptionError(
            f"{base}: quantized already; quantize the original, or first undo it with: convert -d"
        )
    job = _Job(
        source, chosen if quantize else None, dequantize, DTYPES[dtype] if dtype else None, q_encoder_bits
    )
    job.open_heads(heads, chosen if q_heads else None)
    with staged_folder(target) as folder:
        return job.write(folder, target, base=str(base), progress=progress)


def _check_options(
    quantize: bool, dequantize: bool, q_heads: bool, dtype: str | None, settings: _Settings
) -> Recipe | None:
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"--dtype {dtype}: not one of {', '.join(DTYPES)}")
    if dequantize and (quantize or q_heads):
        raise OptionError("--dequantize and quantizing exclude each other: choose one")
    if settings[1] is not None and not (quantize or q_heads):
        raise OptionError("--q-group-size does nothing without quantizing: add -q or --q-bits")
    return recipe(*settings) if quantize or q_heads else None


@dataclass
class _Size:
    """What ``check_tensors`` looks at, for a tensor that is no longer in memory."""

    shape: tuple[int, ...]


class _Job:
    """One conversion, checked as far as it can be before anything is written."""

    def __init__(
        self,
        source: Source,
        chosen: Recipe | None,
        dequantize: bool,
        dtype: mx.Dtype | None,
        encoder_bits: int | None = None,
    ):
        self.source = source
        self.config = {"model_type": "whisper", **source.config}
        self.family = family_of(self.config, source)
        if encoder_bits is not None and not self.family.encoder:
            raise OptionError(f"--q-encoder-bits: {self.family.title} has no speech encoder; drop the option")
        self.dtype = self._dtype(dtype)
        model: Any = build(self.config, source.path)
        self.args = model.args
        self.shapes = hf_shapes(model)
        bits = encoder_bits or self.family.encoder_bits
        self.plan = plan(model, chosen, self.family.encoder, bits) if chosen else Plan()
        self.keep_packed = bool(source.quantization) and not dequantize
        self.tokenizer = self.family.tokenizer(source, self.config)
        self.heads: tuple[dict[str, Any], dict[str, mx.array]] | None = None
        self.heads_recipe: Recipe | None = None
        name = str(self.dtype or source.dtype).rpartition(".")[2]
        self.report = Report(
            Path(), source.kind, self.family.title, name, skipped=self.plan.skipped, size_before=source.size,
            hears=bool(self.family.encoder), notes=source.notes,
        )  # fmt: skip

    def _dtype(self, chosen: mx.Dtype | None) -> mx.Dtype | None:
        """The type that floats are cast to, None as they are; OptionError for float16 where it is too narrow."""
        if self.family.float16:
            return chosen
        if chosen is None:
            return mx.bfloat16 if self.source.dtype == mx.float16 else None
        if chosen == mx.float16:
            raise OptionError(
                f"--dtype float16: the numbers of {self.family.title} leave its range; use --dtype bfloat16"
            )
        return chosen

    def open_heads(self, path: str | Path | None, chosen: Recipe | None) -> None:
        """Read the heads at ``path``, or those that the base folder has; they fit the base or
        CheckpointError.
        """
        if path is not None:
            self.heads = heads_files.read_heads(path)
        elif self.source.heads:
            self.heads = heads_files.read_heads(self.source.path)
        elif self.source.path.is_dir():
            self.heads = checkpoint.read_heads(self.source.path)
        if self.heads is None:
            if chosen:
                raise OptionError("--q-heads: there are no heads to quantize; name some with --heads")
            return
        config, arrays = self.heads
        base = {"d_model": self.args.hidden_size, "vocab_size": self.args.vocab_size}
        heads_files.check_fit(config, arrays, base, path or self.source.path)
        if self.source.quantization and not self.keep_packed:  # --dequantize
            self.heads = heads_files.unquantized(config, arrays, self.dtype or self.source.dtype)
        self.heads_recipe = chosen

    def write(self, folder: Path, target: Path, base: str, progress: bool) -> Report:
        """Fill ``folder``, which will become ``target``."""
        report = self.report
        report.folder = target
        writer = ShardWriter(folder, header_bytes=len(self.shapes) * 3 * 200)
        self._write_tensors(writer, progress)
        writer.close()
        report.parameters = writer.total_parameters
        report.bits_per_weight = 8 * writer.total_size / max(1, writer.total_parameters)
        if self.heads is not None:
            dtype = self.dtype or self.source.dtype
            report.heads = heads_files.write_heads(folder, *self.heads, dtype, self.heads_recipe)
        self._write_settings(folder)
        (folder / "README.md").write_text(model_card(base, self.report), encoding="utf-8")
        report.size_after = sum(file.stat().st_size for file in folder.iterdir())
        return report

    def _write_tensors(self, writer: ShardWriter, progress: bool) -> None:
        from tqdm import tqdm

        seen: dict[str, _Size] = {}
        names = tqdm(
            self.source.tensors(),
            total=len(self.shapes),
            unit="tensor",
            file=sys.stderr,
            disable=not (progress and sys.stderr.isatty()),
        )
        for name, value in names:
            size = _Size(self._check(name, value))
            if name in seen:
                raise CheckpointError(f"{self.source.path}: tensor {name!r} comes twice")
            seen[name] = size
            self._write_tensor(writer, name, value)
            del value
            mx.clear_cache()
        checkpoint.check_tensors(seen, self.shapes, self.source.path)
        self.report.tensors = len(seen)

    def _check(self, name: str, value: mx.array | Packed) -> tuple[int, ...]:
        """The shape that the tensor has, or would have if it were not quantized; CheckpointError if it's
        wrong.
        """
        if isinstance(value, Packed):
            shape = self.shapes.get(name, (0, 0))
            expected = {
                f"{name} ({part})": (*shape[:-1], size)
                for part, size in quantized_sizes(shape[-1], value.settings).items()
            }
            parts = {"weight": value.weight, "scales": value.scales, "biases": value.biases}
            found = {f"{name} ({part})": array for part, array in parts.items() if array is not None}
        else:
            shape = value.shape
            expected = {key: self.shapes[key] for key in (name,) if key in self.shapes}
            found = {name: value}
            if not mx.issubdtype(value.dtype, mx.floating):
                raise CheckpointError(
                    f"{self.source.path}: tensor {name!r} holds {value.dtype}, expected floats"
                )
        checkpoint.check_tensors(found, expected, self.source.path)
        return shape

    def _write_tensor(self, writer: ShardWriter, name: str, value: mx.array | Packed) -> None:
        layer = name.removesuffix(".weight")
        count = value.weight.size * 32 // value.settings["bits"] if isinstance(value, Packed) else value.size
        settings = self.plan.layers.get(layer)
        parts: tuple[mx.array | None, ...]
        if isinstance(value, Packed) and self.keep_packed:
            parts = (value.weight, *(self._cast(name, part) for part in (value.scales, value.biases)))
        else:
            dtype = self.dtype or self.source.dtype
            full = value.dequantize(dtype) if isinstance(value, Packed) else self._cast(name, value)
            assert full is not None
            parts = _quantize(full, settings) if settings and name.endswith(".weight") else (full,)
        if len(parts) == 1:
            assert parts[0] is not None
            writer.add(name, parts[0])
            return
        self.report.quantized += 1
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
            if array is not None:
                writer.add(f"{layer}.{part}", array, count if part == "weight" else 0)

    def _cast(self, name: str, array: mx.array | None) -> mx.array | None:
        if array is None or self.dtype is None or not mx.issubdtype(array.dtype, mx.floating):
            return array
        if self.dtype == mx.float16 != array.dtype and mx.any(mx.abs(array) > 65504).item():
            raise CheckpointError(
                f"{self.source.path}: {name} holds values that float16 cannot; use --dtype bfloat16 or float32"
            )
        return array.astype(self.dtype)

    def _write_settings(self, folder: Path) -> None:
        """Everything beside the weights."""
        source = self.source
        files = self.family.files(source, self.config, self.tokenizer, self.report.dtype)
        config = files["config.json"]
        quantization = source.quantization if self.keep_packed else self.plan.config()
        if quantization:
            config["quantization"] = config["quantization_config"] = quantization
        if self.report.heads:
            config["medusa"] = self.report.heads
        for extra in source.extras:
            (folder / extra.name).write_bytes(extra.read_bytes())
        for name, content in files.items():
            if not (folder / name).exists():
                write_json(folder / name, content)
        text = json.dumps(self.tokenizer, ensure_ascii=False, separators=(",", ":"))
        (folder / "tokenizer.json").write_text(text, encoding="utf-8")


def _quantize(full: mx.array, settings: dict[str, Any]) -> tuple[mx.array, ...]:
    """Weight, scales and perhaps biases of a matrix; a large one in blocks of rows, so that its copies are small."""
    rows = max(1, _BLOCK // full.shape[-1])
    blocks = []
    for start in range(0, len(full), rows):
        blocks.append(mx.quantize(full[start : start + rows], **settings))
        mx.eval(blocks[-1])
    return tuple(mx.concatenate(list(part)) for part in zip(*blocks, strict=True))


def hf_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's tensors as transformers has them: convolutions are [out, in, k]."""
    parameters: Any = tree_flatten(model.parameters())
    convolutions = {
        f"{path}.weight" for path, module in model.named_modules() if isinstance(module, nn.Conv1d)
    }
    shapes = {name: tuple(array.shape) for name, array in parameters}
    return {
        name: (shape[0], shape[2], shape[1]) if name in convolutions else shape
        for name, shape in shapes.items()
    }
