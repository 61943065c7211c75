"""The command line: ``convert`` or ``python -m convert``."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from mlx_medusa.errors import MedusaError

MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")
MIXED = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6", "mixed_4_8")


def parser() -> argparse.ArgumentParser:
    """The options; those of several words take hyphens and underscores."""
    result = argparse.ArgumentParser(
        prog="convert",
        description="Turn a Whisper, MERaLiON-2 or Llama checkpoint, with Medusa heads, into an MLX model folder.",
        epilog="example: convert --base openai/whisper-large-v3 --heads heads.pt --q-bits 4 --mlx-path whisper-4bit",
        allow_abbrev=False,
    )

    def add(*names: str, **settings: Any) -> None:
        underscored = [
            name.replace("-", "_").replace("__", "--", 1) for name in names if name.startswith("--")
        ]
        result.add_argument(*dict.fromkeys([*names, *underscored]), **settings)

    add(
        "--base",
        "--hf-path",
        "--model",
        metavar="MODEL",
        help="hub id or folder of a Hugging Face, faster-whisper or mlx-community Whisper, of a MERaLiON-2 or of a "
        "Llama, an openai .pt file or a .gguf file (default: MERaLiON/MERaLiON-2-3B, with its heads "
        "kartmannXu/MERaLion-2-3B-Medusa)",
    )
    add("--heads", metavar="HEADS", help="Medusa heads: a .pt or .safetensors file, a folder or a hub id")
    add(
        "--mlx-path",
        default="mlx_model",
        metavar="DIR",
        help="the folder to make, not there yet (default: mlx_model)",
    )
    _add_precision(add)
    add("--debug", action="store_true", help="show the traceback of an error")
    return result


def _add_precision(add: Callable[..., None]) -> None:
    add("-q", "--quantize", action="store_true", help="quantize the linear layers and the token embedding")
    add(
        "--q-bits",
        type=int,
        choices=(2, 3, 4, 5, 6, 8),
        help="bits per weight; implies -q (default: 4, mxfp8: 8)",
    )
    add(
        "--q-group-size",
        type=int,
        metavar="N",
        help="weights per scale (default: 64; mxfp4 and mxfp8: 32; nvfp4: 16)",
    )
    add(
        "--q-mode", choices=MODES, default="affine", help="kind of quantization; other than affine implies -q"
    )
    add(
        "--q-encoder-bits",
        type=int,
        choices=(4, 5, 6, 8, 16),
        help="bits of the speech encoder of a quantized model, 16: as it is (default: MERaLiON-2 16, Whisper as the "
        "rest)",
    )
    add("--q-heads", action="store_true", help="quantize the heads too, with the same settings")
    add(
        "--quant-predicate",
        choices=MIXED,
        help="mixed recipe low_high: more bits for touchy layers; implies -q",
    )
    add(
        "--dtype",
        choices=("float16", "bfloat16", "float32"),
        help="type of the floats (default: the source's)",
    )
    add("-d", "--dequantize", action="store_true", help="undo the quantization of the source")


def main(argv: Sequence[str] | None = None) -> None:
    """Convert, print what was done; exit with 1 and one line on an error."""
    args = vars(parser().parse_args(argv))
    debug = args.pop("debug")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the half-written folder is removed
    try:
        from convert import convert

        report = convert(**args, progress=True)
    except MedusaError as error:
        if debug:
            raise
        print(f"convert: error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    for line in report.lines():
        print(line)


if __name__ == "__main__":
    main()
