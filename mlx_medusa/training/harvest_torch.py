"""Answers to many prompts at once, for a harvest where PyTorch is faster than MLX: on CUDA, or in bfloat16 on a CPU.

The model is that of ``llama.load``. Attention is of groups, so that keys and values are read once for all queries that
share them, from a cache that is written in place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import torch
from torch.nn.functional import linear
from transformers import AttentionInterface

from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.decode import Limits
from mlx_medusa.reference import llama
from mlx_medusa.reference.decode import cache_name
from mlx_medusa.reference.folder import Folder
from mlx_medusa.reference.runtime import place

_NAME = "mlx_medusa_grouped"
_CLOSE = 8  # best logits that are computed again in float32, as those of bfloat16 are often equal


@dataclass
class Rows:
    """K and V [B, groups, room, d] of each layer, of which the first ``length`` are there."""

    layers: int
    room: int
    length: int = 0

    def __post_init__(self) -> None:
        self._kept: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * self.layers

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What transformers' attention calls: write new rows [B, groups, W, d], get all."""
        kept = self._kept[layer]
        if kept is None:
            shape = (*keys.shape[:2], self.room, keys.shape[3])
            kept = self._kept[layer] = (keys.new_zeros(shape), values.new_zeros(shape))
        end = self.length + keys.shape[2]
        for old, new in zip(kept, (keys, values), strict=True):
            old[:, :, self.length : end] = new
        return kept[0][:, :, :end], kept[1][:, :, :end]

    def get_seq_length(self, *_: Any) -> int:
        return self.length

    def select(self, going: list[int]) -> None:
        """Keep these sequences of the batch."""
        self._kept = [None if kept is None else (kept[0][going], kept[1][going]) for kept in self._kept]


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor, scaling: float, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Queries [B, heads, W, d]; the heads of a group are rows of one product."""
    batch, heads, width, size = query.shape
    groups, length = key.shape[1:3]
    rows = (query * scaling).reshape(batch * groups, -1, size)
    scores = torch.bmm(rows, key.flatten(0, 1).transpose(1, 2)).view(batch, heads, width, length)
    weights = torch.softmax(scores + attention_mask, dim=-1).view(batch * groups, -1, length)
    out = torch.bmm(weights, value.flatten(0, 1)).view(batch, heads, width, size)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, _attention)


class TorchAnswers:
    """Plain greedy decoding of prompts at once, as ``harvest_text`` takes it."""

    def __init__(self, folder: Path, dtype: str, device: str = "auto"):
        """``dtype`` is what PyTorch computes in, whatever the folder's. OptionError for another family."""
        source = Folder.find(folder)
        if source.config.get("model_type") not in llama.KINDS:
            raise OptionError(f"{folder}: PyTorch answers prompts only for {', '.join(llama.KINDS)}")
        self._where = place(device, dtype)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        loaded = llama.load(source, self._where)
        self._model, self._max_length = loaded.model, loaded.max_length
        self._model.set_attn_implementation(_NAME)
        self._cache_name = cache_name(self._model.model)
        self._projection = self._model.lm_head.weight
        self._precise = self._projection.float()

    @torch.inference_mode()
    def __call__(
        self, prompts: Sequence[Sequence[int]], limits: Limits
    ) -> list[tuple[list[int], mx.array, mx.array]]:
        """Per prompt: see ``harvest_text.greedy_batch``; states are float16."""
        width = max(map(len, prompts))
        room = min(limits.max_tokens, self._max_length - width)
        pads = torch.tensor([width - len(prompt) for prompt in prompts], device=self._where.device)
        rows = [[0] * (width - len(prompt)) + list(prompt) for prompt in prompts]
        cache = Rows(self._model.config.num_hidden_layers, width + room)
        hidden = self._pass(torch.tensor(rows, device=self._where.device), pads, cache)
        before = [_states(states[pad:-1]) for pad, states in zip(pads.tolist(), hidden, strict=True)]
        hidden = hidden[:, -1]
        answers: list[list[int]] = [[] for _ in prompts]
        states: list[list[torch.Tensor]] = [[] for _ in prompts]
        live = list(range(len(prompts)))
        for count in range(1, room + 1):
            picks = self._pick(hidden)
            for at, (row, token) in enumerate(zip(live, picks, strict=True)):
                if not answers[row] or answers[row][-1] not in limits.eos:
                    answers[row].append(token)
                    states[row].append(hidden[at])
            going = [at for at, row in enumerate(live) if answers[row][-1] not in limits.eos]
            if not going or count == room:
                break
            if 4 * len(going) <= 3 * len(live):
                cache.select(going)
                live, picks, pads = [live[at] for at in going], [picks[at] for at in going], pads[going]
            hidden = self._pass(torch.tensor(picks, device=self._where.device)[:, None], pads, cache)[:, 0]
        return [
            (tokens, prompt, _states(torch.stack(found)))
            for tokens, prompt, found in zip(answers, before, states, strict=True)
        ]

    def _pass(self, tokens: torch.Tensor, pads: torch.Tensor, cache: Rows) -> torch.Tensor:
        """Tokens [B, W] of sequences that begin with ``pads`` [B] rows of padding -> hidden [B, W, D]."""
        start, end = cache.length, cache.length + tokens.shape[1]
        rows, columns = torch.arange(start, end, device=pads.device), torch.arange(end, device=pads.device)
        seen = (columns[None] <= rows[:, None])[None] & (columns >= pads[:, None])[:, None]
        seen = seen | (columns[None] == rows[:, None])[None]  # padding sees itself: no softmax of nothing
        mask = torch.where(seen, 0.0, torch.finfo(self._where.dtype).min).to(self._where.dtype)[:, None]
        found = self._model.model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=(rows[None] - pads[:, None]).clamp(min=0),
            use_cache=True,
            **{self._cache_name: cache},
        )
        cache.length = end
        return found.last_hidden_state

    def _pick(self, hidden: torch.Tensor) -> list[int]:
        """The best token of each state [B, D]; the lowest of equal ones."""
        close = linear(hidden, self._projection).topk(_CLOSE, dim=-1).indices.sort(dim=-1).values
        logits = torch.einsum("bd,bkd->bk", hidden.float(), self._precise[close])
        picks: list[int] = close.gather(1, logits.argmax(dim=-1, keepdim=True))[:, 0].tolist()
        return picks


def _states(rows: torch.Tensor) -> mx.array:
    return mx.array(rows.to(torch.float16).cpu().numpy())
