"""Public-domain and made-up English text to speak, without what test clips say. Used by make_speech.py."""

import json
import random
import re
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_medusa.demo import cache_dir

# What the clips of fetch_speech.py say.
KEEP_OUT = (
    "ten of clubs",
    "four queen of clubs",
    "seven of clubs",
    "five five",
    "eight of spades four of clubs seven of hearts",
    "and mister john dashwood had then leisure to consider how much there might be prudently "
    "in his power to do for them",
    "he was not an ill disposed young man",
    "unless to be rather cold hearted and rather selfish is to be ill disposed",
    "had he married a more a amiable woman he might have been made still more respectable than he was",
    "had he married a more amiable woman he might have been made still more respectable than he was",
    "he might even have been made amiable himself",
    "go forward ten meters",
    "go somewhere and do something",
    "two nine three four zero",
    "two nine three four oh",
    "thirty three four six ninety two",
    "feels like these days go on forever",
    "yeah we had a long discussion about how easy we want to make it for people to bleep things out",
    "morgan wants to make it hard did it i didn't even check yesterday whether it was moving",
    "one two three four five six seven eight nine ten",
    "hello world",
    "the quick brown fox jumps over the lazy dog",
)
TEXT_FOLDER = "texts-1"
NOVELS = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
BIBLE = "usr/share/sword/modules/texts/ztext/engWEB2015eb"
FORTUNES = (
    "art definitions education food fortunes humorists kids law literature love medicine miscellaneous people"
)
FORTUNES += " pets platitudes politics riddles science sports wisdom work"
ABBREVIATION = re.compile(r"\b(Mr|Mrs|Ms|Dr|St|Esq|Messrs|Capt|Col|Gen|Rev|Hon|Jr|vs|etc|No|[A-Z])\.")


class SpeechError(Exception):
    """The speech cannot be made; the message is one line."""


def words(text: str) -> list[str]:
    """The text as lower-case words without signs."""
    return re.findall(r"[a-z0-9]+", text.lower().replace("'", "").replace("’", ""))


class KeepOut:
    """Knows sequences of words that must not be spoken."""

    def __init__(self, texts: Iterable[str], size: int = 5) -> None:
        self.grams: dict[int, set[tuple[str, ...]]] = {}
        for text in texts:
            self.add(text, size)

    def add(self, text: str, size: int) -> None:
        """Keep out each `size` words in a row of this text (all of it if it is shorter)."""
        spoken = words(text)
        if len(spoken) > 1:
            self.grams.setdefault(min(size, len(spoken)), set()).update(
                _grams(spoken, min(size, len(spoken)))
            )

    def blocks(self, text: str) -> bool:
        """Whether the text has one of them."""
        spoken = words(text)
        return any(not known.isdisjoint(_grams(spoken, size)) for size, known in self.grams.items())


def _grams(spoken: list[str], size: int) -> Iterator[tuple[str, ...]]:
    return (tuple(spoken[at : at + size]) for at in range(len(spoken) - size + 1))


def split_sentences(paragraph: str, longest: int = 260) -> list[str]:
    """Sentences of a paragraph; a very long one is cut at a semicolon, colon or comma."""
    paragraph = re.sub(r"[_*\[\]|]", "", " ".join(paragraph.split()))
    paragraph = re.sub(r"\s*(?:--+|—)\s*", ", ", ABBREVIATION.sub(lambda found: found[1] + "\0", paragraph))
    paragraph = re.sub(r"([,;:.!?])\s*,(?=\s)|\s+,", lambda found: found[1] or ",", paragraph)
    found: list[str] = []
    for sentence in re.split(r"(?<=[.!?])[\"'”’)]*\s+", paragraph):
        rest = re.sub(r"[“”\"()]", "", sentence).replace("\0", ".").strip(" ,;'")
        while len(rest) > longest:
            cut = max(rest.rfind(sign, 60, longest) for sign in ("; ", ": ", ", "))
            cut = cut if cut > 0 else rest.find(" ", longest - 20)
            if cut < 0:
                break
            found.append(rest[: cut + 1].strip())
            rest = rest[cut + 1 :].strip()
        found.append(rest)
    return [each for each in found if len(each) <= longest + 40 and len(words(each)) > 2 and each.isascii()]


