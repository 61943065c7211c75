"""Give MLX's CPU backend a fast BLAS on Linux.

The Linux wheel of MLX links the reference BLAS, which multiplies float32 matrices at about 2 GFLOP/s
and makes a pass over five rows cost five times one row, so that speculation cannot pay. An OpenBLAS that is
in the global symbol namespace before MLX is loaded takes its place. It is put there when MLX is first imported, and not
before: PyTorch, which has a BLAS of its own, would take it too, and compute other last bits.
"""

import ctypes
import importlib.abc
import os
import sys
from typing import Any

SWITCH = "MLX_MEDUSA_OPENBLAS"  # "0" turns the preload off; a path names the library to load
_LIBRARY = "libopenblas.so.0"
_notice: str | None = None


class _BeforeMLX(importlib.abc.MetaPathFinder):
    """Finds no module; being asked for MLX, it loads OpenBLAS."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "mlx.core":
            sys.meta_path.remove(self)
            preload()


def preload_with_mlx() -> None:
    """Call ``preload`` just before MLX is imported for the first time."""
    if "mlx.core" in sys.modules:
        preload()  # too late, which it notes
    else:
        sys.meta_path.insert(0, _BeforeMLX())


def preload() -> bool:
    """Load OpenBLAS into the global namespace; True if it is in place. Call before ``import mlx.core``."""
    global _notice
    choice = os.environ.get(SWITCH, "")
    if not sys.platform.startswith("linux") or choice == "0":
        return False
    if "mlx.core" in sys.modules:
        _notice = "mlx was imported before mlx_medusa, so OpenBLAS is not in use: import mlx_medusa first"
        return False
    try:
        ctypes.CDLL(choice or _LIBRARY, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        _notice = (
            f"{choice or _LIBRARY} cannot be loaded, so MLX uses a 10 to 30 times slower BLAS on this CPU: "
            f"apt-get install libopenblas0-pthread (or {SWITCH}=0 to hide this line)"
        )
        return False
    return True


def print_notice() -> None:
    """Say once on standard error why OpenBLAS is not in use; nothing when it is, or when it was turned off."""
    global _notice
    if _notice:
        print(f"mlx_medusa: {_notice}", file=sys.stderr)
        _notice = None
