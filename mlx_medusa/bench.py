"""Time decoder steps and whole transcriptions on this machine, beside mlx-whisper where that is installed."""

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from mlx_medusa.demo import cache_dir, demo_model
from mlx_medusa.errors import AudioError, MedusaError, OptionError, OutputError

if TYPE_CHECKING:
    import mlx.core as mx
    import numpy as np

    from mlx_medusa.speech.transcriber import Transcriber

WIDTHS = range(1, 9)  # rows of a verifier pass
CONTEXT = 24  # rows in the cache when a step is timed
STEPS_PER_RUN = 10  # steps are short, so they are timed this many times more often than transcriptions
SHORT = 16_000  # samples to warm up with
OURS = "mlx-medusa"
# mlx-whisper as it runs by default (half precision, which MLX's CPU backend is slow at) and at its best on a CPU
PEERS = {"mlx-whisper": "float16", "mlx-whisper float32": "float32"}

Report = dict[str, Any]


@dataclass(frozen=True)
class Timing:
    """Seconds that one action took, over ``runs`` runs."""

    median: float
    minimum: float
    maximum: float
    runs: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Timing":
        return cls(statistics.median(seconds), min(seconds), max(seconds), len(seconds))


def interleave(
    actions: Mapping[str, Callable[[], object]],
    runs: int,
    warm_up: int = 1,
    prepare: Mapping[str, Callable[[], object]] | None = None,
) -> dict[str, Timing]:
    """Time each action ``runs`` times, in turns, so that a slow moment of the machine hits all of them.

    ``prepare`` is called before an action and not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for run in range(warm_up + runs):
        for name, action in actions.items():
            if prepare and name in prepare:
                prepare[name]()
            start = perf_counter()
            action()
            elapsed = perf_counter() - start
            if run >= warm_up:
                seconds[name].append(elapsed)
    return {name: Timing.of(s) for name, s in seconds.items()}


# --- mlx-whisper with the same weights ---

PEER_NAMES = (  # our (Hugging Face) names -> OpenAI's, applied in this order
    ("model.", ""),
    (".layers.", ".blocks."),
    ("encoder_attn_layer_norm", "cross_attn_ln"),
    ("self_attn_layer_norm", "attn_ln"),
    ("final_layer_norm", "mlp_ln"),
    ("encoder_attn", "cross_attn"),
    ("self_attn", "attn"),
    ("q_proj", "query"),
    ("k_proj", "key"),
    ("v_proj", "value"),
    ("out_proj", "out"),
    ("fc1", "mlp1"),
    ("fc2", "mlp2"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
    ("decoder.embed_tokens", "decoder.token_embedding"),
    ("decoder.embed_positions.weight", "decoder.positional_embedding"),
)


def peer_name(name: str) -> str:
    """The OpenAI name of one of our parameters."""
    for ours, theirs in PEER_NAMES:
        name = name.replace(ours, theirs)
    return name


def write_peer_folder(model: Any, dtype: str, folder: Path) -> Path:
    """Write a loaded model as mlx-whisper reads it, with weights of type ``dtype``."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    parameters: Any = tree_flatten(model.parameters())
    weights = {
        peer_name(name): array.astype(getattr(mx, dtype))
        for name, array in parameters
        if name != "model.encoder.embed_positions.weight"  # mlx-whisper computes these sines
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "weights.safetensors"), weights)
    args = model.args
    dimensions = {
        "n_mels": args.num_mel_bins,
        "n_audio_ctx": args.max_source_positions,
        "n_audio_state": args.d_model,
        "n_audio_head": args.encoder_attention_heads,
        "n_audio_layer": args.encoder_layers,
        "n_vocab": args.vocab_size,
        "n_text_ctx": args.max_target_positions,
        "n_text_state": args.d_model,
        "n_text_head": args.decoder_attention_heads,
        "n_text_layer": args.decoder_layers,
    }
    (folder / "config.json").write_text(json.dumps({"model_type": "whisper", **dimensions}))
    return folder


