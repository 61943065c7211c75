"""One small random Whisper in every form that the converter reads, written without the code under test."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

DIM, LAYERS, HEADS, FFN, MELS, FRAMES, VOCAB, CONTEXT = 64, 2, 2, 256, 80, 24, 51864, 32
DIMS = {
    "n_mels": MELS,
    "n_audio_ctx": FRAMES,
    "n_audio_state": DIM,
    "n_audio_head": HEADS,
    "n_audio_layer": LAYERS,
    "n_vocab": VOCAB,
    "n_text_ctx": CONTEXT,
    "n_text_state": DIM,
    "n_text_head": HEADS,
    "n_text_layer": LAYERS,
}
Tensors = dict[str, np.ndarray]


def write_hf(folder: Path, dtype: torch.dtype = torch.float16, **changes: Any) -> Path:
    """What transformers saves."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    settings = {
        "d_model": DIM,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": FFN,
        "decoder_ffn_dim": FFN,
        "num_mel_bins": MELS,
        "max_source_positions": FRAMES,
        "max_target_positions": CONTEXT,
        "vocab_size": VOCAB,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    torch.manual_seed(0)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**settings, **changes}))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zeros would hide a mix-up
            torch.nn.init.normal_(parameter.data, std=0.02)
    model.to(dtype).save_pretrained(folder)
    return folder


