"""The PyTorch oracle: what transformers' own classes write, on CUDA or a CPU. It needs the extra ``reference``.

Nothing in this package imports MLX or a model of ours: an oracle that shared code with what it judges would share its
mistakes. Use it in a process that does not import MLX: on Linux an OpenBLAS comes with that, which takes the place of
PyTorch's own BLAS as well; its sums run in another order, so the last bits differ.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from mlx_medusa.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from mlx_medusa.reference.decode import Reference

FAMILIES = {  # model_type -> module here
    "whisper": "whisper",
    "meralion2": "meralion2",
    "llama": "llama",
    "mistral": "llama",
}


def load(
    folder: str | Path,
    *,
    heads: str | Path | None = None,
    medusa: bool = False,
    device: str = "auto",
    dtype: str = "float32",
) -> "Reference":
    """The oracle of a model folder, quantized or not, on ``device`` ("auto": CUDA where there is one, else the CPU).

    ``medusa`` loads the folder's heads, ``heads`` those of a folder or a medusa.safetensors. Quantized weights are
    dequantized by the published formulas. Raises CheckpointError if the files are not a model, OptionError without
    PyTorch and transformers or for a device or dtype that cannot be.
    """
    from importlib import import_module

    from mlx_medusa.reference.folder import Folder

    try:
        from mlx_medusa.reference import runtime
    except ImportError as error:
        raise OptionError(f'{error.name or error} is missing: pip install "mlx-medusa[reference]"') from error
    source = Folder.find(folder)
    model_type = source.config.get("model_type")
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise CheckpointError(
            f"{source.path}: the reference has no model_type {model_type!r} (it has {known})"
        )
    module = import_module(f"{__name__}.{FAMILIES[model_type]}")
    place = runtime.place(device, dtype)
    reference: Reference = module.load(source, place)
    if heads is not None or medusa:
        from mlx_medusa.reference.heads import load_drafter

        reference.drafter = load_drafter(Path(heads) if heads is not None else source.path, place)
    return reference
