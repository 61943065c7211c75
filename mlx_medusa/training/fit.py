"""Fit heads on a harvest: AdamW with warm-up and cosine, the best epoch by tokens per verify on held-out files."""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from tqdm import tqdm

from mlx_medusa.errors import MedusaError, OptionError, OutputError
from mlx_medusa.medusa.causal import CausalHeads
from mlx_medusa.medusa.drafters import build_heads
from mlx_medusa.shards import read_header
from mlx_medusa.training import regress, start
from mlx_medusa.training.data import Decoded, Harvest, batches, draft_vocabulary
from mlx_medusa.training.data_text import TextHarvest
from mlx_medusa.training.harvest import fingerprint
from mlx_medusa.training.objective import Scores, Target, loss_of_batch

CHECKPOINT = "checkpoint.safetensors"
LOG = "log.json"
# found best for small Whispers; Medusa's own trainer; found best for a small Llama
LEARNING_RATES = {"recurrent": 8e-4, "medusa": 1e-3, "causal": 5e-5}


@dataclass(frozen=True)
class FitOptions:
    """How to fit. ``batch`` is in windows, ``draft_vocabulary`` None guesses among the tokens that were seen, ``hours``
    None trains on all audio, ``learning_rate`` None takes that of the kind.
    """

    kind: str = "recurrent"
    num_heads: int = 5
    num_layers: int = 1
    memory_pool: int = 1  # recurrent heads attend to averages of so many neighbouring rows
    ffn_dim: int | None = None  # of causal heads; None: as in the base
    match_length: int = (
        4  # of causal heads: tokens in a row that tell where the same came before; 0: they don't look
    )
    draft_vocabulary: int | None = None
    loss_vocabulary: int | None = None  # train among so many of these, which is cheaper; None: among all
    draft_rank: int = 0  # screen the draft vocabulary in so many directions; 0: read it in full
    epochs: int = 12
    batch: int = 2
    learning_rate: float | None = None
    weight_decay: float = 0.05
    loss_decay: float = 0.8  # weight of guess k is this to the power of k
    imitation: float = 5.0  # weight of the distance to the verifier's own later states
    soft: float = (
        0.0  # how much the verifier's own distribution is what guesses should have; 0: its token alone
    )
    warm_up: float = 0.1  # of all steps
    clip: float = 1.0  # norm of the gradient
    held_out: float = 0.1  # of the files
    hours: float | None = None
    dtype: str = "float16"  # of the written heads
    bits: int | None = None  # to which their matrices are quantized; None: they are not
    start: str | None = None  # trained heads to go on from, such as those of a larger harvest
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in LEARNING_RATES:
            raise OptionError(f"kind {self.kind!r} is not known: use one of {', '.join(LEARNING_RATES)}")
        for name in ("num_heads", "num_layers", "memory_pool", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise OptionError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.draft_rank and self.draft_vocabulary is None:
            raise OptionError("draft_rank does nothing without draft_vocabulary")
        if self.loss_vocabulary is not None and (self.draft_vocabulary or 0) < self.loss_vocabulary:
            raise OptionError("loss_vocabulary must be a part of draft_vocabulary")
        if not 0 < self.held_out < 1:
            raise OptionError(f"held_out is {self.held_out}, but must be between 0 and 1")


@dataclass
class Progress:
    """What a checkpoint holds beside arrays."""

    settings: dict[str, Any]
    epoch: int = 0  # epochs done
    step: int = 0
    best: float = 0.0  # tokens per verify on the held-out files
    log: list[dict[str, Any]] = field(default_factory=list)


class Fit:
    """One training run, in a folder that it can go on from."""

    def __init__(
        self,
        model: Any,
        model_folder: Path,
        harvest: Harvest,
        folder: Path,
        options: FitOptions | None = None,
        text_counts: np.ndarray | None = None,
    ):
        """``text_counts`` [V]: how often ids come in other texts; it counts as much as the harvest for the draft
        vocabulary. Raises CheckpointError for a harvest of another model, OptionError for a folder with another run.
        """
        from convert.quantize import recipe  # not needed to transcribe

        self.options = options = options or FitOptions()
        self._recipe = recipe(options.bits) if options.bits is not None else None
        self.model, self.harvest, self.folder = model, harvest, Path(folder)
        identity = fingerprint(model_folder)
        harvest.check(identity, str(model.embed(mx.array([0])).dtype).rpartition(".")[2])
        if isinstance(harvest, TextHarvest) and options.kind == "causal":
            harvest.match_length = options.match_length
        self.train, self.held_out = harvest.split(options.held_out, options.hours)
        counts = harvest.token_counts(self.train).astype(np.float64)
        if text_counts is not None:
            counts = counts / max(counts.sum(), 1) + text_counts / max(text_counts.sum(), 1)
        ids = draft_vocabulary(counts, options.draft_vocabulary, harvest.index["eos"])
        self.target = Target(model, ids, harvest.index["vocab_size"])
        self.learned = self.target
        if options.loss_vocabulary is not None:
            few = draft_vocabulary(counts, options.loss_vocabulary, harvest.index["eos"])
            self.learned = Target(model, few, harvest.index["vocab_size"])
        self.basis = mx.array(harvest.directions(self.train, options.draft_rank))
        self.config = start.config(options, model.args)
        mx.random.seed(options.seed)
        self.heads = build_heads(self.config, "heads")
        if options.start is None and isinstance(self.heads, CausalHeads):
            regress.first_weights(self.heads, model, self.target.embed, harvest, self.train)
        elif options.start is None:
            start.initialise(self.heads, model)
        else:
            start.take(self.heads, self.config, options.start)
        mx.eval(self.heads.parameters())
        self.steps_per_epoch = sum(1 for _ in batches(self.train, options.batch, (options.seed, 0)))
        self.optimizer = optim.AdamW(
            learning_rate=0.0, betas=[0.9, 0.999], weight_decay=options.weight_decay, bias_correction=True
        )
        self.optimizer.init(self.heads.trainable_parameters())
        hours = round(sum(one.seconds for one in self.train) / 3600, 2)
        settings = {
            **asdict(options),
            "fingerprint": identity,
            "windows": len(self.train),
            "vocabulary": hashlib.sha256(ids.tobytes()).hexdigest(),
            "hours_of_audio": hours,
        }
        if isinstance(harvest, TextHarvest):
            settings["tokens_of_text"] = sum(one.length for one in self.train)
        self.progress = Progress(settings)
        self._resume()

    # --- the loop ---

    def run(self, progress: bool = False, after: Callable[[], None] | None = None) -> Progress:
        """Train the epochs that are left. ``after`` is called when an epoch's files are written.

        Raises MedusaError for a loss that is not finite; the best heads so far stay.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        while self.progress.epoch < self.options.epochs:
            begin = perf_counter()
            losses = self._epoch(progress)
            scores = self.score(self.held_out)
            entry = {
                "epoch": self.progress.epoch + 1,
                "step": self.progress.step,
                "loss_per_guess": losses,
                "held_out": scores.to_dict(),
                "learning_rate": self._learning_rate(self.progress.step),
                "seconds": round(perf_counter() - begin, 1),
            }
            self.progress.epoch += 1
            self.progress.log.append(entry)
            if scores.tokens_per_verify > self.progress.best:
                self.progress.best = scores.tokens_per_verify
                self._write_heads(scores.accuracies())
            self._save()
            if after is not None:
                after()
        return self.progress

    def _epoch(self, progress: bool) -> list[float]:
        """One pass over the training sequences; the mean cross-entropy per guess."""
        options = self.options
        compute = nn.value_and_grad(self.heads, self._loss)
        totals, counts = np.zeros(options.num_heads), 0
        order = batches(self.train, options.batch, (options.seed, self.progress.epoch))
        bar = tqdm(
            order,
            total=self.steps_per_epoch,
            desc=f"epoch {self.progress.epoch + 1}/{options.epochs}",
            disable=None if progress else True,
        )
        for members in bar:
            (loss, per_guess), gradients = compute(self.heads, members)
            gradients, _ = optim.clip_grad_norm(gradients, options.clip)
            self.optimizer.learning_rate = self._learning_rate(self.progress.step)
            self.optimizer.update(self.heads, gradients)
            mx.eval(loss, per_guess, self.heads.parameters(), self.optimizer.state)
            if not math.isfinite(loss.item()):
                raise MedusaError(
                    f"{self.folder}: the loss is {loss.item()} at step {self.progress.step}; the best heads so far "
                    "are kept: use a lower --learning-rate"
                )
            self.progress.step += 1
            totals += np.array(per_guess)
            counts += sum(one.length - 1 for one in members)
        return (totals / max(counts, 1)).round(4).tolist()

    def _loss(self, heads: Any, members: list[Decoded]) -> tuple[mx.array, mx.array]:
        batch = self.harvest.batch(members, self.options.num_heads)
        options = self.options
        return loss_of_batch(
            heads,
            batch,
            self.learned,
            options.num_heads,
            options.loss_decay,
            options.imitation,
            options.soft,
        )

    def _learning_rate(self, step: int) -> float:
        """Linear warm-up, then half a cosine down to zero."""
        options, total = self.options, self.steps_per_epoch * self.options.epochs
        peak = options.learning_rate or LEARNING_RATES[options.kind]
        warm = max(1, round(total * options.warm_up))
        if step < warm:
            return peak * (step + 1) / warm
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, total - warm)))

    def score(self, sequences: list[Decoded]) -> Scores:
        """How good the heads, rounded as they are written, are on some sequences."""
        kept = self.heads.parameters()
        self.heads.update(tree_map_with_path(self._rounded, kept))
        scores = Scores(self.options.num_heads)
        usable = sorted((one for one in sequences if one.length > 1), key=lambda one: one.length)
        for first in range(0, len(usable), self.options.batch):
            members = usable[first : first + self.options.batch]
            scores.add(self.heads, self.harvest.batch(members, self.options.num_heads), self.target)
        self.heads.update(kept)
        return scores

    def _rounded(self, name: str, array: mx.array) -> mx.array:
        """A parameter as its readers will have it."""
        array = array.astype(getattr(mx, self.options.dtype))
        if self._recipe is not None and array.ndim > 1 and name.endswith("weight"):
            settings = self._recipe.high_settings
            array = mx.dequantize(*mx.quantize(array, **settings), **settings)
        return array.astype(mx.float32)

    # --- files ---

    def _write_heads(self, accuracies: list[list[float]]) -> None:
        from convert.heads import write_heads  # not needed to transcribe

        arrays = dict(tree_flatten(self.heads.parameters()))
        config = {**self.config, "accuracies": accuracies}
        if self.options.draft_vocabulary is not None:
            config["draft_vocabulary"] = len(self.target.ids)
            arrays["draft_vocabulary"] = mx.array(self.target.ids)
            if self.options.draft_rank:
                config["draft_rank"] = self.options.draft_rank
                arrays["draft_basis"] = self.basis
        write_heads(self.folder, config, arrays, getattr(mx, self.options.dtype), self._recipe)

    def _save(self) -> None:
        """Write the checkpoint and the log, each whole or not at all."""
        parts: Any = {"heads": self.heads.parameters(), "optimizer": self.optimizer.state}
        arrays: Any = dict(tree_flatten(parts))
        temporary = self.folder / f".{CHECKPOINT}"
        mx.save_safetensors(str(temporary), arrays, {"progress": json.dumps(asdict(self.progress))})
        _rename(temporary, self.folder / CHECKPOINT)
        text = json.dumps(
            {"settings": self.progress.settings, "best": self.progress.best, "epochs": self.progress.log},
            indent=1,
        )
        (self.folder / f".{LOG}").write_text(text + "\n", encoding="utf-8")
        _rename(self.folder / f".{LOG}", self.folder / LOG)

    def _resume(self) -> None:
        path = self.folder / CHECKPOINT
        if not path.exists():
            return
        saved = Progress(**json.loads(read_header(path)[1]["progress"]))
        defaults = asdict(FitOptions())  # an older run does not name what came later
        for name, value in self.progress.settings.items():
            if saved.settings.get(name, defaults.get(name)) != value:
                raise OptionError(
                    f"{path}: is of a run with {name} {saved.settings.get(name)!r}, not {value!r}: "
                    "choose another folder"
                )
        arrays = mx.load(str(path))
        assert isinstance(arrays, dict)
        parts: Any = tree_unflatten(list(arrays.items()))
        self.heads.update(parts["heads"])
        self.optimizer.state = parts["optimizer"]
        self.progress = saved


def _rename(temporary: Path, path: Path) -> None:
    try:
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}: choose another folder") from error