def write_reference(folder: Path) -> Path:
    """The same in float16, with openai's sinusoids as the encoder's positions: a source may leave those out."""
    write_hf(folder)
    tensors = read(folder)
    angles = np.arange(FRAMES)[:, None] * np.exp(-np.log(10000) / (DIM // 2 - 1) * np.arange(DIM // 2))
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    tensors["model.encoder.embed_positions.weight"] = table.astype(np.float32).astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


def read(folder: Path) -> Tensors:
    """All tensors of a folder, by the safetensors library."""
    found: Tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        found.update(load_file(file))
    return found


def write_sharded(source: Path, folder: Path) -> Path:
    """The same checkpoint in two shards with an index, and with the tied projection stored twice."""
    tensors = read(source)
    tensors["proj_out.weight"] = tensors["model.decoder.embed_tokens.weight"].copy()
    folder.mkdir()
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in halves.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def openai_names(tensors: Tensors) -> Tensors:
    """The tensors under openai's names."""
    pairs = [
        (r"^model\.", ""),
        (r"embed_positions\.weight", "positional_embedding"),
        (r"embed_tokens", "token_embedding"),
        (r"^encoder\.layer_norm", "encoder.ln_post"),
        (r"^decoder\.layer_norm", "decoder.ln"),
        (r"\.layers\.", ".blocks."),
        (r"encoder_attn_layer_norm", "cross_attn_ln"),
        (r"self_attn_layer_norm", "attn_ln"),
        (r"final_layer_norm", "mlp_ln"),
        (r"encoder_attn\.", "cross_attn."),
        (r"self_attn\.", "attn."),
        (r"q_proj", "query"),
        (r"k_proj", "key"),
        (r"v_proj", "value"),
        (r"out_proj", "out"),
        (r"fc1", "mlp.0"),
        (r"fc2", "mlp.2"),
    ]
    result = {}
    for name, tensor in tensors.items():
        for pattern, text in pairs:
            name = re.sub(pattern, text, name)
        result[name] = tensor
    return result


def write_openai(tensors: Tensors, path: Path, dims: dict[str, int] | None = None) -> Path:
    """An openai .pt file."""
    state = {name: torch.from_numpy(tensor.copy()) for name, tensor in openai_names(tensors).items()}
    torch.save({"dims": dims or DIMS, "model_state_dict": state}, path)
    return path


def write_mlx_whisper(tensors: Tensors, folder: Path, kind: str = "npz", quantize: bool = False) -> Path:
    """An mlx-community folder, npz or safetensors, perhaps 4-bit; it has no encoder positions."""
    import mlx.core as mx

    folder.mkdir()
    config: dict[str, Any] = {**DIMS, "model_type": "whisper"}
    weights: dict[str, mx.array] = {}
    for name, tensor in openai_names(tensors).items():
        name = name.replace("mlp.0", "mlp1").replace("mlp.2", "mlp2")
        if name == "encoder.positional_embedding":
            continue
        array = mx.array(tensor.swapaxes(1, 2) if ".conv" in name and tensor.ndim == 3 else tensor)
        matrix = array.ndim == 2 and "positional" not in name
        if quantize and matrix:
            layer = name.removesuffix(".weight")
            weights[name], weights[f"{layer}.scales"], weights[f"{layer}.biases"] = mx.quantize(array, 64, 4)
        else:
            weights[name] = array
    weights["alignment_heads"] = mx.array([[1, 0], [1, 1]])
    if quantize:
        config["quantization"] = {"group_size": 64, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    if kind == "npz":
        mx.savez(str(folder / "weights.npz"), **weights)
    else:
        mx.save_safetensors(str(folder / f"{kind}.safetensors"), weights)
    return folder


CT2_TYPES = {"float32": 0, "int8": 1, "int16": 2, "int32": 3, "float16": 4, "bfloat16": 5}
CT2_PARTS = {
    "self_attn_layer_norm": "self_attention/layer_norm",
    "encoder_attn_layer_norm": "attention/layer_norm",
    "final_layer_norm": "ffn/layer_norm",
    "self_attn.out_proj": "self_attention/linear_1",
    "encoder_attn.q_proj": "attention/linear_0",
    "encoder_attn.out_proj": "attention/linear_2",
    "fc1": "ffn/linear_0",
    "fc2": "ffn/linear_1",
}


def ct2_variables(tensors: Tensors) -> Tensors:
    """The variables of a CTranslate2 Whisper: attention projections are joined, keys have a zero bias."""
    out: Tensors = {}
    for stack in ("encoder", "decoder"):
        top = f"model.{stack}."
        out[f"{stack}/num_heads"] = np.array(HEADS, np.int16)
        out[f"{stack}/position_encodings/encodings"] = tensors[f"{top}embed_positions.weight"]
        out[f"{stack}/layer_norm/gamma"] = tensors[f"{top}layer_norm.weight"]
        out[f"{stack}/layer_norm/beta"] = tensors[f"{top}layer_norm.bias"]
        for layer in range(LAYERS):
            hf, ct2 = f"{top}layers.{layer}.", f"{stack}/layer_{layer}/"
            joined = {"self_attention/linear_0": ("self_attn", "qkv")}
            if stack == "decoder":
                joined["attention/linear_1"] = ("encoder_attn", "kv")
            for target, (attention, letters) in joined.items():
                weights = [tensors[f"{hf}{attention}.{letter}_proj.weight"] for letter in letters]
                out[f"{ct2}{target}/weight"] = np.concatenate(weights)
                zero = np.zeros(DIM, weights[0].dtype)
                biases = [tensors.get(f"{hf}{attention}.{letter}_proj.bias", zero) for letter in letters]
                out[f"{ct2}{target}/bias"] = np.concatenate(biases)
            for source, target in CT2_PARTS.items():
                if f"{hf}{source}.weight" in tensors:
                    kinds = ("gamma", "beta") if "norm" in source else ("weight", "bias")
                    out[f"{ct2}{target}/{kinds[0]}"] = tensors[f"{hf}{source}.weight"]
                    out[f"{ct2}{target}/{kinds[1]}"] = tensors[f"{hf}{source}.bias"]
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            out[f"encoder/{conv}/{kind}"] = tensors[f"model.encoder.{conv}.{kind}"]
    out["decoder/embeddings/weight"] = tensors["model.decoder.embed_tokens.weight"]
    out["decoder/scale_embeddings"] = np.array(0, np.int8)
    out["decoder/alignment_heads"] = np.array([1], np.int16)
    return out


def write_ct2(
    variables: Tensors, folder: Path, settings: dict[str, Any] | None = None, version: int = 6
) -> Path:
    """model.bin and config.json."""

    def string(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    folder.mkdir()
    body = struct.pack("<I", version) + string("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, array in variables.items():
        data = np.ascontiguousarray(array).tobytes()
        body += string(name) + struct.pack("<B", array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape)
        kind = "bfloat16" if array.dtype == np.uint16 else array.dtype.name  # numpy has no bfloat16
        body += struct.pack("<BI", CT2_TYPES[kind], len(data)) + data
    body += struct.pack("<I", 1) + string("decoder/projection/weight") + string("decoder/embeddings/weight")
    (folder / "model.bin").write_bytes(body)
    (folder / "config.json").write_text(
        json.dumps(settings or {"suppress_ids": [1, 2], "suppress_ids_begin": [3]})
    )
    return folder


def assert_same(folder: Path, expected: Tensors) -> None:
    found = read(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def break_hf(source: Path, folder: Path, change: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = read(source)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])
