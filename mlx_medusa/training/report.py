"""What a fit leaves beside the heads: a card and, with matplotlib, the curves."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_medusa.errors import OptionError
from mlx_medusa.training.fit import LOG

TITLES = {"recurrent": "Audio-aware recurrent", "causal": "Causal recurrent", "medusa": "Plain"}


def write_card(folder: Path, command: Sequence[str], data: str | None) -> None:
    """README.md: data, recipe, figures of the best epoch, command. ``data``: where it is from, and its licence."""
    log = json.loads((folder / LOG).read_text(encoding="utf-8"))
    settings = log["settings"]
    best = max(log["epochs"], key=lambda entry: entry["held_out"]["tokens_per_verify"])
    scores = best["held_out"]
    rows = [
        f"| {guess} | {top1:.1%} | {top5:.1%} | {chain:.1%} |"
        for guess, (top1, top5, chain) in enumerate(
            zip(scores["top1"], scores["top5"], scores["chain"], strict=True), 1
        )
    ]
    names = (
        "num_heads",
        "num_layers",
        "draft_vocabulary",
        "epochs",
        "batch",
        "weight_decay",
        "loss_decay",
        "seed",
    )
    tokens = settings.get("tokens_of_text")
    amount = f"{tokens} tokens" if tokens else f"{settings['hours_of_audio']} hours"
    recipe = ", ".join(f"{name} {settings[name]}" for name in names)
    lines = [
        "---",
        "library_name: mlx",
        "tags:",
        "- medusa",
        "---",
        "",
        f"# {TITLES[settings['kind']]} Medusa heads for MLX",
        "",
        f"Base weights (SHA-256): {settings['fingerprint']}",
        "",
        f"Data: {data or 'not stated'}. {amount} in {settings['windows']} sequences for training; files held out are "
        "not among them.",
        "",
        f"Recipe: AdamW, warm-up and cosine, {recipe}. Best epoch {best['epoch']}.",
        "",
        f"On held-out files: {scores['tokens_per_verify']:.2f} tokens per verify.",
        "",
        "| guess | top-1 | top-5 | right with all before it |",
        "|---|---|---|---|",
        *rows,
        "",
        "```shell",
        " ".join(command),
        "```",
        "",
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def write_curves(folder: Path) -> Path:
    """curves.png of a fit's log. OptionError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise OptionError('the curves need matplotlib: pip install "mlx-medusa[train]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    epochs: list[dict[str, Any]] = json.loads((folder / LOG).read_text(encoding="utf-8"))["epochs"]
    x = [entry["epoch"] for entry in epochs]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4), constrained_layout=True)
    for guess in range(len(epochs[0]["loss_per_guess"])):
        left.plot(x, [entry["loss_per_guess"][guess] for entry in epochs], label=f"guess {guess + 1}")
        right.plot(x, [entry["held_out"]["chain"][guess] for entry in epochs], label=f"guess {guess + 1}")
    middle.plot(x, [entry["held_out"]["tokens_per_verify"] for entry in epochs])
    titles = ("training loss", "held out: tokens per verify", "held out: right with all before it")
    for axes, title in zip((left, middle, right), titles, strict=True):
        axes.set(title=title, xlabel="epoch")
    left.legend()
    path = folder / "curves.png"
    figure.savefig(path, dpi=100)
    plt.close(figure)
    return path
