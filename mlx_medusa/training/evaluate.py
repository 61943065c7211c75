"""Measure heads with the real engine on audio: tokens per verify, acceptance, speed, and whether the text stays."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from tqdm import tqdm

from mlx_medusa.errors import AudioError, OptionError
from mlx_medusa.medusa.vocabulary import DraftVocabulary
from mlx_medusa.speech.results import Transcription
from mlx_medusa.speech.transcriber import SpeechToText
from mlx_medusa.training.data import Batch
from mlx_medusa.training.harvest import HarvestOptions, decode_encoded, list_audio, read_windows
from mlx_medusa.training.objective import Scores, Target

Report = dict[str, Any]


def evaluate(
    transcriber: SpeechToText,
    sources: Iterable[str | Path],
    *,
    width: int | None = None,
    language: str | None = "en",
    progress: bool = False,
) -> tuple[Report, list[AudioError]]:
    """Transcribe audio with the transcriber's heads and without; (report, errors of the files that cannot be read).

    The report holds, for all files together and for each, ``tokens_per_verify`` and ``accepted_per_head`` (of all
    rounds) as the engine measured them, seconds with heads and at width 1, and whether the texts are the same;
    ``expected`` holds top-1 and top-5 accuracy per guess and the tokens per verify that follow from them.
    """
    drafter: Any = transcriber.drafter
    if drafter is None:
        raise OptionError("there are no heads to evaluate: name some with --heads")
    vocab_size = transcriber.model.args.vocab_size
    few = drafter.guess if isinstance(drafter.guess, DraftVocabulary) else None
    ids = np.unique(np.array(few.ids)) if few else np.arange(vocab_size)
    target = Target(transcriber.model, ids.astype(np.int32), vocab_size)
    scores = Scores(drafter.max_drafts)
    clips, errors = [], []
    for path in tqdm(list_audio(sources), unit="file", disable=None if progress else True):
        try:
            plain = transcriber.transcribe(path, language=language, medusa=False)
            drafted = transcriber.transcribe(path, language=language, width=width)
            clips.append(_clip(path, plain, drafted))
            for batch in _batches(transcriber, path, scores.guesses, language):
                scores.add(drafter.heads, batch, target)
        except AudioError as error:
            errors.append(error)
    return {**_total(clips), "expected": scores.to_dict(), "clips": clips}, errors


def _clip(path: Path, plain: Transcription, drafted: Transcription) -> Report:
    return {
        "name": path.name,
        "audio_seconds": round(drafted.duration, 2),
        "tokens": drafted.medusa.tokens,
        "rounds": drafted.medusa.rounds,
        "tokens_per_verify": round(drafted.medusa.tokens_per_verify, 3),
        "accepted_per_head": drafted.medusa.accepted_per_head,
        "width": drafted.medusa.width,
        "decode_seconds": drafted.medusa.decode_seconds,
        "draft_seconds": drafted.medusa.draft_seconds,
        "encode_seconds": drafted.medusa.encode_seconds,
        "decode_seconds_at_width_1": plain.medusa.decode_seconds,
        "encode_seconds_at_width_1": plain.medusa.encode_seconds,
        "same_text": plain.text == drafted.text,
    }


def _total(clips: list[Report]) -> Report:
    """The sums over the clips, and what follows from them."""
    names = ("audio_seconds", "tokens", "rounds", "decode_seconds", "draft_seconds", "encode_seconds",
             "decode_seconds_at_width_1", "encode_seconds_at_width_1", "same_text")  # fmt: skip
    sums: Report = {name: round(sum(clip[name] for clip in clips), 3) for name in names}
    rounds = max(sums["rounds"], 1)
    heads = np.sum([clip["accepted_per_head"] for clip in clips], axis=0) if clips else np.zeros(0)
    whole = [sums[f"encode_seconds{end}"] + sums[f"decode_seconds{end}"] for end in ("_at_width_1", "")]
    return {
        "files": len(clips),
        **sums,
        "tokens_per_verify": round(sums["tokens"] / rounds, 3),
        "accepted_per_head": (heads / rounds).round(4).tolist(),
        "draft_milliseconds_per_round": round(sums["draft_seconds"] / rounds * 1000, 2),
        "decode_speed_up": round(sums["decode_seconds_at_width_1"] / max(sums["decode_seconds"], 1e-9), 3),
        "speed_up": round(whole[0] / max(whole[1], 1e-9), 3),
    }


def _batches(transcriber: SpeechToText, path: Path, guesses: int, language: str | None) -> Iterable[Batch]:
    """What training would read of a file: its windows, one by one."""
    options = HarvestOptions(language=language)
    for window in read_windows(path):
        encoded = transcriber.encode(window)
        ((tokens, hidden),) = decode_encoded(transcriber, encoded, False, options)
        if len(tokens) < 2:
            continue
        rows = len(tokens) - 1
        padded = np.zeros((1, rows + guesses), dtype=np.int32)
        padded[0, : len(tokens)] = tokens
        yield Batch(
            encoded.astype(mx.float32),
            hidden[None, :rows].astype(mx.float32),
            padded,
            np.array([len(tokens)]),
        )


def table(report: Report) -> str:
    """The report in words."""
    expected = report["expected"]
    percent = lambda rates: " ".join(f"{rate:.0%}" for rate in rates)  # noqa: E731
    return "\n".join(
        [
            f"{report['files']} files, {report['audio_seconds']:.0f} s, {report['tokens']} tokens in "
            f"{report['rounds']} rounds: {report['tokens_per_verify']} tokens per verify "
            f"(expected {expected['tokens_per_verify']:.3f})",
            f"accepted per head: {percent(report['accepted_per_head'])}; top-1: {percent(expected['top1'])}; "
            f"top-5: {percent(expected['top5'])}",
            f"decode {report['decode_seconds']:.2f} s (width 1: {report['decode_seconds_at_width_1']:.2f} s, "
            f"{report['decode_speed_up']:.2f} x), drafting {report['draft_milliseconds_per_round']} ms a round, "
            f"encode {report['encode_seconds']:.2f} s, end to end {report['speed_up']:.2f} x",
            f"same text in {int(report['same_text'])} of {report['files']} files",
        ]
    )
