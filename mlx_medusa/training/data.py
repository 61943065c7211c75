"""Read a harvest: which sequences there are, which are held out, and batches of them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.shards import read_header
from mlx_medusa.training.harvest import FORMAT, INDEX, KINDS, PROMPTS

_DTYPES = {"F16": np.float16, "F32": np.float32, "BF16": np.uint16, "I32": np.int32}
_POOL = 8  # batches whose sequences are sorted by length, so that little is padded


@dataclass(frozen=True)
class Decoded:
    """One decoded sequence of a window, still on disk."""

    file: str
    shard: Path
    memory: str  # tensor names
    tokens: str
    hidden: str
    length: int
    seconds: float  # of its file, divided by the file's sequences


@dataclass(frozen=True)
class Batch:
    """B sequences padded to T + K tokens. Row j of a sequence guesses from the state that predicted token j."""

    memory: mx.array  # [B, S, D] float32
    hidden: mx.array  # [B, T, D] float32
    tokens: np.ndarray  # [B, T + K] int32, 0 where padded
    lengths: np.ndarray  # [B]; row j of a sequence of n tokens has min(K, n - 1 - j) guesses to learn
    later: mx.array | None = None  # [K, B, T, D] float32: the verifier's states that guesses should be
    memory_lengths: np.ndarray | None = None  # [B] where memories are padded, in front; None: all are whole
    matches: np.ndarray | None = (
        None  # [K, B, T]: column of memory and hidden where the same tokens came before
    )
    followed: np.ndarray | None = None  # [K, B, T]: the token that followed there
    match_lengths: np.ndarray | None = None  # [K, B, T]: how many tokens are the same there


class Harvest:
    """The sequences of a harvest folder; their arrays are read when they are asked for."""

    def __init__(self, folder: Path):
        """Raises CheckpointError if the folder is no harvest, or if a shard is missing, broken or cut short."""
        self.folder = Path(folder)
        self.index = checkpoint.read_json(self.folder / INDEX)
        if self.index.get("format") != FORMAT:
            raise CheckpointError(f"{folder}: not a harvest of this version: harvest again")
        self._headers: dict[Path, dict[str, tuple[int, dict[str, Any]]]] = {}
        for name in sorted({entry["shard"] for entry in self.index["files"]}):
            self._headers[self.folder / name] = _tensors(self.folder / name)
        self.sequences = [found for entry in self.index["files"] for found in self._of_file(entry)]
        if not self.sequences:
            raise CheckpointError(f"{folder}: the harvest is empty: harvest more audio")

    def _of_file(self, entry: dict[str, Any]) -> list[Decoded]:
        shard = self.folder / entry["shard"]
        header = self._headers[shard]
        found = []
        for window in range(entry["windows"]):
            key = f"{entry['number']}.{window}"
            for kind in PROMPTS[self.index["prompts"]]:
                prefix = f"{key}.{KINDS[kind]}"
                names = (f"{key}.memory", f"{prefix}.tokens", f"{prefix}.hidden")
                if any(name not in header for name in names):
                    raise CheckpointError(f"{shard}: lacks tensors of {entry['name']}: harvest again")
                length = header[names[1]][1]["shape"][0]
                found.append(Decoded(entry["name"], shard, *names, length, entry["seconds"]))
        return [replace(one, seconds=one.seconds / len(found)) for one in found]

    def read(self, shard: Path, name: str) -> np.ndarray:
        """One array; bfloat16 comes as float32."""
        start, info = self._headers[shard][name]
        dtype = _DTYPES[info["dtype"]]
        array = np.memmap(shard, dtype, "r", offset=start, shape=tuple(info["shape"]))
        if info["dtype"] == "BF16":
            return np.array(mx.array(array).view(mx.bfloat16).astype(mx.float32))
        return np.array(array)

    def check(self, fingerprint: str, dtype: str) -> None:
        """CheckpointError unless the harvest is of this model, run in this type."""
        for name, value in (("fingerprint", fingerprint), ("dtype", dtype)):
            if self.index[name] != value:
                raise CheckpointError(
                    f"{self.folder}: is a harvest of a model with {name} {self.index[name]}, not {value}: "
                    "fit with the model and --dtype that it was harvested from"
                )

    def split(self, held_out: float, hours: float | None = None) -> tuple[list[Decoded], list[Decoded]]:
        """(training, held-out) sequences, split by file.

        A file's side depends on its name alone, so it stays when a harvest grows. ``hours``: use only so much audio
        for training.
        """
        order = sorted({one.file for one in self.sequences}, key=_hash)
        if len(order) < 2:
            raise OptionError(f"{self.folder}: one file cannot be split into training and held-out files")
        out = {file for file in order if _hash(file) < held_out} or {order[0]}
        if len(out) == len(order):
            out = set(order[:-1])
        by_file: dict[str, list[Decoded]] = {file: [] for file in order}
        for one in self.sequences:
            by_file[one.file].append(one)
        train: list[Decoded] = []
        seconds = 0.0
        for file in reversed(order):
            if file in out or (hours is not None and seconds >= hours * 3600):
                continue
            train += by_file[file]
            seconds += sum(one.seconds for one in by_file[file])
        return train, [one for file in order if file in out for one in by_file[file]]

    def token_counts(self, sequences: Sequence[Decoded]) -> np.ndarray:
        """How often each id was written, [V]."""
        counts = np.zeros(self.index["vocab_size"], dtype=np.int64)
        for one in sequences:
            np.add.at(counts, self.read(one.shard, one.tokens), 1)
        return counts

    def directions(self, sequences: Sequence[Decoded], count: int, most: int = 200) -> np.ndarray:
        """The ``count`` orthonormal directions [D, count] in which the states of ``most`` sequences are largest."""
        moment = np.zeros((self.index["hidden_size"],) * 2)
        for one in sequences[:most]:
            states = self.read(one.shard, one.hidden).astype(np.float64)
            moment += states.T @ states
        _, vectors = np.linalg.eigh(moment)  # by rising eigenvalue
        return vectors[:, ::-1][:, :count].astype(np.float32)

    def batch(self, sequences: Sequence[Decoded], guesses: int) -> Batch:
        """Read and pad some sequences for K guesses."""
        lengths = np.array([one.length for one in sequences])
        rows = max(1, int(lengths.max()) - 1)  # no guess follows the last token
        tokens = np.zeros((len(sequences), rows + guesses), dtype=np.int32)
        hidden = np.zeros((len(sequences), rows + guesses, self.index["hidden_size"]), dtype=np.float32)
        for at, one in enumerate(sequences):
            tokens[at, : one.length] = self.read(one.shard, one.tokens)
            hidden[at, : one.length] = self.read(one.shard, one.hidden)
        memory, memory_lengths = self.read_memories(sequences)
        later = np.stack([hidden[:, 1 + guess : 1 + guess + rows] for guess in range(guesses)])
        return Batch(memory, mx.array(hidden[:, :rows]), tokens, lengths, mx.array(later), memory_lengths)

    def read_memories(self, sequences: Sequence[Decoded]) -> tuple[mx.array, np.ndarray | None]:
        """What the sequences attend to, [B, S, D] float32, and the lengths [B] if there is padding in front."""
        found = np.stack([self.read(one.shard, one.memory) for one in sequences])
        return mx.array(found.astype(np.float32)), None


def text_counts(paths: Sequence[Path], encode: Callable[[str], list[int]], vocab_size: int) -> np.ndarray:
    """How often each id comes in some texts, [V]: plain text, or JSON lines with a "text".

    Raises OptionError for a file that cannot be read as one of these.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for path in paths:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            if path.suffix == ".jsonl":
                lines = [json.loads(line)["text"] for line in lines if line.strip()]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise OptionError(f'{path}: is neither text nor JSON lines with a "text" ({error})') from error
        for line in lines:
            np.add.at(counts, encode(f" {line.strip()}"), 1)  # Whisper's text begins with a space
    return counts


