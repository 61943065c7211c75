"""MLX's quantized formats back to numbers, by their published formulas, in numpy.

The layouts: https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html. Elements are packed
from the lower to the upper bits of little-endian words; where elements do not fill a word (3, 5, 6 bits) one goes on in
the next byte, so that each row is one little-endian stream of bits. The mx and nv element and scale types: OCP
Microscaling Formats 1.0 (E2M1, E4M3, E8M0).
"""

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)  # the magnitudes; the fourth bit is the sign


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Words [..., n] uint32 -> elements [..., n * 32 / bits] uint8, of ``bits`` bits each."""
    stream = np.unpackbits(
        np.ascontiguousarray(packed).astype("<u4").view(np.uint8), axis=-1, bitorder="little"
    )
    elements = stream.reshape(*packed.shape[:-1], -1, bits)
    return np.packbits(elements, axis=-1, bitorder="little")[..., 0]


def e4m3(codes: np.ndarray) -> np.ndarray:
    """Bytes -> float32: a sign, 4 bits of exponent with bias 7, 3 bits of mantissa; 0x7f is no number."""
    exponent, mantissa = (codes >> 3 & 15).astype(np.int32), (codes & 7).astype(np.float32)
    size = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    size = np.where(codes & 127 == 127, np.float32(np.nan), size)
    return np.where(codes & 128, -size, size).astype(np.float32)


def e2m1(codes: np.ndarray) -> np.ndarray:
    """4-bit codes -> float32."""
    return np.where(codes & 8, -E2M1[codes & 7], E2M1[codes & 7])


def e8m0(codes: np.ndarray) -> np.ndarray:
    """Bytes -> float32: a power of two with bias 127; 0xff is no number."""
    value = np.ldexp(np.float64(1), codes.astype(np.int32) - 127)
    return np.where(codes == 255, np.nan, value).astype(np.float32)


_ELEMENTS = {"mxfp4": e2m1, "mxfp8": e4m3, "nvfp4": e2m1}
_SCALES = {"mxfp4": e8m0, "mxfp8": e8m0, "nvfp4": e4m3}
_BLOCK = 1 << 20  # words at once, which bounds the memory of a large matrix


def dequantize(
    packed: np.ndarray,
    scales: np.ndarray,
    biases: np.ndarray | None,
    *,
    group_size: int,
    bits: int,
    mode: str,
) -> np.ndarray:
    """Packed [..., n] uint32, a scale (and for affine a bias) per group [..., groups] -> [..., in] float32.

    affine: scale * q + bias, in float32. mxfp4, mxfp8, nvfp4: scale * element. ValueError for another mode.
    """
    if mode != "affine" and mode not in _ELEMENTS:
        raise ValueError(f"quantization mode {mode!r} is not known")
    words, groups = packed.shape[-1], scales.shape[-1]
    words_by_row, scales_by_row = packed.reshape(-1, words), scales.reshape(-1, groups)
    out = np.empty((len(words_by_row), groups, group_size), np.float32)
    step = max(1, _BLOCK // words)
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
        codes = unpack(words_by_row[rows], bits).reshape(-1, groups, group_size)
        if mode == "affine":
            assert biases is not None, "affine weights have biases"
            shift = biases.reshape(-1, groups)[rows, :, None]
            out[rows] = scales_by_row[rows, :, None] * codes.astype(np.float32) + shift
        else:
            out[rows] = _SCALES[mode](scales_by_row[rows])[..., None] * _ELEMENTS[mode](codes)
    return out.reshape(*packed.shape[:-1], groups * group_size)
