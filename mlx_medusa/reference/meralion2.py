"""MERaLiON-2 from transformers' WhisperEncoder and Gemma2ForCausalLM, and the adapter from its published description.

Names are those of the checkpoints (MERaLiON/MERaLiON-2-3B on the hub).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
)
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.reference.decode import Decoded, Drafter, Processor, Task, cache_name, decode
from mlx_medusa.reference.folder import Folder, read_json
from mlx_medusa.reference.runtime import Place, build

CHUNK = 480_000  # samples that the encoder hears at once
TEMPLATE = (  # Gemma's chat of one turn
    "{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}\n"
    "{{ message['content'] | trim }}<end_of_turn>\n{% endfor %}<start_of_turn>model\n"
)
CONTENT = "Instruction: {query} \nFollow the text instruction based on the following audio: {speech}"


class Adapter(nn.Module):
    """Joins frames and takes them to the decoder's width; ``kind``: gated, plain, or v1 (the first generation's)."""

    def __init__(self, kind: str, dim: int, out: int, factor: int):
        super().__init__()
        inner = dim if kind == "v1" else 5 * dim
        self.kind, self.factor = kind, factor
        self.mlp_adapter = nn.Sequential(nn.Linear(dim * factor, inner), nn.SiLU())
        if kind == "v1":
            self.speech_llm_proj = nn.Sequential(
                nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Dropout(0.1), nn.Linear(4 * dim, out)
            )
            return
        if kind == "gated":
            self.gate_proj, self.pool_proj = nn.Linear(inner, inner), nn.Linear(inner, inner)
        self.out_proj = nn.Linear(inner, out)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """[B, S, dim] -> [B, S / factor, out]"""
        batch, length, dim = frames.shape
        x = self.mlp_adapter(frames.reshape(batch, length // self.factor, dim * self.factor))
        if self.kind == "v1":
            return self.speech_llm_proj(x)
        if self.kind == "gated":
            x = nn.functional.silu(self.gate_proj(x)) * self.pool_proj(x)
        return self.out_proj(x)


class Meralion2(nn.Module):
    """The parts joined; random unless they are given."""

    def __init__(
        self, speech: WhisperConfig, text: Gemma2Config, kind: str, speech_token: int, factor: int,
        encoder: Any = None, decoder: Any = None,
    ):  # fmt: skip
        super().__init__()
        self.speech_encoder = encoder or WhisperEncoder(speech)
        self.ln_speech = nn.LayerNorm(speech.d_model)
        self.speech_audio_adapter = Adapter(kind, speech.d_model, text.hidden_size, factor)
        self.text_decoder = decoder or Gemma2ForCausalLM(text)
        self.speech_token = speech_token

    def rows(self, mel: torch.Tensor) -> torch.Tensor:
        """[C, mels, frames] -> rows of speech [C * n, D]"""
        encoded = self.speech_encoder(mel).last_hidden_state
        return self.speech_audio_adapter(self.ln_speech(encoded)).flatten(0, 1)

    def embed(self, tokens: torch.Tensor, rows: torch.Tensor | None = None, heard: int = 0) -> torch.Tensor:
        """Ids [n] -> what the first layer takes, [1, n, D]; ``rows`` replace the first ``heard`` speech tokens."""
        decoder = self.text_decoder
        embedded = nn.functional.embedding(tokens[None], decoder.model.embed_tokens.weight)
        if rows is not None:
            spoken = tokens == self.speech_token
            spoken &= spoken.cumsum(0) <= heard  # later ones are written, not heard
            embedded = embedded.masked_scatter(spoken[None, :, None], rows.to(embedded.dtype))
        if hasattr(
            decoder.model.embed_tokens, "embed_scale"
        ):  # transformers 5: the embedding scales, not the model
            embedded = embedded * torch.tensor(decoder.config.hidden_size**0.5).to(embedded)
        return embedded

    def forward(self, tokens: list[int], rows: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(last hidden states [W, D], logits [W, V]) of one pass over all tokens."""
        embedded = self.embed(torch.tensor(tokens), rows, 0 if rows is None else len(rows))
        out = self.text_decoder(inputs_embeds=embedded, output_hidden_states=True, use_cache=False)
        return out.hidden_states[-1][0], out.logits[0]


