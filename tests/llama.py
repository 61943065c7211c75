"""Random small Llama models of transformers, and ours with the same weights, float32."""

import mlx.core as mx
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from mlx_medusa import checkpoint, models

torch.set_num_threads(1)  # models this small are slower on more

ROPES = [  # every kind that is known, in turn
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "original_max_position_embeddings": 32,
    },
]


def settings(seed: int) -> dict:
    """Sizes, grouping, biases, tying and rotation vary with the seed."""
    rng = np.random.default_rng(seed)
    groups = int(rng.choice([1, 2, 3]))
    heads = groups * int(rng.choice([1, 2, 3]))
    dim = heads * int(rng.choice([8, 16]))
    return {
        "vocab_size": int(rng.integers(50, 120)),
        "hidden_size": dim,
        "intermediate_size": int(rng.choice([32, 56])),
        "num_hidden_layers": int(rng.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": [dim // heads, 4, 12][seed % 3],
        "max_position_embeddings": 256,
        "rms_norm_eps": float(rng.choice([1e-6, 1e-5])),
        "rope_parameters": {"rope_theta": float(rng.choice([1e4, 5e5])), **ROPES[seed % len(ROPES)]},
        "attention_bias": seed % 4 == 1,
        "mlp_bias": seed % 4 in (1, 2),
        "tie_word_embeddings": seed % 5 in (0, 2),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }


def reference(seed: int, **changes):
    """A model of transformers with lively weights."""
    torch.manual_seed(seed)
    theirs = LlamaForCausalLM(LlamaConfig(**{**settings(seed), **changes})).eval()
    return enliven(theirs)


def mistral(seed: int, **changes):
    torch.manual_seed(seed)
    said = {**settings(seed), "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, **changes}
    return enliven(MistralForCausalLM(MistralConfig(**said)).eval())


def enliven(theirs):
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_("norm" in name, 0.1 if parameter.ndim == 1 else 0.3)
    return theirs


def ours_of(theirs, config: dict | None = None):
    """Our model with the weights of theirs; ``config`` in place of its own."""
    ours = models.build(config or theirs.config.to_dict())
    weights = {name: mx.array(w.numpy()) for name, w in theirs.state_dict().items()}
    if theirs.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    checkpoint.load_into(ours, ours.sanitize(weights), quantization=None, dtype=None, source="test")
    return ours


def prompt_of(ours, seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, ours.args.vocab_size, size=length).tolist()
