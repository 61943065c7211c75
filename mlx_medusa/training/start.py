"""Where training starts from: the settings of new heads, and their first weights."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_medusa import checkpoint
from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.recurrent import RecurrentHeads
from mlx_medusa.models.whisper import Model as Whisper

if TYPE_CHECKING:
    from mlx_medusa.training.fit import FitOptions

# Root mean square of what Whisper's last decoder layer is given: 0.2 to 0.3 (tiny.en)
_STATE, _TOKEN, _NOISE = 0.28, 0.1, 0.1


def config(options: "FitOptions", base: Any) -> dict[str, Any]:
    """The ``medusa`` config of new heads for a base with these arguments."""
    common = {
        "type": options.kind,
        "num_heads": options.num_heads,
        "num_layers": options.num_layers,
        "hidden_size": base.hidden_size,
        "tied": True,
    }
    if options.kind == "medusa":
        return common
    if options.kind == "causal":
        return {
            **common,
            "attention_heads": base.num_attention_heads,
            "key_value_heads": base.num_key_value_heads,
            "head_dim": base.head_dim,
            "ffn_dim": options.ffn_dim or base.intermediate_size,
            "match_length": options.match_length,
            "rope_theta": int(base.rope_theta),
            "norm_eps": base.rms_norm_eps,
        }
    return {
        **common,
        "attention_heads": base.decoder_attention_heads,
        "ffn_dim": base.decoder_ffn_dim,
        "memory_pool": options.memory_pool,
    }


def initialise(heads: nn.Module, model: Any) -> None:
    """First weights. Plain heads start as the identity, as Medusa's own trainer has it; recurrent ones from the base.

    Each recurrent layer is the cross-attention and the MLP of one of a Whisper's last decoder layers. What is joined
    starts as the state, at about the size that those layers are used to, with a little of the token: from a random
    matrix, which hides the state, training needs several times as long.
    """
    if not isinstance(heads, RecurrentHeads):
        return  # StackedLinear is made of zeros
    weights = _from_whisper(heads, model) if isinstance(model, Whisper) else _from_gemma(model)
    same = mx.eye(heads.args.hidden_size)
    both = mx.concatenate([_STATE * same, _TOKEN * same], axis=1)
    weights["joint.weight"] = both + _NOISE * heads.joint.weight
    heads.load_weights(list(weights.items()), strict=False)


def _from_whisper(heads: RecurrentHeads, model: Whisper) -> dict[str, mx.array]:
    """Layers and last norm of the decoder."""
    decoder = model.model.decoder
    weights: dict[str, mx.array] = {}
    for index, source in enumerate(decoder.layers[-len(heads.layers) :]):
        theirs = parameters(source)
        own: Any = tree_flatten(heads.layers[index].parameters())
        weights |= {f"layers.{index}.{name}": theirs[name] for name, _ in own}
    weights |= {f"layer_norm.{name}": array for name, array in parameters(decoder.layer_norm).items()}
    return weights


def _from_gemma(model: Any) -> dict[str, mx.array]:
    """MERaLiON's decoder has no cross-attention to start from: its last norm only, whose weights are kept less 1."""
    return {"layer_norm.weight": 1 + model.text_decoder.model.norm.weight.astype(mx.float32)}


def take(heads: nn.Module, config: dict[str, Any], source: str | Path) -> None:
    """First weights from trained heads of the same shape, to train them further. OptionError if they differ."""
    found = checkpoint.read_heads(Path(source))
    if found is None:
        raise OptionError(f"{source}: holds no heads to start from")
    theirs, arrays = found
    for name, value in config.items():
        if name != "memory_pool" and theirs.get(name) != value:
            raise OptionError(
                f"{source}: heads with {name} {theirs.get(name)!r}, not {value!r}, to start from"
            )
    for name in ("draft_vocabulary", "draft_basis"):
        arrays.pop(name, None)
    checkpoint.load_into(
        heads, arrays, quantization=theirs.get("quantization"), dtype=mx.float32, source=source
    )


def parameters(module: nn.Module) -> dict[str, mx.array]:
    """The parameters of a module by name, float32, quantized ones expanded."""
    found: dict[str, mx.array] = {}
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        own: Any = {name: value for name, value in part.items() if isinstance(value, mx.array)}
        if isinstance(part, nn.QuantizedLinear):
            packed = own.pop("weight"), own.pop("scales"), own.pop("biases", None)
            own["weight"] = mx.dequantize(*packed, part.group_size, part.bits, part.mode)
        found |= {prefix + name: value.astype(mx.float32) for name, value in own.items()}
    return found
