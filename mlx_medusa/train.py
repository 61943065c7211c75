"""Command line: ``python -m mlx_medusa.train harvest|fit|evaluate``."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from mlx_medusa.command import chosen, guarded
from mlx_medusa.errors import MedusaError, OptionError, OutputError

# What fit does where it is not told: the defaults of FitOptions, and for text
TEXT_FIT = {"epochs": 4, "batch": 4, "imitation": 0.0, "soft": 1.0}
DTYPES = ("float16", "bfloat16", "float32")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mlx_medusa.train",
        description="Train Medusa heads for a frozen model: harvest what it writes, fit heads to that, evaluate them.",
        allow_abbrev=False,
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", help="model folder (default: ./mlx_model, else the demo model)")
    common.add_argument(
        "--dtype", choices=DTYPES, help="precision of the model (default: its own; on a CPU float32)"
    )
    common.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = p.add_subparsers(dest="command", required=True)
    add_harvest(
        commands.add_parser("harvest", parents=[common], help="decode audio and keep states and tokens")
    )
    add_fit(commands.add_parser("fit", parents=[common], help="train heads on a harvest"))
    add_evaluate(commands.add_parser("evaluate", parents=[common], help="measure heads on audio"))
    return p


def add_harvest(p: argparse.ArgumentParser) -> None:
    p.add_argument("audio", nargs="+", metavar="audio|prompts",
                   help="audio files, folders, or JSON-lines manifests with 'audio' paths; for a text model JSON-lines "
                   "files with a 'prompt' or 'messages' in each line")  # fmt: skip
    p.add_argument(
        "--output", "-o", type=Path, required=True, help="folder of the harvest; one that is there goes on"
    )
    p.add_argument("--prompts", choices=("text", "stamped", "both"), default="text",
                   help="decode without timestamps, with them, or both ways (default: %(default)s)")  # fmt: skip
    p.add_argument("--language", help="code of the language that a Whisper hears (default: en)")
    p.add_argument("--batch", type=int, help="windows (8) or prompts (48) decoded at once")
    p.add_argument("--files-per-shard", type=int, default=50, help="default: %(default)s")
    p.add_argument("--max-tokens", type=int, default=192, help="of an answer (default: %(default)s)")
    p.add_argument("--prompts-per-shard", type=int, default=96, help="default: %(default)s")
    p.add_argument("--torch", choices=DTYPES, help="answer prompts with PyTorch in this precision: on CUDA if there is "
                   "a GPU, and far faster than MLX on a CPU that has bfloat16")  # fmt: skip


def add_fit(p: argparse.ArgumentParser) -> None:
    p.add_argument("harvest", type=Path, help="folder that harvest wrote")
    p.add_argument(
        "--output", "-o", type=Path, required=True, help="folder of the heads; a run that is there goes on"
    )
    p.add_argument(
        "--kind", choices=("recurrent", "medusa"), default="recurrent", help="default: %(default)s"
    )
    p.add_argument("--num-heads", type=int, default=5, help="number of guesses (default: %(default)s)")
    p.add_argument("--num-layers", type=int, default=1, help="blocks of a head (default: %(default)s)")
    p.add_argument("--memory-pool", type=int, default=1, metavar="ROWS",
                   help="recurrent heads attend to averages of so many rows of the memory (default: 1)")  # fmt: skip
    p.add_argument(
        "--ffn-dim", type=int, metavar="N", help="units of recurrent heads for text (default: as in the base)"
    )
    p.add_argument("--match-length", type=int, default=4, metavar="N",
                   help="recurrent heads for text compare so many tokens to find where the same came before "
                   "(default: %(default)s; 0: they don't)")  # fmt: skip
    p.add_argument(
        "--draft-vocabulary", type=int, metavar="N", help="guess only among the N most frequent tokens"
    )
    p.add_argument("--loss-vocabulary", type=int, metavar="N",
                   help="train among the N most frequent of those, which is cheaper (default: among all)")  # fmt: skip
    p.add_argument("--draft-rank", type=int, default=0, metavar="R",
                   help="screen those tokens in R directions first, to read fewer bytes (default: no)")  # fmt: skip
    p.add_argument("--vocabulary-text", type=Path, nargs="+", metavar="FILE", default=[],
                   help="count the tokens of these texts too (plain, or JSON lines with a 'text')")  # fmt: skip
    p.add_argument("--epochs", type=int, help="default: 12, text 4")
    p.add_argument("--batch", type=int, help="windows or answers a step (default: 2, text 4)")
    p.add_argument("--learning-rate", type=float,
                   help="at its peak (default: 8e-4 recurrent, 1e-3 medusa, for text 5e-5 recurrent)")  # fmt: skip
    p.add_argument("--weight-decay", type=float, default=0.05, help="default: %(default)s")
    p.add_argument(
        "--loss-decay", type=float, default=0.8, help="weight of guess k is this to the power of k"
    )
    p.add_argument("--imitation", type=float, metavar="WEIGHT",
                   help="of the distance to the model's own later states (default: 5, text 0)")  # fmt: skip
    p.add_argument("--soft", type=float, metavar="PART",
                   help="learn the model's distribution so far, else its token (default: 0, text 1)")  # fmt: skip
    p.add_argument(
        "--held-out", type=float, default=0.1, help="part of the files to judge by (default: %(default)s)"
    )
    p.add_argument("--hours", type=float, help="train on so much of the audio (default: all)")
    p.add_argument("--start", metavar="HEADS", help="begin from these trained heads (default: from the base)")
    p.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    p.add_argument("--heads-dtype", choices=DTYPES, default="float16", help="default: %(default)s")
    p.add_argument("--heads-bits", type=int, help="quantize the written heads (default: no)")
    p.add_argument("--export", choices=("whisper", "meralion", "vicuna"), action="append", default=[],
                   help="also write plain heads in the layout of this system, in OUTPUT/export-NAME")  # fmt: skip
    p.add_argument("--data", help="for the card: where the audio or the prompts are from, and the licence")


def add_evaluate(p: argparse.ArgumentParser) -> None:
    p.add_argument("audio", nargs="+", metavar="audio|prompts",
                   help="audio files, folders or manifests, or JSON-lines files of prompts, that the heads were not "
                   "trained on")  # fmt: skip
    p.add_argument("--heads", help="file or folder of heads (default: the model's own)")
    p.add_argument("--width", type=int, help="rows of a verifier pass (default: all guesses)")
    p.add_argument("--language", help="code of the language that a Whisper hears (default: en)")
    p.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    p.add_argument(
        "--nodes",
        type=int,
        default=8,
        help="of the tree that answers are made with too (default: %(default)s)",
    )
    p.add_argument("--json", type=Path, help="also write the report there")


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return guarded(
        "train",
        lambda: {"harvest": run_harvest, "fit": run_fit, "evaluate": run_evaluate}[args.command](args),
        args.debug,
    )


def load(args: argparse.Namespace, **settings: Any) -> tuple[Any, Path]:
    """(transcriber, model folder)"""
    from mlx_medusa import checkpoint
    from mlx_medusa.loading import load_speech
    from mlx_medusa.speech.transcriber import Transcriber
    from mlx_medusa.transcribe import find_model

    folder = checkpoint.resolve(find_model(args.model))
    transcriber = load_speech(folder, dtype=args.dtype, **settings)
    if isinstance(transcriber, Transcriber) and getattr(args, "language", "en") is None:
        args.language = "en"
    return transcriber, folder


def run_harvest(args: argparse.Namespace) -> int:
    """Decode and write; files that cannot be read are named at the end, and then the status is 1."""
    from mlx_medusa.training.harvest import HarvestOptions, harvest

    if has_prompts(args.audio):
        return harvest_prompts(args)
    transcriber, folder = load(args, medusa=False)
    options = chosen(HarvestOptions, args, batch=HarvestOptions.batch if args.batch is None else args.batch)
    errors = harvest(transcriber, folder, args.audio, args.output, options, progress=True)
    return name_errors(errors)


def has_prompts(sources: Sequence[str]) -> bool:
    """Whether sources are prompts for a text model, by the first line of the first of them."""
    path = Path(sources[0])
    try:
        with path.open(encoding="utf-8") as file:
            entry = (
                json.loads(next(line for line in file if line.strip())) if path.suffix == ".jsonl" else None
            )
    except (OSError, ValueError, StopIteration):
        return False
    return isinstance(entry, dict) and not {"prompt", "messages"}.isdisjoint(entry)


def load_writer(args: argparse.Namespace, **settings: Any) -> tuple[Any, Path]:
    """(text generator, model folder)"""
    from mlx_medusa import checkpoint
    from mlx_medusa.command import find_model
    from mlx_medusa.demo import TEXT
    from mlx_medusa.loading import load_text

    folder = checkpoint.resolve(find_model(args.model, TEXT, "HuggingFaceTB/SmolLM2-135M-Instruct"))
    return load_text(folder, dtype=args.dtype, **settings), folder


def harvest_prompts(args: argparse.Namespace) -> int:
    """Answer prompts; those that do not fit the context are counted, and then the status is 1."""
    from mlx_medusa.training.harvest_text import TextOptions, describe, harvest_text, read_prompts

    options = chosen(TextOptions, args, batch=TextOptions.batch if args.batch is None else args.batch)
    writer, folder = load_writer(args, medusa=False)
    left_out = harvest_text(
        writer.model,
        writer.tokenizer.chat,
        sorted(writer.tokenizer.stops),
        describe(writer.model, folder, args.torch),
        read_prompts(args.audio),
        args.output,
        options,
        answer=torch_answers(folder, args.torch) if args.torch else None,
        progress=True,
    )
    if left_out:
        print(f"train: skipped: {left_out} prompts that do not fit the model's context", file=sys.stderr)
    return 1 if left_out else 0


def torch_answers(folder: Path, dtype: str) -> Any:
    """What answers prompts with PyTorch."""
    try:
        from mlx_medusa.training.harvest_torch import TorchAnswers
    except ImportError:
        raise OptionError(
            '--torch: PyTorch and transformers are not installed: pip install "mlx-medusa[reference]"'
        ) from None
    return TorchAnswers(folder, dtype)


def name_errors(errors: Sequence[MedusaError]) -> int:
    """Print the errors of skipped files; the exit status."""
    for error in errors:
        print(f"train: skipped: {error}", file=sys.stderr)
    return 1 if errors else 0


def run_fit(args: argparse.Namespace) -> int:
    """Train, write card and curves after each epoch, export."""
    from mlx_medusa.training.data import text_counts
    from mlx_medusa.training.data_text import TextHarvest, open_harvest
    from mlx_medusa.training.export import export_heads
    from mlx_medusa.training.fit import Fit, FitOptions
    from mlx_medusa.training.report import write_card, write_curves

    if args.export and args.kind != "medusa":
        raise OptionError("--export: only plain heads can be exported: use --kind medusa")
    harvest = open_harvest(args.harvest)
    text = isinstance(harvest, TextHarvest)
    if text and args.kind == "recurrent":
        args.kind = "causal"
    defaults = {**{field.name: field.default for field in fields(FitOptions)}, **(TEXT_FIT if text else {})}
    for name in TEXT_FIT:
        if getattr(args, name) is None:
            setattr(args, name, defaults[name])
    options = chosen(FitOptions, args, dtype=args.heads_dtype, bits=args.heads_bits)
    command = ["python -m mlx_medusa.train", *(sys.argv[1:])]
    transcriber, folder = load_writer(args, medusa=False) if text else load(args, medusa=False)
    texts = None
    if args.vocabulary_text:
        if args.draft_vocabulary is None:
            raise OptionError("--vocabulary-text does nothing without --draft-vocabulary")
        texts = text_counts(args.vocabulary_text, transcriber.tokenizer.encode, harvest.index["vocab_size"])
    fit = Fit(transcriber.model, folder, harvest, args.output, options, texts)

    def after() -> None:
        entry = fit.progress.log[-1]
        print(f"epoch {entry['epoch']}: {json.dumps(entry['held_out'])}", file=sys.stderr, flush=True)
        write_card(args.output, command, args.data)
        write_curves(args.output)

    fit.run(progress=True, after=after)
    for layout in args.export:
        export_heads(args.output, layout, args.output / f"export-{layout}")
    print(f"{fit.progress.best:.3f} tokens per verify on held-out files: {args.output}")
    return 0


def run_evaluate(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    from mlx_medusa.training.evaluate import evaluate, table

    if has_prompts(args.audio):
        return evaluate_prompts(args)
    transcriber, _ = load(args, heads=args.heads)
    found, errors = evaluate(transcriber, args.audio, width=args.width, language=args.language, progress=True)
    print(table(found))
    if args.json is not None:
        write_report(found, args.json)
    return name_errors(errors)


def evaluate_prompts(args: argparse.Namespace) -> int:
    """Measure, print, write; 1 if a text is not that of plain decoding."""
    from mlx_medusa.training.evaluate_text import evaluate_text, table
    from mlx_medusa.training.harvest_text import read_prompts

    generator, _ = load_writer(args, heads=args.heads)
    found = evaluate_text(
        generator,
        read_prompts(args.audio),
        max_tokens=args.max_tokens,
        width=args.width,
        nodes=args.nodes,
        progress=True,
    )
    print(table(found))
    if args.json is not None:
        write_report(found, args.json)
    return 0 if all(found[way]["same_text"] == found[way]["answers"] for way in ("chain", "tree")) else 1


def write_report(found: dict[str, Any], path: Path) -> None:
    """Write JSON beside its place, then rename it, so that no half of it is ever seen."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(found, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"{path}: {error.strerror or error}; choose another file with --json") from error


if __name__ == "__main__":
    sys.exit(main())
