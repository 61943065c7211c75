"""Llama and Mistral by transformers' LlamaForCausalLM and MistralForCausalLM, with its own tokenizer."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.reference.decode import Decoded, Drafter, Task, cache_name, decode
from mlx_medusa.reference.folder import Folder
from mlx_medusa.reference.runtime import Place, build

KINDS: dict[str, Any] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
MAX_TOKENS = 100  # if nothing is asked, as in ``parity.records``


class LlamaReference:
    """transformers' model and tokenizer on one prompt."""

    def __init__(self, model: Any, tokenizer: Any, eos: frozenset[int], where: Place):
        self.model, self.tokenizer, self.eos, self.where = model, tokenizer, eos, where
        window = getattr(model.config, "sliding_window", None)
        self.max_length: int = min(model.config.max_position_embeddings, window or 1 << 40)
        self.drafter: Drafter | None = None

    def encode(self, content: str) -> str:
        """A prompt is read token by token: there is nothing to encode."""
        return content

    def ask(
        self, memory: str, *, language: str | None = None, task: str = "transcribe", timestamps: bool = False,
        instruction: str | None = None, max_tokens: int | None = None, chat: bool = False,
    ) -> tuple[Task, None]:  # fmt: skip
        """The prompt as it is, or as the one message of a chat; no rules."""
        if language is not None or timestamps or instruction is not None:
            raise OptionError(
                "a text model takes prompts only: neither a language, timestamps nor an instruction"
            )
        if chat:
            messages = [{"role": "user", "content": memory}]
            prompt = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=False
            )
        else:
            prompt = self.tokenizer(memory).input_ids
        return Task(list(prompt), [], self.eos, max_tokens or MAX_TOKENS), None

    def decode(self, memory: str, task: Task, width: int = 1) -> Decoded:
        return decode(self, LlamaSequence(self.model, self.where.device), task, width)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings()(tokens)

    @property
    def projection(self) -> torch.Tensor:
        return self.model.lm_head.weight

    def text(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            [token for token in tokens if token not in self.eos], skip_special_tokens=True
        )


class LlamaSequence:
    """A text under way."""

    memory = None

    def __init__(self, model: Any, device: torch.device):
        self._model, self._name, self._device = model, cache_name(model), device
        self._cache = DynamicCache()

    def step(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.tensor([list(tokens)], device=self._device)
        out = self._model(
            input_ids=ids, output_hidden_states=True, use_cache=True, **{self._name: self._cache}
        )
        return out.hidden_states[-1][0], out.logits[0].float()

    def rewind(self, count: int) -> None:
        if count:
            self._cache.crop(-count)


def load(source: Folder, where: Place) -> LlamaReference:
    """The oracle of a Llama or Mistral folder."""
    config_class, model_class = KINDS[source.config["model_type"]]
    model = build(model_class, config_class.from_dict(source.settings), source.tensors(), where, source.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{source.path}: the tokenizer cannot be read ({error}); convert again"
        ) from error
    said = source.generation.get("eos_token_id", source.config.get("eos_token_id"))
    eos = {said} if isinstance(said, int) else set(said or [])
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    return LlamaReference(model, tokenizer, frozenset(eos), where)
