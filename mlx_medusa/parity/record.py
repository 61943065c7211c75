"""Let the PyTorch oracle write, and note it."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from mlx_medusa.parity.inputs import Input
from mlx_medusa.parity.records import Asked, Entry, Head
from mlx_medusa.reference.folder import Folder

if TYPE_CHECKING:
    from mlx_medusa.reference.decode import Reference


def head_of(reference: "Reference", folder: Folder, *, name: str, width: int, heads: str | None) -> Head:
    """What is run; ``heads`` is the SHA-256 of the heads' file, if they are used."""
    return Head(
        family=str(folder.config["model_type"]),
        model=name,
        fingerprint=folder.fingerprint(),
        quantization=folder.quantization,
        width=width,
        heads=heads,
        **reference.where.describe(),
    )


def record(
    reference: "Reference", inputs: Iterable[tuple[Input, Sequence[Asked]]], *, width: int = 1
) -> Iterator[Entry]:
    """An entry for each input and each thing asked of it.

    Tokens and margins are those of plain greedy decoding. A ``width`` above 1 decodes once more, with the heads, and
    notes how many tokens each pass decided; not, where a near-tie made that text another one.
    """
    for given, questions in inputs:
        memory = reference.encode(given.content)
        for asked in questions:
            task, detected = reference.ask(memory, **asdict(asked))
            found = reference.decode(memory, task)
            rounds = None
            if width > 1:
                again = reference.decode(memory, task, width)
                rounds = again.rounds if again.tokens == found.tokens else None
            yield Entry(
                name=given.name,
                sha256=given.sha256,
                asked=asked,
                prompt=task.prompt,
                tokens=found.tokens,
                text=reference.text(found.tokens),
                margins=found.margins,
                logprobs=found.logprobs,
                rounds=rounds,
                start=given.start,
                input=given.content if isinstance(given.content, str) else None,
                detected=None if detected is None else (detected[0], round(detected[1], 5)),
            )
