"""Write plain Medusa heads in the layouts of the public systems, for their PyTorch users.

- ``whisper`` (jburtoft): medusa_heads.pt, {"heads": {medusa_head_{i}.{l}.linear.*}}.
- ``meralion`` (kartmannXu): medusa_heads.safetensors, heads.{i}.mlp.{l}.linear.*, and adapter_config.json.
- ``vicuna`` (theharshithh, FasterDecoding): medusa_lm_head.safetensors, {i}.{l}.linear.*, and config.json.

``convert --heads`` reads each of them back.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_medusa import checkpoint
from mlx_medusa.errors import OptionError
from mlx_medusa.shards import write_json

Arrays = dict[str, mx.array]


def export_heads(source: Path, layout: str, folder: Path) -> Path:
    """Write the heads of ``source`` (medusa.safetensors, or a folder with it) into a new ``folder``; the main file.

    The arrays keep their type and bits. Raises OptionError for heads that the layout cannot hold.
    """
    if layout not in LAYOUTS:
        raise OptionError(f"layout {layout!r} is not known: use one of {', '.join(LAYOUTS)}")
    found = checkpoint.read_heads(source)
    if found is None:
        raise OptionError(f"{source}: holds no heads")
    config, arrays = found
    if config.get("type", "medusa") != "medusa" or config.get("quantization") or not config["tied"]:
        raise OptionError(f"{source}: only plain, tied, unquantized Medusa heads can be exported")
    arrays.pop(
        "draft_vocabulary", None
    )  # the layouts have no place for it; what is guessed may differ without
    with checkpoint.staged_folder(folder) as staging:
        name = LAYOUTS[layout](config, arrays, staging)
    return folder / name


def _flat(arrays: Arrays, pattern: str) -> Arrays:
    """Stacked arrays -> one per head, named by ``pattern`` of head, block and kind."""
    flat = {}
    for name, array in arrays.items():
        _, block, kind = name.split(".")
        for head in range(len(array)):
            flat[pattern.format(head=head, block=block, kind=kind)] = mx.contiguous(array[head])
    return flat


def _whisper(config: dict[str, Any], arrays: Arrays, folder: Path) -> str:
    try:
        import torch
    except ImportError as error:
        raise OptionError('the layout "whisper" is a .pt file: pip install "mlx-medusa[torch]"') from error
    state = {}
    for name, array in _flat(arrays, "medusa_head_{head}.{block}.linear.{kind}").items():
        raw = array.view(mx.int16) if array.dtype == mx.bfloat16 else array  # numpy has no bfloat16
        tensor = torch.from_numpy(np.array(raw))
        state[name] = tensor.view(torch.bfloat16) if array.dtype == mx.bfloat16 else tensor
    torch.save({"heads": state}, folder / "medusa_heads.pt")
    return "medusa_heads.pt"


def _meralion(config: dict[str, Any], arrays: Arrays, folder: Path) -> str:
    flat = _flat(arrays, "heads.{head}.mlp.{block}.linear.{kind}")
    mx.save_safetensors(str(folder / "medusa_heads.safetensors"), flat, {"format": "pt"})
    sizes = {name: config[name] for name in ("num_heads", "num_layers", "hidden_size")}
    write_json(folder / "adapter_config.json", {"adapter_type": "MEDUSA", **sizes})
    return "medusa_heads.safetensors"


def _vicuna(config: dict[str, Any], arrays: Arrays, folder: Path) -> str:
    flat = _flat(arrays, "{head}.{block}.linear.{kind}")
    mx.save_safetensors(str(folder / "medusa_lm_head.safetensors"), flat, {"format": "pt"})
    sizes = {"medusa_num_heads": config["num_heads"], "medusa_num_layers": config["num_layers"]}
    (folder / "config.json").write_text(json.dumps({**sizes, "version": "2"}, indent=2) + "\n")
    return "medusa_lm_head.safetensors"


LAYOUTS: dict[str, Callable[[dict[str, Any], Arrays, Path], str]] = {
    "whisper": _whisper,
    "meralion": _meralion,
    "vicuna": _vicuna,
}
