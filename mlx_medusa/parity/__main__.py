"""Command line: ``python -m mlx_medusa.parity record|check|report``."""

import argparse
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mlx_medusa.command import guarded
from mlx_medusa.errors import OptionError
from mlx_medusa.parity import records
from mlx_medusa.parity.inputs import Input, read_inputs
from mlx_medusa.speech import tasks
from mlx_medusa.transcribe import add, emit, find_model

DTYPES = ("float32", "float16", "bfloat16")
WIDEST = 64  # pass of a check without heads


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mlx_medusa.parity",
        description="Compare what MLX writes with what PyTorch writes, token by token: `record` lets transformers' own "
        "models decode (CUDA or CPU) and notes it in a file that travels; `check` holds MLX against that file, "
        "without PyTorch.",
        allow_abbrev=False,
    )
    commands = p.add_subparsers(dest="command", required=True, metavar="record|check|report")
    _record_options(commands.add_parser("record", allow_abbrev=False, help="let PyTorch decode, and note it"))
    _check_options(commands.add_parser("check", allow_abbrev=False, help="hold MLX against a record"))
    report = commands.add_parser("report", allow_abbrev=False, help="records and results as a Markdown table")
    report.add_argument("files", nargs="+", help="records, and results that `check --json` wrote")
    _debug(report)
    return p


def _record_options(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "inputs", nargs="+", help="audio files or folders; for text models .txt or .jsonl of prompts"
    )
    add(p, "--output", "-o", type=Path, help="the record (default: standard output)")
    _model_options(p, "use its own Medusa heads and note what each pass decides")
    p.add_argument("--width", type=int, help="rows of a verifier pass (default: 1, with heads all of them)")
    p.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: CUDA where there is one)"
    )
    p.add_argument("--dtype", choices=DTYPES, default="float32", help="precision (default: %(default)s)")
    p.add_argument("--language", help="Whisper: spoken language, a code (default: told by the model)")
    p.add_argument(
        "--task", choices=tasks.WHISPER, default="transcribe", help="Whisper (default: %(default)s)"
    )
    p.add_argument("--timestamps", action="store_true", help="Whisper: under the rules of timestamps")
    p.add_argument("--instruction", help=f"MERaLiON: what to do (default: {tasks.HEADS_QUERY!r})")
    p.add_argument("--chat", action="store_true", help="text: each prompt is the message of a chat")
    add(p, "--max-tokens", type=int, help="the most tokens of an input (default: the family's)")
    _debug(p)


def _check_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("record", help="what `record` wrote")
    p.add_argument(
        "inputs", nargs="*", help="the recorded audio, files or folders (default: where it was then)"
    )
    _model_options(p, "decode with its own Medusa heads")
    p.add_argument("--width", type=int, nargs="+", help="rows of a verifier pass (default: 1, with heads all of them); "
                   "without heads the recorded tokens are the guesses")  # fmt: skip
    p.add_argument(
        "--dtype", choices=DTYPES, help="precision of MLX (default: the model's; on a CPU float32)"
    )
    p.add_argument("--margin", type=float, help="the reference's margin up to which another token is a near-tie and "
                   "no failure (default: by precision, 0.001 for float32)")  # fmt: skip
    p.add_argument("--drift", type=float, help="how far margins and log probabilities may lie from the record's "
                   "(default: 0.002 for float32, half precisions: not held against it)")  # fmt: skip
    add(p, "--any-weights", action="store_true", help="check a model whose weights are not those recorded")
    p.add_argument("--json", type=Path, help="write the results there, for `report`")
    p.add_argument("--quiet", action="store_true", help="print only what is not equal, and the total")
    _debug(p)


def _model_options(p: argparse.ArgumentParser, what: str) -> None:
    p.add_argument("--model", help="folder made by convert (default: ./mlx_model, else the demo model)")
    p.add_argument("--heads", help="heads to use: a folder with, or a, medusa.safetensors")
    p.add_argument("--medusa", action="store_true", help=what)


def _debug(p: argparse.ArgumentParser) -> None:
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    actions = {"record": run_record, "check": run_check, "report": run_report}
    return guarded("parity", lambda: actions[args.command](args), args.debug)


