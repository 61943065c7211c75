"""Give MLX's CPU backend a fast BLAS on Linux.

The Linux wheel of MLX links the reference BLAS, which multiplies float32 matrices at about 2 GFLOP/s
and makes a pass over five rows cost five times one row, so that speculation cannot pay. An OpenBLAS that is
in the global symbol namespace before MLX is loaded takes its place.
"""

import ctypes
import os
import sys

SWITCH = "MLX_MEDUSA_OPENBLAS"  # "0" turns the preload off; a path names the library to load
_LIBRARY = "libopenblas.so.0"
_notice: str | None = None


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