class Peer:
    """mlx-whisper on a folder that ``write_peer_folder`` made."""

    def __init__(self, folder: Path, dtype: str):
        self.folder = str(folder)
        self.half = dtype == "float16"

    def load(self) -> Any:
        """The model, from mlx-whisper's own store, which holds one at a time."""
        import mlx.core as mx
        from mlx_whisper.transcribe import ModelHolder

        return ModelHolder.get_model(self.folder, mx.float16 if self.half else mx.float32)

    def step_action(self, mel: "mx.array", tokens: Sequence[int]) -> Callable[[], "mx.array"]:
        """Its decoder over one row behind ``tokens``, as its own decoding loop calls it."""
        import mlx.core as mx

        model = self.load()
        encoded = model.encoder(mel[None].astype(mx.float16 if self.half else mx.float32))
        _, filled, _ = model.decoder(mx.array([list(tokens)]), encoded)
        mx.eval(encoded, filled)

        def step() -> mx.array:
            # the decoder replaces the list's entries; the arrays in them stay as they are
            logits, _, _ = model.decoder(mx.array([[tokens[-1]]]), encoded, kv_cache=list(filled))
            mx.eval(mx.argmax(logits, axis=-1))
            return logits

        return step

    def transcribe(self, clip: "np.ndarray") -> str:
        """The text of a clip, under the options that our engine has."""
        import mlx_whisper

        return mlx_whisper.transcribe(
            clip,
            path_or_hf_repo=self.folder,
            language="en",
            temperature=0.0,
            without_timestamps=True,
            condition_on_previous_text=False,
            compression_ratio_threshold=None,
            logprob_threshold=None,
            no_speech_threshold=None,
            fp16=self.half,
        )["text"].strip()


def make_peers(model: Any, folder: Path) -> dict[str, Peer]:
    """mlx-whisper with our weights, once per type of PEERS; none if it is not installed."""
    if importlib.util.find_spec("mlx_whisper") is None:
        say('mlx-whisper is not installed, so its rows are left out: pip install "mlx-medusa[bench]"')
        return {}
    return {
        name: Peer(write_peer_folder(model, dtype, folder / dtype), dtype) for name, dtype in PEERS.items()
    }


# --- what is timed ---


def step_actions(model: Any, mel: "mx.array", tokens: Sequence[int]) -> dict[str, Callable[[], "mx.array"]]:
    """Our decoder over 1 to 8 rows behind ``tokens``: pass, projection, the best token of each row."""
    import mlx.core as mx

    from mlx_medusa.medusa.cache import KVCache
    from mlx_medusa.medusa.decode import chain_pass

    cache = KVCache(model.num_layers, model.attend(model.encode(mel[None])))
    mx.eval(chain_pass(model, tokens, cache))

    def step(width: int) -> mx.array:
        logits = model.logits(chain_pass(model, [tokens[-1]] * width, cache))
        mx.eval(mx.argmax(logits, axis=-1))
        cache.rewind(width)
        return logits

    return {str(width): lambda width=width: step(width) for width in WIDTHS}  # type: ignore[misc]


def time_steps(
    transcriber: "Transcriber", peers: Mapping[str, Peer], clip: "np.ndarray", runs: int
) -> dict[str, Timing]:
    """Decoder steps behind CONTEXT tokens: ours by number of rows, the peers' over one row."""
    from mlx_medusa.audio import log_mel

    mel = log_mel(clip, transcriber.model.args.num_mel_bins)
    tokens = [transcriber.tokenizer.sot, *range(1000, 1000 + CONTEXT - 1)]
    actions: dict[str, Callable[[], object]] = {**step_actions(transcriber.model, mel, tokens)}
    for name, peer in peers.items():
        actions[name] = peer.step_action(mel, tokens)
    say(f"decoder steps, {runs} runs")
    return interleave(actions, runs, warm_up=3)


def time_transcriptions(
    transcriber: "Transcriber", peers: Mapping[str, Peer], clips: Sequence["np.ndarray"], runs: int
) -> tuple[dict[str, Timing], dict[str, list[str]]]:
    """Transcriptions of all clips, without the loading of a model: times and texts."""
    texts: dict[str, list[str]] = {}

    def ours() -> None:
        results = [transcriber.transcribe(clip, language="en", medusa=False) for clip in clips]
        texts[OURS] = [result.text.strip() for result in results]

    def theirs(name: str, peer: Peer) -> None:
        texts[name] = [peer.transcribe(clip) for clip in clips]

    actions: dict[str, Callable[[], object]] = {OURS: ours}
    for name, peer in peers.items():
        actions[name] = lambda name=name, peer=peer: theirs(name, peer)  # type: ignore[misc]
        peer.transcribe(clips[0][:SHORT])  # warm up
    transcriber.transcribe(clips[0][:SHORT], language="en", medusa=False)
    say(f"transcriptions of {len(clips)} clips, {runs} runs")
    prepare = {name: peer.load for name, peer in peers.items()}
    return interleave(actions, runs, warm_up=0, prepare=prepare), texts


