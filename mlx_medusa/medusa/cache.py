"""K/V of a decoder: preallocated, grown in blocks, rewound in O(1)."""

from typing import Any

import mlx.core as mx


class KVCache:
    """Self-attention K/V of all layers for B sequences of equal length.

    ``length`` rows are kept. ``write`` puts the rows of a pass behind them, layer by layer, and ``advance``
    keeps them; what is past ``length`` is never read. ``memory`` is what the model attends to besides its own
    past (Whisper: K/V of the encoder output per layer); it is fixed.
    """

    def __init__(self, num_layers: int, memory: Any = None, block: int = 64):
        self.length = 0
        self.memory = memory
        self._block = block
        self._keys: list[mx.array] = [mx.zeros((1, 1, 0, 1))] * num_layers  # shaped by the first write
        self._values: list[mx.array] = [mx.zeros((1, 1, 0, 1))] * num_layers

    def write(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write K and V [B, heads, W, d] behind the kept rows; returns all rows [B, heads, length + W, d]."""
        end = self.length + keys.shape[2]
        self._keys[layer] = self._put(self._keys[layer], keys, end)
        self._values[layer] = self._put(self._values[layer], values, end)
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def _put(self, buffer: mx.array, rows: mx.array, end: int) -> mx.array:
        if end > buffer.shape[2]:
            shape = list(rows.shape)
            shape[2] = -(-end // self._block) * self._block
            grown = mx.zeros(shape, rows.dtype)
            if self.length:
                grown[:, :, : self.length] = buffer[:, :, : self.length]
            buffer = grown
        buffer[:, :, self.length : end] = rows
        return buffer

    def advance(self, rows: int) -> None:
        """Keep the ``rows`` last written rows."""
        self.length += rows

    def rewind(self, rows: int) -> None:
        """Drop the last ``rows`` kept rows. O(1): they are overwritten by the next pass."""
        if not 0 <= rows <= self.length:
            raise ValueError(f"cannot rewind {rows} of {self.length} rows")
        self.length -= rows

    def keep(self, base: int, slots: list[int]) -> None:
        """Of the rows from ``base`` on, keep ``slots`` (absolute, rising) and make them contiguous.

        A chain's accepted rows are contiguous already, and then nothing moves.
        """
        if slots != list(range(base, base + len(slots))):
            index = mx.array(slots)
            for buffers in (self._keys, self._values):
                for layer, buffer in enumerate(buffers):
                    buffer[:, :, base : base + len(slots)] = buffer[:, :, index]
                    buffers[layer] = buffer
        self.length = base + len(slots)

    def select(self, sequences: list[int]) -> None:
        """Keep only these sequences of the batch."""
        index = mx.array(sequences)
        for buffers in (self._keys, self._values):
            for layer, buffer in enumerate(buffers):
                buffers[layer] = buffer[index]

    def rows(self, layer: int) -> tuple[mx.array, mx.array]:
        """The kept K and V of a layer, [B, heads, length, d]."""
        return self._keys[layer][:, :, : self.length], self._values[layer][:, :, : self.length]
