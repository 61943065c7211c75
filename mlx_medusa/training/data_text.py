"""Read a text harvest: its answers as sequences, the states of their prompts as what they attend to."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError
from mlx_medusa.training.data import Decoded, Harvest
from mlx_medusa.training.harvest import INDEX
from mlx_medusa.training.harvest_text import FAMILY


class TextHarvest(Harvest):
    """The answers of a harvest folder; ``file`` is a prompt, which is one sequence, and has no seconds."""

    def _of_file(self, entry: dict[str, Any]) -> list[Decoded]:
        shard = self.folder / entry["shard"]
        prompt, tokens, hidden = (f"{entry['number']}.{kind}" for kind in ("prompt", "tokens", "hidden"))
        if any(name not in self._headers[shard] for name in (prompt, tokens, hidden)):
            raise CheckpointError(f"{shard}: lacks tensors of {entry['name']}: harvest again")
        length = self._headers[shard][tokens][1]["shape"][0]
        return [Decoded(entry["name"], shard, prompt, tokens, hidden, length, seconds=0.0)]

    def read_memories(self, sequences: Sequence[Decoded]) -> tuple[mx.array, np.ndarray]:
        """(states of the prompts [B, S, D] float32, padded in front, their lengths [B])"""
        found = [self.read(one.shard, one.memory) for one in sequences]
        lengths = np.array([len(states) for states in found])
        memory = np.zeros((len(found), int(lengths.max()), self.index["hidden_size"]), dtype=np.float32)
        for row, states in zip(memory, found, strict=True):
            row[len(row) - len(states) :] = states
        return mx.array(memory), lengths


def open_harvest(folder: Path) -> Harvest:
    """The harvest of a folder, of speech or of text. CheckpointError if there is none, or if it is broken."""
    family = checkpoint.read_json(Path(folder) / INDEX).get("family")
    return TextHarvest(folder) if family == FAMILY else Harvest(folder)
