"""Command line: ``python -m mlx_medusa.generate --prompt "..."``."""

import argparse
import json
import logging
import sys
from typing import TYPE_CHECKING

from mlx_medusa.command import add, add_model, chosen, find_model, guarded, log_to_stderr
from mlx_medusa.demo import TEXT
from mlx_medusa.errors import OptionError

if TYPE_CHECKING:
    from mlx_medusa.text.generator import Prompt, TextGenerator
    from mlx_medusa.text.options import TextOptions
    from mlx_medusa.text.results import TextPiece, TextResult

logger = logging.getLogger("mlx_medusa")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mlx_medusa.generate",
        description="Write text with a Llama-type model on MLX. Medusa heads, where the model has them, make it come "
        "in fewer passes; the text is that of plain decoding.",
        allow_abbrev=False,
    )
    add(p, "--prompt", "-p", required=True, help="what to answer, or - for standard input")
    add_writing(p)
    add(p, "--ignore-chat-template", action="store_true",
        help="the prompt is text to go on from, not a question of a chat")  # fmt: skip
    add(p, "--json", action="store_true", help="print one JSON object with text, tokens and statistics")
    add_model(p)
    return p


def add_writing(p: argparse.ArgumentParser) -> None:
    """Add the options of how to write; those in ``TextOptions`` have the names of its fields."""
    add(p, "--system-prompt", "--system", help="what the model is told before the chat")
    add(
        p, "--max-tokens", "-m", type=int, default=256, help="most tokens of an answer (default: %(default)s)"
    )
    add(p, "--temp", type=float, default=0.0,
        help="temperature: 0 takes the best token, more draws (default: %(default)s)")  # fmt: skip
    add(p, "--top-p", type=float, default=1.0, help="draw from the best tokens with this much probability")
    add(p, "--top-k", type=int, default=0, help="draw from the best K tokens (default: all)")
    add(p, "--min-p", type=float, default=0.0,
        help="draw from tokens with at least this part of the best one's probability")  # fmt: skip
    add(p, "--seed", type=int, help="draw the same text again, with or without heads (default: another)")
    add(p, "--repetition-penalty", type=float, help="divide the logits of the newest tokens by this")
    add(p, "--repetition-context-size", type=int, default=20, help="so many of them (default: %(default)s)")
    add(p, "--no-medusa", action="store_true", help="plain decoding, without heads")
    add(p, "--width", type=int,
        help="rows of a verifier pass, one more than the guesses (default: all heads)")  # fmt: skip
    add(
        p,
        "--tree",
        help="guess alternatives too: mc_sim_7b_63 or another name, a number of nodes, or [[0], [1], [0, 0]]",
    )
    add(
        p,
        "--acceptance",
        choices=("exact", "typical"),
        default="exact",
        help="exact, or Medusa's typical acceptance, which is faster and changes the distribution of texts "
        "(default: %(default)s)",
    )
    add(p, "--stats", action="store_true", help="print times and acceptance to standard error")


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    log_to_stderr("generate")
    return guarded("generate", lambda: run(args), args.debug)


def run(args: argparse.Namespace) -> int:
    """Write the answer as it comes, or all of it as JSON."""
    options = writing_options(args)
    prompt = prompt_of(args)
    generator = load(args)
    pieces = []
    for piece in generator.stream(prompt, options):
        pieces.append(piece)
        if not args.json:
            show(piece.text)
    if not args.json:
        show("\n")
    warn_if_cut(pieces[-1], generator, options)
    from mlx_medusa.text.generator import whole

    if args.json:
        show(json.dumps(whole(pieces).to_dict(), ensure_ascii=False) + "\n")
    if args.stats:
        print(statistics(whole(pieces)), file=sys.stderr)
    return 0


def writing_options(args: argparse.Namespace) -> "TextOptions":
    """The options of ``add_writing``; OptionError for a value that cannot be."""
    from mlx_medusa.text.options import TextOptions

    return chosen(TextOptions, args, medusa=not args.no_medusa)


def load(args: argparse.Namespace) -> "TextGenerator":
    """The model of ``add_model``."""
    from mlx_medusa.loading import load_text

    folder = find_model(args.model, TEXT, "lmsys/vicuna-7b-v1.3")
    return load_text(folder, heads=args.heads, medusa=not args.no_medusa, dtype=args.dtype)


def prompt_of(args: argparse.Namespace) -> "Prompt":
    """What the model is asked: the messages of a chat, or with --ignore-chat-template the text alone.

    OptionError if it is empty, or not text.
    """
    text = args.prompt
    if text == "-":
        text = line_of(sys.stdin.buffer.read())
    if args.ignore_chat_template:
        if args.system_prompt is not None:
            raise OptionError("--system-prompt is part of a chat: leave out --ignore-chat-template")
        return text
    system = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    return [*system, {"role": "user", "content": text}]


def line_of(data: bytes) -> str:
    """Text from standard input, without the line end behind it. OptionError if it is not UTF-8."""
    try:
        return data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise OptionError(
            f"standard input is not UTF-8 text ({error.reason} at byte {error.start})"
        ) from error


def show(text: str) -> None:
    """Write to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def warn_if_cut(last: "TextPiece", generator: "TextGenerator", options: "TextOptions") -> None:
    """Say why a text did not come to its end, if it did not."""
    if last.finish_reason != "length":
        return
    context = generator.model.max_length
    if last.prompt_tokens + last.generation_tokens >= context:
        logger.warning("the text was cut where the model's context of %d tokens was full", context)
    else:
        logger.warning("the text was cut at %d tokens (--max-tokens)", options.max_tokens)


def statistics(result: "TextResult") -> str:
    """One line for ``--stats``."""
    from mlx.core import get_peak_memory

    m = result.medusa
    return (
        f"prompt {result.prompt_tokens} tokens, {result.cached_tokens} of them kept, {m.encode_seconds:.2f} s "
        f"({result.prompt_tps:.0f} tokens/s), text {m.decode_seconds:.2f} s, {m.line()}, "
        f"peak memory {get_peak_memory() / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    sys.exit(main())
