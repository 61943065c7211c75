"""Command lines: ``python -m mlx_medusa.export --model FOLDER --format onnx -o DIR``, ``... run DIR file.wav``."""

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlx_medusa.audio import SAMPLE_RATE
from mlx_medusa.command import guarded, report
from mlx_medusa.errors import AudioError, CheckpointError, MedusaError, OptionError

if TYPE_CHECKING:
    from mlx_medusa.exporting.onnx_loop import OnnxTranscriber, Written

FORMATS = ("onnx", "mlxfn")
NEEDED = {  # to write ONNX, and to run it: module -> the extra that brings it
    "write": {"torch": "reference", "transformers": "reference", "onnx": "onnx", "onnxscript": "onnx"},
    "run": {"onnxruntime": "onnx"},
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mlx_medusa.export",
        description="Write encoder, verifier step and heads of a Whisper model as functions in files: ONNX files for "
        "onnxruntime (from the PyTorch reference), or MLX functions for apps in C++ or Swift.",
        epilog="Transcribe with exported ONNX files: python -m mlx_medusa.export run DIR file.wav",
        allow_abbrev=False,
    )
    p.add_argument("--model", help="model folder (default: ./mlx_model, else the demo model)")
    p.add_argument(
        "--heads", type=Path, help="folder or medusa.safetensors to use instead of the model's own heads"
    )
    p.add_argument("--format", choices=FORMATS, required=True, help="onnx, or mlxfn")
    p.add_argument("--output", "-o", type=Path, required=True, metavar="DIR", help="folder to make")
    p.add_argument("--dtype", choices=("float16", "bfloat16", "float32"),
                   help="mlxfn: precision (default: the model's; on a CPU float32)")  # fmt: skip
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return p


def run_parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mlx_medusa.export run",
        description="Transcribe with exported ONNX files; neither MLX nor PyTorch is used.",
        allow_abbrev=False,
    )
    p.add_argument("folder", type=Path, metavar="DIR", help="what export --format onnx wrote")
    p.add_argument("audio", nargs="+", help="audio files")
    p.add_argument("--language", help="code of the spoken language (default: detected)")
    p.add_argument(
        "--task", choices=("transcribe", "translate"), default="transcribe", help="default: %(default)s"
    )
    p.add_argument(
        "--width", type=int, help="rows of a pass, one more than the guesses (default: all; 1: no heads)"
    )
    p.add_argument("--timestamps", action="store_true", help="write <|0.00|> where segments begin and end")
    p.add_argument("--stats", action="store_true", help="print acceptance to standard error")
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["run"]:
        args = run_parser().parse_args(argv[1:])
        logging.basicConfig(format="export run: warning: %(message)s", stream=sys.stderr, force=True)
        return guarded("export run", lambda: run(args), args.debug)
    args = parser().parse_args(argv)
    return guarded("export", lambda: export(args), args.debug)


def export(args: argparse.Namespace) -> int:
    """Write the folder, whole or not at all, and say what is in it."""
    if args.format == "onnx":
        if args.dtype is not None:
            raise OptionError(
                "--dtype is for mlxfn: ONNX files compute in float32, and store float16 where it is exact"
            )
        need("write")
        written = export_onnx(args.model, args.heads, args.output)
    else:
        written = export_mlxfn(args.model, args.heads, args.output, args.dtype)
    for path in written:
        print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


def need(purpose: str) -> None:
    """OptionError that names the extras of what is not installed."""
    missing = {module: extra for module, extra in NEEDED[purpose].items() if find_spec(module) is None}
    if missing:
        extras = ",".join(sorted(set(NEEDED[purpose].values())))
        raise OptionError(f'{", ".join(missing)} not installed: pip install "mlx-medusa[{extras}]"')


def export_mlxfn(
    model: str | Path | None, heads: Path | None, output: Path, dtype: str | None = None
) -> list[Path]:
    """Write MLX functions of a model folder and its heads into ``output``, which must not exist; the files written.

    ``dtype``: float16, bfloat16 or float32; None keeps the folder's, except on a CPU backend (float32). Raises
    MedusaError if the model is no Whisper, the heads do not fit or the folder cannot be written.
    """
    from mlx_medusa import checkpoint
    from mlx_medusa.exporting import description, mlxfn
    from mlx_medusa.loading import load_speech

    with checkpoint.staged_folder(output) as staging:
        folder, _ = find_whisper(model)
        transcriber: Any = load_speech(folder, heads=heads, dtype=dtype)
        whisper, drafter = transcriber.model, transcriber.drafter
        functions = mlxfn.export(whisper, drafter, staging)
        drafts = drafter.max_drafts if drafter else 0
        settings = description.decoding(
            transcriber.tokenizer, whisper.max_length, whisper.args.vocab_size, drafts
        )
        description.write(staging, folder, "mlxfn", functions, settings)
    return listing(output)


