"""Command line: ``python -m mlx_medusa.transcribe file.wav``."""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_medusa import command
from mlx_medusa.command import add, add_model, guarded, report
from mlx_medusa.demo import SPEECH
from mlx_medusa.errors import AudioError, MedusaError, OutputError
from mlx_medusa.speech import tasks

if TYPE_CHECKING:
    from mlx_medusa.speech.results import Transcription
    from mlx_medusa.speech.transcriber import Options, SpeechToText

FORMATS = ("txt", "json")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mlx_medusa.transcribe",
        description="Transcribe speech with Whisper or MERaLiON-2 on MLX. The text is that of plain greedy decoding; "
        "Medusa heads, where the model has them, make it come in fewer passes.",
        allow_abbrev=False,
    )
    p.add_argument(
        "audio", nargs="+", help="audio files (wav, flac, ogg, mp3; others through ffmpeg), or - for stdin"
    )
    add(p, "--no-medusa", action="store_true", help="plain greedy decoding, without heads")
    p.add_argument(
        "--width", type=int, help="rows of a verifier pass, one more than the guesses (default: all heads)"
    )
    p.add_argument("--language", help="spoken language, a code or its English name (default: detected)")
    p.add_argument(
        "--task",
        choices=tasks.ALL,
        default="transcribe",
        metavar="TASK",
        help=f"Whisper: transcribe, or translate (into English); MERaLiON: {', '.join(tasks.MERALION)} "
        "(default: %(default)s)",
    )
    p.add_argument(
        "--instruction",
        help="MERaLiON: the question of --task question, or what else to do (--task instruction, or instead of the "
        "usual words of --task transcribe)",
    )
    add(p, "--speaker-tags", action="store_true", help="MERaLiON: leave <Speaker1>: in the text")
    add(
        p,
        "--output-format",
        "-f",
        choices=FORMATS,
        default="txt",
        help="what to write (default: %(default)s)",
    )
    add(p, "--output-dir", "-o", type=Path, help="write <name>.<format> there instead of to standard output")
    p.add_argument("--stats", action="store_true", help="print times and acceptance to standard error")
    add_model(p)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    command.log_to_stderr("transcribe")
    return guarded("transcribe", lambda: run(args), args.debug)


def run(args: argparse.Namespace) -> int:
    """Transcribe every input; the good ones are written even if others fail, and then the status is 1."""
    from mlx_medusa.loading import load_speech
    from mlx_medusa.speech.transcriber import Options

    options = Options(
        args.language,
        args.task,
        args.width,
        medusa=not args.no_medusa,
        instruction=args.instruction,
        speaker_tags=args.speaker_tags,
    )
    if args.output_dir:
        make_folder(args.output_dir)
    transcriber = load_speech(
        find_model(args.model), heads=args.heads, medusa=not args.no_medusa, dtype=args.dtype
    )
    options = transcriber.check(options)
    status = 0
    written: dict[Path, str] = {}
    for name in args.audio:
        try:
            target = args.output_dir / f"{stem(name)}.{args.output_format}" if args.output_dir else None
            if target in written:
                raise OutputError(
                    f"{name}: {target} is already that of {written[target]}: use another --output-dir"
                )
            result = transcribe(transcriber, name, options)
            emit(render(result, args.output_format), target)
            if target:
                written[target] = name
            if args.stats:
                print(statistics(name, result), file=sys.stderr)
        except MedusaError as error:
            status = report("transcribe", error, args.debug)
    return status


def find_model(name: str | None) -> str | Path:
    """The model to use: the one named, else ./mlx_model, else the demo model; OptionError if there is none."""
    return command.find_model(name, SPEECH, "openai/whisper-large-v3")


def transcribe(transcriber: "SpeechToText", name: str, options: "Options") -> "Transcription":
    """Transcribe a file or, for ``-``, standard input; AudioError if it holds no sample."""
    result = transcriber.transcribe(sys.stdin.buffer if name == "-" else name, options, progress=True)
    if not result.duration:
        raise AudioError(f"{name}: holds no audio: record or export it anew")
    return result


def stem(name: str) -> str:
    """The file name without its last extension."""
    return "stdin" if name == "-" else Path(name).stem


def render(result: "Transcription", output_format: str) -> str:
    """The content of an output file."""
    if output_format == "json":
        return json.dumps(result.to_dict(), ensure_ascii=False) + "\n"
    return "".join(segment.text.strip() + "\n" for segment in result.segments)


def emit(content: str, target: Path | None) -> None:
    """Write to standard output, or to a file that is there whole or not at all."""
    if target is None:
        sys.stdout.write(content)
        sys.stdout.flush()
        return
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=target.parent, prefix=".", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(content)
        temporary.chmod(0o666 & ~umask())
        temporary.replace(target)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise OutputError(
            f"{target}: cannot be written: {error.strerror}: use another --output-dir"
        ) from error


def umask() -> int:
    """The file mode bits that this process does not give."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: cannot be made: {error.strerror}: use another --output-dir") from error


def statistics(name: str, result: "Transcription") -> str:
    """One line for ``--stats``."""
    m = result.medusa
    return (
        f"{name}: audio {result.duration:.1f} s, encode {m.encode_seconds:.2f} s, decode {m.decode_seconds:.2f} s, "
        f"{m.line()}"
    )


if __name__ == "__main__":
    sys.exit(main())
