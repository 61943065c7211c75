"""Encoder, verifier step and heads of the PyTorch reference as ONNX files.

The numbers in the graphs are float32. In the files, what is exactly so in float16 (all of a model that was published in
half precision) is stored as that, which the runtime undoes once, when it loads.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from mlx_medusa.exporting.description import WINDOW_SAMPLES, Function, Port, pairs
from mlx_medusa.exporting.torch_graphs import Encoder, Heads, Step
from mlx_medusa.reference.heads import RecurrentHeads
from mlx_medusa.reference.whisper import WhisperReference

OPSET = 18
LARGEST = 2_000_000_000  # bytes of one file; protobuf holds no more than 2 GiB
SMALL = 1024  # elements of a constant that is left as it is


def export(reference: WhisperReference, folder: Path) -> dict[str, Function]:
    """Write encoder.onnx, step.onnx and, with a drafter, heads.onnx into ``folder``; says what they take and give."""
    if reference.drafter is not None:  # which then knows the verifier's embedding
        reference.drafter.begin(reference, torch.zeros(1, 1, reference.model.config.d_model))
    encoder, step = encoder_ports(reference), step_ports(reference)
    _write(Encoder(reference), encoder, (torch.zeros(WINDOW_SAMPLES),), (None,), folder)
    tokens, *cached = _examples(step)
    layers = 2 * reference.model.config.decoder_layers
    rows, past = torch.export.Dim.DYNAMIC, torch.export.Dim.DYNAMIC
    sizes = ({1: rows}, [{2: past}] * layers, [None] * layers)
    _write(Step(reference), step, (tokens, cached[:layers], cached[layers:]), sizes, folder)
    functions = {"encoder": encoder, "step": step}
    if reference.drafter is not None:
        functions["heads"] = heads = heads_ports(reference)
        hidden, token, *memory = _examples(heads)
        drafter: Any = reference.drafter
        module = Heads(drafter, reference.model.get_input_embeddings())
        _write(module, heads, (hidden, token, memory), (None, None, [None] * len(memory)), folder)
    return functions


def _examples(function: Function) -> list[torch.Tensor]:
    """Zeros to trace with; 3 rows, 5 of the past, since 0 and 1 would count as sizes that never change."""
    named = {"rows": 3, "past": 5}
    return [
        torch.zeros([size if isinstance(size, int) else named[size] for size in port.shape],
                    dtype=getattr(torch, port.dtype))
        for port in function.inputs
    ]  # fmt: skip


def _write(module: torch.nn.Module, ports: Function, args: tuple[Any, ...], sizes: Any, folder: Path) -> None:
    """Trace, name inputs and outputs, store in half precision what is exactly so, write."""
    names = [port.name for port in ports.inputs]
    with torch.no_grad(), _quiet():
        program = torch.onnx.export(
            module.eval(), args, dynamo=True, opset_version=OPSET, dynamic_shapes=sizes, input_names=names,
            output_names=[port.name for port in ports.outputs],
        )  # fmt: skip
    assert program is not None, "the exporter returns a program"
    model = program.model
    _name_sizes(model, ports)
    _halve(model.graph)
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    outside = f"{ports.file}.data" if size > LARGEST else None
    ir.save(model, folder / ports.file, external_data=outside)


@contextlib.contextmanager
def _quiet() -> Any:
    """Without what the exporter says about its own steps; its errors are raised all the same."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _name_sizes(model: ir.Model, ports: Function) -> None:
    """Sizes that differ from call to call are named as in export.json."""
    for values, found in ((model.graph.inputs, ports.inputs), (model.graph.outputs, ports.outputs)):
        for value, port in zip(values, found, strict=True):
            value.shape = ir.Shape(list(port.shape))


def _halve(graph: ir.Graph) -> None:
    """Store as float16, with a cast behind it, each large float32 constant that float16 holds exactly."""
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.dtype != ir.DataType.FLOAT or tensor.size < SMALL:
            continue
        array = tensor.numpy()
        with np.errstate(over="ignore"):
            half = array.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), array):
            continue
        stored = ir.Value(name=f"{name}.float16", const_value=ir.tensor(half, name=f"{name}.float16"))
        stored.dtype, stored.shape = ir.DataType.FLOAT16, ir.Shape(half.shape)
        cast = ir.node("Cast", [stored], attributes={"to": ir.DataType.FLOAT.value})
        ir.convenience.replace_all_uses_with(value, cast.outputs[0])
        del graph.initializers[name]
        cast.outputs[0].name, cast.outputs[0].dtype = name, ir.DataType.FLOAT
        cast.outputs[0].shape = stored.shape
        graph.register_initializer(stored)
        graph.insert_before(graph[0], cast)


# -------------------------------------------------------------------------------- what they take and give


def encoder_ports(reference: WhisperReference) -> Function:
    samples = Port("samples", (WINDOW_SAMPLES,), "float32")
    return Function("encoder.onnx", (samples,), (*_memory_ports(reference), *_heads_memory_ports(reference)))


def step_ports(reference: WhisperReference) -> Function:
    """``past`` may be 0, and to rewind the cache is to pass fewer rows of it."""
    config = reference.model.config
    heads, layers = config.decoder_attention_heads, config.decoder_layers
    past, present = ((1, heads, rows, config.d_model // heads) for rows in ("past", "past + rows"))
    logits = Port("logits", (1, "rows", config.vocab_size), "float32")
    hidden = Port("hidden", (1, "rows", config.d_model), "float32")
    return Function(
        "step.onnx",
        (
            Port("tokens", (1, "rows"), "int64"),
            *pairs("past_", layers, past, "float32"),
            *_memory_ports(reference),
        ),
        (logits, hidden, *pairs("present_", layers, present, "float32")),
    )


def heads_ports(reference: WhisperReference) -> Function:
    assert reference.drafter is not None, "there are heads"
    hidden = Port("hidden", (1, 1, reference.model.config.d_model), "float32")
    guesses = Port("guesses", (reference.drafter.max_drafts,), "int64")
    return Function(
        "heads.onnx", (hidden, Port("token", (1,), "int64"), *_heads_memory_ports(reference)), (guesses,)
    )


def _memory_ports(reference: WhisperReference) -> Sequence[Port]:
    config = reference.model.config
    heads = config.decoder_attention_heads
    shape = (1, heads, config.max_source_positions, config.d_model // heads)
    return pairs("memory_", config.decoder_layers, shape, "float32")


def _heads_memory_ports(reference: WhisperReference) -> Sequence[Port]:
    """Plain heads attend to nothing."""
    if not isinstance(reference.drafter, RecurrentHeads):
        return []
    config, heads = reference.model.config, reference.drafter
    rows, width = config.max_source_positions // heads.memory_pool, config.d_model // heads.attention_heads
    shape = (1, heads.attention_heads, rows, width)
    return pairs("heads_", heads.num_layers, shape, "float32")