def package_file(package: str, path: str) -> Path:
    """A file of a Debian package: where it is installed, else in the cache, where it is unpacked once."""
    if (installed := Path("/", path)).exists():
        return installed
    folder = cache_dir() / TEXT_FOLDER / package
    if not (folder / path).exists():
        try:
            with tempfile.TemporaryDirectory() as staging:
                run(["apt-get", "download", "-q", package], cwd=staging)
                folder.mkdir(parents=True, exist_ok=True)
                run(["dpkg-deb", "-x", *map(str, Path(staging).glob("*.deb")), str(folder)])
        except OSError as error:
            raise SpeechError(f"the texts of {package} cannot be unpacked into {folder}: {error}") from error
    if not (folder / path).exists():
        raise SpeechError(f"the package {package} has no {path}")
    return folder / path


def run(command: list[str], **options: Any) -> None:
    """Run a program quietly; SpeechError with its last words if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, **options)
    except FileNotFoundError as error:
        raise SpeechError(f"{command[0]} is not installed, and it is needed here") from error
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise SpeechError(f"{' '.join(command[:3])} failed: {said[-1]}")


@dataclass(frozen=True)
class Source:
    """Texts of one kind: sentences in their order, and what may be done with them."""

    name: str
    licence: str
    weight: float
    sentences: list[str]


def novels() -> tuple[dict[str, str], str]:
    """(title -> text of each Austen novel but one, the text of that one: Sense and Sensibility)."""
    data = package_file("r-cran-janeaustenr", NOVELS).read_bytes()
    books = {}
    while (
        len(data) > 4
    ):  # R's lazy-load file: length, zlib stream, again and again; in each, one vector of lines
        stream = zlib.decompressobj()
        lines = _r_strings(stream.decompress(data[4:]))
        data = stream.unused_data
        books[lines[0].strip().upper()] = "\n".join(lines)
    kept_out = books.pop("SENSE AND SENSIBILITY", None)
    if kept_out is None or len(books) != 5:
        raise SpeechError(f"r-cran-janeaustenr has other books than the six expected: {', '.join(books)}")
    return books, kept_out


def _r_strings(data: bytes) -> list[str]:
    """The strings of a serialized R character vector (XDR, version 3)."""
    at = data.index(b"\0\0\0\x10") + 4
    count, at, strings = struct.unpack_from(">I", data, at)[0], at + 4, []
    for _ in range(count):
        size = struct.unpack_from(">i", data, at + 4)[0]
        strings.append(data[at + 8 : at + 8 + max(size, 0)].decode("utf-8"))
        at += 8 + max(size, 0)
    return strings


def bible() -> str:
    """The World English Bible as plain text."""
    parts = []
    for half in ("ot", "nt"):
        places = package_file("sword-text-web", f"{BIBLE}/{half}.bzs").read_bytes()
        data = package_file("sword-text-web", f"{BIBLE}/{half}.bzz").read_bytes()
        for start, size, _ in struct.iter_unpack("<III", places):
            parts.append(zlib.decompress(data[start : start + size]).decode("utf-8", "replace"))
    text = re.sub(r"<(note|title)\b.*?</\1>", " ", "\n".join(parts), flags=re.DOTALL)
    text = re.sub(r"<(?:chapter|div|lg)[^>]*>", "\n\n", text)
    return re.sub(r"[ \t]+", " ", re.sub(r"<[^>]*>", "", text)).translate(str.maketrans("‘’", "''"))


def usage_examples() -> list[str]:
    """WordNet's quoted usage examples as sentences."""
    found = []
    for kind in ("verb", "adj", "adv", "noun"):
        text = package_file("wordnet-base", f"usr/share/wordnet/data.{kind}").read_text("utf-8")
        found += re.findall(r'; "([^"]{20,200})"', text)
    return [
        text[0].upper() + text[1:] + ("" if text[-1] in ".?!" else ".")
        for text in found
        if len(text.split()) > 3
    ]


def fortunes() -> list[str]:
    """Short prose of the fortunes package, without the names of those who said it."""
    found = []
    for name in FORTUNES.split():
        text = package_file("fortunes", f"usr/share/games/fortunes/{name}").read_text("utf-8", "replace")
        for saying in text.split("\n%\n"):
            prose = saying.split("\n\t\t--")[0].strip()
            if 40 < len(prose) < 700 and not re.search(r"\n\s|[<>{}=\\/@#^~:]|\t|\.\.", prose):
                found += split_sentences(prose)
    return found


