"""Which layers are quantized, and how.
 The common recipe gives every ``nn.Linear`` and ``nn.Embedding`` the same bits. Mixed recipes
(``mixed_L_H``) give most layers L bits and H bits where Whisper is touchiest: ``v_proj`` and ``fc2`` in the
first and last eighth of each stack and in every third layer between (mlx-lm's rule, whose ``down_proj`` is
Whisper's ``fc2``), and the token embedding, since it is the vocabulary projection as well. A speech encoder
can have bits of its own, or stay as it is. Convolutions, positions and norms always do.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_medusa.errors import OptionError

MODES = {  # mode -> (bits, group sizes); the first or 4-bit 64 is the default
    "affine": ((2, 3, 4, 5, 6, 8), (32, 64, 128)),
    "mxfp4": ((4,), (32,)),
    "mxfp8": ((8,), (32,)),
    "nvfp4": ((4,), (16,)),
}
MIXED = {
    "mixed_2_6": (2, 6),
    "mixed_3_4": (3, 4),
    "mixed_3_6": (3, 6),
    "mixed_4_6": (4, 6),
    "mixed_4_8": (4, 8),
}


@dataclass(frozen=True)
class Recipe:
    """Settings for most layers, and more bits for some of them in a mixed recipe."""

    bits: int
    group_size: int
    mode: str = "affine"
    high_bits: int | None = None

    @property
    def settings(self) -> dict[str, Any]:
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}

    @property
    def high_settings(self) -> dict[str, Any]:
        return {**self.settings, "bits": self.high_bits or self.bits}


def recipe(
    bits: int | None = None, group_size: int | None = None, mode: str = "affine", mixed: str | None = None
) -> Recipe:
    """The recipe of these options, with mlx-lm's defaults. Raises OptionError for a combination that can't
    be.
    """
    if mode not in MODES:
        raise OptionError(f"--q-mode {mode}: not one of {', '.join(MODES)}")
    all_bits, sizes = MODES[mode]
    if mixed is not None:
        if mixed not in MIXED:
            raise OptionError(f"--quant-predicate {mixed}: not one of {', '.join(MIXED)}")
        if mode != "affine" or bits is not None:
            raise OptionError(
                f"--quant-predicate {mixed} sets the bits itself, in mode affine: drop --q-bits and --q-mode"
            )
        low, high = MIXED[mixed]
        return Recipe(low, _choose("--q-group-size", group_size, sizes, 64, mode), mode, high)
    default_bits, default_size = (4, 64) if mode == "affine" else (all_bits[0], sizes[0])
    return Recipe(
        _choose("--q-bits", bits, all_bits, default_bits, mode),
        _choose("--q-group-size", group_size, sizes, default_size, mode),
        mode,
    )


def _choose(option: str, value: int | None, allowed: tuple[int, ...], default: int, mode: str) -> int:
    if value is not None and value not in allowed:
        raise OptionError(f"{option} {value}: mode {mode} has {', '.join(map(str, allowed))}")
    return default if value is None else value


@dataclass
class Plan:
    """The settings of each layer that is quantized, and the layers that aren't, by reason."""

    layers: dict[str, dict[str, Any]] = field(default_factory=dict)
    skipped: dict[str, list[str]] = field(default_factory=dict)
    common: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        """The ``quantization`` object of config.json: common settings, and an entry for each layer that
        differs.
        """
        own = {layer: settings for layer, settings in self.layers.items() if settings != self.common}
        return {**self.common, **own}


def plan(model: nn.Module, chosen: Recipe, encoder: str = "", encoder_bits: int | None = None) -> Plan:
    """Decide for each layer of ``model``; those under ``encoder`` get ``encoder_bits`` (16: they stay as they are).

    Raises OptionError if none can be quantized.
    """
    own = {"group_size": chosen.group_size, "bits": encoder_bits, "mode": "affine"} if encoder_bits else None
    if own and encoder_bits != 16 and chosen.mode != "affine":
        raise OptionError(f"--q-encoder-bits {encoder_bits}: for --q-mode affine only")
    modules = [(path, module) for path, module in model.named_modules() if _is_matrix(module)]
    result = Plan(common=chosen.settings)
    count = _layer_counts(path for path, _ in modules)
    for path, module in sorted(modules, key=lambda item: item[0]):
        if not isinstance(module, nn.Linear | nn.Embedding):
            kind = "convolution" if isinstance(module, nn.Conv1d) else "position table"
            result.skipped.setdefault(kind, []).append(path)
        elif (dim := module.weight.shape[-1]) % chosen.group_size:
            reason = f"rows of {dim} are not a multiple of the group size {chosen.group_size}"
            result.skipped.setdefault(reason, []).append(path)
        elif own and path.startswith(f"{encoder}."):
            if encoder_bits == 16:
                result.skipped.setdefault("speech encoder", []).append(path)
            else:
                result.layers[path] = own
        else:
            result.layers[path] = chosen.high_settings if _wants_more(path, count) else chosen.settings
    if not result.layers:
        raise OptionError(f"--q-group-size {chosen.group_size}: no layer's rows are a multiple of it")
    return result


def _is_matrix(module: nn.Module) -> bool:
    weight = module.get("weight")
    return isinstance(weight, mx.array) and weight.ndim > 1


def _layer_counts(paths: Iterable[str]) -> dict[str, int]:
    """{"model.encoder": 32, ...}"""
    counts: dict[str, int] = {}
    for path in paths:
        stack, found, rest = path.partition(".layers.")
        if found:
            counts[stack] = max(counts.get(stack, 0), int(rest.split(".")[0]) + 1)
    return counts


def _wants_more(path: str, count: dict[str, int]) -> bool:
    """Whether a mixed recipe gives this layer its higher bits."""
    stack, found, rest = path.partition(".layers.")
    if not found:
        return path.endswith(("embed_tokens", "lm_head"))
    index, total = int(rest.split(".")[0]), count[stack]
    edge = total // 8
    outer = index < edge or index >= 7 * total // 8 or (index - edge) % 3 == 2
    return outer and path.endswith(("v_proj", "fc2", "down_proj"))
