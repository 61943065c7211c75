"""What the architectures share: arguments read from a config.json."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar

from mlx_medusa.errors import CheckpointError

Args = TypeVar("Args", bound="BaseModelArgs")


@dataclasses.dataclass(frozen=True)
class BaseModelArgs:
    """Base of an architecture's arguments, whose names are the keys of the Hugging Face config."""

    @classmethod
    def from_config(cls: type[Args], config: dict[str, Any], source: str | Path) -> Args:
        """Pick the arguments out of ``config``; other keys are ignored, a missing one is a CheckpointError."""
        values: dict[str, Any] = {}
        for field in dataclasses.fields(cls):
            value = config.get(field.name)
            if value is None:
                if field.default is dataclasses.MISSING:
                    raise CheckpointError(
                        f"{source}: setting {field.name!r} is missing, so this model cannot be built"
                    )
                continue
            if field.type is int and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise CheckpointError(
                    f"{source}: setting {field.name!r} is {value!r}, expected a positive integer"
                )
            values[field.name] = value
        args = cls(**values)
        if problem := args.check():
            raise CheckpointError(f"{source}: {problem}")
        return args

    def check(self) -> str | None:
        """What makes these arguments impossible together, if anything does."""
        return None