def time_widths(transcriber: "Transcriber", clips: Sequence["np.ndarray"], runs: int) -> dict[str, Report]:
    """Width of a verifier pass -> seconds of the decode loop and end to end over all clips, and tokens per verify.

    The loop's seconds hold prefill, drafting and verifying; end to end adds the encoder. Width 1 is without heads.
    """
    if transcriber.drafter is None:
        say("the model has no heads, so there is nothing to compare width 1 with")
        return {}
    widths = range(1, transcriber.drafter.max_drafts + 2)
    seconds: dict[int, list[tuple[float, float]]] = {width: [] for width in widths}
    counts, texts = {}, {}
    say(f"widths 1 to {widths[-1]} on {len(clips)} clips, {runs} runs")
    transcriber.transcribe(clips[0][:SHORT], language="en")
    for _ in range(runs):
        for width in widths:
            results = [transcriber.transcribe(clip, language="en", width=width) for clip in clips]
            loop = sum(result.medusa.decode_seconds for result in results)
            seconds[width].append((loop, loop + sum(result.medusa.encode_seconds for result in results)))
            counts[width] = [sum(getattr(r.medusa, name) for r in results) for name in ("tokens", "rounds")]
            texts[width] = [result.text for result in results]
    return {
        str(width): {
            "decode": asdict(Timing.of([loop for loop, _ in seconds[width]])),
            "end_to_end": asdict(Timing.of([whole for _, whole in seconds[width]])),
            "tokens_per_verify": round(counts[width][0] / counts[width][1], 3),
            "same_text_as_width_1": texts[width] == texts[1],
        }
        for width in widths
    }


def measure(model: Path, paths: Sequence[Path], runs: int) -> Report:
    """Time everything on one model folder and some clips."""
    import numpy as np

    import mlx_medusa
    from mlx_medusa import audio

    clips = [np.concatenate(list(audio.read_blocks(path))) for path in paths]
    transcriber = mlx_medusa.load(model)
    if not isinstance(transcriber, mlx_medusa.Transcriber):
        raise OptionError(f"{model}: only Whisper models are timed here: name one with --model")
    with tempfile.TemporaryDirectory(prefix="mlx-medusa-bench-") as temporary:
        peers = make_peers(transcriber.model, Path(temporary))
        steps = time_steps(transcriber, peers, clips[0], runs * STEPS_PER_RUN)
        whole, texts = time_transcriptions(transcriber, peers, clips, runs)
    by_width = time_widths(transcriber, clips, runs)
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": versions(),
        "model": model.name,
        "clips": [path.name for path in paths],
        "audio_seconds": round(sum(map(len, clips)) / audio.SAMPLE_RATE, 3),
        "cached_rows": CONTEXT,
        "step_seconds": {name: asdict(timing) for name, timing in steps.items()},
        "transcription_seconds": {name: asdict(timing) for name, timing in whole.items()},
        "clips_with_the_same_text": {
            name: sum(a == b for a, b in zip(texts[OURS], texts[name], strict=True)) for name in peers
        },
        "widths": by_width,
        "ratios": ratios(steps, whole),
    }


def ratios(steps: Mapping[str, Timing], whole: Mapping[str, Timing]) -> dict[str, float]:
    """The medians that matter, one over the other."""
    found = {"5 rows / 1 row": steps["5"].median / steps["1"].median}
    for peer in whole:
        if peer != OURS:
            found[f"step of 1 row / {peer}"] = steps["1"].median / steps[peer].median
            found[f"transcription / {peer}"] = whole[OURS].median / whole[peer].median
    return {name: round(value, 3) for name, value in found.items()}


# --- where it is timed ---


def machine() -> Report:
    """What the figures were taken on."""
    import mlx.core as mx

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "device": mx.default_device().type.name,
        "openblas": openblas_in_place(),
    }


def processor() -> str:
    """The processor's name."""
    try:
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except (OSError, subprocess.CalledProcessError):
        pass
    return platform.processor() or platform.machine()


