"""Make a random checkpoint in Hugging Face form, to try the converter on a full-size model without a download.

    python examples/make_random_checkpoint.py /tmp/random-large-v3            # 3.1 GB, whisper-large-v3's shape
    python examples/make_random_checkpoint.py /tmp/random-tiny --size tiny
    convert --base /tmp/random-large-v3 --q-bits 4 --mlx-path /tmp/random-4bit
    python examples/make_random_checkpoint.py /tmp/random-meralion --model meralion-2-3b   # 7 GB, with 4 heads
    convert --base /tmp/random-meralion --heads /tmp/random-meralion/heads --q-bits 4 --mlx-path /tmp/meralion-4bit
    python examples/make_random_checkpoint.py /tmp/random-vicuna --model vicuna-7b    # 13 GB, two sets of heads, 1.8 GB
    convert --base /tmp/random-vicuna --heads /tmp/random-vicuna/heads-tied --q-bits 4 --mlx-path /tmp/vicuna-4bit

The text it writes is noise. Tensors are made and written one at a time.
"""

import argparse
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import make_gemma_tokenizer
import numpy as np

from convert.pipeline import hf_shapes
from convert.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, scored
from mlx_medusa import models
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
_BLOCK = 1 << 24  # numbers that are made at once
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
            writer.add(name, uniform(random, shape, 0.05, DTYPES[dtype]))
        writer.close()


def uniform(random: np.random.Generator, shape: Iterable[int], most: float, dtype: mx.Dtype) -> mx.array:
    """Numbers between -most and most, made in blocks so that their float32 form is small."""
    shape = tuple(shape)
    size = math.prod(shape)
    blocks = []
    for start in range(0, size, _BLOCK):
        block = random.random(min(_BLOCK, size - start), dtype=np.float32)
        blocks.append(mx.array((block - 0.5) * (2 * most)).astype(dtype))
        mx.eval(blocks[-1])
    return mx.concatenate(blocks).reshape(shape)


def meralion_config(encoder: str = "large-v3", **text: int) -> dict[str, Any]:
    """A config.json with the shape of MERaLiON-2-3B; ``text`` changes settings of its decoder."""
    decoder: dict[str, Any] = {
        "model_type": "gemma2",
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        **text,
    }
    return {
        "model_type": "meralion2",
        "architectures": ["MERaLiON2ForConditionalGeneration"],
        "speech_config": {"model_type": "whisper", **whisper_config(encoder, "bfloat16")},
        "text_config": decoder,
        "speech_mlp_scale_factor": 15,
        "speech_token_index": decoder["vocab_size"] - 1,
        "hidden_size": decoder["hidden_size"],  # some text keys stand here a second time
        "num_hidden_layers": decoder["num_hidden_layers"],
        "torch_dtype": "bfloat16",
    }


def make_meralion(
    folder: Path,
    seed: int = 0,
    shard_bytes: int = 5 << 30,
    heads: int = 4,
    config: dict[str, Any] | None = None,
) -> None:
    """Write a bfloat16 MERaLiON-2-3B (or what ``config`` says) with a tokenizer, and in heads/ Medusa heads as their
    author stores them.
    """
    random = np.random.default_rng(seed)
    config = config or meralion_config()
    dim, vocabulary = config["text_config"]["hidden_size"], config["text_config"]["vocab_size"]
    with staged_folder(folder) as staging:
        write_json(staging / "config.json", config)
        write_json(staging / "generation_config.json", {"eos_token_id": [1, 107], "no_repeat_ngram_size": 6})
        make_gemma_tokenizer.make(staging, vocabulary)
        writer = ShardWriter(staging, shard_bytes=shard_bytes)
        for name, shape in hf_shapes(models.build(config)).items():
            writer.add(name, uniform(random, shape, 0.05, mx.bfloat16))
        writer.close()
        (staging / "heads").mkdir()
        writer = ShardWriter(staging / "heads", "medusa_heads", shard_bytes=1 << 62)
        for head in range(heads):
            for part, shape in (("weight", (dim, dim)), ("bias", (dim,))):
                name = f"heads.{head}.mlp.0.linear.{part}"
                writer.add(name, uniform(random, shape, 0.01, mx.bfloat16))
        writer.close(index=False)
        said = {"adapter_type": "MEDUSA", "num_heads": heads, "num_layers": 1, "hidden_size": dim}
        write_json(staging / "heads" / "adapter_config.json", {**said, "vocab_size": vocabulary})


def vicuna_config(**changes: int) -> dict[str, Any]:
    """A config.json with the shape of Vicuna-7B v1.3; ``changes`` are other numbers in it."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float16",
        **changes,
    }


def make_vicuna(
    folder: Path, seed: int = 0, shard_bytes: int = 5 << 30, config: dict[str, Any] | None = None
) -> None:
    """Write a float16 Vicuna-7B (or what ``config`` says), and Medusa heads as their authors store them: in heads-tied
    the three of theharshithh/vicuna-7b-speculative, in heads-own the five of FasterDecoding/medusa-vicuna-7b-v1.3.
    """
    random = np.random.default_rng(seed)
    config = config or vicuna_config()
    dim, vocabulary = config["hidden_size"], config["vocab_size"]
    with staged_folder(folder) as staging:
        write_json(staging / "config.json", config)
        write_json(staging / "tokenizer.json", llama_tokenizer(vocabulary))
        writer = ShardWriter(staging, shard_bytes=shard_bytes)
        for name, shape in hf_shapes(models.build(config)).items():
            writer.add(name, uniform(random, shape, 0.05, mx.float16))
        writer.close()
        for kind, heads, blocks in (("tied", 3, [(dim, dim)]), ("own", 5, [(dim, dim), (vocabulary, dim)])):
            (staging / f"heads-{kind}").mkdir()
            said = {
                "medusa_num_heads": heads,
                "medusa_num_layers": 1,
                "version": "2" if kind == "tied" else "1",
            }
            said["base_model_name_or_path"] = "lmsys/vicuna-7b-v1.3"
            write_json(staging / f"heads-{kind}" / "config.json", said)
            writer = ShardWriter(staging / f"heads-{kind}", "medusa_lm_head", shard_bytes=1 << 62)
            for head in range(heads):
                writer.add(f"{head}.0.linear.weight", uniform(random, blocks[0], 0.01, mx.float16))
                writer.add(f"{head}.0.linear.bias", uniform(random, (dim,), 0.01, mx.float16))
                for shape in blocks[1:]:
                    writer.add(f"{head}.1.weight", uniform(random, shape, 0.05, mx.float16))
            writer.close(index=False)


def llama_tokenizer(vocabulary: int) -> dict[str, Any]:
    """A tokenizer.json of Llama's kind whose tokens are bytes, letters and fillers."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)]
    pieces = (pieces + [f"<filler {number}>" for number in range(vocabulary)])[:vocabulary]
    kinds = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * (vocabulary - 259)]
    return scored(pieces, kinds, [0.0] * vocabulary, True, 1, Path("tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=("whisper", "meralion-2-3b", "vicuna-7b"), default="whisper")
    parser.add_argument("--size", choices=SIZES, default="large-v3")
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.model == "whisper":
        make(args.folder, args.size, args.dtype, args.seed)
    elif args.model == "vicuna-7b":
        make_vicuna(args.folder, args.seed)
    else:
        make_meralion(args.folder, args.seed)


if __name__ == "__main__":
    main()
