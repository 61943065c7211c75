r"""Record what transformers' greedy decoding writes for the clips and prompts of the real-model tests.

    python tests/record_golden.py tiny.en FOLDER --heads recurrent > tests/golden/whisper-tiny.en.jsonl
    python tests/record_golden.py tiny.en FOLDER --heads medusa --only cards/002.wav "very short" librivox/... \
        > tests/golden/whisper-tiny.en-plain-heads.jsonl
    python tests/record_golden.py tiny.en FOLDER_OF_8_BITS > tests/golden/whisper-tiny.en-8bit.jsonl
    python tests/record_golden.py base FOLDER > tests/golden/whisper-base.jsonl
    python tests/record_golden.py meralion2 SMALL/meralion2 > tests/golden/small-meralion2.jsonl
    python tests/record_golden.py smollm2 FOLDER > tests/golden/smollm2-135m.jsonl

FOLDER is what `convert` made, SMALL what examples/make_small_models.py makes; the reference runs all in float32. No MLX
is imported. PYTHONPATH must name the root of the tree and examples/.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

from clips import english, nine_languages, sounds
from fetch_speech import fetch_languages, fetch_speech
from record_smollm2 import PROMPTS

from mlx_medusa import reference
from mlx_medusa.demo import SPEECH
from mlx_medusa.parity.inputs import Input
from mlx_medusa.parity.record import head_of, record
from mlx_medusa.parity.records import Asked, Entry, Record
from mlx_medusa.reference.folder import Folder, heads_fingerprint
from mlx_medusa.speech.tasks import HEADS_QUERY

MAX_TOKENS, SMALL_TOKENS, TEXT_TOKENS = 224, 64, 32
NAMES = {
    "tiny.en": "whisper-tiny.en",
    "base": "whisper-base",
    "meralion2": "small-meralion2",
    "smollm2": "smollm2-135m",
}


def of_tiny_en(oracle, only, width) -> Iterator[Entry]:
    """All English clips, and the LibriVox ones with timestamps too."""
    plain, stamped = Asked(max_tokens=MAX_TOKENS), Asked(max_tokens=MAX_TOKENS, timestamps=True)
    for name, samples in english(fetch_speech(), fetch_languages()):
        if not only or name in only:
            asked = [plain, stamped] if name.startswith("librivox") else [plain]
            yield from record(oracle, [(Input(name, samples), asked)], width=width)


def of_base(oracle, only, width) -> Iterator[Entry]:
    """Nine languages: detected, given where that is another, and translated."""
    for name, samples in nine_languages(fetch_languages()):
        if only and name not in only:
            continue
        given, clip = name.split("/")[0], Input(name, samples)
        asked = [Asked(max_tokens=MAX_TOKENS), Asked(given, "translate", max_tokens=MAX_TOKENS)]
        entries = list(record(oracle, [(clip, asked)], width=width))
        yield from entries
        if entries[0].detected[0] != given:
            yield from record(oracle, [(clip, [Asked(given, max_tokens=MAX_TOKENS)])], width=width)


def of_meralion2(oracle, only, width) -> Iterator[Entry]:
    """The sounds that come with the small models."""
    asked = [Asked(instruction=HEADS_QUERY, max_tokens=SMALL_TOKENS)]
    given = (clip for clip in sounds() if not only or clip.name in only)
    yield from record(oracle, ((clip, asked) for clip in given), width=width)


def of_smollm2(oracle, only, width) -> Iterator[Entry]:
    """Questions of a chat."""
    asked = [Asked(max_tokens=TEXT_TOKENS, chat=True)]
    given = (Input(prompt, prompt) for prompt in PROMPTS if not only or prompt in only)
    yield from record(oracle, ((prompt, asked) for prompt in given), width=width)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    jobs = {"tiny.en": of_tiny_en, "base": of_base, "meralion2": of_meralion2, "smollm2": of_smollm2}
    parser.add_argument("model", choices=jobs)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--heads", choices=("recurrent", "medusa"), help="shipped heads, whose passes to note"
    )
    parser.add_argument("--only", nargs="*", help="names of clips (default: all)")
    args = parser.parse_args()
    heads = SPEECH.shipped / args.heads if args.heads else None
    oracle = reference.load(args.folder, heads=heads, device="cpu")
    width = 1 + oracle.drafter.max_drafts if oracle.drafter else 1
    entries = []
    for entry in jobs[args.model](oracle, args.only, width):
        print(entry.name, file=sys.stderr)
        entries.append(entry)
    head = head_of(
        oracle, Folder.find(args.folder), name=NAMES[args.model], width=width,
        heads=heads_fingerprint(heads) if heads else None,
    )  # fmt: skip
    sys.stdout.writelines(Record(head, entries).lines())
    assert not [name for name in sys.modules if name.startswith("mlx.")]


if __name__ == "__main__":
    main()
