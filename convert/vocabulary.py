"""tokenizer.json out of a vocabulary as llama.cpp and SentencePiece store it: pieces with a kind each, and merges or
scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_medusa.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)  # kinds of piece, in both formats
SPACE = "▁"  # stands for a space in SentencePiece's pieces

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True)
class Split:
    """How a byte-level vocabulary cuts text before it merges."""

    pattern: str
    digits: bool = False  # each digit is cut off first
    whole: bool = False  # a piece that is in the vocabulary is taken without merging


_DIGITS = Split(_GPT2, digits=True)
# By tokenizer.ggml.pre; the patterns are those of the models' own tokenizer.json.
SPLITS = {
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2"), Split(_GPT2)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS
    ),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), Split(_LLAMA3, whole=True)),
    "tekken": Split(_TEKKEN, whole=True),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), Split(_QWEN2)),
}


def byte_level(
    pieces: Sequence[str],
    kinds: Sequence[int],
    merges: Sequence[str],
    split: Split,
    bos: int | None,
    path: Path,
) -> dict[str, Any]:
    """GPT-2's kind of vocabulary: bytes as printable characters, ranked merges. ``bos`` begins every text, if given.

    Raises CheckpointError if a piece comes twice.
    """
    cut: dict[str, Any] = {"type": "Split", "pattern": {"Regex": split.pattern}, "behavior": "Isolated"}
    cuts = [{**cut, "invert": False}, _byte_level(False)]
    if split.digits:
        cuts.insert(0, {"type": "Digits", "individual_digits": True})
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": split.whole,
        "vocab": _numbered(pieces, path),
        "merges": list(merges),
    }
    return _tokenizer(
        pieces,
        kinds,
        bos,
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": cuts},
        decoder=_byte_level(True),
        model=model,
    )


def _byte_level(regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": regex}


def scored(
    pieces: Sequence[str],
    kinds: Sequence[int],
    scores: Sequence[float],
    prefix: bool,
    bos: int | None,
    path: Path,
) -> dict[str, Any]:
    """SentencePiece's BPE: of all neighbours that make a piece, those of the highest score are joined first.

    ``prefix``: a text, and what follows a control token, begins with a space, as in Llama's first tokenizer.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    back = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    before = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = next((piece for piece, kind in zip(pieces, kinds, strict=True) if kind == UNKNOWN), None)
    return _tokenizer(
        pieces,
        kinds,
        bos,
        normalizer={"type": "Sequence", "normalizers": [*before, replace]},
        pre_tokenizer=None,
        decoder={
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        model={
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "fuse_unk": True,
            "byte_fallback": BYTE in kinds,
            "ignore_merges": False,
            "vocab": _numbered(pieces, path),
            "merges": _merges(pieces, kinds, scores),
        },
    )


def _merges(pieces: Sequence[str], kinds: Sequence[int], scores: Sequence[float]) -> list[str]:
    """Every way in which two pieces make a third, best first; of equal ones that with the longest left part."""
    normal = {p: s for p, kind, s in zip(pieces, kinds, scores, strict=True) if kind == NORMAL}
    ways = [
        (-score, -cut, piece)
        for piece, score in normal.items()
        for cut in range(1, len(piece))
        if piece[:cut] in normal and piece[cut:] in normal
    ]
    return [f"{piece[:-cut]} {piece[-cut:]}" for _, cut, piece in sorted(ways)]


def _numbered(pieces: Sequence[str], path: Path) -> dict[str, int]:
    numbers = {piece: number for number, piece in enumerate(pieces)}
    if len(numbers) != len(pieces):
        twice = next(piece for number, piece in enumerate(pieces) if numbers[piece] != number)
        raise CheckpointError(f"{path}: token {twice!r} is in its vocabulary twice; fetch the file again")
    return numbers


def _tokenizer(
    pieces: Sequence[str], kinds: Sequence[int], bos: int | None, **parts: dict[str, Any] | None
) -> dict[str, Any]:
    added = [
        added_token(piece, number, special=kind != USER)
        for number, (piece, kind) in enumerate(zip(pieces, kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        **parts,
        "post_processor": None if bos is None else begin_with(pieces[bos], bos),
    }


def added_token(text: str, number: int, *, special: bool) -> dict[str, Any]:
    """An entry of a tokenizer.json's ``added_tokens``: found in a text before it is cut."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": number, "content": text, **flags, "special": special}


def begin_with(token: str, number: int) -> dict[str, Any]:
    """The post-processor that puts a token before every text."""
    first, second = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    begin = [{"SpecialToken": {"id": token, "type_id": i}} for i in (0, 1)]
    return {
        "type": "TemplateProcessing",
        "single": [begin[0], first],
        "pair": [begin[0], first, begin[1], second],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }
