"""Command line: ``python -m mlx_medusa.chat``, a conversation that keeps its K/V cache."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING

from mlx_medusa.command import add_model, guarded, log_to_stderr, report
from mlx_medusa.errors import MedusaError
from mlx_medusa.generate import (
    add_writing,
    line_of,
    load,
    show,
    statistics,
    warn_if_cut,
    writing_options,
)

if TYPE_CHECKING:
    from mlx_medusa.text.conversation import Conversation

HELP = "q ends the chat, r starts a new one, h shows this; Ctrl-C stops an answer"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m mlx_medusa.chat",
        description="Talk with a Llama-type model on MLX, with Medusa heads where it has them. Each line of standard "
        f"input is a question; {HELP}.",
        allow_abbrev=False,
    )
    add_writing(p)
    add_model(p)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    log_to_stderr("chat")
    return guarded("chat", lambda: run(args), args.debug)


def run(args: argparse.Namespace) -> int:
    """Answer line by line until the input ends; the status is 1 if a line could not be answered."""
    from mlx_medusa.text.conversation import Conversation

    options = writing_options(args)
    chat = Conversation(load(args), args.system_prompt, options)
    if sys.stdin.isatty():
        note(f"Chat with {args.model or 'the default model'}: {HELP}")
    status = 0
    for question in questions():
        if question == "q":
            break
        if question == "r":
            chat.reset()
            note("(a new chat)")
        elif question == "h":
            note(HELP)
        elif question:
            try:
                answer(chat, question, args.stats)
            except MedusaError as error:
                status = report("chat", error, args.debug)
    return status


def questions() -> Iterator[str]:
    """The lines of standard input, with a prompt on a terminal, where Ctrl-C drops the line."""
    if not sys.stdin.isatty():
        yield from (line_of(line).strip() for line in sys.stdin.buffer)
        return
    import readline  # noqa: F401  input() edits its line with it

    while True:
        try:
            yield input(">> ").strip()
        except KeyboardInterrupt:
            note("\n(q ends the chat)")
        except EOFError:
            note("")
            return


def answer(chat: "Conversation", question: str, stats: bool) -> None:
    """Write the answer to a question as it comes; Ctrl-C stops it."""
    from mlx_medusa.text.generator import whole

    pieces = []
    try:
        with closing(chat.ask(question)) as answer:
            for piece in answer:
                pieces.append(piece)
                show(piece.text)
        show("\n")
        warn_if_cut(pieces[-1], chat.generator, chat.options)
    except KeyboardInterrupt:
        show("\n")
        note("(stopped)")
    if stats and pieces:
        print(statistics(whole(pieces)), file=sys.stderr)


def note(text: str) -> None:
    """What is said to the user and is no answer."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
