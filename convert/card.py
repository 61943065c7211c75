"""The model card of a converted folder."""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from convert.pipeline import Report

_REPO = re.compile(r"[\w.-]+/[\w.-]+")


def model_card(base: str, report: "Report") -> str:
    """README.md: what hubs read in the front matter, and how to use the folder.

    A base that is a local path is left out: it says nothing to others.
    """
    from_hub = bool(_REPO.fullmatch(base)) and not base.startswith(".")
    task = "automatic-speech-recognition" if report.hears else "text-generation"
    front = ["library_name: mlx", f"pipeline_tag: {task}", "tags:", "- mlx"]
    front += [f"- {report.title.lower()}"]
    front += ["- medusa"] if report.heads else []
    front += [f"base_model: {base}"] if from_hub else []
    origin = (
        f"[{base}](https://huggingface.co/{base})"
        if from_hub
        else f"a {report.kind} checkpoint of {report.title}"
    )
    weights = f"{report.bits_per_weight:.2f} bits per weight" if report.quantized else report.dtype
    heads = f", with {report.heads['num_heads']} Medusa heads" if report.heads else ""
    return "\n".join(
        [
            "---",
            *front,
            "---",
            "",
            f"# {report.title} for MLX",
            "",
            f"Converted from {origin} by mlx-medusa ({weights}{heads}).",
            "",
            "```shell",
            "python -m mlx_medusa.transcribe --model . speech.wav"
            if report.hears
            else "python -m mlx_medusa.generate --model . --prompt 'Why is the sky blue?'",
            "```",
            "",
        ]
    )
