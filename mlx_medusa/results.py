"""What the results of speech and of text share: how the decode loop did."""

from dataclasses import dataclass

from mlx_medusa.medusa.decode import Statistics


@dataclass(frozen=True)
class MedusaStatistics:
    """How the decode loop did.

    ``tokens`` were decided in ``rounds`` verifier passes (the token that each prefill decides is not counted),
    ``accepted`` of ``drafted`` guesses were right, ``accepted_per_head`` by distance from the last sure token. Speech:
    encoding takes from samples to cross-attention K/V, decoding includes the prefill. Text: encoding is the prefill,
    decoding what follows. Both times include neither loading nor writing; decoding includes the drafting.
    """

    tokens: int
    rounds: int
    drafted: int
    accepted: int
    accepted_per_head: list[int]
    tokens_per_verify: float
    width: int
    encode_seconds: float
    decode_seconds: float
    draft_seconds: float = 0.0

    def line(self) -> str:
        """One line for ``--stats``."""
        rate = self.tokens / self.decode_seconds if self.decode_seconds else 0.0
        heads = " ".join(f"{count / max(self.rounds, 1):.0%}" for count in self.accepted_per_head)
        how = f"accepted per head: {heads}" if heads else "plain decoding, no heads"
        return (
            f"{self.tokens} tokens in {self.rounds} passes of width {self.width} ({rate:.0f} tokens/s), "
            f"{self.tokens_per_verify:.2f} tokens per verify, {how}"
        )


def medusa_statistics(
    counts: Statistics, depth: int, width: int, encode_seconds: float, decode_seconds: float
) -> MedusaStatistics:
    """The counts of a decode loop that guesses ``depth`` tokens ahead in passes of ``width`` rows, with its times."""
    heads = counts.accepted_per_head + [0] * (depth - len(counts.accepted_per_head))
    return MedusaStatistics(
        tokens=counts.tokens,
        rounds=counts.rounds,
        drafted=counts.drafted,
        accepted=counts.accepted,
        accepted_per_head=heads,
        tokens_per_verify=counts.tokens_per_verify,
        width=width,
        encode_seconds=encode_seconds,
        decode_seconds=decode_seconds,
        draft_seconds=counts.draft_seconds,
    )