def draft_vocabulary(counts: np.ndarray, size: int | None, eos: int) -> np.ndarray:
    """The ids to guess among, rising: the ``size`` most frequent ones of ``counts`` [V], ``eos`` always among them.

    Where fewer were seen, the lowest ids fill up, since byte-pair vocabularies number common pairs first. ``size`` None
    takes all that were seen.
    """
    if size is not None and not 1 <= size <= len(counts):
        raise OptionError(f"a draft vocabulary of {size} tokens is not among 1 to {len(counts)}")
    order = np.lexsort((np.arange(len(counts)), -counts))  # by frequency, of equal ones the lower id
    order = order[order != eos]
    if size is None:
        size = int(np.count_nonzero(counts[order])) + 1
    return np.sort(np.append(order[: size - 1], eos)).astype(np.int32)


def batches(sequences: Sequence[Decoded], size: int, seed: tuple[int, ...]) -> Iterator[list[Decoded]]:
    """All sequences in random batches of ``size``, each of about equally long ones. The same seed, the same batches."""
    rng = np.random.default_rng(seed)
    usable = [one for one in sequences if one.length > 1]
    shuffled = [usable[i] for i in rng.permutation(len(usable))]
    found = []
    for first in range(0, len(shuffled), size * _POOL):
        pool = sorted(shuffled[first : first + size * _POOL], key=lambda one: one.length)
        found += [pool[start : start + size] for start in range(0, len(pool), size)]
    for i in rng.permutation(len(found)):
        yield found[i]


def _tensors(path: Path) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name -> (place of its first byte, header entry) of a shard that is whole."""
    header, _ = read_header(path)
    with path.open("rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    return {name: (start + info["data_offsets"][0], info) for name, info in header.items()}


def _hash(file: str) -> float:
    """A number in [0, 1) that depends on the file's name, without its folder."""
    digest = hashlib.sha256(Path(file).name.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
