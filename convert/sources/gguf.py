"""A Llama in a GGUF file: its tensors under Hugging Face names, its settings, its tokenizer and its chat template."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from convert import vocabulary
from convert.sources.base import Packed, Source
from convert.sources.gguf_file import GROUP, GGUFFile
from mlx_medusa.errors import CheckpointError

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
FREQUENCIES = "rope_freqs.weight"
# Llama 3.1 to 3.3: what they have in common, of which llama.cpp stores the outcome only.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")  # of a turn


def open_file(path: Path) -> Source:
    """Open a GGUF file. Raises CheckpointError if it is no whole Llama of types that are read."""
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{path}: architecture {architecture!r} is not read from GGUF, only 'llama' is; use the original model"
        )
    if file.metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{path}: one of {file.metadata['split.count']} parts; join them with: llama-gguf-split --merge"
        )
    config = _config(file)
    names = {name: _hf_name(name) for name in file.tensors if name != FREQUENCIES}
    quantization = _quantization(file, names)
    dtype = file.dtype("token_embd.weight") if quantization is None else mx.float16

    def tensors() -> Iterator[tuple[str, mx.array | Packed]]:
        for name, hf_name in names.items():
            value = file.read(name)
            heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
            if heads_of := heads.get(name.split(".")[-2]):
                value = _unpermuted(value, heads_of, path, name)
            yield hf_name, value if isinstance(value, Packed) else _cast(value, dtype)

    tokens, settings, decoding = _tokenizer(file, config)
    return Source(
        path=path,
        kind="GGUF",
        config={**config, **decoding},
        dtype=dtype,
        tensors=tensors,
        size=path.stat().st_size,
        quantization=quantization,
        generation=decoding,
        made={"tokenizer.json": tokens, "tokenizer_config.json": settings},
    )


def _hf_name(name: str) -> str:
    """The Hugging Face name of a tensor; one that is not known keeps its name, and the pipeline refuses it."""
    match = _BLOCK.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    return _TOP.get(name, name)


def _cast(array: mx.array, dtype: mx.Dtype) -> mx.array:
    """Norms are float32 in every GGUF; they become what the matrices are, where that can hold them."""
    cast = array.astype(dtype)
    return cast if mx.all(mx.isfinite(cast)).item() else array


def _unpermuted(value: mx.array | Packed, heads: int, path: Path, name: str) -> mx.array | Packed:
    """Rows of a query or key projection in Hugging Face's order: llama.cpp has the halves of a head interleaved."""
    rows = (value.weight if isinstance(value, Packed) else value).shape[0]
    if rows % (2 * heads):
        raise CheckpointError(f"{path}: tensor {name!r} has {rows} rows, which {heads} heads cannot share")
    order = mx.array(np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1))
    if not isinstance(value, Packed):
        return value[order]
    assert value.biases is not None
    return replace(value, weight=value.weight[order], scales=value.scales[order], biases=value.biases[order])


def _quantization(file: GGUFFile, names: dict[str, str]) -> dict[str, Any] | None:
    """MLX's settings: the bits of most layers, and an entry for each layer that has others."""
    bits = {names[name].removesuffix(".weight"): file.tensors[name].bits for name in names}
    packed = {layer: count for layer, count in bits.items() if count}
    if not packed:
        return None
    counts = list(packed.values())
    common: dict[str, Any] = {
        "group_size": GROUP,
        "bits": max(set(counts), key=counts.count),
        "mode": "affine",
    }
    own = {layer: {**common, "bits": count} for layer, count in packed.items() if count != common["bits"]}
    return {**common, **own}


