"""Single modules of mlx-lm: importing the whole of it imports transformers too, which takes seconds."""

from functools import cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


@cache
def part(name: str) -> ModuleType:
    """The module ``mlx_lm.{name}``, one that imports nothing of mlx-lm: ``models.rope_utils`` or ``sample_utils``.

    Raises ImportError if mlx-lm has none.
    """
    package = find_spec("mlx_lm")  # does not import it
    if package is None or not package.submodule_search_locations:
        raise ImportError('mlx-lm is not installed: pip install "mlx-lm>=0.31"')
    file = Path(package.submodule_search_locations[0], *name.split(".")).with_suffix(".py")
    spec = spec_from_file_location(f"mlx_lm.{name}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ImportError(f"{file}: not there; this mlx-lm is too new or too old: pip install -U mlx-medusa")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
