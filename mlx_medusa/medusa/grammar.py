"""Whisper's timestamp grammar, on numpy alone, so that a decode loop without MLX has it too."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class TimestampGrammar:
    """What may follow what; see ``mlx_medusa.medusa.rules.Timestamps``."""

    first: int  # timestamps are the ids from here on
    eos: int
    no_timestamps: int
    max_initial: int | None = None  # steps that the first timestamp is at most; None: no limit

    def banned(self, written: Sequence[int], vocab_size: int) -> np.ndarray:
        """[V] bool: what may not follow ``written``, the tokens since the prompt."""
        banned = np.zeros(vocab_size, dtype=bool)
        banned[self.no_timestamps] = True
        stamps = [token for token in written if token >= self.first]
        if not written:
            banned[: self.first] = True
            if self.max_initial is not None:
                banned[self.first + self.max_initial + 1 :] = True
            return banned
        after_stamp = written[-1] >= self.first
        paired = len(written) < 2 or written[-2] >= self.first
        if after_stamp and paired:
            banned[self.first :] = True
        elif after_stamp:
            banned[: self.eos] = True
        if stamps:
            # an end may equal the begin of the segment that follows, but no segment has zero length
            floor = stamps[-1] if after_stamp and not paired else stamps[-1] + 1
            banned[self.first : floor] = True
        return banned
