"""Make small random models of every family, with tokenizers, and inputs for them: the same on every machine.

    python examples/make_small_models.py /tmp/small     # whisper/, meralion2/, llama/, speech/, prompts.txt: 4 MB

Their text is noise, but not one token over and over. The numbers come from numpy, so neither MLX nor PyTorch is needed,
and the folders are as `convert` writes them: mlx_medusa and, for Whisper and Llama, transformers open them.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_gemma_tokenizer
import numpy as np
import soundfile
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Shapes = Iterator[tuple[str, tuple[int, ...]]]

DIM, LAYERS, HEADS, FFN, MELS, FRAMES = 64, 2, 2, 128, 80, 1500
STAMPS = 1501  # Whisper's timestamps, 0.00 to 30.00
PROMPTS = (
    "The sky is",
    "One, two, three,",
    "def main():",
    "It was a dark night",
    "Guten Tag",
    "a b c d e f",
    "?",
    "42 and",
)


# ---- the names and shapes of the tensors


def linear(name: str, outputs: int, inputs: int, bias: bool = True) -> Shapes:
    yield f"{name}.weight", (outputs, inputs)
    if bias:
        yield f"{name}.bias", (outputs,)


def layer_norm(name: str, dim: int) -> Shapes:
    yield from ((f"{name}.{part}", (dim,)) for part in ("weight", "bias"))


def whisper_stack(prefix: str, dim: int, cross: bool) -> Shapes:
    """The layers of Whisper's encoder, or of its decoder, which attend across too."""
    for layer in range(LAYERS):
        name = f"{prefix}.layers.{layer}"
        for attention in ("self_attn", "encoder_attn") if cross else ("self_attn",):
            for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                yield from linear(f"{name}.{attention}.{part}", dim, dim, bias=part != "k_proj")
            yield from layer_norm(f"{name}.{attention}_layer_norm", dim)
        yield from linear(f"{name}.fc1", FFN, dim)
        yield from linear(f"{name}.fc2", dim, FFN)
        yield from layer_norm(f"{name}.final_layer_norm", dim)
    yield from layer_norm(f"{prefix}.layer_norm", dim)


def whisper_encoder(prefix: str, dim: int) -> Shapes:
    yield from [(f"{prefix}.conv1.weight", (dim, MELS, 3)), (f"{prefix}.conv1.bias", (dim,))]
    yield from [(f"{prefix}.conv2.weight", (dim, dim, 3)), (f"{prefix}.conv2.bias", (dim,))]
    yield f"{prefix}.embed_positions.weight", (FRAMES, dim)
    yield from whisper_stack(prefix, dim, cross=False)


def decoder_only(prefix: str, config: dict[str, Any], norms: tuple[str, ...]) -> Shapes:
    """Gemma 2 or Llama with a tied projection."""
    dim, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    wide, narrow = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield f"{prefix}.embed_tokens.weight", (config["vocab_size"], dim)
    for layer in range(config["num_hidden_layers"]):
        name = f"{prefix}.layers.{layer}"
        for part, outputs, inputs in (
            ("self_attn.q_proj", wide, dim), ("self_attn.k_proj", narrow, dim), ("self_attn.v_proj", narrow, dim),
            ("self_attn.o_proj", dim, wide), ("mlp.gate_proj", inner, dim), ("mlp.up_proj", inner, dim),
            ("mlp.down_proj", dim, inner),
        ):  # fmt: skip
            yield from linear(f"{name}.{part}", outputs, inputs, bias=False)
        yield from ((f"{name}.{norm}.weight", (dim,)) for norm in norms)
    yield f"{prefix}.norm.weight", (dim,)


