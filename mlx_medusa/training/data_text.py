"""Read a text harvest: its answers as sequences, the states of their prompts as what they attend to."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError
from mlx_medusa.training.data import Batch, Decoded, Harvest
from mlx_medusa.training.harvest import INDEX
from mlx_medusa.training.harvest_text import FAMILY


class TextHarvest(Harvest):
    """The answers of a harvest folder; ``file`` is a prompt, which is one sequence, and has no seconds."""

    match_length = 0  # tokens in a row that batches compare to find where the same came before; 0: they don't

    def _of_file(self, entry: dict[str, Any]) -> list[Decoded]:
        shard, number = self.folder / entry["shard"], entry["number"]
        header = self._headers[shard]
        if any(f"{number}.{kind}" not in header for kind in ("prompt", "memory", "tokens", "hidden")):
            raise CheckpointError(f"{shard}: lacks tensors of {entry['name']}: harvest again")
        memory, tokens, hidden = (f"{number}.{kind}" for kind in ("memory", "tokens", "hidden"))
        length = header[tokens][1]["shape"][0]
        return [Decoded(entry["name"], shard, memory, tokens, hidden, length, seconds=0.0)]

    def prompt(self, one: Decoded) -> np.ndarray:
        """The tokens of a sequence's prompt, [P] int32."""
        return self.read(one.shard, f"{one.memory.removesuffix('memory')}prompt")

    def read_memories(self, sequences: Sequence[Decoded]) -> tuple[mx.array, np.ndarray]:
        """(states of the prompts [B, S, D] float32, padded in front, their lengths [B])"""
        found = [self.read(one.shard, one.memory) for one in sequences]
        lengths = np.array([len(states) for states in found])
        memory = np.zeros((len(found), int(lengths.max()), self.index["hidden_size"]), dtype=np.float32)
        for row, states in zip(memory, found, strict=True):
            row[len(row) - len(states) :] = states
        return mx.array(memory), lengths

    def batch(self, sequences: Sequence[Decoded], guesses: int) -> Batch:
        """Read and pad some sequences for K guesses."""
        batch = super().batch(sequences, guesses)
        if not self.match_length:
            return batch
        before, rows = batch.memory.shape[1], batch.hidden.shape[1]
        places, followed, lengths = np.zeros((3, guesses, len(sequences), rows), dtype=np.int32)
        for row, one in enumerate(sequences):
            prompt = self.prompt(one)
            tokens = np.concatenate([prompt, batch.tokens[row, : one.length]])
            found, same = find_matches(tokens, len(prompt), guesses, self.match_length)
            places[:, row, : one.length - 1] = found + before - (len(prompt) - 1)
            followed[:, row, : one.length - 1] = tokens[found + 1]
            lengths[:, row, : one.length - 1] = same
        return replace(batch, matches=places, followed=followed, match_lengths=lengths)


def find_matches(
    tokens: np.ndarray, begin: int, guesses: int, match_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Where the same tokens came before, as ``causal.Past`` finds it: (places, lengths), each [K, n - 1].

    ``tokens`` are P of a prompt and n of its answer, ``begin`` is P. Guess k of row j comes after token P + j + k. That
    is looked for among the first P + j, whose states the verifier has computed by then. Length 0: nowhere.
    """
    same = tokens[:, None] == tokens[None]
    length, so_far = same.astype(np.int32), same
    for _ in range(match_length - 1):
        so_far = same & np.pad(so_far, ((1, 0), (1, 0)))[:-1, :-1]
        length += so_far
    count, rows = len(tokens), np.arange(len(tokens) - begin - 1)
    columns = np.arange(count)
    score = np.where(length > 0, length * count + columns, 0)
    places, lengths = (np.zeros((guesses, len(rows)), dtype=np.int32) for _ in range(2))
    for guess in range(guesses):
        newest = np.minimum(begin + rows + guess, count - 1)
        seen = np.where(columns < begin + rows[:, None], score[newest], 0)
        places[guess] = seen.argmax(axis=1)
        lengths[guess] = length[newest, places[guess]] * (seen.max(axis=1) > 0)
    return places, lengths


def open_harvest(folder: Path) -> Harvest:
    """The harvest of a folder, of speech or of text. CheckpointError if there is none, or if it is broken."""
    family = checkpoint.read_json(Path(folder) / INDEX).get("family")
    return TextHarvest(folder) if family == FAMILY else Harvest(folder)
