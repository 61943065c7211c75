"""Whisper: a speech encoder and a decoder that attends to it, as a Medusa verifier.

Parameter names and config keys are those of transformers' ``WhisperForConditionalGeneration``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa.models.base import BaseModelArgs
from mlx_medusa.models.layers import attention, embedded, gelu

if TYPE_CHECKING:
    from mlx_medusa.medusa.cache import KVCache

Memory = list[tuple[mx.array, mx.array]]  # K and V [B, heads, S, d] of the encoder output, per decoder layer


@dataclass(frozen=True, kw_only=True)
class EncoderArgs(BaseModelArgs):
    """What the encoder needs; other models have one too."""

    num_mel_bins: int
    d_model: int
    encoder_layers: int
    encoder_attention_heads: int
    encoder_ffn_dim: int
    max_source_positions: int = 1500

    def check(self) -> str | None:
        if self.d_model % self.encoder_attention_heads:
            return "'encoder_attention_heads' does not divide 'd_model'"
        return None


@dataclass(frozen=True, kw_only=True)
class ModelArgs(EncoderArgs):
    vocab_size: int
    decoder_layers: int
    decoder_attention_heads: int
    decoder_ffn_dim: int
    max_target_positions: int = 448

    def check(self) -> str | None:
        if self.d_model % self.decoder_attention_heads:
            return "'decoder_attention_heads' does not divide 'd_model'"
        return super().check()

    @property
    def hidden_size(self) -> int:
        """Of the states that heads take."""
        return self.d_model


class Attention(nn.Module):
    """Multi-head attention; the caller brings K and V, already projected and split."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.q_proj = nn.Linear(dim, dim)
        self.k_proj = nn.Linear(dim, dim, bias=False)
        self.v_proj = nn.Linear(dim, dim)
        self.out_proj = nn.Linear(dim, dim)

    def split(self, x: mx.array) -> mx.array:
        """[B, T, D] -> [B, heads, T, D / heads]"""
        return x.reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)

    def keys_values(self, x: mx.array) -> tuple[mx.array, mx.array]:
        return self.split(self.k_proj(x)), self.split(self.v_proj(x))

    def __call__(
        self, x: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None = None
    ) -> mx.array:
        queries = self.split(self.q_proj(x))  # [B, heads, W, d]
        out = attention(queries, keys, values, self.scale, mask)
        return self.out_proj(out.swapaxes(1, 2).reshape(x.shape))


class EncoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int, ffn_dim: int):
        super().__init__()
        self.self_attn = Attention(dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def __call__(self, x: mx.array) -> mx.array:
        h = self.self_attn_layer_norm(x)
        x = x + self.self_attn(h, *self.self_attn.keys_values(h))
        return x + self.fc2(gelu(self.fc1(self.final_layer_norm(x))))


class DecoderLayer(nn.Module):
    def __init__(self, dim: int, heads: int, ffn_dim: int):
        super().__init__()
        self.self_attn = Attention(dim, heads)
        self.self_attn_layer_norm = nn.LayerNorm(dim)
        self.encoder_attn = Attention(dim, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, ffn_dim)
        self.fc2 = nn.Linear(ffn_dim, dim)
        self.final_layer_norm = nn.LayerNorm(dim)

    def __call__(self, x: mx.array, mask: mx.array | None, cache: "KVCache", index: int) -> mx.array:
        h = self.self_attn_layer_norm(x)
        keys, values = cache.write(index, *self.self_attn.keys_values(h))
        x = x + self.self_attn(h, keys, values, mask)
        x = x + self.encoder_attn(self.encoder_attn_layer_norm(x), *cache.memory[index])
        return x + self.fc2(gelu(self.fc1(self.final_layer_norm(x))))


class Positions(nn.Module):
    """A table of position vectors; not an ``nn.Embedding``, so that it is never quantized."""

    def __init__(self, length: int, dim: int):
        super().__init__()
        self.weight = mx.zeros((length, dim))


class Encoder(nn.Module):
    def __init__(self, args: EncoderArgs):
        super().__init__()
        dim = args.d_model
        self.conv1 = nn.Conv1d(args.num_mel_bins, dim, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, kernel_size=3, stride=2, padding=1)
        self.embed_positions = Positions(args.max_source_positions, dim)
        heads, ffn_dim = args.encoder_attention_heads, args.encoder_ffn_dim
        self.layers = [EncoderLayer(dim, heads, ffn_dim) for _ in range(args.encoder_layers)]
        self.layer_norm = nn.LayerNorm(dim)

    def __call__(self, mel: mx.array) -> mx.array:
        x = gelu(self.conv1(mel.astype(self.conv1.weight.dtype)))
        x = gelu(self.conv2(x)) + self.embed_positions.weight  # [B, S, D]
        for layer in self.layers:
            x = layer(x)
        return self.layer_norm(x)


class Decoder(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        dim = args.d_model
        self.embed_tokens = nn.Embedding(args.vocab_size, dim)
        self.embed_positions = Positions(args.max_target_positions, dim)
        heads, ffn_dim = args.decoder_attention_heads, args.decoder_ffn_dim
        self.layers = [DecoderLayer(dim, heads, ffn_dim) for _ in range(args.decoder_layers)]
        self.layer_norm = nn.LayerNorm(dim)


class Whisper(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.encoder = Encoder(args)
        self.decoder = Decoder(args)


class Model(nn.Module):
    """A verifier (see ``mlx_medusa.medusa.decode``) whose cache carries the memory that ``attend`` returns."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.model = Whisper(args)

    @property
    def num_layers(self) -> int:
        return self.args.decoder_layers

    @property
    def max_length(self) -> int:
        """Tokens that a sequence may hold, prompt included."""
        return self.args.max_target_positions

    def encode(self, mel: mx.array) -> mx.array:
        """Log-mel [B, 2 S, num_mel_bins] of 30 s -> encoder output [B, S, D]; S = max_source_positions."""
        return self.model.encoder(mel)

    def attend(self, encoded: mx.array) -> Memory:
        """K and V of the cross-attention over the encoder output [B, S, D]: once per window, contiguous in the
        layout that attention reads.
        """
        memory = []
        for layer in self.model.decoder.layers:
            keys, values = layer.encoder_attn.keys_values(encoded)
            memory.append((mx.contiguous(keys), mx.contiguous(values)))
        mx.eval(memory)
        return memory

    def step(
        self, tokens: mx.array, positions: mx.array, mask: mx.array | None, cache: "KVCache"
    ) -> mx.array:
        """Tokens and positions [B, W], mask [B, 1, W, T + W] or None -> hidden [B, W, D]; writes W rows of K/V."""
        decoder = self.model.decoder
        x = self.embed(tokens) + decoder.embed_positions.weight[positions]
        for index, layer in enumerate(decoder.layers):
            x = layer(x, mask, cache, index)
        cache.advance(tokens.shape[1])
        return decoder.layer_norm(x)

    def logits(self, hidden: mx.array) -> mx.array:
        """Hidden [..., D] -> logits [..., V], by the tied token embedding."""
        return self.model.decoder.embed_tokens.as_linear(hidden)

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids [...] -> token embeddings [..., D], without positions; for drafters."""
        decoder = self.model.decoder
        return embedded(decoder.embed_tokens, tokens, like=decoder.layer_norm.weight)

    def projection_rows(self, tokens: mx.array) -> mx.array:
        """Ids [n] -> their rows of the vocabulary projection, [n, D]: the token embedding is tied to it."""
        return self.embed(tokens)

    @staticmethod
    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Convolutions from PyTorch's [out, in, k] to MLX's [out, k, in]."""
        return {
            name: w.swapaxes(1, 2) if ".conv" in name and name.endswith(".weight") and w.ndim == 3 else w
            for name, w in weights.items()
        }
