"""Transcribe with the functions that `python -m mlx_medusa.export --format mlxfn` wrote. MLX, and not mlx_medusa.

    python examples/mlxfn_transcribe.py FOLDER file.wav ...

What an app does that imports the functions, in as few lines as it takes; examples/mlxfn_transcribe.cpp is the same in
C++. The audio is 16 kHz mono; what is longer than 30 s is cut there, wherever that falls.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import soundfile
from tokenizers import Tokenizer


class Exported:
    """The functions of a folder, and a decode loop that drafts and verifies."""

    def __init__(self, folder: Path):
        content = json.loads((folder / "export.json").read_text())
        functions = content["functions"]
        self.settings: dict[str, Any] = content["decoding"]
        imported: dict[str, Any] = {
            name: mx.import_function(str(folder / function["file"])) for name, function in functions.items()
        }
        self.encoder, self.step = imported["encoder"], imported["step"]
        self.heads = imported.get("heads")  # a model without heads has none
        self.empty = [
            mx.zeros(port["shape"], getattr(mx, port["dtype"]))
            for port in functions["step"]["inputs"]
            if port["name"].startswith("past_")
        ]
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.rounds = self.decided = 0
        self._never = self._ban(self.settings["suppressed"])
        self._never_first = self._ban(self.settings["suppressed_at_begin"])

    def _ban(self, ids: list[int]) -> mx.array:
        bias = np.zeros(self.settings["vocab_size"], np.float32)
        bias[ids] = -np.inf
        return mx.array(bias)

    def _pick(self, logits: mx.array) -> list[int]:
        """[W, V] -> W ids"""
        ids: Any = mx.argmax(logits + self._never, axis=-1).tolist()
        return list(ids)

    def prompt(self, language: str) -> list[int]:
        s = self.settings
        spoken = [s["languages"][language], s["tasks"]["transcribe"]] if s["languages"] else []
        return [s["sot"], *spoken, s["no_timestamps"]]

    def transcribe(self, samples: np.ndarray, language: str = "en") -> list[int]:
        """Samples [n] float32 of at most 30 s -> the tokens of their text."""
        s = self.settings
        window = np.zeros(s["window_samples"], np.float32)
        window[: len(samples)] = samples
        listened = self.encoder(mx.array(window))  # K and V: of the decoder's layers, then of the heads'
        memory, heads_memory = listened[: len(self.empty)], listened[len(self.empty) :]

        tokens = self.prompt(language)
        begin = len(tokens)
        logits, hidden, *cache = self.step(mx.array([tokens]), mx.array([0]), *self.empty, *memory)
        tokens += self._pick(logits[:, -1] + self._never_first)
        hidden = hidden[
            :, -1:
        ]  # the state that predicted the last token, whose K and V are not in the cache yet
        while tokens[-1] != s["eot"] and (room := s["max_tokens"] - (len(tokens) - begin)):
            drafts = (
                self.heads(hidden, mx.array(tokens[-1:]), *heads_memory)[0].tolist() if self.heads else []
            )
            rows = [tokens[-1], *drafts[: min(s["width"], room) - 1]]
            logits, states, *cache = self.step(mx.array([rows]), mx.array([len(tokens) - 1]), *cache, *memory)
            picks = self._pick(logits[0])
            right = 0  # drafts that are what the verifier itself picks
            while right < len(rows) - 1 and picks[right] == rows[right + 1] != s["eot"]:
                right += 1
            hidden = states[:, right : right + 1]
            tokens += picks[: right + 1]  # a shorter length is all that it takes to rewind the cache
            self.rounds, self.decided = self.rounds + 1, self.decided + right + 1
        return [token for token in tokens[begin:] if token != s["eot"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Transcribe with exported MLX functions.")
    parser.add_argument("folder", type=Path, help="what export --format mlxfn wrote")
    parser.add_argument("audio", type=Path, nargs="+", help="16 kHz mono files")
    parser.add_argument("--language", default="en", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print tokens and counts, a JSON object per file")
    args = parser.parse_args()
    exported = Exported(args.folder)
    for path in args.audio:
        samples, rate = soundfile.read(path, dtype="float32")
        size = exported.settings["window_samples"]
        if rate != exported.settings["sample_rate"] or samples.ndim != 1:
            parser.error(f"{path}: {rate} Hz, {samples.ndim} channels: bring it to 16 kHz mono first")
        tokens = []
        for start in range(0, len(samples), size):
            tokens += exported.transcribe(samples[start : start + size], args.language)
        if args.json:
            counts = {"tokens": tokens, "decided": exported.decided, "rounds": exported.rounds}
            print(json.dumps({"file": path.name, **counts}))
        else:
            print(exported.tokenizer.decode(tokens).strip())


if __name__ == "__main__":
    main()
