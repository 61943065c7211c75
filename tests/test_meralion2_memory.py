"""The memory arithmetic of examples/meralion_memory.py against its own parts and what the README says. No weights."""

from pathlib import Path

import pytest
from make_random_checkpoint import meralion_config
from meralion_memory import memory, read_per_pass, weights

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
    assert four["speech_audio_adapter"] / PARAMETERS["speech_audio_adapter"] == pytest.approx(4.5 / 8, rel=1e-3)
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
