"""Print what a quantized MERaLiON-2-3B needs in memory, from its config alone: nothing is loaded.

    python examples/meralion_memory.py                       # 4 bits, encoder at 16, 300 s of audio
    python examples/meralion_memory.py --encoder-bits 8 --seconds 30

Sizes are upper ends: the longest text that is written by default, and every array of a step counted as alive at once.
"""

import argparse
import math
from typing import Any

from make_random_checkpoint import meralion_config

from convert.pipeline import hf_shapes
from convert.quantize import plan, recipe
from mlx_medusa import models
from mlx_medusa.medusa.decode import PIECE
from mlx_medusa.models import gemma2
from mlx_medusa.speech.meralion import TOKENS_PER_CHUNK

HALF, FULL = 2, 4  # bytes of bfloat16 and float32
PROMPT = 48  # tokens around the speech, with room for an instruction


def memory(
    config: dict[str, Any], bits: int, encoder_bits: int, seconds: float, heads: int = 4, vocabulary: int = 0
) -> dict[str, int]:
    """Bytes by what they are for. ``vocabulary`` is the size of the draft vocabulary (0: none, heads use all)."""
    model: Any = models.build(config)
    text, speech = model.args.text, model.args.speech
    chunks = max(1, math.ceil(seconds / 30))
    rows = chunks * model.args.rows_per_chunk
    length = rows + PROMPT + TOKENS_PER_CHUNK * chunks
    width, dim = heads + 1, text.hidden_size
    scores = min(gemma2.BLOCK, text.num_attention_heads * PIECE * length)
    frames = speech.max_source_positions
    encoder = HALF * (
        2 * frames * speech.d_model * 2 + frames * (8 * speech.d_model + 2 * speech.encoder_ffn_dim)
    )
    passing = HALF * PIECE * (6 * dim + 3 * text.intermediate_size) + 4 * FULL * scores
    return {
        "weights": sum(weights(model, bits, encoder_bits).values()),
        "heads": HALF * heads * (dim * dim + dim) + HALF * vocabulary * dim,
        "K/V cache": 2 * HALF * text.num_hidden_layers * text.num_key_value_heads * text.head_dim * length,
        "speech rows and prompt states": HALF * dim * (2 * rows + PROMPT),
        "activations": max(encoder, passing),
        "logits": 4 * FULL * (width + heads) * text.vocab_size,
    }


def weights(model: Any, bits: int, encoder_bits: int) -> dict[str, int]:
    """Bytes of the weights by part of the model."""
    layers = plan(model, recipe(bits), "speech_encoder", encoder_bits).layers
    found: dict[str, int] = {}
    for name, shape in hf_shapes(model).items():
        part, settings = name.split(".")[0], layers.get(name.removesuffix(".weight"))
        size = math.prod(shape)
        if settings and name.endswith(".weight"):  # a scale and a bias of 16 bits for each group
            size = size * settings["bits"] // 8 + 2 * HALF * size // settings["group_size"]
        else:
            size *= HALF
        found[part] = found.get(part, 0) + size
    return found


def read_per_pass(config: dict[str, Any], bits: int, heads: int, vocabulary: int = 0) -> dict[str, int]:
    """Bytes of weights that one round reads: the verifier's pass, and its heads' guesses with their projection."""
    model: Any = models.build(config)
    text = model.args.text
    verify = weights(model, bits, 16)["text_decoder"]  # the tied embedding is read as the projection
    projection = text.vocab_size * text.hidden_size
    packed = projection * bits // 8 + 2 * HALF * projection // 64
    guess = HALF * vocabulary * text.hidden_size if vocabulary else packed
    return {"verify": verify, "draft": HALF * heads * text.hidden_size**2 + guess}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--encoder-bits", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--draft-vocabulary", type=int, default=0)
    args = parser.parse_args()
    config = meralion_config()
    found = memory(config, args.bits, args.encoder_bits, args.seconds, vocabulary=args.draft_vocabulary)
    for name, size in [*found.items(), ("in all", sum(found.values()))]:
        print(f"{name:30} {size / 1e6:8.1f} MB")
    for name, size in read_per_pass(config, args.bits, 4, args.draft_vocabulary).items():
        print(f"{'read to ' + name:30} {size / 1e6:8.1f} MB")


if __name__ == "__main__":
    main()
