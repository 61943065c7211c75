"""openai/whisper: its tensor names, and its .pt files ({"dims", "model_state_dict"})."""

import re
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

from convert import torch_files
from convert.sources.base import Packed, Source, whisper_config
from mlx_medusa.errors import CheckpointError

_TOP = {
    "encoder.positional_embedding": "model.encoder.embed_positions.weight",
    "decoder.positional_embedding": "model.decoder.embed_positions.weight",
    "decoder.token_embedding": "model.decoder.embed_tokens",
    "encoder.ln_post": "model.encoder.layer_norm",
    "decoder.ln": "model.decoder.layer_norm",
    "encoder.conv1": "model.encoder.conv1",
    "encoder.conv2": "model.encoder.conv2",
}
_BLOCK = re.compile(r"(encoder|decoder)\.blocks\.(\d+)\.(.+)")
_PARTS = {
    "attn": "self_attn",
    "attn_ln": "self_attn_layer_norm",
    "cross_attn": "encoder_attn",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "mlp_ln": "final_layer_norm",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp1": "fc1",  # mlx-whisper's name
    "mlp2": "fc2",
}
_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}


def hf_name(name: str) -> str:
    """The Hugging Face name of an openai tensor (or mlx-whisper tensor); one that is not known keeps its
    name.
    """
    if name in _TOP:
        return _TOP[name]
    if match := _BLOCK.fullmatch(name):
        stack, index, rest = match.groups()
        module, _, kind = rest.rpartition(".")
        attention, _, projection = module.partition(".")
        if projection in _PROJECTIONS and attention in ("attn", "cross_attn"):
            return f"model.{stack}.layers.{index}.{_PARTS[attention]}.{_PROJECTIONS[projection]}.{kind}"
        if module in _PARTS:
            return f"model.{stack}.layers.{index}.{_PARTS[module]}.{kind}"
        return name
    module, _, kind = name.rpartition(".")
    return f"{_TOP[module]}.{kind}" if module in _TOP else name


def sinusoids(length: int, channels: int) -> mx.array:
    """The encoder's position table [length, channels], float32: openai's formula, bit for bit what its
    files hold.
    """
    step = np.log(10_000) / (channels // 2 - 1)
    angles = np.arange(length)[:, None] * np.exp(-step * np.arange(channels // 2))
    return mx.array(np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32))


def open_file(path: Path) -> Source:
    """Open an openai/whisper .pt file. Raises CheckpointError if it is not one, or if PyTorch is not
    installed.
    """
    content = torch_files.load(path)
    if not isinstance(content, dict) or not {"dims", "model_state_dict"} <= content.keys():
        raise CheckpointError(
            f"{path}: not an openai Whisper checkpoint: 'dims' and 'model_state_dict' are not in it"
        )
    state, dims = content["model_state_dict"], content["dims"]
    try:
        config = whisper_config(dims)
        dtype = torch_files.to_mlx(state["decoder.ln.weight"]).dtype
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: not an openai Whisper checkpoint: {error} is missing") from error

    mapped = torch_files.can_map(path)

    def tensors() -> Iterator[tuple[str, mx.array | Packed]]:
        for name, tensor in state.items():
            if name != "decoder.mask":  # a buffer of early releases
                yield hf_name(name), torch_files.to_mlx(tensor)
                if mapped:
                    torch_files.release(tensor)
        if "encoder.positional_embedding" not in state:
            table = sinusoids(config["max_source_positions"], config["d_model"])
            yield hf_name("encoder.positional_embedding"), table.astype(dtype)

    return Source(path, "openai", config, dtype, tensors, size=path.stat().st_size)
