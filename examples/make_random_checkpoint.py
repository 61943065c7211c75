"""Make a random Whisper checkpoint in Hugging Face form, to try the converter on a full-size model without a download.

    python examples/make_random_checkpoint.py /tmp/random-large-v3            # 3.1 GB, whisper-large-v3's shape
    python examples/make_random_checkpoint.py /tmp/random-tiny --size tiny
    convert --base /tmp/random-large-v3 --q-bits 4 --mlx-path /tmp/random-4bit

The text it writes is noise. Tensors are made and written one at a time.
"""

import argparse
from pathlib import Path

import numpy as np

from mlx_medusa.checkpoint import staged_folder, write_json
from mlx_medusa.shards import ShardWriter

import mlx.core as mx  # isort: skip  (mlx_medusa first: it loads a fast BLAS)

SIZES = {  # d_model, heads, encoder layers, decoder layers, mel bins, vocabulary
    "tiny": (384, 6, 4, 4, 80, 51865),
    "base": (512, 8, 6, 6, 80, 51865),
    "small": (768, 12, 12, 12, 80, 51865),
    "medium": (1024, 16, 24, 24, 80, 51865),
    "large-v3": (1280, 20, 32, 32, 128, 51866),
    "large-v3-turbo": (1280, 20, 32, 4, 128, 51866),
}
DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}


def whisper_config(size: str, dtype: str) -> dict[str, object]:
    """A transformers config with the shape of this Whisper."""
    dim, heads, encoder, decoder, mels, vocab = SIZES[size]
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": dim,
        "encoder_layers": encoder,
        "encoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * dim,
        "decoder_layers": decoder,
        "decoder_attention_heads": heads,
        "decoder_ffn_dim": 4 * dim,
        "num_mel_bins": mels,
        "vocab_size": vocab,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "torch_dtype": dtype,
    }


def shapes(size: str) -> dict[str, tuple[int, ...]]:
    """The tensors of transformers' WhisperForConditionalGeneration, projection tied."""
    dim, _, encoder, decoder, mels, vocab = SIZES[size]
    found: dict[str, tuple[int, ...]] = {
        "encoder.conv1.weight": (dim, mels, 3),
        "encoder.conv1.bias": (dim,),
        "encoder.conv2.weight": (dim, dim, 3),
        "encoder.conv2.bias": (dim,),
        "encoder.embed_positions.weight": (1500, dim),
        "decoder.embed_positions.weight": (448, dim),
        "decoder.embed_tokens.weight": (vocab, dim),
    }
    for stack, layers, attentions in (
        ("encoder", encoder, ["self_attn"]),
        ("decoder", decoder, ["self_attn", "encoder_attn"]),
    ):
        for layer in range(layers):
            prefix = f"{stack}.layers.{layer}"
            for attention in attentions:
                for projection in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    found[f"{prefix}.{attention}.{projection}.weight"] = (dim, dim)
                    if projection != "k_proj":
                        found[f"{prefix}.{attention}.{projection}.bias"] = (dim,)
                found.update(_norm(f"{prefix}.{attention}_layer_norm", dim))
            for name, shape in (("fc1", (4 * dim, dim)), ("fc2", (dim, 4 * dim))):
                found[f"{prefix}.{name}.weight"] = shape
                found[f"{prefix}.{name}.bias"] = shape[:1]
            found.update(_norm(f"{prefix}.final_layer_norm", dim))
        found.update(_norm(f"{stack}.layer_norm", dim))
    return {f"model.{name}": shape for name, shape in found.items()}


def _norm(name: str, dim: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def make(
    folder: Path, size: str = "large-v3", dtype: str = "float16", seed: int = 0, shard_bytes: int = 5 << 30
) -> None:
    """Write the checkpoint; ``folder`` must not exist."""
    random = np.random.default_rng(seed)
    with staged_folder(folder) as staging:
        write_json(staging / "config.json", whisper_config(size, dtype))
        writer = ShardWriter(staging, shard_bytes=shard_bytes)
        for name, shape in shapes(size).items():
            values = (random.random(shape, dtype=np.float32) - 0.5) * 0.1
            writer.add(name, mx.array(values).astype(DTYPES[dtype]))
        writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SIZES, default="large-v3")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.folder, args.size, args.dtype, args.seed)


if __name__ == "__main__":
    main()
