"""Harvest of a text model: what it answers to prompts by itself, and the states of prompt and answer.

A folder as ``harvest`` writes it for speech. Prompt p gives ``{p}.prompt`` [P] int32, its tokens, ``{p}.memory``
[P - 1, D] float16, the states of all of these but the last; ``{p}.tokens`` [n] int32, the tokens decided after the
prompt (with the end token), and ``{p}.hidden`` [n, D], in the verifier's type, the states that predicted them. The
prompts of the index are named by a digest of their tokens, so the same prompt is never harvested twice.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits
from mlx_medusa.medusa.rules import pick
from mlx_medusa.shards import ShardWriter
from mlx_medusa.training.harvest import commit, fingerprint, open_index

FAMILY = "text"
_ROWS = 16_384  # rows of a prefill pass
_HEADER_BYTES = 1 << 18

Messages = list[dict[str, str]]
# prompts, limits -> per prompt the decided tokens and the states, see ``greedy_batch``
Answer = Callable[[Sequence[Sequence[int]], Limits], list[tuple[list[int], mx.array, mx.array]]]
Encode = Callable[[Messages], list[int]]  # messages -> token ids of the whole prompt


@dataclass(frozen=True)
class TextOptions:
    """``max_tokens``: of an answer. ``batch``: prompts answered at once. ``prompts_per_shard``: as it says."""

    max_tokens: int = 192
    batch: int = 48
    prompts_per_shard: int = 96

    def __post_init__(self) -> None:
        for name in ("max_tokens", "batch", "prompts_per_shard"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, but must be at least 1")


def read_prompts(paths: Iterable[str | Path]) -> list[Messages]:
    """The conversations of JSON-lines files, each line {"prompt": ...} or {"messages": [{"role", "content"}, ...]}.

    Raises OptionError, which names file and line, for anything else.
    """
    found: list[Messages] = []
    for path in map(Path, paths):
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{path}: cannot be read ({error}); name a file of JSON lines") from error
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                messages = entry.get("messages") or [{"role": "user", "content": entry["prompt"]}]
                found.append([{"role": str(m["role"]), "content": str(m["content"])} for m in messages])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise OptionError(
                    f'{path}: line {number} is no JSON object with a "prompt" or "messages"'
                ) from error
    if not found:
        raise OptionError("there are no prompts: name JSON-lines files that hold some")
    return found


def describe(model: Any, folder: Path, torch: str | None = None) -> dict[str, Any]:
    """What a harvest says of its model: SHA-256 of the weights, type, sizes; if PyTorch answers, its precision."""
    return {
        "torch": torch,
        "fingerprint": fingerprint(folder),
        "dtype": str(model.embed(mx.array([0])).dtype).rpartition(".")[2],
        "hidden_size": model.args.hidden_size,
        "vocab_size": model.args.vocab_size,
    }


def digest(tokens: Sequence[int]) -> str:
    """The name of a prompt in a harvest."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int32).tobytes()).hexdigest()[:24]


def harvest_text(
    verifier: Any,
    encode: Encode,
    eos: Sequence[int],
    settings: dict[str, Any],
    prompts: Iterable[Messages],
    target: Path,
    options: TextOptions | None = None,
    *,
    answer: Answer | None = None,
    progress: bool = False,
) -> int:
    """Answer prompts into the harvest ``target``, going on with one that is there; how many did not fit the context.

    ``settings`` (fingerprint, dtype, hidden_size, vocab_size) tell which model it is of, ``answer`` how it decodes;
    without, ``verifier`` does. Raises CheckpointError if
    ``target`` is a harvest of another one, or was made with other options.
    """
    options = options or TextOptions()
    answer = answer or partial(greedy_batch, verifier)
    index = open_index(
        target,
        {
            **settings,
            "family": FAMILY,
            "eos": eos[0],
            "max_tokens": options.max_tokens,
            "batch": options.batch,
            "prompts_per_shard": options.prompts_per_shard,
        },
    )
    done = {entry["name"] for entry in index["files"]}
    encoded = {digest(tokens): tokens for tokens in map(encode, prompts)}
    rest = {name: tokens for name, tokens in encoded.items() if name not in done}
    fitting = {name: tokens for name, tokens in rest.items() if len(tokens) < verifier.max_length}
    names, limits = list(fitting), Limits(frozenset(eos), options.max_tokens)
    with tqdm(total=len(names), unit="prompt", desc="harvested", disable=None if progress else True) as bar:
        for first in range(0, len(names), options.prompts_per_shard):
            members = {name: fitting[name] for name in names[first : first + options.prompts_per_shard]}
            _write_shard(answer, members, target, index, limits, options.batch)
            bar.update(len(members))
    return len(rest) - len(fitting)