def openblas_in_place() -> bool | None:
    """Whether OpenBLAS is loaded for MLX; None where MLX does not need it."""
    if not sys.platform.startswith("linux"):
        return None
    return "/libopenblas" in Path("/proc/self/maps").read_text()


def versions() -> dict[str, str]:
    """Python and the packages that matter for speed."""
    found = {"python": platform.python_version()}
    for name in ("mlx-medusa", "mlx", "mlx-whisper"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


# --- command line ---


def table(report: Report) -> str:
    """The report as text."""
    rows = {}
    for name, timing in report["step_seconds"].items():
        label = f"{name} row{'' if name == '1' else 's'}" if name.isdigit() else f"1 row, {name}"
        rows[f"step, {label}"] = timing
    for name, timing in report["transcription_seconds"].items():
        rows[f"{report['audio_seconds']} s of speech, {name}"] = timing
    lines = [
        f"{report['machine']['processor']}, {report['machine']['cores']} cores, "
        f"MLX {report['versions'].get('mlx', '?')} on {report['machine']['device']}, {report['model']}",
        "",
        f"{'':40}{'median':>12}{'min':>12}{'max':>12}",
    ]
    for label, timing in rows.items():
        values = (timing["median"], timing["minimum"], timing["maximum"])
        lines.append(f"{label:40}" + "".join(f"{value * 1000:9.1f} ms" for value in values))
    lines += ["", *(f"{label}: {value}" for label, value in report["ratios"].items())]
    for width, entry in report["widths"].items():
        gain = report["widths"]["1"]["decode"]["median"] / entry["decode"]["median"]
        whole = report["widths"]["1"]["end_to_end"]["median"] / entry["end_to_end"]["median"]
        lines.append(
            f"width {width}: {entry['tokens_per_verify']:.2f} tokens per verify, decode loop "
            f"{entry['decode']['median'] * 1000:.0f} ms, {gain:.2f} x as fast as width 1, end to end {whole:.2f} x"
            + ("" if entry["same_text_as_width_1"] else ", ANOTHER TEXT")
        )
    for name, clips in report["clips_with_the_same_text"].items():
        lines.append(f"same text as {name}: {clips} of {len(report['clips'])} clips")
    return "\n".join(lines)


def find_clips() -> list[Path]:
    """The five LibriVox clips; in a source tree they are fetched if they are not in the cache."""
    folder = cache_dir() / "speech-1" / "librivox"
    root = Path(__file__).parents[1]
    if not folder.is_dir() and (root / "examples" / "fetch_speech.py").is_file():
        command = [sys.executable, "-m", "examples.fetch_speech"]
        subprocess.run(command, cwd=root, stdout=subprocess.DEVNULL, check=False)
    if not folder.is_dir():
        raise AudioError("there are no clips to time: name some with --audio FILE ...")
    return sorted(folder.glob("*.wav"))


def find_model(chosen: Path | None) -> Path:
    """The model folder to time: the chosen one, or the demo model."""
    folder = chosen or demo_model()
    if folder is None:
        raise OptionError('no model: name a folder with --model, or pip install "mlx-medusa[demo]"')
    return folder


def write_json(report: Report, path: Path) -> None:
    """Write the report beside its place, then rename it, so that no half of it is ever seen."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(report, indent=2) + "\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(f"{path}: {error.strerror or error}; choose another file with --json") from error


def say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr)


def count(text: str) -> int:
    """A positive whole number, for argparse."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def parser() -> argparse.ArgumentParser:
    """The options."""
    result = argparse.ArgumentParser(prog="python -m mlx_medusa.bench", description=__doc__)
    result.add_argument("--model", type=Path, metavar="FOLDER", help="model folder (default: the demo model)")
    result.add_argument(
        "--audio", type=Path, nargs="+", metavar="FILE", help="clips (default: five of LibriVox)"
    )
    result.add_argument(
        "--runs", type=count, default=3, metavar="N", help="timed transcriptions (default: 3)"
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="also write the report as JSON")
    result.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    options = parser().parse_args(arguments)
    try:
        if options.json is not None and not options.json.parent.is_dir():
            raise OutputError(f"{options.json}: there is no folder {options.json.parent}")
        report = measure(find_model(options.model), options.audio or find_clips(), options.runs)
        print(table(report))
        if options.json is not None:
            write_json(report, options.json)
    except MedusaError as error:
        if options.debug:
            raise
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
