"""MERaLiON-2: Whisper's encoder, an adapter and a Gemma 2 decoder that reads speech rows between its words.

Parameter names and config keys are those of ``MERaLiON2ForConditionalGeneration`` on the hub.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa.errors import CheckpointError
from mlx_medusa.models import gemma2
from mlx_medusa.models.whisper import Encoder, EncoderArgs
from mlx_medusa.models.whisper import Model as WhisperModel

if TYPE_CHECKING:
    from mlx_medusa.medusa.cache import KVCache

GATED, PLAIN, FIRST = "gated", "plain", "v1"  # kinds of adapter


@dataclass(frozen=True, kw_only=True)
class ModelArgs:
    speech: EncoderArgs
    text: gemma2.ModelArgs
    speech_mlp_scale_factor: int = 15  # encoder frames that become one row
    speech_token_index: int = 255_999  # stands for a row of speech in a prompt
    adapter: str = GATED

    @classmethod
    def from_config(cls, config: dict[str, Any], source: str | Path) -> "ModelArgs":
        """Read ``speech_config`` and ``text_config``; text settings may stand at the top level instead.

        Raises CheckpointError if one of the two is missing, or what it says cannot be.
        """
        for part in ("speech_config", "text_config"):
            if not isinstance(config.get(part), dict):
                raise CheckpointError(
                    f"{source}: setting {part!r} is missing, so this is no MERaLiON-2 model"
                )
        # transformers writes into text_config only what differs from Gemma2Config, and some keys a second time
        text = {name: config[name] for name in gemma2.ModelArgs.__dataclass_fields__ if name in config}
        text |= config["text_config"]
        if "tie_word_embeddings" not in config["text_config"]:
            text["tie_word_embeddings"] = True
        args = cls(
            speech=EncoderArgs.from_config(config["speech_config"], f"{source}: speech_config"),
            text=gemma2.ModelArgs.from_config(text, f"{source}: text_config"),
            speech_mlp_scale_factor=config.get("speech_mlp_scale_factor", 15),
            speech_token_index=config.get("speech_token_index", 255_999),
            adapter=_adapter_kind(config, source),
        )
        frames, factor = args.speech.max_source_positions, args.speech_mlp_scale_factor
        if not isinstance(factor, int) or factor < 1 or frames % factor:
            raise CheckpointError(
                f"{source}: 'speech_mlp_scale_factor' {factor!r} does not divide {frames} frames"
            )
        if not 0 <= args.speech_token_index < args.text.vocab_size:
            raise CheckpointError(
                f"{source}: 'speech_token_index' {args.speech_token_index} is outside the vocabulary"
            )
        return args

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def hidden_size(self) -> int:
        """Of the states that heads take."""
        return self.text.hidden_size

    @property
    def decoder_attention_heads(self) -> int:
        """Under the name that it has in a Whisper."""
        return self.text.num_attention_heads

    @property
    def decoder_ffn_dim(self) -> int:
        """Under the name that it has in a Whisper."""
        return self.text.intermediate_size

    @property
    def num_mel_bins(self) -> int:
        return self.speech.num_mel_bins

    @property
    def rows_per_chunk(self) -> int:
        """Rows of speech that 30 s become: 100."""
        return self.speech.max_source_positions // self.speech_mlp_scale_factor


def _adapter_kind(config: dict[str, Any], source: str | Path) -> str:
    kind = config.get("speech_adapter") or (GATED if config.get("speech_mlp_use_projection", True) else PLAIN)
    if kind not in (GATED, PLAIN, FIRST):
        raise CheckpointError(f"{source}: setting 'speech_adapter' is {kind!r}, which is not known")
    return kind


@dataclass(frozen=True)
class Speech:
    """Rows of speech [B, N, D] and the position in the prompt where the first of them goes."""

    rows: mx.array
    start: int


class Adapter(nn.Module):
    """Joins frames and takes them to the decoder's width, in one of three ways."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.kind, self.factor = args.adapter, args.speech_mlp_scale_factor
        dim, out = args.speech.d_model, args.text.hidden_size
        inner = dim if self.kind == FIRST else 5 * dim
        self.mlp_adapter = [nn.Linear(dim * self.factor, inner)]
        if self.kind == FIRST:  # numbered as in the checkpoint, where dropout is a module too
            self.speech_llm_proj = [
                nn.Linear(dim, 4 * dim),
                nn.SiLU(),
                nn.Dropout(0.1),
                nn.Linear(4 * dim, out),
            ]
            return
        if self.kind == GATED:
            self.gate_proj = nn.Linear(inner, inner)
            self.pool_proj = nn.Linear(inner, inner)
        self.out_proj = nn.Linear(inner, out)

    def __call__(self, frames: mx.array) -> mx.array:
        """[B, S, d_model] -> [B, S / factor, D]"""
        batch, length, dim = frames.shape
        x = frames.reshape(batch, length // self.factor, dim * self.factor)
        x = nn.silu(self.mlp_adapter[0](x))
        if self.kind == FIRST:
            return self.speech_llm_proj[3](nn.silu(self.speech_llm_proj[0](x)))
        if self.kind == GATED:
            x = nn.silu(self.gate_proj(x)) * self.pool_proj(x)
        return self.out_proj(x)


class Model(nn.Module):
    """A verifier (see ``mlx_medusa.medusa.decode``) whose cache carries a ``Speech`` as its memory."""

    float16 = False  # Gemma's activations do not fit: bfloat16 takes its place

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.speech_encoder = Encoder(args.speech)
        self.ln_speech = nn.LayerNorm(args.speech.d_model)
        self.speech_audio_adapter = Adapter(args)
        self.text_decoder = gemma2.Gemma2(args.text)

    @property
    def num_layers(self) -> int:
        return self.args.text.num_hidden_layers

    @property
    def max_length(self) -> int:
        """Tokens that a sequence may hold, prompt included."""
        return self.args.text.max_position_embeddings

    def encode(self, mel: mx.array) -> mx.array:
        """Log-mel [B, 2 S, num_mel_bins] of 30 s each -> rows of speech [B, rows_per_chunk, D]."""
        return self.speech_audio_adapter(self.ln_speech(self.speech_encoder(mel)))

    def step(
        self, tokens: mx.array, positions: mx.array, mask: mx.array | None, cache: "KVCache"
    ) -> mx.array:
        """Tokens and positions [B, W], mask [B, 1, W, T + W] or None -> hidden [B, W, D]; writes W rows of K/V.

        A speech token at a position of ``cache.memory`` is that row of speech; elsewhere it is a token like others.
        """
        x = self.text_decoder.embed(tokens)
        if cache.memory is not None:
            x = self._place(x, tokens, positions, cache.memory)
        return self.text_decoder(self.text_decoder.scale(x), positions, mask, cache)

    def _place(self, x: mx.array, tokens: mx.array, positions: mx.array, speech: Speech) -> mx.array:
        """Rows of speech in the place of their tokens' embeddings, before Gemma scales them."""
        index = positions - speech.start  # [B, W]
        count = speech.rows.shape[1]
        inside = (tokens == self.args.speech_token_index) & (index >= 0) & (index < count)
        rows = mx.take_along_axis(speech.rows, mx.clip(index, 0, count - 1)[..., None], axis=1)
        return mx.where(inside[..., None], rows.astype(x.dtype), x)

    def logits(self, hidden: mx.array) -> mx.array:
        """Hidden [..., D] -> logits [..., V] float32."""
        return self.text_decoder.logits(hidden)

    def embed(self, tokens: mx.array) -> mx.array:
        """Ids [...] -> token embeddings [..., D] as the first layer takes them; for drafters."""
        return self.text_decoder.scale(self.text_decoder.embed(tokens))

    def projection_rows(self, tokens: mx.array) -> mx.array:
        """Ids [n] -> their rows of the vocabulary projection, [n, D]."""
        return self.text_decoder.projection_rows(tokens)

    @staticmethod
    def sanitize(weights: dict[str, mx.array]) -> dict[str, mx.array]:
        """Convolutions from PyTorch's [out, in, k] to MLX's [out, k, in]."""
        return WhisperModel.sanitize(weights)