def _write_shard(
    answer: Answer,
    prompts: dict[str, list[int]],
    folder: Path,
    index: dict[str, Any],
    limits: Limits,
    batch: int,
) -> None:
    """Answer the prompts of one shard and put it, whole, into the index."""
    name = f"shard-{index['shards']:05}"
    writer = ShardWriter(folder, name, header_bytes=_HEADER_BYTES, shard_bytes=1 << 62)
    entries: list[dict[str, Any]] = []
    for members in _groups(prompts, batch):
        answers = answer([prompts[member] for member in members], limits)
        for member, (tokens, memory, hidden) in zip(members, answers, strict=True):
            number = len(index["files"]) + len(entries)
            writer.add(f"{number}.prompt", mx.array(prompts[member], dtype=mx.int32))
            writer.add(f"{number}.memory", memory.astype(mx.float16))
            writer.add(f"{number}.tokens", mx.array(tokens, dtype=mx.int32))
            writer.add(f"{number}.hidden", hidden)
            entries.append({"name": member, "shard": f"{name}.safetensors", "number": number})
        mx.clear_cache()
    writer.close(index=False)
    commit(folder, index, entries)


def _groups(prompts: dict[str, list[int]], batch: int) -> Iterator[list[str]]:
    """The names of the prompts in batches of about equally long ones, few enough to be read in one pass."""
    group: list[str] = []
    for name in sorted(prompts, key=lambda name: len(prompts[name])):
        if group and (len(group) == batch or (len(group) + 1) * len(prompts[name]) > _ROWS):
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def greedy_batch(
    verifier: Any, prompts: Sequence[Sequence[int]], limits: Limits
) -> list[tuple[list[int], mx.array, mx.array]]:
    """Plain greedy decoding of B prompts at once.

    Per prompt of P tokens: the n decided tokens (an end token included), the states [P - 1, D] of its tokens but the
    last, and the states [n, D] that predicted the decided ones. Shorter prompts are padded in front; what is there is
    masked, so an answer is that of its prompt alone, but for the last bits of the sums. A sequence that is done leaves
    the batch when a fourth of it can leave.
    """
    width = max(map(len, prompts))
    pads = np.array([width - len(prompt) for prompt in prompts])
    padded = mx.array([[0] * int(pad) + list(prompt) for pad, prompt in zip(pads, prompts, strict=True)])
    cache = KVCache(verifier.num_layers)
    hidden = _pass(verifier, padded, pads, cache)
    before = [mx.contiguous(rows[int(pad) : -1]) for pad, rows in zip(pads, hidden, strict=True)]
    mx.eval(before)
    hidden = hidden[:, -1]
    answers: list[list[int]] = [[] for _ in prompts]
    states: list[list[mx.array]] = [[] for _ in prompts]
    live = list(range(len(prompts)))
    room = min(limits.max_tokens, verifier.max_length - width)
    for count in range(1, room + 1):
        picks, _ = pick((), (), verifier.logits(hidden))
        for at, (row, token) in enumerate(zip(live, picks, strict=True)):
            if not _ended(answers[row], limits):
                answers[row].append(token)
                states[row].append(hidden[at])
        going = [at for at, row in enumerate(live) if not _ended(answers[row], limits)]
        if not going or count == room:
            break
        if 4 * len(going) <= 3 * len(live):
            cache.select(going)
            live, picks, pads = [live[at] for at in going], [picks[at] for at in going], pads[going]
        hidden = _pass(verifier, mx.array(picks)[:, None], pads, cache)[:, 0]
        mx.eval(hidden)
    return [
        (tokens, prompt, mx.stack(rows)) for tokens, prompt, rows in zip(answers, before, states, strict=True)
    ]


def _ended(tokens: list[int], limits: Limits) -> bool:
    return bool(tokens) and tokens[-1] in limits.eos


def _pass(verifier: Any, tokens: mx.array, pads: np.ndarray, cache: KVCache) -> mx.array:
    """One pass over tokens [B, W] of sequences that begin with ``pads`` [B] rows of padding: hidden [B, W, D]."""
    start, width = cache.length, tokens.shape[1]
    rows = mx.arange(start, start + width)
    padding = mx.array(pads)[:, None]
    columns = mx.arange(start + width)
    seen = (columns[None] <= rows[:, None])[None] & (columns >= padding)[:, None]
    own = (columns[None] == rows[:, None])[
        None
    ]  # a row of padding sees itself, or its softmax would be empty
    return verifier.step(tokens, mx.maximum(rows - padding, 0), (seen | own)[:, None], cache)