def run_record(args: argparse.Namespace) -> int:
    """PyTorch only: MLX is not imported."""
    from mlx_medusa import reference
    from mlx_medusa.parity.record import head_of, record
    from mlx_medusa.reference.folder import Folder

    folder = Folder.find(find_model(args.model))
    oracle = reference.load(
        folder.path, heads=args.heads, medusa=args.medusa, device=args.device, dtype=args.dtype
    )
    most = 1 + oracle.drafter.max_drafts if oracle.drafter else 1
    width = args.width or most
    if not 1 <= width <= most:
        raise OptionError(
            f"--width {width}: must be 1 to {most}" + ("" if most > 1 else "; for more, use --medusa")
        )
    asked = _asked(args, folder.config["model_type"])
    given = _with_progress(read_inputs(args.inputs, folder.config["model_type"]))
    entries = list(record(oracle, ((one, [asked]) for one in given), width=width))
    if not entries:
        raise OptionError(
            f"{', '.join(args.inputs)}: no input in there: name audio files, or files of prompts"
        )
    heads = _heads(args, folder.path) if width > 1 else None
    head = head_of(oracle, folder, name=_name(args.model, folder.path), width=width, heads=heads)
    emit("".join(records.Record(head, entries).lines()), args.output)
    return 0


def _asked(args: argparse.Namespace, family: str) -> records.Asked:
    instruction = args.instruction
    if family == "meralion2":
        instruction = instruction or tasks.HEADS_QUERY
    return records.Asked(args.language, args.task, args.timestamps, instruction, args.max_tokens, args.chat)


def _with_progress(inputs: Iterator[Input]) -> Iterator[Input]:
    yield from tqdm(inputs, unit="input", disable=None)


def _name(model: str | None, folder: Path) -> str:
    return model if model and "/" in model and not Path(model).exists() else folder.resolve().name


def _heads(args: argparse.Namespace, folder: Path) -> str:
    """The fingerprint of the heads in use."""
    from mlx_medusa.reference.folder import heads_fingerprint

    return heads_fingerprint(Path(args.heads) if args.heads else folder)


def run_check(args: argparse.Namespace) -> int:
    """MLX only: PyTorch is not imported."""
    record = records.read(args.record)
    total, run = _check(args, record)
    if args.json:
        from mlx_medusa.parity import report

        emit("".join(report.lines(run, total.results)), args.json)
    print(total.line())
    return 1 if total.failed or not total.results else 0


def _check(args: argparse.Namespace, record: records.Record) -> tuple[Any, Any]:
    """(the total, what was run); prints a line per result."""
    import mlx.core as mx

    from mlx_medusa import load
    from mlx_medusa.checkpoint import resolve
    from mlx_medusa.parity.candidate import candidate_of
    from mlx_medusa.parity.check import Total, bounds_for, check
    from mlx_medusa.parity.report import Run
    from mlx_medusa.reference.folder import Folder

    folder = Folder.find(resolve(find_model(args.model)))
    if not args.any_weights and (found := folder.fingerprint()) != record.head.fingerprint:
        raise OptionError(
            f"{args.record}: recorded with other weights ({record.head.fingerprint[:12]}...) than {folder.path} has "
            f"({found[:12]}...): name the recorded model with --model, or use --any-weights"
        )
    loaded = load(folder.path, heads=args.heads, medusa=args.medusa, dtype=args.dtype)
    candidate = candidate_of(loaded)
    most = 1 + candidate.drafter.max_drafts if candidate.drafter else WIDEST
    widths = args.width or [most if candidate.drafter else 1]
    if not all(1 <= width <= most for width in widths):
        raise OptionError(f"--width {' '.join(map(str, widths))}: must be 1 to {most}")
    config, on_cpu = folder.config, mx.default_device().type == mx.cpu
    dtype = args.dtype or (
        "float32" if on_cpu else config.get("dtype") or config.get("torch_dtype") or "float32"
    )
    bounds = bounds_for(record.head.dtype, dtype, args.margin, args.drift)
    run = Run(
        str(args.record),
        record.head,
        _device(mx),
        dtype,
        {"mlx": version("mlx")},
        widths,
        bounds.margin,
        bounds.drift,
    )
    total = Total()
    ours = _heads(args, folder.path) if candidate.drafter else None
    same_heads = record.head.width if ours and ours == record.head.heads else None
    for result in check(candidate, record.entries, _inputs(args, record), bounds, widths, same_heads):
        total.results.append(result)
        if result.verdict != "equal" or not args.quiet:
            print(result.line(), flush=True)
    return total, run


def _inputs(args: argparse.Namespace, record: records.Record) -> Iterator[Input]:
    """What was recorded, in the record itself or in files."""
    texts = {entry.name: entry.input for entry in record.entries if entry.input is not None}
    if texts:
        return (Input(name, text) for name, text in texts.items())
    paths = args.inputs or list(dict.fromkeys(entry.name for entry in record.entries))
    return read_inputs(paths, record.head.family)


def _device(mx: Any) -> str:
    if mx.default_device().type != mx.cpu:
        return str(mx.device_info().get("device_name", "Metal"))
    import platform

    return f"{platform.system()} {platform.machine()} CPU"


def run_report(args: argparse.Namespace) -> int:
    from mlx_medusa.parity.report import table

    sys.stdout.write(table(args.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