def _config(file: GGUFFile) -> dict[str, Any]:
    """A transformers LlamaConfig."""
    said, path = file.metadata, file.path

    def number(key: str, default: float | None = None) -> Any:
        value = said.get(f"llama.{key}", default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CheckpointError(f"{path}: setting 'llama.{key}' is {value!r}, expected a number")
        return value

    if number("expert_count", 0):
        raise CheckpointError(f"{path}: a mixture of experts, which is not read")
    missing = [name for name in ("token_embd.weight", "output_norm.weight") if name not in file.tensors]
    if missing:
        raise CheckpointError(f"{path}: tensor {missing[0]!r} is missing; not a whole model")
    heads = number("attention.head_count")
    head_dim = number("attention.key_length", number("embedding_length") // max(1, heads))
    if number("rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(f"{path}: only a part of each head is turned, which is not read")
    return {
        "model_type": "llama",
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"),
        "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": number("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": number("context_length"),
        "rms_norm_eps": _shortest(number("attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(number("rope.freq_base", 10_000)),
        "rope_scaling": _rope_scaling(file, head_dim),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _shortest(value: float) -> float:
    """The shortest number that float32 rounds to this one: 1e-5 and not 9.99999974e-6."""
    return float(np.format_float_scientific(np.float32(value)))


def _rope_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any] | None:
    said = file.metadata
    if FREQUENCIES in file.tensors:
        return _llama3_scaling(file, head_dim)
    kind, factor = said.get("llama.rope.scaling.type", "none"), said.get("llama.rope.scaling.factor", 1.0)
    if "llama.rope.scale_linear" in said:  # in older files
        kind, factor = "linear", said["llama.rope.scale_linear"]
    if kind == "none" or factor in (0, 1):
        return None
    scaling = {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        original = said.get("llama.rope.scaling.original_context_length", said["llama.context_length"])
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """The settings whose outcome the file holds: by how much each frequency is divided."""
    found = np.array(file.read(FREQUENCIES))
    factor = float(found.max())
    theta = file.metadata.get("llama.rope.freq_base", 10_000.0)
    turns = _LLAMA3["original_max_position_embeddings"] / (
        2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    )
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if found.shape != expected.shape or not np.allclose(found, expected, rtol=1e-3):
        raise CheckpointError(
            f"{file.path}: tensor {FREQUENCIES!r} is not Llama 3's scaling of positions, the only one read"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _tokenizer(
    file: GGUFFile, config: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json, generation_config.json)"""
    said, path = file.metadata, file.path
    model = said.get("tokenizer.ggml.model")
    pieces = said.get("tokenizer.ggml.tokens")
    if model not in ("gpt2", "llama") or not isinstance(pieces, list):
        raise CheckpointError(
            f"{path}: its tokenizer is {model!r}, which is not read (read: 'gpt2', 'llama'); use the original model"
        )
    kinds = said.get("tokenizer.ggml.token_type") or [vocabulary.NORMAL] * len(pieces)
    scores = said.get("tokenizer.ggml.scores") or [0.0] * len(pieces)
    if len(pieces) != config["vocab_size"] or len(kinds) != len(pieces) or len(scores) != len(pieces):
        raise CheckpointError(
            f"{path}: {len(pieces)} tokens, but {config['vocab_size']} rows; fetch it again"
        )
    ids = {name: _token_id(file, name, pieces) for name in ("bos", "eos", "unknown", "padding", "eot")}
    pre = said.get("tokenizer.ggml.pre", "default")
    if model == "llama":
        begin = ids["bos"] if said.get("tokenizer.ggml.add_bos_token", True) else None
        prefix = said.get("tokenizer.ggml.add_space_prefix", True)
        tokens = vocabulary.scored(pieces, kinds, scores, prefix, begin, path)
    elif pre not in vocabulary.SPLITS:
        raise CheckpointError(
            f"{path}: its tokenizer cuts text by the rules {pre!r}, which are not known; use the original model"
        )
    else:
        split = vocabulary.SPLITS[pre]
        begin = ids["bos"] if said.get("tokenizer.ggml.add_bos_token", pre.startswith("llama")) else None
        merges = said.get("tokenizer.ggml.merges", [])
        tokens = vocabulary.byte_level(pieces, kinds, merges, split, begin, path)
    template = said.get("tokenizer.chat_template")
    ends = [pieces.index(end) for end in _ENDS if end in (template or "") and end in pieces]
    stops = sorted({*ends, *(number for name in ("eos", "eot") if (number := ids[name]) is not None)})
    return tokens, _settings(ids, pieces, template, config), _decoding(ids, stops)


def _token_id(file: GGUFFile, name: str, pieces: list[str]) -> int | None:
    number = file.metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is not None and not (isinstance(number, int) and 0 <= number < len(pieces)):
        raise CheckpointError(f"{file.path}: its {name} token is {number}, of {len(pieces)}; fetch it again")
    return number


def _settings(
    ids: dict[str, int | None], pieces: list[str], template: str | None, config: dict[str, Any]
) -> dict[str, Any]:
    """tokenizer_config.json"""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    known = {key: pieces[number] for name, key in names.items() if (number := ids[name]) is not None}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config["max_position_embeddings"],
        **known,
        **({"chat_template": template} if template else {}),
    }


def _decoding(ids: dict[str, int | None], stops: list[int]) -> dict[str, Any]:
    """What config.json and generation_config.json say of tokens."""
    names = {"bos": "bos_token_id", "padding": "pad_token_id"}
    known: dict[str, Any] = {key: number for name, key in names.items() if (number := ids[name]) is not None}
    return {**known, "eos_token_id": stops[0] if len(stops) == 1 else stops}
