"""Random small MERaLiON-2 models: the oracle's, of transformers' parts and an adapter from the published facts.

``pair`` gives one and ours with the same weights, float32.
"""

import json

import make_gemma_tokenizer
import mlx.core as mx
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import Gemma2Config, WhisperConfig

from mlx_medusa import checkpoint, models
from mlx_medusa.models.meralion2 import Speech
from mlx_medusa.reference.meralion2 import Meralion2

torch.set_num_threads(1)  # models this small are slower on more

FACTOR = 5  # encoder frames that become one row of speech


def configs(seed):
    """(WhisperConfig, Gemma2Config, adapter kind): sizes, grouping, tying, window and adapter vary with the seed."""
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([1, 2]))
    speech = WhisperConfig(
        num_mel_bins=int(rng.choice([8, 16])), d_model=heads * 8, encoder_layers=int(rng.integers(1, 3)),
        encoder_attention_heads=heads, encoder_ffn_dim=int(rng.choice([24, 40])),
        max_source_positions=FACTOR * int(rng.integers(2, 5)), decoder_layers=1, decoder_attention_heads=1,
    )  # fmt: skip
    shared = int(rng.choice([1, 2]))
    text = Gemma2Config(
        vocab_size=int(rng.integers(50, 120)), hidden_size=int(rng.choice([24, 36])),
        intermediate_size=int(rng.choice([32, 56])), num_hidden_layers=int(rng.integers(1, 4)),
        num_attention_heads=shared * int(rng.choice([1, 2, 3])), num_key_value_heads=shared,
        head_dim=int(rng.choice([4, 8, 16])), query_pre_attn_scalar=int(rng.choice([4, 9, 16])),
        sliding_window=int(rng.choice([6, 20, 4096])), max_position_embeddings=256,
        attn_logit_softcapping=float(rng.choice([3, 50])), final_logit_softcapping=float(rng.choice([5, 30])),
        rope_theta=10_000.0, tie_word_embeddings=bool(rng.random() < 0.5), pad_token_id=0, bos_token_id=2,
        eos_token_id=1, attn_implementation="eager",
    )  # fmt: skip
    return speech, text, ["gated", "v1", "gated", "plain"][seed % 4]


def pair(seed):
    """(the oracle's model, ours)"""
    speech, text, kind = configs(seed)
    torch.manual_seed(seed)
    theirs = Meralion2(speech, text, kind, text.vocab_size - 1, FACTOR).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "embed_positions" not in name:
                layer_norm = name.endswith("norm.weight") and not name.startswith("text_decoder")
                parameter.normal_(
                    layer_norm or name == "ln_speech.weight", 0.1 if parameter.ndim == 1 else 0.3
                )
    ours = models.build(
        {
            "model_type": "meralion2",
            "speech_config": speech.to_dict(),
            "text_config": text.to_dict(),
            "speech_mlp_scale_factor": FACTOR,
            "speech_token_index": text.vocab_size - 1,
            "speech_adapter": kind,
        }
    )
    weights = {name: mx.array(w.numpy()) for name, w in theirs.state_dict().items()}
    if text.tie_word_embeddings:
        del weights["text_decoder.lm_head.weight"]
    checkpoint.load_into(ours, ours.sanitize(weights), quantization=None, dtype=None, source="test")
    return theirs, ours


def mel_of(ours, seed, chunks):
    """[C, frames, mels] float32"""
    shape = (chunks, ours.args.speech.max_source_positions * 2, ours.args.num_mel_bins)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def prompt_of(ours, seed, count):
    """(tokens, where the speech begins): words, ``count`` speech tokens, words"""
    rng = np.random.default_rng(seed)
    before, after = (
        rng.integers(1, ours.args.vocab_size - 1, size=rng.integers(1, 6)).tolist() for _ in "ab"
    )
    return before + [ours.args.speech_token_index] * count + after, len(before)