def export_onnx(model: str | Path | None, heads: Path | None, output: Path) -> list[Path]:
    """Write ONNX files of a model folder and its heads, by the PyTorch reference, into ``output``; the files written.

    Raises MedusaError as ``export_mlxfn`` does. Needs the extras reference and onnx.
    """
    from mlx_medusa import checkpoint, reference
    from mlx_medusa.exporting import description, onnx_files
    from mlx_medusa.medusa.drafters import check_fit
    from mlx_medusa.speech.tokenizer import WhisperTokenizer

    with checkpoint.staged_folder(output) as staging:
        folder, config = find_whisper(model)
        found = checkpoint.read_heads(heads or folder)
        if found is not None:
            check_fit(*found, config["d_model"], config["vocab_size"], heads or folder)
        elif heads is not None:
            raise CheckpointError(f"{heads}: holds no heads: name a folder or a medusa.safetensors")
        tokenizer = WhisperTokenizer.from_folder(folder)
        oracle: Any = reference.load(folder, heads=heads, medusa=found is not None, device="cpu")
        functions = onnx_files.export(oracle, staging)
        drafts = oracle.drafter.max_drafts if oracle.drafter else 0
        settings = description.decoding(tokenizer, oracle.max_length, oracle.model.config.vocab_size, drafts)
        description.write(staging, folder, "onnx", functions, settings)
    return listing(output)


def find_whisper(model: str | Path | None) -> tuple[Path, dict[str, Any]]:
    """(folder, config) of a Whisper; CheckpointError if it is no model, OptionError if it is another one."""
    from mlx_medusa import checkpoint
    from mlx_medusa.transcribe import find_model

    folder = checkpoint.resolve(find_model(None if model is None else str(model)))
    config = checkpoint.read_config(folder)
    if config.get("model_type") != "whisper":
        raise OptionError(f"{folder}: only Whisper models can be exported: name one with --model")
    return folder, config


def listing(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file())


# ------------------------------------------------------------------------------------------------- run


def run(args: argparse.Namespace) -> int:
    """Transcribe every input; the good ones are written even if others fail, and then the status is 1."""
    need("run")
    from mlx_medusa.exporting.onnx_loop import OnnxTranscriber

    transcriber = OnnxTranscriber(args.folder)
    status = 0
    for name in args.audio:
        try:
            transcribe(transcriber, name, args)
        except MedusaError as error:
            status = report("export run", error, args.debug)
    return status


def transcribe(transcriber: "OnnxTranscriber", name: str, args: argparse.Namespace) -> None:
    """Print a line for each window of a file."""
    from mlx_medusa.audio import read_blocks
    from mlx_medusa.speech.windows import windows

    language, found = args.language, []
    for window in windows(read_blocks(name)):
        written = transcriber.transcribe(
            window.samples, language, args.task, width=args.width, timestamps=args.timestamps,
            start=window.start / SAMPLE_RATE,
        )  # fmt: skip
        language = written.language  # as it was detected in the first window
        print(transcriber.text(written.tokens, timestamps=args.timestamps).strip())
        found.append(written)
    if not found:
        raise AudioError(f"{name}: holds no audio: record or export it anew")
    if args.stats:
        print(statistics(name, found), file=sys.stderr)


def statistics(name: str, found: Sequence["Written"]) -> str:
    """One line for ``--stats``."""
    decided, rounds = sum(w.decided for w in found), sum(w.rounds for w in found)
    right = [sum(counts) for counts in zip(*(w.accepted_per_head for w in found), strict=True)]
    heads = " ".join(f"{count / max(rounds, 1):.0%}" for count in right)
    how = f"accepted per head: {heads}" if heads else "no heads"
    return f"{name}: {decided} tokens in {rounds} passes, {decided / max(rounds, 1):.2f} tokens per verify, {how}"


if __name__ == "__main__":
    sys.exit(main())