def made_texts(rng: random.Random, count: int) -> list[str]:
    """Sentences from templates: numbers, dates, spelled words, cards, commands, questions."""
    makers = [_card, _card, _command, _question, _date, _digits, _spelled, _amount, _clock]
    return [text[0].upper() + text[1:] for text in (rng.choice(makers)(rng) for _ in range(count))]


ONES = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
]
ONES += ["seventeen", "eighteen", "nineteen"]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
ORDINALS = [
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
]
MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]
DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
NAMES = [
    "Anna",
    "Thomas",
    "Margaret",
    "Henry",
    "Sophie",
    "Daniel",
    "Grace",
    "Peter",
    "Rachel",
    "Oliver",
    "Julia",
    "Martin",
    "Helen",
    "Samuel",
    "Clara",
]
PLACES = [
    "London",
    "Boston",
    "Chicago",
    "Edinburgh",
    "Paris",
    "Denver",
    "Dublin",
    "Toronto",
    "Sydney",
    "Oxford",
    "Portland",
    "Bristol",
]
THINGS = [
    "lamp",
    "door",
    "letter",
    "garden",
    "ticket",
    "window",
    "kettle",
    "report",
    "camera",
    "bicycle",
    "umbrella",
    "piano",
    "folder",
    "radio",
]
RANKS = [
    "ace",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "jack",
    "queen",
    "king",
]
SUITS = ["clubs", "diamonds", "hearts", "spades"]
WAYS = ["back", "left", "right", "straight on"]
TURNS = ["on", "off", "around"]


