"""What every source of a base model offers."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_medusa.checkpoint import dequantize, settings_for
from mlx_medusa.errors import CheckpointError


@dataclass(frozen=True)
class Packed:
    """A weight that the source holds quantized, with its settings {group_size, bits, mode}."""

    weight: mx.array  # uint32 [out, in * bits / 32]
    scales: mx.array  # [out, in / group_size]
    biases: mx.array | None  # as scales; affine only
    settings: dict[str, Any]

    def dequantize(self, dtype: mx.Dtype) -> mx.array:
        """The weight [out, in] as ``dtype``."""
        return dequantize(self.weight, self.scales, self.biases, self.settings, dtype)


@dataclass
class Source:
    """A base checkpoint under Hugging Face names.

    ``tensors`` yields (name, array or Packed) one by one, in Hugging Face layouts (convolutions [out, in,
    k]), and keeps none of them. ``generation`` and ``tokenizer`` are what the source says about decoding
    and where its tokenizer is; None if it says nothing.
    """

    path: Path
    kind: str  # for the report
    config: dict[str, Any]  # a transformers config
    dtype: mx.Dtype  # of the floats; quantized ones are dequantized to it
    tensors: Callable[[], Iterator[tuple[str, mx.array | Packed]]]
    size: int  # bytes of the weights on disk
    quantization: dict[str, Any] | None = None  # as in an MLX config.json; keys are Hugging Face layer names
    generation: dict[str, Any] | None = None
    tokenizer: Path | None = None  # a folder with tokenizer.json, or with vocab.json and merges.txt
    extras: list[Path] = field(default_factory=list)  # small files to copy as they are
    made: dict[str, dict[str, Any]] = field(default_factory=dict)  # JSON files that it holds in another form
    heads: bool = False  # whether its files hold Medusa heads too
    notes: list[str] = field(default_factory=list)  # what the report says about it


def unite(
    names: Iterable[str],
    fetch: Callable[[str], mx.array],
    rename: Callable[[str], str],
    quantization: Mapping[str, Any] | None,
    path: Path,
) -> Iterator[tuple[str, mx.array | Packed]]:
    """Yield (new name, array), with the weight, scales and biases of a quantized layer joined into a
    ``Packed``.
    """
    known = set(names)
    for name in sorted(known):
        layer, _, part = name.rpartition(".")
        packed = f"{layer}.scales" in known
        if packed and part in ("scales", "biases"):
            continue
        if not (packed and part == "weight"):
            yield rename(name), fetch(name)
            continue
        if quantization is None:
            raise CheckpointError(f"{path}: {layer} is quantized, but config.json has no 'quantization'")
        settings = settings_for(quantization, rename(name).removesuffix(".weight"))
        biases = fetch(f"{layer}.biases") if f"{layer}.biases" in known else None
        yield rename(name), Packed(fetch(name), fetch(f"{layer}.scales"), biases, settings)


def whisper_config(dims: Mapping[str, int]) -> dict[str, Any]:
    """The transformers config of a model with openai's dimensions (n_mels, n_audio_ctx, ...).

    Raises KeyError if one is missing.
    """
    return {
        "vocab_size": dims["n_vocab"],
        "num_mel_bins": dims["n_mels"],
        "d_model": dims["n_audio_state"],
        "encoder_layers": dims["n_audio_layer"],
        "encoder_attention_heads": dims["n_audio_head"],
        "encoder_ffn_dim": 4 * dims["n_audio_state"],
        "decoder_layers": dims["n_text_layer"],
        "decoder_attention_heads": dims["n_text_head"],
        "decoder_ffn_dim": 4 * dims["n_text_state"],
        "max_source_positions": dims["n_audio_ctx"],
        "max_target_positions": dims["n_text_ctx"],
        "activation_function": "gelu",
        "scale_embedding": False,
        "tie_word_embeddings": True,
        "is_encoder_decoder": True,
    }
