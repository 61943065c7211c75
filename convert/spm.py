"""tokenizer.model: a SentencePiece model, a protobuf of which the few fields that a Llama tokenizer has are read.

Fields, by sentencepiece_model.proto: 1 a piece (1 its text, 2 its score, 3 its kind), 2 the trainer's settings (3 the
type of model, 2 is BPE), 3 the normalizer's (2 its rules, 3 a space goes first, 4 double spaces go, 5 spaces become ▁).
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from convert.vocabulary import CONTROL, NORMAL, scored
from mlx_medusa.errors import CheckpointError

_BPE = 2


def tokenizer_json(path: Path, bos: bool = True) -> dict[str, Any]:
    """The tokenizer of a tokenizer.model; with ``bos``, every text begins with its <s>.

    Raises CheckpointError if the file is broken, or of a kind that Llama does not have.
    """
    try:
        data = path.read_bytes()
        pieces, trainer, normalizer = _read(data)
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except (ValueError, IndexError, struct.error, TypeError) as error:
        raise CheckpointError(
            f"{path}: not a SentencePiece model, or cut short; fetch the file again"
        ) from error
    if trainer.get(3, 1) != _BPE or normalizer.get(2) or normalizer.get(4, 1) or not normalizer.get(5, 1):
        raise CheckpointError(
            f"{path}: not Llama's kind of SentencePiece model; make tokenizer.json with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    texts, scores, kinds = zip(*pieces, strict=True)
    begin = next((i for i, (text, _, kind) in enumerate(pieces) if (text, kind) == ("<s>", CONTROL)), None)
    return scored(texts, kinds, scores, bool(normalizer.get(3, 1)), begin if bos else None, path)


def _read(data: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """(pieces, trainer's settings, normalizer's settings)"""
    pieces, settings = [], {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            (score,) = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))
            pieces.append((piece[1].decode("utf-8"), score, piece.get(3, NORMAL)))
        elif number in (2, 3):
            settings[number] = dict(_fields(value))
    if not pieces:
        raise ValueError
    return pieces, settings.get(2, {}), settings.get(3, {})


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message: an int, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, len(data))
        if size > len(data) - at:
            raise ValueError
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while data[at] & 128:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
    return value | data[at] << shift, at + 1
