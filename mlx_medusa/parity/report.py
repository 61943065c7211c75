"""Results of checks as a file, and records and results as a Markdown table."""

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlx_medusa.errors import OptionError
from mlx_medusa.parity import records
from mlx_medusa.parity.check import Result, Total

FORMAT = "mlx-medusa parity check 1"


@dataclass(frozen=True)
class Run:
    """What was held against a record."""

    record: str
    head: records.Head
    device: str
    dtype: str
    versions: dict[str, str]
    widths: list[int]
    margin: float
    drift: float | None


def lines(run: Run, results: Iterable[Result]) -> Iterator[str]:
    """The lines of a results file: what was run, then a result each."""
    yield json.dumps({"format": FORMAT, **asdict(run)}) + "\n"
    for result in results:
        content = {name: value for name, value in asdict(result).items() if value not in (None, "")}
        yield json.dumps(content, ensure_ascii=False) + "\n"


def table(paths: Iterable[str]) -> str:
    """A Markdown table of records and one of results, of each those that there are."""
    recorded, checked = [], []
    for path in paths:
        try:
            with Path(path).open(encoding="utf-8") as file:
                head = json.loads(file.readline())
                rows = [json.loads(line) for line in file] if head.get("format") == FORMAT else []
        except OSError as error:
            raise OptionError(f"{path}: {error.strerror or error}: check the path") from error
        except (ValueError, AttributeError) as error:
            raise OptionError(f"{path}: neither a parity record nor the results of a check") from error
        if rows:
            checked.append(_checked_row(head, rows))
        else:
            recorded.append(_recorded_row(records.read(path)))
    parts = []
    if recorded:
        parts.append(
            _markdown(["model", "weights", "reference", "inputs", "tokens", "smallest margin"], recorded)
        )
    if checked:
        columns = [
            "model",
            "weights",
            "reference",
            "MLX",
            "widths",
            "equal",
            "near-ties",
            "failed",
            "numbers within",
        ]
        parts.append(_markdown(columns, checked))
    return "\n".join(parts)


def _recorded_row(record: records.Record) -> list[str]:
    margins = [margin for entry in record.entries for margin in entry.margins]
    tokens = sum(len(entry.tokens) for entry in record.entries)
    smallest = min(margins, default=math.inf)
    return [*_model(asdict(record.head)), str(len(record.entries)), str(tokens), f"{smallest:.4g}"]


def _checked_row(head: dict[str, Any], rows: list[dict[str, Any]]) -> list[str]:
    total = Total([Result(**row) for row in rows])
    ties = [
        result.margin
        for result in total.results
        if result.verdict == "near-tie" and result.margin is not None
    ]
    return [
        *_model(head["head"]),
        f"{head['device']}, {head['dtype']}, mlx {head['versions']['mlx']}",
        ", ".join(map(str, head["widths"])),
        f"{total.count('equal')} of {len(rows)}",
        f"{len(ties)}" + (f" (up to {max(ties):.2g})" if ties else ""),
        str(total.failed),
        f"{total.drift:.1e}",
    ]


def _model(head: dict[str, Any]) -> list[str]:
    """Model, weights, reference."""
    versions = head["versions"]
    heads = f", heads at width {head['width']}" if head["width"] > 1 else ""
    reference = f"{head['device']}, {head['dtype']}, torch {versions['torch']}{heads}"
    return [head["model"], quantization_name(head["quantization"]), reference]


def quantization_name(settings: dict[str, Any] | None) -> str:
    """ "8-bit affine, groups of 64", or "as converted"."""
    if not settings:
        return "as converted"
    return f"{settings['bits']}-bit {settings.get('mode', 'affine')}, groups of {settings['group_size']}"


def _markdown(columns: list[str], rows: list[list[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join(head + [f"| {' | '.join(row)} |" for row in rows]) + "\n"
