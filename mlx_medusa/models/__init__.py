"""One file per architecture, as in mlx-lm. A new one is a file here and a line in ``ARCHITECTURES``."""

import logging
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError

logger = logging.getLogger("mlx_medusa")

ARCHITECTURES = {
    "whisper": "whisper",
    "meralion2": "meralion2",
    "llama": "llama",
    "mistral": "llama",
}  # config.json's model_type -> module in this package


def build(config: dict[str, Any], source: str | Path = "config.json") -> nn.Module:
    """The model that ``config`` describes, with lazy random weights.

    Raises CheckpointError if the architecture is not known or a setting that it needs is missing.
    """
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{source}: model_type {model_type!r} is not supported (supported: {known})")
    module = import_module(f"mlx_medusa.models.{ARCHITECTURES[model_type]}")
    return module.Model(module.ModelArgs.from_config(config, source))


def load(folder: Path, dtype: mx.Dtype | None = None) -> tuple[Any, dict[str, Any]]:
    """Read a model folder: (model with its weights in memory, config).

    ``dtype`` casts the weights that are not quantized; None keeps what the folder holds, except on a CPU
    backend, where everything becomes float32 (half precision and quantized matrices are 4 to 10 times
    slower there). A model whose activations leave the range of float16 gets bfloat16 in its place. Raises
    CheckpointError if the folder does not hold exactly this model.
    """
    config = checkpoint.read_config(folder)
    model: Any = build(config, folder / "config.json")
    arrays = model.sanitize(checkpoint.read_arrays(folder))
    if not getattr(model, "float16", True):
        dtype = _without_float16(dtype, arrays, folder)
    checkpoint.load_into(
        model,
        arrays,
        quantization=config.get("quantization"),
        dtype=dtype,
        source=folder,
    )
    return model, config


def _without_float16(dtype: mx.Dtype | None, arrays: dict[str, mx.array], folder: Path) -> mx.Dtype | None:
    """``dtype``, or bfloat16 where float16 was asked for or is what the folder holds."""
    on_cpu = mx.default_device().type == mx.DeviceType.cpu  # where None means float32
    if dtype is None:
        narrow = not on_cpu and any(array.dtype == mx.float16 for array in arrays.values())
    else:
        narrow = dtype == mx.float16
    if narrow:
        logger.warning("%s: this model's numbers leave the range of float16: bfloat16 is used", folder)
    return mx.bfloat16 if narrow else dtype
