"""Whisper by transformers' WhisperForConditionalGeneration, features by its WhisperFeatureExtractor."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    PreTrainedTokenizerFast,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from mlx_medusa.errors import OptionError
from mlx_medusa.reference.decode import Decoded, Drafter, Processor, Task, cache_name, decode
from mlx_medusa.reference.folder import Folder
from mlx_medusa.reference.runtime import Place, build


class WhisperReference:
    """transformers' model on one window of audio."""

    def __init__(self, model: Any, generation: Any, tokenizer: Any, where: Place):
        self.model, self.settings, self.tokenizer, self.where = model, generation, tokenizer, where
        self.features = WhisperFeatureExtractor(feature_size=model.config.num_mel_bins)
        self.max_length: int = model.config.max_target_positions
        self.multilingual = bool(generation.is_multilingual)
        self.drafter: Drafter | None = None

    @torch.inference_mode()
    def encode(self, samples: np.ndarray) -> torch.Tensor:
        """16 kHz mono [n], at most 30 s -> encoder output [1, S, D]."""
        mel = self.features(samples, sampling_rate=16_000, return_tensors="pt").input_features
        return self.model.get_encoder()(mel.to(self.where.device, self.where.dtype)).last_hidden_state

    @torch.inference_mode()
    def language(self, encoded: torch.Tensor) -> tuple[str, float]:
        """(code, its probability among the languages)"""
        _, logits = WhisperSequence(self.model, encoded).step([self.settings.decoder_start_token_id])
        codes, ids = zip(*self.settings.lang_to_id.items(), strict=True)
        chances = torch.softmax(logits[0, list(ids)], -1)
        best = int(chances.argmax())
        return codes[best].strip("<|>"), float(chances[best])

    def ask(
        self, memory: torch.Tensor, *, language: str | None = None, task: str = "transcribe", timestamps: bool = False,
        instruction: str | None = None, max_tokens: int | None = None, chat: bool = False,
    ) -> tuple[Task, tuple[str, float] | None]:  # fmt: skip
        """The prompt and the rules, as the folder's generation settings say them; and the language and its probability,
        where it had to be told.
        """
        if instruction is not None:
            raise OptionError("Whisper takes no instruction")
        settings, detected = self.settings, None
        prompt = [settings.decoder_start_token_id]
        if self.multilingual:
            if language is None:
                detected = self.language(memory)
                language = detected[0]
            if f"<|{language}|>" not in settings.lang_to_id:
                raise OptionError(f"language {language!r} is not among those of this model")
            prompt += [settings.lang_to_id[f"<|{language}|>"], settings.task_to_id[task]]
        if not timestamps:
            prompt.append(settings.no_timestamps_token_id)
        limit = max_tokens or self.max_length // 2
        eos = frozenset([settings.eos_token_id])
        return Task(prompt, self._rules(len(prompt), timestamps), eos, limit), detected

    def _rules(self, begin: int, timestamps: bool) -> list[Processor]:
        settings, device = self.settings, str(self.where.device)
        rules: list[Processor] = []
        if settings.suppress_tokens:
            rules.append(SuppressTokensLogitsProcessor(settings.suppress_tokens, device=device))
        if settings.begin_suppress_tokens:
            first = settings.begin_suppress_tokens
            rules.append(SuppressTokensAtBeginLogitsProcessor(first, begin, device=device))
        if timestamps:
            rules.append(WhisperTimeStampLogitsProcessor(settings, begin_index=begin))
        return rules

    def decode(self, encoded: torch.Tensor, task: Task, width: int = 1) -> Decoded:
        return decode(self, WhisperSequence(self.model, encoded), task, width)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.model.decoder.embed_tokens(tokens)

    @property
    def projection(self) -> torch.Tensor:
        return self.model.proj_out.weight

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([token for token in tokens if token < self.settings.eos_token_id])


class WhisperSequence:
    """A text under way over the encoder output ``memory`` [1, S, D]."""

    def __init__(self, model: Any, memory: torch.Tensor):
        self.memory = memory
        self._model, self._name = model, cache_name(model.model.decoder)
        self._cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

    def step(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([list(tokens)], device=self.memory.device)
        hidden = self._model.model.decoder(
            input_ids=ids, encoder_hidden_states=self.memory, use_cache=True, **{self._name: self._cache}
        ).last_hidden_state[0]
        return hidden, self._model.proj_out(hidden).float()

    def rewind(self, count: int) -> None:
        if count:
            self._cache.self_attention_cache.crop(-count)


def load(source: Folder, where: Place) -> WhisperReference:
    """The oracle of a Whisper folder."""
    config = WhisperConfig.from_dict(source.settings)
    model = build(WhisperForConditionalGeneration, config, source.tensors(), where, source.path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(source.path / "tokenizer.json"))
    return WhisperReference(model, GenerationConfig.from_dict(source.generation), tokenizer, where)