def number(value: int) -> str:
    """An integer below a million in words."""
    if value >= 1000:
        rest = value % 1000
        return f"{number(value // 1000)} thousand" + (
            f" {'and ' if rest < 100 else ''}{number(rest)}" if rest else ""
        )
    if value >= 100:
        return f"{ONES[value // 100]} hundred" + (f" and {number(value % 100)}" if value % 100 else "")
    if value >= 20:
        return TENS[value // 10 - 2] + (f" {ONES[value % 10]}" if value % 10 else "")
    return ONES[value]


def _card(rng: random.Random) -> str:
    cards = [f"{rng.choice(RANKS)} of {rng.choice(SUITS)}" for _ in range(rng.randint(1, 5))]
    return rng.choice([", ".join(cards), " ".join(cards), f"I have the {' and the '.join(cards[:3])}"]) + "."


def _command(rng: random.Random) -> str:
    thing, place = rng.choice(THINGS), rng.choice(["left", "right", "top", "back", "front"])
    return rng.choice(
        [
            f"Turn the {thing} {rng.choice(TURNS)} in {number(rng.randint(2, 60))} minutes.",
            f"Go {rng.choice(WAYS)} {number(rng.randint(2, 300))} feet and stop.",
            f"Please move the {thing} to the {place} of the room.",
            f"Call {rng.choice(NAMES)} {rng.choice(['at home', 'on the mobile', 'at work'])}.",
            f"Set an alarm for {_time(rng)} on {rng.choice(DAYS)}.",
            f"Remind me to bring the {thing} when I see {rng.choice(NAMES)}.",
            f"Play the next song, and set the volume to {number(rng.randint(1, 100))}.",
            f"Add {number(rng.randint(2, 30))} {thing}s to the list, then read it back to me.",
        ]
    )


def _question(rng: random.Random) -> str:
    name, place, thing = rng.choice(NAMES), rng.choice(PLACES), rng.choice(THINGS)
    return rng.choice(
        [
            f"How far is it from {place} to {rng.choice(PLACES)}?",
            f"What will the weather be like in {place} on {rng.choice(DAYS)}?",
            f"Did {name} find the {thing} that was left in {place}?",
            f"When does the train to {place} leave, and from which platform?",
            f"Could you tell {name} that the {thing} is ready?",
            f"What is {number(rng.randint(2, 99))} times {number(rng.randint(2, 99))}?",
            f"Who was it that bought the {thing} in {rng.choice(MONTHS)}?",
            f"Why did you not ask {name} about the {thing}?",
        ]
    )


def _date(rng: random.Random) -> str:
    date = f"the {rng.choice(ORDINALS)} of {rng.choice(MONTHS)}"
    year = f"{rng.choice(['eighteen', 'nineteen', 'twenty'])} {number(rng.randint(11, 99))}"
    return rng.choice(
        [
            f"{rng.choice(NAMES)} was born on {date}, {year}.",
            f"The meeting is on {rng.choice(DAYS)}, {date}, at {_time(rng)}.",
            f"On {date}, {year}, the family moved to {rng.choice(PLACES)}.",
        ]
    )


def _time(rng: random.Random) -> str:
    minute = rng.choice(["o'clock", "fifteen", "thirty", "forty five", "twenty", "ten", "oh five"])
    return f"{number(rng.randint(1, 12))} {minute}" + rng.choice(["", " in the morning", " in the afternoon"])


def _clock(rng: random.Random) -> str:
    return f"The {rng.choice(['train', 'bus', 'boat', 'lesson'])} is at {_time(rng)}, not at {_time(rng)}."


def _digits(rng: random.Random) -> str:
    digits = [rng.choice([*ONES[:10], "oh"]) for _ in range(rng.randint(3, 10))]
    lead = rng.choice(["", "", "my number is ", "the code is ", "flight ", "room "])
    return lead + rng.choice([" ", ", "]).join(digits) + "."


def _spelled(rng: random.Random) -> str:
    word = rng.choice([*NAMES, *PLACES, *THINGS])
    return f"{word} is spelled {', '.join(word.upper())}."


def _amount(rng: random.Random) -> str:
    amount = number(rng.choice([rng.randint(2, 99), rng.randint(100, 999), rng.randint(1000, 99_999)]))
    unit = rng.choice(
        [
            "dollars",
            "pounds",
            "miles",
            "metres",
            "people",
            "pages",
            "degrees",
            "kilometres",
            "percent",
            "tons",
        ]
    )
    return (
        rng.choice(["It came to", "We counted", "That is about", "They asked for", "Exactly"])
        + f" {amount} {unit}."
    )


def keep_out_texts(folders: Iterable[Path]) -> list[str]:
    """The texts of KEEP_OUT and those in the folders: transcripts.json files and .txt files."""
    texts = list(KEEP_OUT)
    for folder in folders:
        if not folder.is_dir():
            raise SpeechError(f"{folder} is no folder: --keep-out takes a folder of transcripts")
        for path in sorted(folder.rglob("transcripts.json")):
            texts += json.loads(path.read_text("utf-8")).values()
        texts += [path.read_text("utf-8", "replace") for path in sorted(folder.rglob("*.txt"))]
    return texts


def load_sources(seed: int, folders: Iterable[Path]) -> list[Source]:
    """All texts that may be spoken, by source."""
    books, other = novels()
    keep_out = KeepOut(keep_out_texts(folders))
    keep_out.add(other, 8)
    rng = random.Random(f"texts {seed}")
    shuffled = [usage_examples(), fortunes(), made_texts(rng, 8000)]
    for texts in shuffled:
        texts[:] = dict.fromkeys(texts)
        rng.shuffle(texts)
    prose = "Public domain; package r-cran-janeaustenr (MIT)"
    found = [
        Source(f"Jane Austen: {title.title()}", prose, 12, _sentences(text)) for title, text in books.items()
    ]
    found.append(Source("World English Bible", "Public domain", 8, _sentences(bible())))
    found.append(Source("WordNet 3.0 usage examples", "WordNet licence", 12, split_all(shuffled[0])))
    found.append(Source("fortunes", "fortune-mod (BSD), short quotations", 5, shuffled[1]))
    found.append(Source("made by templates", "None claimed", 15, shuffled[2]))
    return [
        Source(
            each.name,
            each.licence,
            each.weight,
            [text for text in each.sentences if not keep_out.blocks(text)],
        )
        for each in found
    ]


def _sentences(text: str) -> list[str]:
    text = re.sub(r"(?m)^ *(CHAPTER|Chapter|VOLUME|Volume)\b.*$", "", text)
    return split_all(re.split(r"\n\s*\n", text))


def split_all(paragraphs: Iterable[str]) -> list[str]:
    """The sentences of paragraphs in a row."""
    return [sentence for paragraph in paragraphs for sentence in split_sentences(paragraph)]
