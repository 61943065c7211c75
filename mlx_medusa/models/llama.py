"""Llama: a text decoder with grouped queries and rotary positions; Mistral within its window is the same arithmetic.

Parameter names and config keys are those of transformers' ``LlamaForCausalLM``; the rotary variants are mlx-lm's.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa.errors import CheckpointError
from mlx_medusa.mlx_lm_parts import part
from mlx_medusa.models.base import BaseModelArgs
from mlx_medusa.models.layers import attention, embedded, rows, turn

if TYPE_CHECKING:
    from mlx_medusa.medusa.cache import KVCache

ROPES = ("default", "linear", "dynamic", "llama3", "yarn")
# What transformers' MistralConfig leaves out of a config.json.
_MISTRAL = {"num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096}


@dataclass(frozen=True, kw_only=True)
class ModelArgs(BaseModelArgs):
    """The defaults are those of transformers' LlamaConfig."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000
    rope_scaling: dict[str, Any] = field(default_factory=dict)
    rope_traditional: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"

    @classmethod
    def from_config(cls, config: dict[str, Any], source: str | Path) -> "ModelArgs":
        """Read a config of transformers 4 (``rope_theta``, ``rope_scaling``) or 5 (``rope_parameters``).

        Raises CheckpointError for one that is not complete, or for arithmetic that this model does not have.
        """
        config = {name: value for name, value in config.items() if value is not None or name in _MISTRAL}
        if config.get("model_type") == "mistral":
            config = {**_MISTRAL, **config, "attention_bias": False, "mlp_bias": False}
        heads = config.get("num_attention_heads")
        if not config.get("num_key_value_heads"):
            config["num_key_value_heads"] = heads
        dim = config.get("hidden_size")
        if "head_dim" not in config and isinstance(heads, int) and isinstance(dim, int) and heads > 0:
            config["head_dim"] = dim // heads
        try:
            config |= {"max_position_embeddings": _context(config), **_rope(config, source)}
        except (TypeError, AttributeError, ZeroDivisionError) as error:
            raise CheckpointError(
                f"{source}: a setting of positions is not what it should be ({error})"
            ) from error
        return super().from_config(config, source)

    def check(self) -> str | None:
        if self.hidden_act != "silu":
            return f"'hidden_act' is {self.hidden_act!r}, but only 'silu' is known"
        if self.num_attention_heads % self.num_key_value_heads:
            return "'num_key_value_heads' does not divide 'num_attention_heads'"
        return "'head_dim' is odd" if self.head_dim % 2 else None


def _context(config: dict[str, Any]) -> int:
    """How many tokens a sequence may hold: those of which each sees all before it."""
    length = max(config.get("max_position_embeddings") or 2048, config.get("max_sequence_length") or 0)
    slides = "sliding_attention" in config.get("layer_types", [])
    if window := config.get("sliding_window") if slides or config.get("model_type") == "mistral" else None:
        length = min(length, window)
    return length


