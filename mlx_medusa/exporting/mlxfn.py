"""Encoder, verifier step and heads as MLX functions in files, which MLX for C++, C, Swift and Python import.

MLX traces a function for the shapes of its arguments. So the cache is an argument of fixed length, written at an
offset that is an array, and the step is traced once for each number of rows; the traces share the weights.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map

from mlx_medusa.audio.mel import window_mel
from mlx_medusa.errors import OutputError
from mlx_medusa.exporting.description import WINDOW_SAMPLES, Function, Port, pairs
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.heads import MedusaDrafter
from mlx_medusa.medusa.recurrent import RecurrentDrafter
from mlx_medusa.models.whisper import Model

LONGEST_PROMPT = 4  # start, language, task, no timestamps: read in one pass

Arrays = list[mx.array]
Traced = Callable[..., Arrays]
Drafter = MedusaDrafter | RecurrentDrafter


def export(model: Model, drafter: Drafter | None, folder: Path) -> dict[str, Function]:
    """Write encoder.mlxfn, step.mlxfn and, with a drafter, heads.mlxfn into ``folder``; says what they take and give.

    The numbers keep the dtype of the loaded model, logits are float32.
    """
    for module in (model, drafter.heads) if drafter else (model,):
        # MLX 0.32 writes an array that is laid out by column as if it were laid out by row
        module.update(tree_map(mx.contiguous, module.parameters()))
        mx.eval(module.parameters())
    functions = {"encoder": encoder_ports(model, drafter), "step": step_ports(model)}
    widths = range(1, max(1 + (drafter.max_drafts if drafter else 0), LONGEST_PROMPT) + 1)
    _write(encoder(model, drafter), functions["encoder"], [{}], folder)
    _write(step(model), functions["step"], [{"rows": width} for width in widths], folder)
    if drafter is not None:
        functions["heads"] = heads_ports(model, drafter)
        _write(heads(drafter), functions["heads"], [{}], folder)
    return functions


def _write(function: Traced, ports: Function, sizes: Sequence[dict[str, int]], folder: Path) -> None:
    """One trace for each of ``sizes``, which say how long the named dimensions are."""
    path = folder / ports.file
    try:
        with mx.exporter(str(path), function) as trace:
            for size in sizes:
                trace(*(_example(port, size) for port in ports.inputs))
        mx.import_function(str(path))  # which reads all of it
    except RuntimeError as error:
        if str(error).startswith(("[write]", "[read]")):
            raise OutputError(f"{path.name}: cannot be written: {error}: is the disk full?") from error
        raise


def _example(port: Port, sizes: dict[str, int]) -> mx.array:
    return mx.zeros([size if isinstance(size, int) else sizes[size] for size in port.shape], _dtype(port))


def _dtype(port: Port) -> mx.Dtype:
    dtype: mx.Dtype = getattr(mx, port.dtype)
    return dtype


def _precision(model: Model) -> str:
    """The dtype in which the model computes, as numpy names it."""
    return str(model.model.decoder.layer_norm.weight.dtype).removeprefix("mlx.core.")


# ------------------------------------------------------------------------------------------ the functions


def encoder(model: Model, drafter: Drafter | None) -> Traced:
    """Samples [480,000] of a window -> K and V of all that is attended to: by the decoder, then by the heads."""

    def run(samples: mx.array) -> Arrays:
        encoded = model.encode(window_mel(samples, model.args.num_mel_bins)[None])
        found: list[Any] = [layer.encoder_attn.keys_values(encoded) for layer in model.model.decoder.layers]
        if isinstance(drafter, RecurrentDrafter):
            pooled = drafter.heads.pooled(encoded)
            found += [layer.encoder_attn.keys_values(pooled) for layer in drafter.heads.layers]
        return [_row_major(array) for pair in found for array in pair]

    return run


def _row_major(array: mx.array) -> mx.array:
    """As ``mx.contiguous``, which MLX does not export: to flatten what is transposed copies it."""
    return array.reshape(-1).reshape(array.shape)


def step(model: Model) -> Traced:
    """One pass over W rows that follow ``length`` cached ones."""
    cached = 2 * model.num_layers

    def run(tokens: mx.array, length: mx.array, *arrays: mx.array) -> Arrays:
        cache = ArgumentCache(length, arrays[:cached], arrays[cached:])
        positions = length + mx.arange(tokens.shape[1])
        mask = mx.arange(model.max_length)[None] <= positions[:, None]
        hidden = model.step(tokens, positions[None], mask[None, None], cache)
        return [model.logits(hidden).astype(mx.float32), hidden, *cache.arrays]

    return run


def heads(drafter: Drafter) -> Traced:
    """The state that predicted the pending token, and that token -> all guesses."""

    def run(hidden: mx.array, token: mx.array, *memory: mx.array) -> Arrays:
        if isinstance(drafter, MedusaDrafter):
            ids = drafter.guesses(hidden, drafter.max_drafts)
        else:
            ids = mx.concatenate(list(drafter.chain(hidden, token, _pairs(memory), drafter.max_drafts)))
        return [ids.astype(mx.int32)]

    return run


class ArgumentCache(KVCache):
    """K/V that come as arguments: buffers of all rows, of which those from ``start`` on are written."""

    def __init__(self, start: mx.array, buffers: Sequence[mx.array], memory: Sequence[mx.array]):
        """``start`` [1] int32; ``buffers`` and ``memory`` are K and V of each layer in turn."""
        super().__init__(len(buffers) // 2, _pairs(memory))
        self._start = start
        self.arrays = list(buffers)

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        for i, rows in ((2 * layer, keys), (2 * layer + 1, values)):
            self.arrays[i] = mx.slice_update(self.arrays[i], rows, self._start, axes=(2,))
        return self.arrays[2 * layer], self.arrays[2 * layer + 1]


def _pairs(arrays: Sequence[mx.array]) -> list[tuple[mx.array, mx.array]]:
    return list(zip(arrays[::2], arrays[1::2], strict=True))


# -------------------------------------------------------------------------------- what they take and give


def encoder_ports(model: Model, drafter: Drafter | None) -> Function:
    return Function(
        "encoder.mlxfn",
        (Port("samples", (WINDOW_SAMPLES,), "float32"),),
        (*_memory_ports(model), *_heads_memory_ports(model, drafter)),
    )


def step_ports(model: Model) -> Function:
    """The cache comes back with the new rows in it; to rewind is to pass a smaller ``length``."""
    args, dtype = model.args, _precision(model)
    size = args.d_model // args.decoder_attention_heads
    shape = (1, args.decoder_attention_heads, model.max_length, size)
    taken = (Port("tokens", (1, "rows"), "int32"), Port("length", (1,), "int32"))
    given = (
        Port("logits", (1, "rows", args.vocab_size), "float32"),
        Port("hidden", (1, "rows", args.d_model), dtype),
    )
    return Function(
        "step.mlxfn",
        (*taken, *pairs("past_", model.num_layers, shape, dtype), *_memory_ports(model)),
        (*given, *pairs("present_", model.num_layers, shape, dtype)),
    )


def heads_ports(model: Model, drafter: Drafter) -> Function:
    taken = (Port("hidden", (1, 1, model.args.d_model), _precision(model)), Port("token", (1,), "int32"))
    return Function(
        "heads.mlxfn",
        (*taken, *_heads_memory_ports(model, drafter)),
        (Port("guesses", (drafter.max_drafts,), "int32"),),
    )


def _memory_ports(model: Model) -> list[Port]:
    heads = model.args.decoder_attention_heads
    shape = (1, heads, model.args.max_source_positions, model.args.d_model // heads)
    return pairs("memory_", model.num_layers, shape, _precision(model))


def _heads_memory_ports(model: Model, drafter: Drafter | None) -> list[Port]:
    """Plain heads attend to nothing."""
    if not isinstance(drafter, RecurrentDrafter):
        return []
    args: Any = drafter.heads.args
    parameters: Any = tree_flatten(drafter.heads.parameters())
    dtype = str(dict(parameters)["layer_norm.weight"].dtype).removeprefix("mlx.core.")
    shape = (
        1,
        args.attention_heads,
        model.args.max_source_positions // args.memory_pool,
        args.hidden_size // args.attention_heads,
    )
    return pairs("heads_", args.num_layers, shape, dtype)
