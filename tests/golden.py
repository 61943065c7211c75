"""The golden records, and what the tests hold against them."""

from pathlib import Path

from mlx_medusa.demo import SPEECH
from mlx_medusa.parity import records
from mlx_medusa.parity.check import BOUNDS, Result
from mlx_medusa.reference.folder import Folder

HEADS = SPEECH.shipped  # a folder for each kind
FLOAT32 = BOUNDS["float32"]
QUANTIZED = {  # of the golden records -> how `convert` made the model
    "8bit": {"q_bits": 8},
    "6bit": {"q_bits": 6},
    "4bit": {"q_bits": 4},
    "mxfp4": {"q_mode": "mxfp4"},
}


def golden(name: str) -> records.Record:
    return records.read(Path(__file__).parent / "golden" / f"{name}.jsonl")


def is_recorded(record: records.Record, folder: Path) -> bool:
    """Whether the record is of these weights."""
    return Folder.find(folder).fingerprint() == record.head.fingerprint


def failures(results: list[Result]) -> list[str]:
    return [result.line() for result in results if result.verdict != "equal"]
