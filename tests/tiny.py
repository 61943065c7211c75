"""Tiny random models: seconds on a CPU, they prove logic and not numbers."""

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.models.whisper import Model, ModelArgs

ARGS = {
    "vocab_size": 61,
    "num_mel_bins": 8,
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_layers": 2,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 48,
    "max_source_positions": 10,
    "max_target_positions": 40,
}


def tiny_whisper(seed: int, **changes: int) -> tuple[Model, mx.array]:
    """A random float32 Whisper with lively logits, and a random encoder output [1, S, D]."""
    model = Model(ModelArgs(**{**ARGS, **changes}))
    rng = np.random.default_rng(seed)

    def weights(old: mx.array) -> mx.array:
        return mx.array(rng.normal(size=old.shape).astype(np.float32) * (0.4 if old.ndim > 1 else 0.1))

    parameters = [
        (name, 1 + weights(old) if name.endswith("norm.weight") else weights(old))
        for name, old in tree_flatten(model.parameters())
    ]
    model.load_weights(parameters)
    encoded = mx.array(
        rng.normal(size=(1, model.args.max_source_positions, model.args.d_model)).astype(np.float32)
    )
    mx.eval(model.parameters(), encoded)
    return model, encoded


def new_cache(model: Model, encoded: mx.array) -> KVCache:
    return KVCache(model.num_layers, model.attend(encoded), block=8)
