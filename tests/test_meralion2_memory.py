"""The memory arithmetic of examples/meralion_memory.py against counts by hand, the README and a converted folder."""

from pathlib import Path

import numpy as np
import pytest
from make_random_checkpoint import make_meralion, meralion_config
from meralion_memory import memory, read_per_pass, weights

import mlx_medusa
from convert import convert
from mlx_medusa import models

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
PARAMETERS = {  # by hand: Whisper large-v3's encoder with 128 mels, the adapter, Gemma 2 2B
    "speech_encoder": 1280 * 128 * 3 + 1280 + 1280 * 1280 * 3 + 1280 + 1500 * 1280
    + 32 * (4 * 1280**2 + 3 * 1280 + 2 * 1280 * 5120 + 5120 + 1280 + 4 * 1280) + 2 * 1280,
    "ln_speech": 2 * 1280,
    "speech_audio_adapter": 19_200 * 6400 + 6400 + 2 * (6400**2 + 6400) + 6400 * 2304 + 2304,
    "text_decoder": 256_000 * 2304
    + 26 * (2304 * 2048 * 2 + 2304 * 1024 * 2 + 3 * 2304 * 9216 + 4 * 2304) + 2304,
}  # fmt: skip


def test_weights():
    """Unquantized, two bytes for each parameter."""
    model = models.build(meralion_config())
    sizes = weights(model, 8, 16)
    assert sizes["speech_encoder"] == 2 * PARAMETERS["speech_encoder"]
    assert sizes["ln_speech"] == 2 * PARAMETERS["ln_speech"]
    assert sizes["text_decoder"] / PARAMETERS["text_decoder"] == pytest.approx(8.5 / 8, rel=1e-3)
    four = weights(model, 4, 8)
    assert four["text_decoder"] / PARAMETERS["text_decoder"] == pytest.approx(4.5 / 8, rel=1e-3)
    assert four["speech_audio_adapter"] / PARAMETERS["speech_audio_adapter"] == pytest.approx(
        4.5 / 8, rel=1e-3
    )
    assert four["speech_encoder"] / PARAMETERS["speech_encoder"] == pytest.approx(8.5 / 8, rel=2e-2)


def test_300_s_fit_a_mac_of_8_gb():
    """Under 4 GB, weights and all, and half of that is never far from free on such a machine."""
    for encoder_bits in (16, 8):
        total = sum(memory(meralion_config(), 4, encoder_bits, 300).values())
        assert total < 4e9
        assert f"{total / 1e9:.1f} GB" in README


def test_the_budget_can_fail():
    """In 8 bits it does not fit."""
    assert sum(memory(meralion_config(), 8, 16, 300).values()) > 4e9


def test_bytes_of_a_pass():
    """Drafting reads the projection a second time unless the heads have a draft vocabulary."""
    plain = read_per_pass(meralion_config(), 4, 4)
    small = read_per_pass(meralion_config(), 4, 4, vocabulary=16_384)
    assert plain["verify"] == small["verify"]
    for found in (plain, small):
        assert f"{found['draft'] / sum(found.values()):.0%}" in README


def test_a_random_checkpoint_has_the_size_that_was_computed(tmp_path):
    """The script's checkpoint, small, from shards to a 4-bit folder with heads and on to text."""
    config = meralion_config(
        "tiny", vocab_size=384, hidden_size=128, intermediate_size=128, num_hidden_layers=2, head_dim=64
    )
    make_meralion(tmp_path / "random", config=config, shard_bytes=20_000_000)
    assert len(list((tmp_path / "random").glob("model-*.safetensors"))) > 1
    convert(
        tmp_path / "random", tmp_path / "model", tmp_path / "random" / "heads", q_bits=4, q_encoder_bits=8
    )
    computed = memory(config, 4, 8, 30)
    on_disk = {
        part: (tmp_path / "model" / f"{part}.safetensors").stat().st_size for part in ("model", "medusa")
    }
    assert on_disk["model"] == pytest.approx(computed["weights"], rel=0.02)  # the header is the rest
    header = int.from_bytes((tmp_path / "model" / "medusa.safetensors").read_bytes()[:8], "little")
    assert on_disk["medusa"] - header - 8 == computed["heads"]
    transcriber = mlx_medusa.load(tmp_path / "model")
    noise = np.random.default_rng(0).normal(size=16_000).astype(np.float32)
    assert transcriber.transcribe(noise, max_tokens=12).medusa.width == 5
