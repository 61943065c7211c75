"""Parts that architectures share; attention and GELU from cheaper elements on a CPU in float32, elsewhere MLX's own.

MLX's CPU backend takes about 10 ns for an exp and 22 ns for an erf, but 3 ns for a power and 0.2 ns for a product, and
a Whisper encoder needs millions of them: softmax in base 2 and a polynomial erf make it nearly twice as fast there.
"""

import math
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn

_LOG2_E = math.log2(math.e)
_BLOCK = 1 << 20  # elements per block: few enough to stay in the processor's cache between operations


def attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, mask: mx.array | None = None
) -> mx.array:
    """softmax(scale Q K^T) V.

    Queries [B, H, W, d], keys and values [B, G, T, d] with H a multiple of G, mask [B, 1, W, T] bool or None (all
    visible) -> [B, H, W, d].
    """
    if not _on_cpu(queries):
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    batch, heads, width, dim = queries.shape
    groups, length = keys.shape[1:3]
    queries = (queries * (scale * _LOG2_E)).reshape(batch, groups, -1, width, dim)
    keys = keys.swapaxes(-1, -2)
    rows = max(1, _BLOCK // (batch * heads * length))
    blocks = []
    for start in range(0, width, rows):
        block = queries[:, :, :, start : start + rows]
        scores = block.reshape(batch, groups, -1, dim) @ keys  # [B, G, H / G * rows, T]
        if mask is not None:
            seen = mask[:, :, None, start : start + rows]
            shared = scores.reshape(batch, groups, heads // groups, -1, length)
            scores = mx.where(seen, shared, -mx.inf).reshape(scores.shape)
        weights = mx.power(2.0, scores - mx.max(scores, axis=-1, keepdims=True))
        blocks.append(((weights @ values) / mx.sum(weights, axis=-1, keepdims=True)).reshape(block.shape))
    out = blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=3)
    return out.reshape(batch, heads, width, dim)


def turn(rope: Callable[..., mx.array], x: mx.array, positions: mx.array) -> mx.array:
    """Rotary positions, one per token: [B, W, heads, d], positions [B, W] -> [B, heads, W, d].

    ``rope`` has an offset per batch row, as ``mx.fast.rope`` has, so tokens go to that axis.
    """
    turned = rope(x.reshape(-1, x.shape[2], 1, x.shape[3]), offset=positions.reshape(-1))
    return turned.reshape(x.shape).swapaxes(1, 2)


def embedded(embedding: nn.Embedding, tokens: mx.array, like: mx.array) -> mx.array:
    """Ids [...] -> rows of a token embedding [..., D]; those of a quantized one in the dtype of ``like``.

    MLX makes bfloat16 of the mx and nv modes, whatever the rest of the model is.
    """
    found = embedding(tokens)
    return found.astype(like.dtype) if isinstance(embedding, nn.QuantizedEmbedding) else found


def rows(layer: nn.Module, indices: mx.array) -> mx.array:
    """Rows [n, in] of the weight of a linear layer, quantized or not."""
    if not isinstance(layer, nn.QuantizedLinear):
        return layer.weight[indices]
    biases = None if layer.biases is None else layer.biases[indices]
    return mx.dequantize(
        layer.weight[indices], layer.scales[indices], biases, group_size=layer.group_size, bits=layer.bits,
        mode=layer.mode,
    )  # fmt: skip


def gelu(x: mx.array) -> mx.array:
    """x Phi(x), with the error function itself, not the tanh form. [B, T, D] -> [B, T, D]."""
    if not _on_cpu(x):
        return nn.gelu(x)
    rows = max(1, _BLOCK // (4 * x.shape[0] * x.shape[2]))
    blocks = [x[:, start : start + rows] for start in range(0, x.shape[1], rows)]
    blocks = [0.5 * block * (1 + _erf(block * math.sqrt(0.5))) for block in blocks]
    return blocks[0] if len(blocks) == 1 else mx.concatenate(blocks, axis=1)


def logsumexp(x: mx.array) -> mx.array:
    """log sum exp over the last axis of [..., V] -> [...]."""
    if not _on_cpu(x):
        return mx.logsumexp(x, axis=-1)
    highest = mx.max(x, axis=-1, keepdims=True)
    total = mx.sum(mx.power(2.0, (x - highest) * _LOG2_E), axis=-1)
    return mx.log(total) + highest[..., 0]


def _erf(x: mx.array) -> mx.array:
    """Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: off by at most 1.5e-7."""
    size = mx.abs(x)
    t = 1 / (1 + 0.3275911 * size)
    series = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    return mx.sign(x) * (1 - series * mx.power(2.0, -_LOG2_E * size * size))


def _on_cpu(x: mx.array) -> bool:
    return mx.default_device().type == mx.cpu and x.dtype == mx.float32