class Meralion2Reference:
    """The joined model on one part of up to 300 s."""

    def __init__(
        self, model: Meralion2, generation: dict[str, Any], tokenizer: Any, template: str, where: Place
    ):
        self.model, self.settings, self.tokenizer, self.where = model, generation, tokenizer, where
        self.template = template
        mels = model.speech_encoder.config.num_mel_bins
        self.features = WhisperFeatureExtractor(feature_size=mels)
        self.max_length: int = model.text_decoder.config.max_position_embeddings
        self.drafter: Drafter | None = None

    @torch.inference_mode()
    def encode(self, samples: np.ndarray) -> torch.Tensor:
        """16 kHz mono [n] -> rows of speech [1, N, D], of each 30 s begun the same number."""
        rows = []
        for start in range(0, max(1, len(samples)), CHUNK):
            mel = self.features(
                samples[start : start + CHUNK], sampling_rate=16_000, return_tensors="pt", do_normalize=True
            ).input_features
            rows.append(self.model.rows(mel.to(self.where.device, self.where.dtype)))
        return torch.cat(rows)[None]

    def ask(
        self, memory: torch.Tensor, *, language: str | None = None, task: str = "transcribe", timestamps: bool = False,
        instruction: str | None = None, max_tokens: int | None = None, chat: bool = False,
    ) -> tuple[Task, None]:  # fmt: skip
        """The chat prompt of an instruction, with a token for each row of speech."""
        if language is not None or timestamps or instruction is None:
            raise OptionError("MERaLiON takes an instruction, and neither a language nor timestamps")
        token = self.model.speech_token
        content = CONTENT.format(query=instruction, speech=self.tokenizer.convert_ids_to_tokens(token))
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], chat_template=self.template, add_generation_prompt=True,
            tokenize=True, return_dict=False,
        )  # fmt: skip
        if ids.count(token) != 1:
            raise CheckpointError(f"the prompt has {ids.count(token)} places for speech, expected one")
        at = ids.index(token)
        size = self.settings.get("no_repeat_ngram_size") or 0
        rules: list[Processor] = [NoRepeatNGramLogitsProcessor(size)] if size else []
        stops = self.settings["eos_token_id"]
        chunks = math.ceil(memory.shape[1] / self._rows_per_chunk)
        written = Task(
            ids[:at] + [token] * memory.shape[1] + ids[at + 1 :], rules,
            frozenset([stops] if isinstance(stops, int) else stops), max_tokens or 400 * chunks,
        )  # fmt: skip
        return written, None

    @property
    def _rows_per_chunk(self) -> int:
        frames = self.model.speech_encoder.config.max_source_positions
        return frames // self.model.speech_audio_adapter.factor

    def decode(self, rows: torch.Tensor, task: Task, width: int = 1) -> Decoded:
        return decode(self, Meralion2Sequence(self.model, rows), task, width)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.embed(tokens)[0]

    @property
    def projection(self) -> torch.Tensor:
        return self.model.text_decoder.lm_head.weight

    def text(self, tokens: list[int]) -> str:
        stops = self.settings["eos_token_id"]
        stops = [stops] if isinstance(stops, int) else stops
        return self.tokenizer.decode(
            [token for token in tokens if token not in stops], skip_special_tokens=True
        )


class Meralion2Sequence:
    """A text under way over rows of speech ``memory`` [1, N, D]."""

    def __init__(self, model: Meralion2, memory: torch.Tensor):
        self.memory = memory
        self._model, self._name = model, cache_name(model.text_decoder)
        self._cache = DynamicCache()  # without a window of its own, so that it can be cut back to any length
        self._heard = memory.shape[1]

    def step(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor(list(tokens), device=self.memory.device)
        embedded = self._model.embed(ids, self.memory[0], self._heard)
        self._heard = 0  # the prompt holds all of the speech
        out = self._model.text_decoder(
            inputs_embeds=embedded, output_hidden_states=True, use_cache=True, **{self._name: self._cache}
        )
        return out.hidden_states[-1][0], out.logits[0].float()

    def rewind(self, count: int) -> None:
        if count:
            self._cache.crop(-count)


def load(source: Folder, where: Place) -> Meralion2Reference:
    """The oracle of a MERaLiON-2 folder."""
    config, tensors = source.config, source.tensors()
    speech, text = WhisperConfig.from_dict(config["speech_config"]), _text_config(config)

    def part(prefix: str) -> dict[str, Any]:
        names = [name for name in tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): tensors.pop(name) for name in names}

    encoder = build(WhisperEncoder, speech, part("speech_encoder."), where, source.path)
    decoder = build(Gemma2ForCausalLM, text, part("text_decoder."), where, source.path)
    model = Meralion2(
        speech, text, _adapter_kind(tensors), config.get("speech_token_index", 255_999),
        config.get("speech_mlp_scale_factor", 15), encoder, decoder,
    ).to(where.device, where.dtype)  # fmt: skip
    wanted = {
        name
        for name, _ in model.named_parameters()
        if name.startswith(("ln_speech.", "speech_audio_adapter."))
    }
    if wanted != tensors.keys():
        raise CheckpointError(
            f"{source.path}: not the tensors of this adapter: {sorted(wanted ^ tensors.keys())}"
        )
    model.load_state_dict(tensors, strict=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source.path / "tokenizer.json"), bos_token="<bos>")
    return Meralion2Reference(model.eval(), source.generation, tokenizer, _template(source), where)


def _text_config(config: dict[str, Any]) -> Gemma2Config:
    """Settings of the decoder, of which some may stand at the top level only."""
    known = Gemma2Config().to_dict()
    values = {
        name: config[name] for name in known if name in config and name not in ("model_type", "architectures")
    }
    return Gemma2Config.from_dict({**values, **config["text_config"]})


def _adapter_kind(tensors: dict[str, Any]) -> str:
    names = " ".join(tensors)
    return "v1" if "speech_llm_proj" in names else "gated" if "gate_proj" in names else "plain"


def _template(source: Folder) -> str:
    """The folder's chat template, else Gemma's for one turn."""
    file = source.path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    settings = source.path / "tokenizer_config.json"
    found = read_json(settings).get("chat_template") if settings.is_file() else None
    return found or TEMPLATE
