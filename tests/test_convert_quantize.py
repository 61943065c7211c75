"""The converter: every quantization holds the right numbers and reloads."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from checkpoints import (
    LAYERS,
    Tensors,
    config_of,
)
from make_small_models import make_llama, make_meralion2, make_whisper
from mlx.utils import tree_flatten

from convert import convert
from mlx_medusa import models
from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.cache import KVCache

EMBEDDING = "model.decoder.embed_tokens"


def test_four_bit_values(hf: Path, tensors: Tensors, out: Path) -> None:
    """Unpack by hand: eight numbers in a word, lowest bits first, w = scale * q + bias."""
    report = convert(hf, out, q_bits=4)
    arrays: Any = mx.load(str(out / "model.safetensors"))
    layer = "model.decoder.layers.0.fc2"
    packed, scales, biases = (np.array(arrays[f"{layer}.{part}"]) for part in ("weight", "scales", "biases"))
    q = (packed[:, :, None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    q = q.reshape(len(packed), -1, 64).astype(np.float32)
    values = (q * scales[..., None].astype(np.float32) + biases[..., None].astype(np.float32)).reshape(
        len(packed), -1
    )
    original = tensors[f"{layer}.weight"].astype(np.float32)
    step = np.repeat(np.abs(scales.astype(np.float32)), 64, axis=1)
    error = np.abs(values - original)
    assert (error <= step).all()  # MLX moves the scale so that the far end of a group is exact
    assert (error <= 0.51 * step + 1e-4).mean() > 0.95
    model, _ = models.load(out)  # on a CPU: dequantized to float32
    loaded = dict(tree_flatten(model.parameters()))[f"{layer}.weight"]
    np.testing.assert_allclose(np.array(loaded.astype(mx.float32)), values, atol=1e-6)
    assert set(report.skipped) == {"convolution", "position table"}


def test_quantized_layers(hf: Path, out: Path) -> None:
    """Every linear layer and the embedding: 6 in an encoder layer, 10 in a decoder layer."""
    report = convert(hf, out, quantize=True)
    assert report.quantized == 6 * LAYERS + 10 * LAYERS + 1
    names = mx.load(str(out / "model.safetensors")).keys()
    assert sum(name.endswith(".scales") for name in names) == report.quantized
    assert config_of(out)["quantization"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert config_of(out)["quantization"] == config_of(out)["quantization_config"]


MODES = [
    ({"q_bits": 4}, {"group_size": 64, "bits": 4, "mode": "affine"}),
    *(
        ({"q_bits": bits, "q_group_size": 32}, {"group_size": 32, "bits": bits, "mode": "affine"})
        for bits in (2, 3, 5, 6, 8)
    ),
    ({"q_mode": "mxfp4"}, {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ({"q_mode": "mxfp8"}, {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
    ({"q_mode": "nvfp4"}, {"group_size": 16, "bits": 4, "mode": "nvfp4"}),
]


@pytest.mark.parametrize(("options", "settings"), MODES, ids=[str(options) for options, _ in MODES])
@pytest.mark.parametrize("dtype", [None, mx.float16], ids=["dequantized", "kept"])
def test_modes_reload(
    hf: Path,
    tensors: Tensors,
    out: Path,
    options: dict[str, Any],
    settings: dict[str, Any],
    dtype: mx.Dtype | None,
) -> None:
    convert(hf, out, **options)
    assert config_of(out)["quantization"] == settings
    model, _ = models.load(out, dtype)
    parameters = dict(tree_flatten(model.parameters()))
    weight = mx.array(tensors[f"{EMBEDDING}.weight"])
    parts = mx.quantize(weight, **settings)
    if dtype is None:
        found = parameters[f"{EMBEDDING}.weight"]
        assert found.dtype == mx.float32
        expected = mx.dequantize(*parts, **settings).astype(mx.float32)
        assert mx.allclose(found, expected, atol=2e-4).item()
    else:
        for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
            assert mx.array_equal(parameters[f"{EMBEDDING}.{part}"], array).item()


@pytest.mark.parametrize(
    "options",
    [
        {"q_mode": "mxfp4", "q_bits": 8},
        {"q_mode": "mxfp8", "q_group_size": 64},
        {"q_mode": "nvfp4", "q_group_size": 32},
        {"q_bits": 7},
        {"q_bits": 4, "q_group_size": 16},
        {"q_mode": "int4"},
        {"quant_predicate": "mixed_1_2"},
        {"quant_predicate": "mixed_4_6", "q_mode": "mxfp4"},
        {"quant_predicate": "mixed_4_6", "q_bits": 4},
        {"q_bits": 4, "dequantize": True},
        {"q_group_size": 64},
        {"q_heads": True},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_impossible_options(hf: Path, out: Path, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError) as caught:
        convert(hf, out, **options)
    assert "\n" not in str(caught.value)
    assert list(out.parent.iterdir()) == []


def test_layers_left_out(hf: Path, out: Path) -> None:
    """Only fc2 has rows (of 256) that are a multiple of 128; the report says so of the others."""
    report = convert(hf, out, q_bits=4, q_group_size=128)
    assert report.quantized == 2 * LAYERS
    assert EMBEDDING in report.skipped["rows of 64 are not a multiple of the group size 128"]
    models.load(out)


@pytest.mark.parametrize("mixed", ["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6", "mixed_4_8"])
def test_mixed_recipes(hf: Path, tensors: Tensors, out: Path, mixed: str) -> None:
    low, high = map(int, mixed.split("_")[1:])
    convert(hf, out, quant_predicate=mixed)
    entry = config_of(out)["quantization"]
    assert (entry["bits"], entry["group_size"]) == (low, 64)
    own = {key: value["bits"] for key, value in entry.items() if isinstance(value, dict)}
    # two layers a stack: an eighth of two is none, 7/8 of two is layer 1
    assert own == {
        EMBEDDING: high,
        "model.encoder.layers.1.fc2": high,
        "model.encoder.layers.1.self_attn.v_proj": high,
        "model.decoder.layers.1.fc2": high,
        "model.decoder.layers.1.self_attn.v_proj": high,
        "model.decoder.layers.1.encoder_attn.v_proj": high,
    }
    packed, _ = models.load(out, mx.float32)
    modules = dict(packed.named_modules())
    assert own.keys() <= modules.keys()
    assert modules[EMBEDDING].bits == high
    assert modules["model.decoder.layers.0.fc2"].bits == low
    full, _ = models.load(out)
    for name, bits in ((EMBEDDING, high), ("model.decoder.layers.0.fc2", low)):
        loaded = dict(tree_flatten(full.parameters()))[f"{name}.weight"]
        parts = mx.quantize(mx.array(tensors[f"{name}.weight"]), 64, bits)
        assert mx.allclose(loaded, mx.dequantize(*parts, 64, bits).astype(mx.float32), atol=2e-4).item()


def test_mixed_rule_on_large_v3() -> None:
    """32 layers: the first 4, the last 4, and each third between."""
    from convert.quantize import _wants_more

    count = {"model.decoder": 32}
    chosen = [i for i in range(32) if _wants_more(f"model.decoder.layers.{i}.fc2", count)]
    assert chosen == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]
    assert not any(_wants_more(f"model.decoder.layers.{i}.fc1", count) for i in range(32))


def test_four_bit_size_of_a_real_model(tiny_en: Path, tiny_en_ct2: Path, tmp_path: Path) -> None:
    report = convert(tiny_en_ct2, tmp_path / "q4", q_bits=4)
    before = sum(file.stat().st_size for file in tiny_en.iterdir())
    assert report.size_after <= 0.45 * before
    assert report.size_after == sum(file.stat().st_size for file in (tmp_path / "q4").iterdir())
    assert 4.5 < report.bits_per_weight < 5


@pytest.mark.parametrize("mode", ["affine", "mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    ("make", "dtype"), [(make_whisper, mx.float16), (make_llama, mx.float32), (make_meralion2, mx.float32)]
)
def test_a_quantized_embedding_keeps_the_models_precision(
    tmp_path: Path, out: Path, make, dtype, mode
) -> None:
    """MLX itself makes bfloat16 of what the mx and nv modes hold, and the numbers of every layer would follow."""
    make(tmp_path / "model")
    convert(tmp_path / "model", out, q_mode=mode, **({"q_bits": 4} if mode == "affine" else {}))
    model, _ = models.load(out, dtype)
    cache = KVCache(model.num_layers)
    if make is make_whisper:
        cache.memory = model.attend(mx.zeros((1, 8, 64), dtype))
    assert model.embed(mx.array([3])).dtype == dtype
    assert model.step(mx.array([[3]]), mx.array([[0]]), None, cache).dtype == dtype