def hear(theirs, ours, seed, chunks):
    """(rows of theirs [N, D] torch, ours [1, N, D], prompt, our memory)"""
    mel = mel_of(ours, seed, chunks)
    with torch.no_grad():
        rows = theirs.rows(torch.tensor(mel).swapaxes(1, 2))
    encoded = ours.encode(mx.array(mel))
    encoded = encoded.reshape(1, -1, encoded.shape[-1])
    prompt, start = prompt_of(ours, seed, len(rows))
    return rows, encoded, prompt, Speech(encoded, start)


def small_reference(seed=0, *, tied=True, kind="gated", dtype=torch.float32):
    """A random model that hears 30 s, with a vocabulary for the tokenizer of examples/make_gemma_tokenizer.py."""
    speech = WhisperConfig(
        num_mel_bins=80, d_model=32, encoder_layers=1, encoder_attention_heads=1, encoder_ffn_dim=32,
        max_source_positions=1500, decoder_layers=1, decoder_attention_heads=1,
    )  # fmt: skip
    text = Gemma2Config(
        vocab_size=384, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, query_pre_attn_scalar=32, sliding_window=64,
        max_position_embeddings=2048, tie_word_embeddings=tied, pad_token_id=0, bos_token_id=2, eos_token_id=1,
        attn_implementation="eager",
    )  # fmt: skip
    torch.manual_seed(seed)
    model = Meralion2(speech, text, kind, 383, 15).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                layer_norm = name.endswith("norm.weight") and not name.startswith("text_decoder")
                parameter.normal_(
                    layer_norm or name == "ln_speech.weight", 0.1 if parameter.ndim == 1 else 0.3
                )
    return model.to(dtype), speech, text


def write_hf(folder, seed=0, *, tied=True, kind="gated", dtype=torch.float32, keep_head=False, **changes):
    """A folder as the hub has it: shards with an index, and text settings that stand at the top level too."""
    model, speech, text = small_reference(seed, tied=tied, kind=kind, dtype=dtype)
    tensors = {name: w.contiguous() for name, w in model.state_dict().items()}
    if tied and not keep_head:
        del tensors["text_decoder.lm_head.weight"]
    make_gemma_tokenizer.make(folder)
    names = sorted(tensors)
    index = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file(
            {name: tensors[name].clone() for name in part}, str(folder / file), metadata={"format": "pt"}
        )
        index |= dict.fromkeys(part, file)
    config = {
        "model_type": "meralion2",
        "architectures": ["MERaLiON2ForConditionalGeneration"],
        "auto_map": {"AutoConfig": "configuration_meralion2.MERaLiON2Config"},
        "speech_config": speech.to_dict(),
        "text_config": text.to_dict(),
        "speech_mlp_scale_factor": 15,
        "speech_token_index": 383,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "torch_dtype": "bfloat16",
    }
    del config["text_config"]["num_hidden_layers"]  # said at the top level only
    files = {
        "config.json": {**config, **changes},
        "model.safetensors.index.json": {"metadata": {}, "weight_map": index},
        "generation_config.json": {
            "eos_token_id": [1, 107],
            "no_repeat_ngram_size": 6,
            "transformers_version": "4.50",
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def write_heads(folder, *, dim=64, heads=4, seed=0):
    """Heads in the layout of kartmannXu/MERaLion-2-3B-Medusa."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tensors = {}
    for head in range(heads):
        tensors[f"heads.{head}.mlp.0.linear.weight"] = torch.randn(dim, dim).bfloat16() * 0.1
        tensors[f"heads.{head}.mlp.0.linear.bias"] = torch.randn(dim).bfloat16() * 0.1
    save_file(tensors, str(folder / "medusa_heads.safetensors"))
    said = {
        "adapter_type": "MEDUSA",
        "num_heads": heads,
        "num_layers": 1,
        "hidden_size": dim,
        "vocab_size": 384,
    }
    (folder / "adapter_config.json").write_text(json.dumps(said), encoding="utf-8")
    return folder
