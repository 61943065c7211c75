"""Where and how PyTorch computes: device, precision, and the settings that make a run repeatable."""

import os
import platform
from dataclasses import dataclass
from typing import Any

os.environ.setdefault(
    "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
)  # what deterministic cuBLAS asks for, before it starts

import numpy as np
import torch
import transformers

from mlx_medusa.errors import CheckpointError, OptionError

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Place:
    """A device and a precision."""

    device: torch.device
    dtype: torch.dtype

    def describe(self) -> dict[str, Any]:
        """{device, dtype, versions} for the head of a record."""
        cuda = self.device.type == "cuda"
        name = (
            torch.cuda.get_device_name(self.device)
            if cuda
            else f"{platform.system()} {platform.machine()} CPU"
        )
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        if cuda:
            versions["cuda"] = str(torch.version.cuda)
        return {"device": name, "dtype": str(self.dtype).removeprefix("torch."), "versions": versions}


def place(device: str = "auto", dtype: str = "float32") -> Place:
    """The device and precision of these names, with PyTorch set to repeatable, full-precision arithmetic.

    ``device``: auto (CUDA where there is one, else cpu), cpu, cuda or cuda:N. ``dtype``: float32, float16, bfloat16.
    Raises OptionError for others.
    """
    if dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is not known: use one of {', '.join(DTYPES)}")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise OptionError(f"device {device!r} is not known: use auto, cpu, cuda or cuda:0") from None
    if chosen.type not in ("cpu", "cuda") or (chosen.type == "cuda" and not torch.cuda.is_available()):
        raise OptionError(f"device {device!r} is not there: use --device cpu")
    torch.backends.cuda.matmul.allow_tf32 = False  # TF32 keeps 10 bits of a float32's 23
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(True, warn_only=True)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return Place(chosen, DTYPES[dtype])


def build(kind: Any, config: Any, tensors: dict[str, Any], where: Place, source: object) -> Any:
    """transformers' model of class ``kind`` with these weights, in evaluation mode. CheckpointError unless they fit.

    Attention is transformers' plain formula ("eager"): the same on every device, and the only one that caps scores.
    """
    config._attn_implementation = "eager"
    try:
        model, info = kind.from_pretrained(
            None, config=config, state_dict=tensors, dtype=where.dtype, output_loading_info=True
        )
    except RuntimeError as error:
        raise CheckpointError(f"{source}: the weights are not of this model ({error})") from error
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := info[what]:
            raise CheckpointError(f"{source}: {what.replace('_', ' ')}: {', '.join(sorted(map(str, names)))}")
    return model.to(where.device).eval()


def to_numpy(values: torch.Tensor) -> np.ndarray:
    """A tensor as a float32 array in main memory."""
    return values.float().cpu().numpy()
