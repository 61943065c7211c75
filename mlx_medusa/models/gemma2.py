"""Gemma 2: a text decoder whose scores and logits are capped, and whose every other layer sees a window only.

Parameter names and config keys are those of transformers' ``Gemma2ForCausalLM``. Its activations leave the range of
float16, so its weights are bfloat16 or float32.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa.models.base import BaseModelArgs
from mlx_medusa.models.layers import embedded, rows, turn

if TYPE_CHECKING:
    from mlx_medusa.medusa.cache import KVCache

BLOCK = 1 << 22  # attention scores that are in memory at once


@dataclass(frozen=True, kw_only=True)
class ModelArgs(BaseModelArgs):
    """The defaults are those of transformers' Gemma2Config, which leaves them out of a config.json."""

    vocab_size: int = 256_000
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 26
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    max_position_embeddings: int = 8192
    sliding_window: int = 4096
    query_pre_attn_scalar: float = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000
    attn_logit_softcapping: float = 50
    final_logit_softcapping: float = 30
    tie_word_embeddings: bool = True

    def check(self) -> str | None:
        if self.num_attention_heads % self.num_key_value_heads:
            return "'num_key_value_heads' does not divide 'num_attention_heads'"
        return "'head_dim' is odd" if self.head_dim % 2 else None


def softcap(x: mx.array, cap: float) -> mx.array:
    """cap tanh(x / cap), in float32."""
    return mx.tanh(x.astype(mx.float32) / cap) * cap