def _rope(config: dict[str, Any], source: str | Path) -> dict[str, Any]:
    """{rope_theta, rope_scaling}: the second as mlx-lm's rope utilities read it, empty for plain rotation.

    What transformers computes and they don't is a CheckpointError.
    """
    said = {**(config.get("rope_parameters") or config.get("rope_scaling") or {})}
    said = {name: value for name, value in said.items() if value is not None}
    theta = said.pop("rope_theta", None) or config.get("rope_theta") or 10_000
    kind = said.pop("rope_type", None) or said.pop("type", None) or "default"
    said.pop("type", None)
    if kind not in ROPES:
        raise CheckpointError(f"{source}: rope type {kind!r} is not known (known: {', '.join(ROPES)})")
    for name, usual in {"partial_rotary_factor": 1, "truncate": True, "attention_factor": None}.items():
        if name in said and said.pop(name) != usual:
            raise CheckpointError(f"{source}: rope setting {name!r} is not supported")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": {}}
    said.setdefault("original_max_position_embeddings", config.get("max_position_embeddings") or 2048)
    if kind == "yarn" and "factor" not in said:
        said["factor"] = (
            config.get("max_position_embeddings", 2048) / said["original_max_position_embeddings"]
        )
    if not isinstance(said.get("factor"), int | float):
        raise CheckpointError(f"{source}: rope type {kind!r} needs a 'factor'")
    if not (said.get("mscale") and said.get("mscale_all_dim")):  # transformers takes both or none
        said = {name: value for name, value in said.items() if not name.startswith("mscale")}
    return {"rope_theta": theta, "rope_scaling": {"rope_type": kind, **said}}


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.head_dim, self.scale = args.head_dim, args.head_dim**-0.5
        inner, shared = args.num_attention_heads * args.head_dim, args.num_key_value_heads * args.head_dim
        self.q_proj = nn.Linear(args.hidden_size, inner, bias=args.attention_bias)
        self.k_proj = nn.Linear(args.hidden_size, shared, bias=args.attention_bias)
        self.v_proj = nn.Linear(args.hidden_size, shared, bias=args.attention_bias)
        self.o_proj = nn.Linear(inner, args.hidden_size, bias=args.attention_bias)
        scaling = args.rope_scaling
        if scaling.get("rope_type") == "dynamic":
            scaling = {}  # it changes nothing up to max_position_embeddings, where a sequence ends
        self.rope = part("models.rope_utils").initialize_rope(
            args.head_dim,
            args.rope_theta,
            args.rope_traditional,
            scaling or None,
            args.max_position_embeddings,
        )

    def __call__(
        self, x: mx.array, positions: mx.array, mask: mx.array | None, cache: "KVCache", index: int
    ) -> mx.array:
        split = (*x.shape[:2], -1, self.head_dim)
        queries = turn(self.rope, self.q_proj(x).reshape(split), positions)
        keys = turn(self.rope, self.k_proj(x).reshape(split), positions)
        values = self.v_proj(x).reshape(split).swapaxes(1, 2)
        out = attention(queries, *cache.write(index, keys, values), self.scale, mask)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dim, inner = args.hidden_size, args.intermediate_size
        self.gate_proj = nn.Linear(dim, inner, bias=args.mlp_bias)
        self.up_proj = nn.Linear(dim, inner, bias=args.mlp_bias)
        self.down_proj = nn.Linear(inner, dim, bias=args.mlp_bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.self_attn = Attention(args)
        self.mlp = MLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)

    def __call__(
        self, x: mx.array, positions: mx.array, mask: mx.array | None, cache: "KVCache", index: int
    ) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), positions, mask, cache, index)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args) for _ in range(args.num_hidden_layers)]
        self.norm = nn.RMSNorm(args.hidden_size, args.rms_norm_eps)


class Model(nn.Module):
    """A verifier (see ``mlx_medusa.medusa.decode``); its cache carries no memory."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model = Decoder(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    @property
    def num_layers(self) -> int:
        return self.args.num_hidden_layers

    @property
    def max_length(self) -> int:
        """Tokens that a sequence may hold, prompt included."""
        return self.args.max_position_embeddings

    def step(
        self, tokens: mx.array, positions: mx.array, mask: mx.array | None, cache: "KVCache"
    ) -> mx.array:
        """Tokens and positions [B, W], mask [B, 1, W, T + W] or None -> hidden [B, W, D]; writes W rows of K/V."""
        x = self.embed(tokens)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, positions, mask, cache, index)
        cache.advance(tokens.shape[1])
        return self.model.norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """Hidden [..., D] -> logits [..., V]."""
        project = self.model.embed_tokens.as_linear if self.args.tie_word_embeddings else self.lm_head
        return project(hidden)

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids [...] -> token embeddings [..., D]; for drafters."""
        return embedded(self.model.embed_tokens, tokens, like=self.model.norm.weight)

    def projection_rows(self, tokens: mx.array) -> mx.array:
        """Ids [n] -> their rows of the vocabulary projection, [n, D]."""
        return self.embed(tokens) if self.args.tie_word_embeddings else rows(self.lm_head, tokens)

    @staticmethod
    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """The layouts are those of the folder."""
        return weights
