"""The oracle's dequantization: by hand from the published formats, and against MLX on what MLX quantizes. No model."""

import mlx.core as mx
import numpy as np
import pytest

from convert.quantize import MODES
from mlx_medusa.reference.quantized import dequantize, e2m1, e4m3, e8m0, unpack

CASES = [
    (mode, bits, size) for mode, (all_bits, sizes) in MODES.items() for bits in all_bits for size in sizes
]


def test_element_types_have_the_published_values():
    """OCP Microscaling Formats 1.0, section 5.3."""
    assert e2m1(np.arange(16, dtype=np.uint8)).tolist() == [
        0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6,
    ]  # fmt: skip
    codes = np.array([0x00, 0x01, 0x07, 0x08, 0x38, 0x3C, 0x7E, 0xB8, 0xFE], np.uint8)
    assert e4m3(codes).tolist() == [0, 2**-9, 7 * 2**-9, 2**-6, 1, 1.5, 448, -1, -448]
    assert e8m0(np.array([127, 128, 120, 1], np.uint8)).tolist() == [1, 2, 2**-7, 2.0**-126]
    assert np.isnan([*e4m3(np.array([0x7F, 0xFF], np.uint8)), *e8m0(np.array([255], np.uint8))]).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_elements_are_packed_from_the_lowest_bit_on(bits):
    """A row as one long number, which Python's integers can write out: element i is at bit i * bits."""
    values = np.random.default_rng(bits).integers(0, 2**bits, size=(2, 64))
    rows = [sum(int(value) << (bits * place) for place, value in enumerate(row)) for row in values]
    packed = np.stack([np.frombuffer(row.to_bytes(8 * bits, "little"), "<u4") for row in rows])
    np.testing.assert_array_equal(unpack(packed, bits), values)


def test_affine_is_scale_times_element_plus_bias():
    packed = np.array([[0x76543210] * 4], np.uint32)  # 0 to 7, four times
    found = dequantize(
        packed,
        np.array([[0.5]], np.float32),
        np.array([[-1]], np.float32),
        group_size=32,
        bits=4,
        mode="affine",
    )
    assert found.tolist() == [[0.5 * element - 1 for element in range(8)] * 4]


@pytest.mark.parametrize(("mode", "bits", "group_size"), CASES)
def test_every_mode_of_the_converter_equals_mlx(mode, bits, group_size):
    """Also small and large numbers, zeros, and rows of a stack of matrices."""
    rng = np.random.default_rng(bits + group_size)
    weight = rng.normal(size=(3, 5, 384)) * np.exp(rng.normal(size=(3, 5, 1)) * 3)
    weight[0, 0] = 0
    words, scales, *biases = mx.quantize(mx.array(weight.astype(np.float32)), group_size, bits, mode)
    settings = {"group_size": group_size, "bits": bits, "mode": mode}
    theirs = mx.dequantize(words, scales, *biases, **settings).astype(mx.float32)
    ours = dequantize(np.array(words), np.array(scales), np.array(biases[0]) if biases else None, **settings)
    np.testing.assert_allclose(ours, np.array(theirs), rtol=1e-6, atol=1e-7)
    if mode != "affine":  # a product with a power of two, or of few bits, is exact
        np.testing.assert_array_equal(ours, np.array(theirs))


def test_another_mode_is_refused():
    with pytest.raises(ValueError, match="int4"):
        dequantize(
            np.zeros((1, 4), np.uint32), np.ones((1, 1), np.float32), None, group_size=32, bits=4, mode="int4"
        )