class RMSNorm(nn.Module):
    """x / rms(x) (1 + w), computed in float32 and rounded once."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = mx.zeros((dim,))
        self.eps = eps

    def __call__(self, x: mx.array) -> mx.array:
        scale = 1 + self.weight.astype(mx.float32)
        return mx.fast.rms_norm(x.astype(mx.float32), scale, self.eps).astype(x.dtype)


class Rope:
    """Rotary positions, one per token."""

    def __init__(self, head_dim: int, theta: float):
        self._dims = head_dim
        self._periods = mx.power(
            theta, mx.arange(0, head_dim, 2, dtype=mx.float32) / head_dim
        )  # in tokens / 2 pi

    def __call__(self, x: mx.array, positions: mx.array) -> mx.array:
        """[B, W, heads, d], positions [B, W] -> [B, heads, W, d]"""
        return turn(self._turn, x, positions)

    def _turn(self, x: mx.array, offset: mx.array) -> mx.array:
        return mx.fast.rope(
            x, self._dims, traditional=False, base=None, scale=1.0, offset=offset, freqs=self._periods
        )


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, cap: float, mask: mx.array | None
) -> mx.array:
    """softmax(cap tanh(Q K^T / cap)) V, the queries scaled already; in blocks of query rows.

    Queries [B, H, W, d], keys and values [B, G, T, d] with H a multiple of G, mask [B, 1, W, T] bool or None (all
    visible) -> [B, H, W, d].
    """
    batch, heads, width, dim = queries.shape
    groups, length = keys.shape[1:3]
    transposed = keys.swapaxes(-1, -2)
    rows = max(1, BLOCK // (batch * heads * length))
    blocks = []
    for start in range(0, width, rows):
        block = queries[:, :, start : start + rows]
        scores = softcap(block.reshape(batch, groups, -1, dim) @ transposed, cap)  # [B, G, H / G * rows, T]
        if mask is not None:
            seen = mask[:, :, None, start : start + rows]
            scores = scores.reshape(batch, groups, heads // groups, -1, length)
            scores = mx.where(seen, scores, -mx.inf).reshape(batch, groups, -1, length)
        weights = mx.softmax(scores, axis=-1).astype(values.dtype)
        blocks.append((weights @ values).reshape(block.shape))
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=2)


class Attention(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.head_dim, self.cap = args.head_dim, args.attn_logit_softcapping
        self.scale = args.query_pre_attn_scalar**-0.5
        inner, shared = args.num_attention_heads * args.head_dim, args.num_key_value_heads * args.head_dim
        self.q_proj = nn.Linear(args.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(args.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(args.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(inner, args.hidden_size, bias=False)
        self.rope = Rope(args.head_dim, args.rope_theta)

    def __call__(
        self, x: mx.array, positions: mx.array, mask: mx.array | None, cache: "KVCache", index: int
    ) -> mx.array:
        split = (*x.shape[:2], -1, self.head_dim)
        queries = self.rope(self.q_proj(x).reshape(split), positions) * self.scale
        keys = self.rope(self.k_proj(x).reshape(split), positions)
        values = self.v_proj(x).reshape(split).swapaxes(1, 2)
        out = attention(queries, *cache.write(index, keys, values), self.cap, mask)
        return self.o_proj(out.swapaxes(1, 2).reshape(*x.shape[:2], -1))


class MLP(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, inner, bias=False)
        self.up_proj = nn.Linear(dim, inner, bias=False)
        self.down_proj = nn.Linear(inner, dim, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.gelu_approx(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.self_attn = Attention(args)
        self.mlp = MLP(args.hidden_size, args.intermediate_size)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def __call__(
        self, x: mx.array, positions: mx.array, mask: mx.array | None, cache: "KVCache", index: int
    ) -> mx.array:
        out = self.self_attn(self.input_layernorm(x), positions, mask, cache, index)
        x = x + self.post_attention_layernorm(out)
        out = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(out)


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Layer(args) for _ in range(args.num_hidden_layers)]
        self.norm = RMSNorm(args.hidden_size, args.rms_norm_eps)


class Gemma2(nn.Module):
    """The decoder and its vocabulary projection, as ``Gemma2ForCausalLM`` nests them."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model = Decoder(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids [...] -> rows of the token embedding [..., D], not scaled."""
        return embedded(self.model.embed_tokens, tokens, like=self.model.norm.weight)

    def scale(self, embedded: mx.array) -> mx.array:
        """Embeddings as the first layer takes them, times sqrt(D) rounded to their dtype."""
        return embedded * mx.array(self.args.hidden_size**0.5, embedded.dtype)

    def __call__(self, x: mx.array, positions: mx.array, mask: mx.array | None, cache: "KVCache") -> mx.array:
        """Scaled embeddings [B, W, D], positions [B, W], mask [B, 1, W, T + W] or None -> hidden [B, W, D].

        Writes W rows of K/V and keeps them.
        """
        windowed = self._windowed(positions, mask, cache.length)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, positions, mask if index % 2 else windowed, cache, index)
        cache.advance(x.shape[1])
        return self.model.norm(x)

    def _windowed(self, positions: mx.array, mask: mx.array | None, kept: int) -> mx.array | None:
        """The mask of the layers that see the last ``sliding_window`` positions, the token's own among them.

        Kept rows are at the position of their slot, new ones where ``positions`` says.
        """
        window = self.args.sliding_window
        width = positions.shape[1]
        if kept + width <= window:
            return mask
        before = mx.broadcast_to(mx.arange(kept), (positions.shape[0], kept))
        slots = mx.concatenate([before, positions], axis=1)
        near = (positions[:, :, None] - slots[:, None] < window)[:, None]  # [B, 1, W, T + W]
        return near if mask is None else near & mask

    def logits(self, hidden: mx.array) -> mx.array:
        """[..., D] -> [..., V] float32"""
        project = self.model.embed_tokens.as_linear if self.args.tie_word_embeddings else self.lm_head
        return softcap(project(hidden), self.args.final_logit_softcapping)

    def projection_rows(self, tokens: mx.array) -> mx.array:
        """Ids [n] -> their rows of the vocabulary projection, [n, D]."""
        return self.embed(tokens) if self.args.tie_word_embeddings else rows(self.lm_head, tokens)
