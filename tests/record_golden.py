"""Record what transformers' greedy decoding writes for the clips of the real-model tests.

    python tests/record_golden.py tiny.en MODEL_FOLDER [--only NAME ...] > tests/golden/whisper-tiny.en.json

MODEL_FOLDER is an unquantized folder that `convert` made; transformers runs it in float32. A process of its own: the
OpenBLAS that mlx_medusa loads would slow PyTorch down.
"""

import os

os.environ["MLX_MEDUSA_OPENBLAS"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from clips import english, nine_languages
from fetch_speech import fetch_languages, fetch_speech
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

MAX_TOKENS = 224


def fingerprint(samples: np.ndarray) -> str:
    """Of the samples as 16-bit integers, so that a resampler's last bits do not matter."""
    return hashlib.sha256(np.round(samples * 32767).astype("<i2").tobytes()).hexdigest()[:16]


class Reference:
    """transformers' WhisperForConditionalGeneration on one window of audio."""

    def __init__(self, folder: Path):
        self.model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.features = WhisperFeatureExtractor.from_pretrained(folder)
        self.settings = self.model.generation_config

    def encode(self, samples: np.ndarray):
        mel = self.features(samples, sampling_rate=16_000, return_tensors="pt").input_features
        return self.model.get_encoder()(mel)

    def tokens(self, encoded, **options) -> list[int]:
        """The tokens of the text, without the prompt and the end."""
        mask = torch.ones(encoded[0].shape[:2])
        ids = self.model.generate(
            encoder_outputs=encoded,
            attention_mask=mask,
            do_sample=False,
            num_beams=1,
            max_new_tokens=MAX_TOKENS,
            **options,
        )[0].tolist()
        if self.settings.no_timestamps_token_id in ids:
            ids = ids[ids.index(self.settings.no_timestamps_token_id) + 1 :]
        return ids[: ids.index(self.settings.eos_token_id)] if self.settings.eos_token_id in ids else ids

    def language(self, encoded) -> tuple[str, float]:
        """(code, probability among the languages)"""
        start = torch.tensor([[self.settings.decoder_start_token_id]])
        logits = self.model(encoder_outputs=encoded, decoder_input_ids=start).logits[0, 0]
        codes, ids = zip(*self.settings.lang_to_id.items(), strict=True)
        probabilities = torch.softmax(logits[list(ids)], -1)
        return codes[int(probabilities.argmax())].strip("<|>"), round(float(probabilities.max()), 5)


def record(reference: Reference, name: str, samples: np.ndarray, multilingual: bool) -> dict:
    encoded = reference.encode(samples)
    entry: dict = {"samples": fingerprint(samples)}
    if not multilingual:
        return entry | {"transcribe": reference.tokens(encoded)}
    given = name.split("/")[0]
    code, probability = reference.language(encoded)
    entry |= {"language": code, "probability": probability}
    entry["transcribe"] = reference.tokens(encoded, language=given, task="transcribe")
    entry["translate"] = reference.tokens(encoded, language=given, task="translate")
    if code != given:
        entry["transcribe_detected"] = reference.tokens(encoded, language=code, task="transcribe")
    return entry


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("tiny.en", "base"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", help="names of clips (default: all)")
    args = parser.parse_args()
    reference = Reference(args.folder)
    clips = (
        nine_languages(fetch_languages())
        if args.model == "base"
        else english(fetch_speech(), fetch_languages())
    )
    entries = {}
    for name, samples in clips:
        if not args.only or name in args.only:
            print(name, file=sys.stderr)
            entries[name] = record(reference, name, samples, args.model == "base")
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32"}
    head = json.dumps({"model": f"whisper-{args.model}", **versions, "max_tokens": MAX_TOKENS})
    rows = ",\n".join(f'"{name}": {json.dumps(entry)}' for name, entry in entries.items())
    print(f'{{"recorded_by": {head},\n"clips": {{\n{rows}\n}}}}')


if __name__ == "__main__":
    main()
