"""Harvest: what the frozen verifier writes by itself, and the state that predicted each token.

A harvest is a folder of safetensors shards and an index.json. Window w of file f gives ``{f}.{w}.memory`` [S, D]
float16 (what the verifier hears: Whisper's encoder output, or the rows of speech in MERaLiON's prompt), and per prompt
``{f}.{w}.text.tokens`` [n] int32, the tokens decided after it (with the end token), and ``{f}.{w}.text.hidden`` [n, D],
in the verifier's type, the states that predicted them; ``stamped`` instead of ``text`` where timestamps were asked for.
A shard covers whole files, and is in the index only when it is whole, so a harvest goes on where it was killed.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlx_medusa import checkpoint
from mlx_medusa.audio import ENDINGS, SAMPLE_RATE, read_blocks
from mlx_medusa.digest import sha256
from mlx_medusa.errors import AudioError, CheckpointError, OptionError, OutputError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, Verifier
from mlx_medusa.medusa.rules import Rule, pick
from mlx_medusa.shards import ShardWriter, write_json
from mlx_medusa.speech.transcriber import SpeechToText
from mlx_medusa.speech.windows import Window, windows

INDEX = "index.json"
FORMAT = 1
AUDIO_KEYS = ("audio", "audio_filepath", "path", "file")  # of a manifest's lines
PROMPTS = {"text": (False,), "stamped": (True,), "both": (False, True)}  # with timestamps?
KINDS = {False: "text", True: "stamped"}  # the part of a tensor's name
_HEADER_BYTES = 1 << 20


@dataclass(frozen=True)
class HarvestOptions:
    """``prompts``: text, stamped or both. ``batch``: windows decoded at once. ``files_per_shard``: as it says."""

    prompts: str = "text"
    language: str | None = "en"  # for Whisper
    batch: int = 8
    files_per_shard: int = 50

    def __post_init__(self) -> None:
        if self.prompts not in PROMPTS:
            raise OptionError(f"prompts {self.prompts!r} is not known: use one of {', '.join(PROMPTS)}")
        for name in ("batch", "files_per_shard"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, but must be at least 1")


def list_audio(sources: Iterable[str | Path]) -> list[Path]:
    """The audio files of folders (sorted, with what is in them), JSON-lines manifests (in their order) and files.

    Each comes once. Raises AudioError for a source that is not there, OptionError for a broken manifest.
    """
    found: dict[Path, None] = {}
    for source in map(Path, sources):
        if source.is_dir():
            inside = (path for path in sorted(source.rglob("*")) if path.suffix.lower() in ENDINGS)
            found.update(dict.fromkeys(inside))
        elif source.suffix == ".jsonl":
            found.update(dict.fromkeys(_manifest(source)))
        elif source.exists():
            found[source] = None
        else:
            raise AudioError(f"{source}: no such file or folder")
    return list(found)


def _manifest(path: Path) -> Iterator[Path]:
    """The files that the lines of a manifest name, relative to its folder."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise AudioError(f"{path}: {error.strerror or error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            name = next(entry[key] for key in AUDIO_KEYS if key in entry)
        except (ValueError, StopIteration, TypeError) as error:
            raise OptionError(
                f"{path}: line {number} is no JSON object with one of {', '.join(AUDIO_KEYS)}"
            ) from error
        yield path.parent / name


def fingerprint(folder: Path) -> str:
    """SHA-256 of the bytes of a model folder's weights."""
    return sha256(checkpoint.weight_files(folder), cure="convert the model again")


def greedy(
    verifier: Verifier,
    prompt: Sequence[int],
    cache: KVCache,
    batch: int,
    limits: Limits,
    rules: Sequence[Rule],
) -> list[tuple[list[int], mx.array]]:
    """Plain greedy decoding of B sequences that share a prompt, each against its own memory in ``cache``.

    Per sequence: the n decided tokens (an end token included) and the states [n, D] that predicted them.
    """
    sequences = [list(prompt) for _ in range(batch)]
    ends = [0] * batch  # 0: goes on
    states: list[mx.array] = []
    room = min(limits.max_tokens, verifier.max_length - len(prompt))
    tokens = mx.array(sequences)
    while len(states) < room and not all(ends):
        start, width = cache.length, tokens.shape[1]
        positions = mx.arange(start, start + width)
        mask = (mx.arange(start + width)[None] <= positions[:, None])[None, None] if width > 1 else None
        hidden = verifier.step(tokens, mx.broadcast_to(positions, tokens.shape), mask, cache)[:, -1]
        picks, _ = pick(rules, sequences, verifier.logits(hidden))
        states.append(hidden)
        for row, token in enumerate(picks):
            sequences[row].append(token)
            if token in limits.eos and not ends[row]:
                ends[row] = len(states)
        tokens = mx.array(picks)[:, None]
    stacked = mx.stack(states, axis=1)  # [B, n, D]
    found = []
    for row, end in enumerate(ends):
        count = end or len(states)
        found.append((sequences[row][len(prompt) : len(prompt) + count], stacked[row, :count]))
    return found


def decode_encoded(
    transcriber: SpeechToText, encoded: mx.array, stamped: bool, options: HarvestOptions
) -> list[tuple[list[int], mx.array]]:
    """What ``greedy`` writes for encoder outputs [B, S, D], under the rules that transcribing has."""
    at = transcriber.opening(encoded, options.language, timestamps=stamped)
    return greedy(transcriber.model, at.prompt, at.cache, len(encoded), at.limits, at.rules)


def read_windows(path: Path) -> list[Window]:
    """All windows of a file. AudioError if it cannot be read to its end, or holds nothing."""
    found = list(windows(read_blocks(path)))
    if not found:
        raise AudioError(f"{path}: holds no audio: record or export it anew")
    return found


def harvest(
    transcriber: SpeechToText,
    model_folder: Path,
    sources: Iterable[str | Path],
    target: Path,
    options: HarvestOptions | None = None,
    *,
    progress: bool = False,
) -> list[AudioError]:
    """Decode all audio of ``sources`` into the harvest ``target``, going on with one that is there.

    Returns the errors of the files that cannot be read, which are skipped. Raises CheckpointError if ``target`` is the
    harvest of another model or of other settings.
    """
    options = options or HarvestOptions()
    index = open_index(target, _settings(transcriber, model_folder, options))
    done = {entry["name"] for entry in index["files"]}
    rest = [path for path in list_audio(sources) if str(path) not in done]
    errors: list[AudioError] = []
    with tqdm(total=len(rest), unit="file", desc="harvested", disable=None if progress else True) as bar:
        for first in range(0, len(rest), options.files_per_shard):
            shard = _Shard(transcriber, target, index, options)
            for path in rest[first : first + options.files_per_shard]:
                try:
                    shard.add(path)
                except AudioError as error:
                    errors.append(error)
                bar.update()
            shard.close()
    return errors


def _settings(transcriber: SpeechToText, model_folder: Path, options: HarvestOptions) -> dict[str, Any]:
    """What must be the same for a harvest to go on."""
    args = transcriber.model.args
    return {
        "fingerprint": fingerprint(model_folder),
        "dtype": str(transcriber.model.embed(mx.array([0])).dtype).rpartition(".")[2],
        "hidden_size": args.hidden_size,
        "vocab_size": args.vocab_size,
        "eos": max(transcriber.tokenizer.stops),
        "prompts": options.prompts,
        "language": options.language,
        "batch": options.batch,
        "files_per_shard": options.files_per_shard,
    }


def open_index(target: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The index of a new or a started harvest; what a killed run left half written is removed.

    Raises CheckpointError for a harvest with other settings.
    """
    settings = {"format": FORMAT, **settings}
    if (target / INDEX).exists():
        index = checkpoint.read_json(target / INDEX)
        for name, value in settings.items():
            if index.get(name) != value:
                raise CheckpointError(
                    f"{target}: is a harvest with {name} {index.get(name)!r}, not {value!r}: choose another folder"
                )
    else:
        index = {**settings, "files": [], "shards": 0}
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{target}: {error.strerror}: choose another folder") from error
    for stray in target.glob("*.part"):
        stray.unlink()
    return index


def commit(folder: Path, index: dict[str, Any], files: list[dict[str, Any]]) -> None:
    """Put a shard that is whole, and covers ``files``, into the index."""
    index["files"] += files
    index["shards"] += 1
    temporary = folder / f"{INDEX}.part"
    write_json(temporary, index)
    temporary.replace(folder / INDEX)


class _Shard:
    """The shard that is being written: its files' windows wait until a batch of them is full."""

    def __init__(
        self, transcriber: SpeechToText, folder: Path, index: dict[str, Any], options: HarvestOptions
    ):
        self._transcriber, self._folder, self._index, self._options = transcriber, folder, index, options
        self._name = f"shard-{index['shards']:05}"
        self._writer = ShardWriter(folder, self._name, header_bytes=_HEADER_BYTES, shard_bytes=1 << 62)
        self._files: list[dict[str, Any]] = []
        self._waiting: list[tuple[str, Window]] = []

    def add(self, path: Path) -> None:
        """Decode one file. AudioError, with nothing of it written, if it cannot be read."""
        found = read_windows(path)
        number = len(self._index["files"]) + len(self._files)
        samples = sum(len(window.samples) for window in found)
        self._files.append(
            {
                "name": str(path),
                "shard": f"{self._name}.safetensors",
                "number": number,
                "windows": len(found),
                "seconds": round(samples / SAMPLE_RATE, 3),
            }
        )
        for count, window in enumerate(found):
            self._waiting.append((f"{number}.{count}", window))
            if len(self._waiting) == self._options.batch:
                self._flush()

    def _flush(self) -> None:
        keys, batch = zip(*self._waiting, strict=True)
        self._waiting = []
        encoded = mx.concatenate([self._transcriber.encode(window) for window in batch])
        for key, memory in zip(keys, encoded, strict=True):
            self._writer.add(f"{key}.memory", memory.astype(mx.float16))
        for stamped in PROMPTS[self._options.prompts]:
            decoded = decode_encoded(self._transcriber, encoded, stamped, self._options)
            for key, (tokens, hidden) in zip(keys, decoded, strict=True):
                prefix = f"{key}.{KINDS[stamped]}"
                self._writer.add(f"{prefix}.tokens", mx.array(tokens, dtype=mx.int32))
                self._writer.add(f"{prefix}.hidden", hidden)
        mx.clear_cache()

    def close(self) -> None:
        """Write what waits, name the shard, and only then put it into the index."""
        if self._waiting:
            self._flush()
        if not self._files:
            return
        self._writer.close(index=False)
        commit(self._folder, self._index, self._files)
