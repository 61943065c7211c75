"""Encoder, verifier step and heads of the PyTorch reference as modules of tensors only, to be exported.

The verifier's own code is transformers'; here are only its arguments: the cache comes in and goes out as tensors.
"""

import math
from typing import Any

import torch
from transformers import DynamicCache, EncoderDecoderCache

from mlx_medusa.exporting.description import WINDOW_SAMPLES
from mlx_medusa.reference.decode import cache_name
from mlx_medusa.reference.heads import MedusaHeads, RecurrentHeads
from mlx_medusa.reference.whisper import WhisperReference

FRAME = 400  # samples of a spectrum, and
HOP = 160  # from one to the next: the spectrogram that Whisper was trained on (openai/whisper, audio.py)

Tensors = tuple[torch.Tensor, ...]
Drafter = MedusaHeads | RecurrentHeads


class Encoder(torch.nn.Module):
    """Samples [480,000] of a window -> K and V of all that is attended to: by the decoder, then by the heads."""

    def __init__(self, reference: WhisperReference):
        super().__init__()
        self.whisper = reference.model
        self.recurrent = reference.drafter if isinstance(reference.drafter, RecurrentHeads) else None
        filters = torch.from_numpy(reference.features.mel_filters.T).float()  # [mels, 201]
        self.filters = torch.nn.Buffer(filters)
        self.waves = torch.nn.Buffer(_waves())

    def forward(self, samples: torch.Tensor) -> Tensors:
        encoded = self.whisper.model.encoder(self.log_mel(samples)).last_hidden_state
        found: list[torch.Tensor] = []
        for layer in self.whisper.model.decoder.layers:
            attention = layer.encoder_attn
            for project in (attention.k_proj, attention.v_proj):
                rows = project(encoded).view(1, encoded.shape[1], attention.num_heads, attention.head_dim)
                found.append(rows.transpose(1, 2))
        if self.recurrent is not None:
            found += [array[None] for pair in self.recurrent.keys_values(encoded[0]) for array in pair]
        return tuple(found)

    def log_mel(self, samples: torch.Tensor) -> torch.Tensor:
        """[480,000] -> [1, mels, 3000], as WhisperFeatureExtractor computes it; the Fourier transform is a convolution,
        which every runtime has.
        """
        edge = FRAME // 2
        reflected = [samples[1 : edge + 1].flip(0), samples, samples[-edge - 1 : -1].flip(0)]
        spectrum = torch.nn.functional.conv1d(torch.cat(reflected)[None, None], self.waves, stride=HOP)
        real, imaginary = spectrum[..., : WINDOW_SAMPLES // HOP].chunk(2, dim=1)  # [1, 201, 3000]
        power = self.filters @ (real * real + imaginary * imaginary)
        levels = torch.clamp(power, min=1e-10).log10()
        return torch.maximum(levels, levels.max() - 8.0) / 4.0 + 1.0


def _waves() -> torch.Tensor:
    """A Hann window times the cosines, then the sines, of the 201 frequencies: [402, 1, 400]."""
    times = torch.arange(FRAME, dtype=torch.float64)
    angles = 2 * math.pi / FRAME * (torch.arange(FRAME // 2 + 1)[:, None] * times % FRAME)
    hann = torch.hann_window(FRAME, dtype=torch.float64)
    return torch.cat([angles.cos() * hann, angles.sin() * hann])[:, None].float()


class Step(torch.nn.Module):
    """One pass over W rows that follow P cached ones."""

    def __init__(self, reference: WhisperReference):
        super().__init__()
        self.whisper = reference.model

    def forward(self, tokens: torch.Tensor, past: list[torch.Tensor], memory: list[torch.Tensor]) -> Tensors:
        """Tokens [1, W]; K and V of each layer in turn, past [1, H, P, d], memory [1, H, S, d] -> logits [1, W, V],
        hidden [1, W, D], and what the past is now, [1, H, P + W, d].
        """
        decoder = self.whisper.model.decoder
        cache = EncoderDecoderCache(_filled(past), _filled(memory))
        cache.is_updated = dict.fromkeys(range(len(decoder.layers)), True)  # the memory is whole
        hidden = decoder(
            input_ids=tokens, encoder_hidden_states=memory[0], use_cache=True, **{cache_name(decoder): cache}
        ).last_hidden_state  # with a whole memory, the encoder's states are asked for but not read
        layers: Any = cache.self_attention_cache.layers
        present = [x for layer in layers for x in (layer.keys, layer.values)]
        return self.whisper.proj_out(hidden), hidden, *present


def _filled(arrays: list[torch.Tensor]) -> DynamicCache:
    cache = DynamicCache()
    for layer, (keys, values) in enumerate(zip(arrays[::2], arrays[1::2], strict=True)):
        cache.update(keys, values, layer)
    return cache


class Heads(torch.nn.Module):
    """The state that predicted the pending token, and that token -> all guesses [K]."""

    def __init__(self, drafter: Drafter, embedding: torch.nn.Module):
        """``embedding`` is the one that the drafter calls; unless it is registered, each call stores its own."""
        super().__init__()
        self.drafter = drafter
        self.embedding = embedding

    def forward(self, hidden: torch.Tensor, token: torch.Tensor, memory: list[torch.Tensor]) -> torch.Tensor:
        """Hidden [1, 1, D]; token [1]; K and V [1, H, S, d] of each layer of the heads in turn, none for plain ones."""
        drafter = self.drafter
        if isinstance(drafter, MedusaHeads):
            return drafter.guesses(hidden[0, 0], drafter.max_drafts)
        pairs: Any = [(k[0], v[0]) for k, v in zip(memory[::2], memory[1::2], strict=True)]
        return drafter.guesses(hidden[0, 0], token[0], pairs, drafter.max_drafts)