def random_tensors(shapes: Shapes, seed: int, around: float = 1.0) -> dict[str, np.ndarray]:
    """float32: norms ``around`` their neutral weight, and token embeddings that are small beside what layers add, so
    that a token does not call for itself.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in shapes:
        scale = 0.1 if len(shape) == 1 else 2 / math.sqrt(math.prod(shape[1:]))
        scale = {"embed_tokens": 0.15, "embed_positions": 0.5}.get(name.split(".")[-2], scale)
        values = rng.standard_normal(size=shape, dtype=np.float32) * np.float32(scale)
        norm = name.endswith("norm.weight") or name == "ln_speech.weight"
        tensors[name] = values + np.float32(around if norm else 0)
    return tensors


# ---- the folders


def write(folder: Path, tensors: dict[str, np.ndarray], **files: dict[str, Any]) -> None:
    """The weights, and settings as <name>.json."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def byte_tokenizer(folder: Path, special: list[str]) -> dict[str, int]:
    """A tokenizer of single bytes, ids 0 to 255, and ``special`` tokens behind; the ids of these."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return {name: 256 + place for place, name in enumerate(special)}


def make_whisper(folder: Path, seed: int = 0) -> Path:
    """English only, with suppressed tokens."""
    names = [
        "endoftext",
        "startoftranscript",
        "translate",
        "transcribe",
        "startoflm",
        "startofprev",
        "nocaptions",
    ]
    special = [f"<|{name}|>" for name in [*names, "notimestamps"]]
    stamps = [f"<|{step * 0.02:.2f}|>" for step in range(STAMPS)]
    ids = byte_tokenizer(folder, special + stamps)
    end, start, silent = ids["<|endoftext|>"], ids["<|startoftranscript|>"], ids["<|notimestamps|>"]
    vocab = 256 + len(ids)
    config = {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "vocab_size": vocab,
        "d_model": DIM, "encoder_layers": LAYERS, "decoder_layers": LAYERS, "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS, "encoder_ffn_dim": FFN, "decoder_ffn_dim": FFN, "num_mel_bins": MELS,
        "max_source_positions": FRAMES, "max_target_positions": 128, "decoder_start_token_id": start,
        "eos_token_id": end, "pad_token_id": end, "bos_token_id": end,
    }  # fmt: skip
    generation = {
        "is_multilingual": False, "decoder_start_token_id": start, "eos_token_id": end, "pad_token_id": end,
        "no_timestamps_token_id": silent, "max_initial_timestamp_index": 50, "begin_suppress_tokens": [7, end],
        "suppress_tokens": [1, 2, 40, *range(start, silent)],
    }  # fmt: skip

    def shapes() -> Shapes:
        yield from whisper_encoder("model.encoder", DIM)
        yield "model.decoder.embed_tokens.weight", (vocab, DIM)
        yield "model.decoder.embed_positions.weight", (128, DIM)
        yield from whisper_stack("model.decoder", DIM, cross=True)

    write(folder, random_tensors(shapes(), seed), config=config, generation_config=generation)
    return folder


def make_meralion2(folder: Path, seed: int = 0) -> Path:
    """The gated adapter, grouped heads, a window that the prompt outgrows, the six-token rule."""
    make_gemma_tokenizer.make(folder)
    vocab, factor = make_gemma_tokenizer.SMALLEST, 15
    speech = {
        "d_model": 32, "encoder_layers": LAYERS, "encoder_attention_heads": HEADS, "encoder_ffn_dim": FFN,
        "num_mel_bins": MELS, "max_source_positions": FRAMES,
    }  # fmt: skip
    text = {
        "vocab_size": vocab, "hidden_size": DIM, "intermediate_size": FFN, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16,
        "sliding_window": 64, "max_position_embeddings": 2048, "tie_word_embeddings": True,
    }  # fmt: skip
    config = {
        "model_type": "meralion2", "architectures": ["MERaLiON2ForConditionalGeneration"], "speech_config": speech,
        "text_config": text, "speech_mlp_scale_factor": factor, "speech_token_index": vocab - 1,
    }  # fmt: skip

    def shapes() -> Shapes:
        yield from whisper_encoder("speech_encoder", 32)
        yield from layer_norm("ln_speech", 32)
        yield from linear("speech_audio_adapter.mlp_adapter.0", 160, 32 * factor)
        for part in ("gate_proj", "pool_proj"):
            yield from linear(f"speech_audio_adapter.{part}", 160, 160)
        yield from linear("speech_audio_adapter.out_proj", DIM, 160)

    norms = (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    )  # fmt: skip
    tensors = random_tensors(shapes(), seed)
    tensors |= random_tensors(
        decoder_only("text_decoder.model", text, norms), seed + 1, around=0.0
    )  # 1 is added
    generation = {"eos_token_id": [1, 107], "no_repeat_ngram_size": 6}
    write(folder, tensors, config=config, generation_config=generation)
    return folder


def make_llama(folder: Path, seed: int = 0) -> Path:
    """Grouped heads, a tied projection."""
    ids = byte_tokenizer(folder, ["<s>", "</s>"])
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256 + len(ids), "hidden_size": DIM,
        "intermediate_size": FFN, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 10_000.0,
        "tie_word_embeddings": True, "bos_token_id": ids["<s>"], "eos_token_id": ids["</s>"],
    }  # fmt: skip
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    shapes = decoder_only("model", config, ("input_layernorm", "post_attention_layernorm"))
    generation = {"eos_token_id": ids["</s>"], "bos_token_id": ids["<s>"]}
    write(
        folder, random_tensors(shapes, seed), config=config, tokenizer_config=settings, generation_config=generation
    )  # fmt: skip
    return folder


MAKERS = {"whisper": make_whisper, "meralion2": make_meralion2, "llama": make_llama}


def make_inputs(folder: Path) -> None:
    """speech/*.wav, tones that glide and noise that comes and goes, and prompts.txt."""
    rng = np.random.default_rng(0)
    (folder / "speech").mkdir(parents=True, exist_ok=True)
    for number, seconds in enumerate((1, 3, 5, 8, 13, 21)):
        time = np.arange(seconds * 16_000) / 16_000
        tones = [
            np.sin(2 * np.pi * time * (pitch + glide * time)) for pitch, glide in rng.uniform(40, 900, (4, 2))
        ]
        gate = np.sin(2 * np.pi * time * rng.uniform(1, 4)) > 0
        noise = rng.standard_normal(len(time)) * gate
        soundfile.write(folder / "speech" / f"{number}.wav", 0.1 * (sum(tones) + noise), 16_000)
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")


def make_all(folder: Path) -> None:
    """A folder per family, and the inputs."""
    for name, make in MAKERS.items():
        make(folder / name)
    make_inputs(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    make_all(args.folder)
    print(args.folder)


if __name__ == "__main__":
    main()
