"""PyTorch files, read without running anything that is in them. The one place that imports torch."""

import ctypes
import mmap
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_medusa.errors import CheckpointError


def load(path: Path) -> Any:
    """What ``torch.save`` wrote, tensors and plain containers only.

    Raises CheckpointError if torch is not installed, or if the file is broken or holds other objects.
    """
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f'{path}: reading .pt files needs PyTorch: pip install "mlx-medusa[torch]"'
        ) from error
    try:
        with path.open("rb") as file:
            start = file.read(2)
        if start not in (b"PK", b"\x80\x02"):  # a zip archive; before PyTorch 1.6, a bare pickle
            raise CheckpointError(f"{path}: not a PyTorch file; fetch the file again")
        # mmap keeps a large file out of memory; files of the format before 1.6 cannot be mapped
        return torch.load(path, map_location="cpu", weights_only=True, mmap=can_map(path))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except Exception as error:  # pickle, zip and torch each have their own
        if "weights_only" in str(error).lower() or "unsupported" in str(error).lower():
            reason = (
                "holds more than tensors, which could run code, so it was not read; save a plain state dict"
            )
        else:
            reason = "cut short or damaged; fetch the file again"
        raise CheckpointError(f"{path}: {reason}") from error


def to_mlx(tensor: Any) -> mx.array:
    """A copy of a torch tensor."""
    import torch

    tensor = tensor.detach().contiguous()
    if tensor.dtype == torch.bfloat16:  # numpy has none
        return mx.array(tensor.view(torch.int16).numpy().view(np.uint16)).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def can_map(path: Path) -> bool:
    """Whether ``load`` maps this file into memory instead of reading it."""
    return zipfile.is_zipfile(path)


def release(tensor: Any) -> None:
    """Drop the pages of a tensor that will not be read again, from a mapped file, out of this process's memory."""
    advise = getattr(mmap, "MADV_DONTNEED", None)
    page = mmap.PAGESIZE
    first = (tensor.data_ptr() + page - 1) // page * page  # whole pages only: neighbours may share the others
    last = (tensor.data_ptr() + tensor.nbytes) // page * page
    if advise is not None and last > first and tensor.is_contiguous():
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(advise))
