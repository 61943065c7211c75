"""The converter: every source gives the same tensors, every quantization reloads, every bad input leaves nothing."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import (
    DIM,
    DIMS,
    FRAMES,
    LAYERS,
    ct2_variables,
    read,
    write_ct2,
    write_hf,
    write_mlx_whisper,
    write_openai,
    write_sharded,
)
from mlx.utils import tree_flatten
from safetensors.numpy import load_file, save_file

from convert import convert
from convert.cli import main
from mlx_medusa import models
from mlx_medusa.errors import CheckpointError, MedusaError, OptionError, OutputError

EMBEDDING = "model.decoder.embed_tokens"


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random float16 Whisper as transformers saves it, with openai's sinusoids as the encoder's positions."""
    folder = write_hf(tmp_path_factory.mktemp("source") / "hf")
    tensors = load_file(folder / "model.safetensors")
    angles = np.arange(FRAMES)[:, None] * np.exp(-np.log(10000) / (DIM // 2 - 1) * np.arange(DIM // 2))
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    tensors["model.encoder.embed_positions.weight"] = table.astype(np.float32).astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def tensors(hf: Path) -> dict[str, np.ndarray]:
    return read(hf)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where the folder goes, in a folder that holds nothing else."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model"


def assert_same(folder: Path, expected: dict[str, np.ndarray]) -> None:
    found = read(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found[name], tensor, err_msg=name)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# ------------------------------------------------------------------------------------------ sources


def test_hugging_face(hf: Path, tensors: dict[str, np.ndarray], out: Path) -> None:
    report = convert(hf, out)
    assert_same(out, tensors)
    assert report.tensors == len(tensors)
    assert report.parameters == sum(tensor.size for tensor in tensors.values())
    assert report.bits_per_weight == 16
    assert {file.name for file in out.iterdir()} == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    assert index["weight_map"] == dict.fromkeys(sorted(tensors), "model.safetensors")


def test_transformers_loads_the_folder(hf: Path, tensors: dict[str, np.ndarray], out: Path) -> None:
    from transformers import AutoProcessor, WhisperForConditionalGeneration

    convert(hf, out)
    model, info = WhisperForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == torch.float16
    for name, value in model.state_dict().items():
        if name != "proj_out.weight":
            np.testing.assert_array_equal(value.numpy(), tensors[name])
    assert model.generation_config.no_timestamps_token_id == 50362
    assert AutoProcessor.from_pretrained(out).tokenizer.encode("Hello") == [50257, 50362, 15496, 50256]


def test_shards_and_tied_projection(
    hf: Path, tensors: dict[str, np.ndarray], tmp_path: Path, out: Path
) -> None:
    convert(write_sharded(hf, tmp_path / "shards"), out)
    assert_same(out, tensors)


def test_untied_projection_is_refused(hf: Path, tmp_path: Path, out: Path) -> None:
    source = write_sharded(hf, tmp_path / "shards")
    for file in source.glob("*.safetensors"):
        part = load_file(file)
        if "proj_out.weight" in part:
            part["proj_out.weight"][5, 5] += 1
            save_file(part, file)
    with pytest.raises(CheckpointError, match=r"proj_out\.weight differs"):
        convert(source, out)


def test_names_without_prefix(hf: Path, tensors: dict[str, np.ndarray], tmp_path: Path, out: Path) -> None:
    """As transformers' WhisperModel saves them."""
    source = tmp_path / "bare"
    source.mkdir()
    (source / "config.json").write_bytes((hf / "config.json").read_bytes())
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, source / "model.safetensors")
    convert(source, out)
    assert_same(out, tensors)


def test_ctranslate2(tensors: dict[str, np.ndarray], tmp_path: Path, out: Path) -> None:
    convert(write_ct2(ct2_variables(tensors), tmp_path / "ct2"), out)
    assert_same(out, tensors)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == [1, 2]
    assert generation["begin_suppress_tokens"] == [3]


def test_ctranslate2_bfloat16(tensors: dict[str, np.ndarray], tmp_path: Path, out: Path) -> None:
    variables = {
        name: (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if array.dtype == np.float16
        else array
        for name, array in ct2_variables(tensors).items()
    }
    convert(write_ct2(variables, tmp_path / "ct2"), out)
    arrays = mx.load(str(out / "model.safetensors"))
    assert isinstance(arrays, dict)
    cut = (tensors["model.decoder.layer_norm.bias"].astype(np.float32).view(np.uint32) >> 16) << 16
    assert arrays["model.decoder.layer_norm.bias"].dtype == mx.bfloat16
    np.testing.assert_array_equal(
        np.array(arrays["model.decoder.layer_norm.bias"].astype(mx.float32)), cut.view(np.float32)
    )


@pytest.mark.parametrize("floats", [np.float16, np.float32])
def test_ctranslate2_int8(tensors: dict[str, np.ndarray], tmp_path: Path, out: Path, floats: type) -> None:
    variables: dict[str, np.ndarray] = {}
    for name, array in ct2_variables(tensors).items():
        if name.endswith("/weight"):
            highest = np.abs(array.astype(np.float32).reshape(len(array), -1)).max(axis=1)
            scale = np.float32(127) / np.where(highest == 0, np.float32(127), highest)
            shaped = scale.reshape(-1, *[1] * (array.ndim - 1))
            variables[name] = np.rint(array.astype(np.float32) * shaped).astype(np.int8)
            variables[f"{name}_scale"] = scale
        else:
            variables[name] = array.astype(floats) if array.dtype == np.float16 else array
    convert(write_ct2(variables, tmp_path / "ct2"), out)
    found = read(out)
    assert found.keys() == tensors.keys()
    fused, scale = (variables[f"decoder/layer_1/attention/linear_1/weight{end}"] for end in ("", "_scale"))
    expected = (fused.astype(np.float32) / scale[:, None])[DIM:]  # the second half of the rows: values
    got = found["model.decoder.layers.1.encoder_attn.v_proj.weight"]
    assert got.dtype == floats
    np.testing.assert_allclose(got, expected.astype(floats), rtol=1e-3 if floats == np.float16 else 1e-6)


def test_openai(tensors: dict[str, np.ndarray], tmp_path: Path, out: Path) -> None:
    convert(write_openai(tensors, tmp_path / "model.pt"), out)
    assert_same(out, tensors)


@pytest.mark.parametrize("kind", ["npz", "weights", "model"])
def test_mlx_whisper(tensors: dict[str, np.ndarray], tmp_path: Path, out: Path, kind: str) -> None:
    """Among them the encoder's positions, which such a folder does not have."""
    convert(write_mlx_whisper(tensors, tmp_path / "mlx", kind), out)
    assert_same(out, tensors)
    assert json.loads((out / "generation_config.json").read_text())["alignment_heads"] == [[1, 0], [1, 1]]


@pytest.mark.parametrize("kind", ["npz", "model"])
def test_mlx_whisper_quantized(tensors: dict[str, np.ndarray], tmp_path: Path, out: Path, kind: str) -> None:
    source = write_mlx_whisper(tensors, tmp_path / "mlx", kind, quantize=True)
    with pytest.raises(OptionError, match="convert -d"):
        convert(source, out, q_bits=4)
    convert(source, out)  # stays as it is, under other names
    arrays: Any = mx.load(str(out / "model.safetensors"))
    parts = mx.quantize(mx.array(tensors[f"{EMBEDDING}.weight"]), 64, 4)
    for part, array in zip(("weight", "scales", "biases"), parts, strict=True):
        assert mx.array_equal(arrays[f"{EMBEDDING}.{part}"], array).item()
    assert config_of(out)["quantization"] == {"group_size": 64, "bits": 4}
    models.load(out)

    full = out.with_name("full")
    convert(out, full, dequantize=True)
    convert(source, out.with_name("direct"), dequantize=True)
    found = read(full)
    assert_same(out.with_name("direct"), found)
    assert found.keys() == tensors.keys()
    wide = mx.dequantize(parts[0], *(part.astype(mx.float32) for part in parts[1:]), 64, 4)
    np.testing.assert_array_equal(found[f"{EMBEDDING}.weight"], np.array(wide.astype(mx.float16)))


def test_real_ctranslate2_and_hugging_face_are_identical(tiny_en_ct2: Path, tmp_path: Path) -> None:
    from transformers import WhisperForConditionalGeneration

    convert(tiny_en_ct2, tmp_path / "a")
    WhisperForConditionalGeneration.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "b")
    assert_same(tmp_path / "b", read(tmp_path / "a"))


def test_real_positions_are_sinusoids(tiny_en: Path) -> None:
    from convert.sources.openai import sinusoids

    stored = read(tiny_en)["model.encoder.embed_positions.weight"]
    np.testing.assert_array_equal(np.array(sinusoids(*stored.shape).astype(mx.float16)), stored)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(hf: Path, tensors: dict[str, np.ndarray], out: Path, dtype: str) -> None:
    convert(hf, out, dtype=dtype)
    arrays: Any = mx.load(str(out / "model.safetensors"))
    assert {str(array.dtype) for array in arrays.values()} == {f"mlx.core.{dtype}"}
    assert config_of(out)["dtype"] == dtype
    expected = torch.from_numpy(tensors[f"{EMBEDDING}.weight"]).to(getattr(torch, dtype)).float().numpy()
    np.testing.assert_array_equal(np.array(arrays[f"{EMBEDDING}.weight"].astype(mx.float32)), expected)


def test_float16_overflow_is_refused(tmp_path: Path, out: Path) -> None:
    source = write_hf(tmp_path / "hf", torch.float32)
    broken = load_file(source / "model.safetensors")
    broken["model.decoder.layers.0.fc1.bias"][3] = 1e6
    save_file(broken, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"decoder\.layers\.0\.fc1\.bias .*bfloat16"):
        convert(source, out, dtype="float16")
    assert list(out.parent.iterdir()) == []


# ------------------------------------------------------------------------------------- quantization


def test_four_bit_values(hf: Path, tensors: dict[str, np.ndarray], out: Path) -> None:
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
    tensors: dict[str, np.ndarray],
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
        {"q_bits": 4, "q_group_size": 128},  # no row of this model is a multiple, save two: see the message
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
    if options == {"q_bits": 4, "q_group_size": 128}:
        report = convert(hf, out, **options)  # fc2 has rows of 256; all others stay, and the report says so
        assert report.quantized == 2 * LAYERS
        assert "rows of 64 are not a multiple of the group size 128" in report.skipped
        return
    with pytest.raises(OptionError) as caught:
        convert(hf, out, **options)
    assert "\n" not in str(caught.value)
    assert list(out.parent.iterdir()) == []


@pytest.mark.parametrize("mixed", ["mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6", "mixed_4_8"])
def test_mixed_recipes(hf: Path, tensors: dict[str, np.ndarray], out: Path, mixed: str) -> None:
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


# --------------------------------------------------------------------------------------- bad inputs


def break_hf(source: Path, folder: Path, change: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = read(source)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/mlx-medusa-was-run",)


def bad_source(case: str, hf: Path, tensors: dict[str, np.ndarray], folder: Path) -> Path:
    """A checkpoint with one fault; ``folder`` does not exist yet."""
    if "safetensors" in case:
        break_hf(hf, folder, lambda t: None)
        cut(folder / "model.safetensors", 0 if "empty" in case else -10)
        return folder
    if "tensor" in case:
        return bad_tensor(case, hf, folder)
    if case in BAD_CT2:
        return bad_ct2(case, tensors, folder)
    if case == "truncated npz":
        write_mlx_whisper(tensors, folder)
        cut(folder / "weights.npz", 1_000_000)
        return folder
    folder.mkdir()
    if case in BAD_CONFIGS:
        (folder / "config.json").write_text(BAD_CONFIGS[case])
        return folder
    if "folder" in case:
        return folder / "nowhere" if case == "no such folder" else folder
    return bad_pt(case, tensors, folder / "model.pt")


def bad_tensor(case: str, hf: Path, folder: Path) -> Path:
    name = "model.decoder.layers.0.fc1.bias"

    def change(t: dict[str, np.ndarray]) -> None:
        if case == "missing tensor":
            del t[name]
        elif case == "extra tensor":
            t["model.decoder.layers.7.fc1.bias"] = t[name].copy()
        elif case == "misshapen tensor":
            t[name] = t[name][:-1].copy()
        else:
            t[name] = np.zeros(t[name].shape, np.int32)

    return break_hf(hf, folder, change)


BAD_CONFIGS = {
    "not whisper": '{"model_type": "llama"}',
    "broken config": "{",
    "config without weights": '{"model_type": "whisper"}',
}
BAD_CT2 = {
    "truncated model.bin": 100_000,
    "header of model.bin": 10,
    "half a name in model.bin": 40,
    "last byte of model.bin": -1,
    "old model.bin": None,
    "extra variable": None,
    "missing variable": None,
    "key bias": None,
}


def bad_ct2(case: str, tensors: dict[str, np.ndarray], folder: Path) -> Path:
    variables = ct2_variables(tensors)
    if case == "extra variable":
        variables["decoder/new/weight"] = np.zeros((3, 3), np.float16)
    elif case == "missing variable":
        del variables["encoder/conv2/bias"]
    elif case == "key bias":
        variables["encoder/layer_0/self_attention/linear_0/bias"][DIM] = 1
    write_ct2(variables, folder, version=3 if case == "old model.bin" else 6)
    if (size := BAD_CT2[case]) is not None:
        cut(folder / "model.bin", size)
    return folder


def bad_pt(case: str, tensors: dict[str, np.ndarray], path: Path) -> Path:
    if case == "hostile pickle":
        torch.save({"dims": DIMS, "model_state_dict": Hostile()}, path)
    elif case == "truncated pt":
        cut(write_openai(tensors, path), 100_000)
    elif case == "text named pt":
        path.write_text("not a model")
    elif case == "pt of something else":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        write_openai({**tensors, "model.decoder.extra": np.zeros(3, np.float16)}, path)
    return path


CASES = {
    "missing tensor": r"missing tensor 'model\.decoder\.layers\.0\.fc1\.bias'",
    "extra tensor": r"unexpected tensor 'model\.decoder\.layers\.7\.fc1\.bias'",
    "misshapen tensor": r"'model\.decoder\.layers\.0\.fc1\.bias' has shape \[255\], expected \[256\]",
    "integer tensor": r"fc1\.bias' holds .*int32",
    "truncated safetensors": r"model\.safetensors: \d+ bytes, but",
    "empty safetensors": r"model\.safetensors: not a safetensors file",
    "truncated model.bin": r"model\.bin: cut short in 'encoder/",
    "header of model.bin": r"model\.bin: not a CTranslate2 model",
    "half a name in model.bin": r"model\.bin: not a CTranslate2 model",
    "last byte of model.bin": r"model\.bin: not a CTranslate2 model",
    "old model.bin": r"model\.bin: binary version 3",
    "extra variable": r"unexpected variable 'decoder/new/weight'",
    "missing variable": r"missing tensor 'model\.encoder\.conv2\.bias'",
    "key bias": r"has a bias for keys",
    "truncated npz": r"weights\.npz: not an npz archive, or cut short",
    "hostile pickle": r"model\.pt: holds more than tensors, which could run code",
    "truncated pt": r"model\.pt: cut short or damaged",
    "text named pt": r"model\.pt: not a PyTorch file",
    "pt of something else": r"model\.pt: not an openai Whisper checkpoint",
    "pt with one more": r"unexpected tensor 'decoder\.extra'",
    "not whisper": r"model_type 'llama'",
    "broken config": r"config\.json: not valid JSON",
    "config without weights": r"no model\.safetensors",
    "empty folder": r"no Whisper checkpoint",
    "no such folder": r"no such file or folder",
}


@pytest.mark.parametrize("case", CASES)
def test_bad_source(
    case: str,
    hf: Path,
    tensors: dict[str, np.ndarray],
    tmp_path: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = bad_source(case, hf, tensors, tmp_path / "bad")
    with pytest.raises(SystemExit) as caught:
        main(["--base", str(source), "--mlx-path", str(out)])
    captured = capsys.readouterr()
    assert caught.value.code == 1
    assert captured.out == ""
    assert captured.err.startswith("convert: error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert re.search(CASES[case], captured.err), captured.err
    assert list(out.parent.iterdir()) == []
    assert not Path("/tmp/mlx-medusa-was-run").exists()


def test_existing_target(hf: Path, out: Path) -> None:
    out.mkdir()
    with pytest.raises(OutputError, match="exists already"):
        convert(hf, out)
    assert list(out.iterdir()) == []


def test_parents_are_made_and_removed(hf: Path, tmp_path: Path, out: Path) -> None:
    convert(hf, out / "a" / "b")
    assert (out / "a" / "b" / "config.json").is_file()
    bad = bad_source("missing tensor", hf, read(hf), tmp_path / "bad")
    with pytest.raises(CheckpointError):
        convert(bad, out / "c" / "d")
    assert not (out / "c").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_full_disk(hf: Path, out: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    from mlx_medusa import shards

    written = []

    def write(file: Any, array: mx.array) -> None:
        written.append(array)
        if len(written) == 20:
            raise OSError(code, os.strerror(code))
        file.write(bytes(array.nbytes))

    monkeypatch.setattr(shards, "_write_array", write)
    with pytest.raises(OutputError, match=os.strerror(code)):
        convert(hf, out)
    assert list(out.parent.iterdir()) == []


def test_limit_on_file_size(hf: Path, out: Path) -> None:
    """A write that the system itself refuses, in the command line."""
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)); "
    code += "from convert.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "--base", str(hf), "--mlx-path", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"convert: error: .*cannot be written: File too large\n", done.stderr)
    assert list(out.parent.iterdir()) == []


def test_read_only_target(hf: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        out.parent.chmod(0o500)
    else:  # root may write anywhere, so let the system call say what it would say to others

        def refuse(*_: Any, **__: Any) -> str:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr("tempfile.mkdtemp", refuse)
    try:
        with pytest.raises(OutputError, match=r"cannot be written: (Read-only|Permission)"):
            convert(hf, out)
    finally:
        out.parent.chmod(0o700)
    assert list(out.parent.iterdir()) == []


def test_interrupt_leaves_nothing(hf: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.pipeline._Job._write_settings", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(hf, out)
    assert list(out.parent.iterdir()) == []


def test_missing_torch(
    tensors: dict[str, np.ndarray], tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_openai(tensors, tmp_path / "model.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"pip install .*torch"):
        convert(source, out)


# ------------------------------------------------------------------------------------- command line


def test_spellings_and_report(hf: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--hf_path",
            str(hf),
            "--mlx_path",
            str(out),
            "--q_bits",
            "8",
            "--q_group_size",
            "32",
            "--q_mode",
            "affine",
        ]
    )
    text = capsys.readouterr().out
    assert config_of(out)["quantization"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert "33 layers quantized" in text
    assert re.search(r"\d\.\d+ bits per weight", text)
    assert "left unquantized (convolution)" in text
    assert re.search(r"[\d.]+ MB -> [\d.]+ MB", text)


def test_bits_imply_quantize_and_model_is_an_alias(hf: Path, out: Path) -> None:
    main(["--model", str(hf), "--mlx-path", str(out), "--quant-predicate", "mixed_4_6"])
    assert config_of(out)["quantization"]["bits"] == 4


@pytest.mark.parametrize("arguments", [["--base", "x", "--q-bits", "7"], [], ["--base", "x", "--nonsense"]])
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    capsys.readouterr()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(MedusaError):
        main(["--base", str(tmp_path / "nowhere"), "--mlx-path", str(tmp_path / "out"), "--debug"])


def test_help_is_quick() -> None:
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "convert", "--help"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[1],
            check=True,
        )
        best = min(best, time.perf_counter() - start)
    assert best < 1
    assert not re.search(r"\| +(mlx|torch|numpy|transformers)\b", done.stderr)


# --------------------------------------------------------------------------- tokenizer and settings


@pytest.mark.parametrize(("fixture", "vocab"), [("tiny_en_ct2", 51864), ("base_ct2", 51865)])
def test_bundled_tokenizer_is_the_real_one(fixture: str, vocab: int, request: pytest.FixtureRequest) -> None:
    from tokenizers import Tokenizer

    from convert import generation, tokenizer

    folder: Path = request.getfixturevalue(fixture)
    real = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ours = tokenizer.load(tokenizer.bundled(vocab, folder), folder)
    text = "Hello, wörld! 日本語 — it's 1,234.5\n ♪♪  end"
    assert ours.encode(text, add_special_tokens=False).ids == real.encode(text, add_special_tokens=False).ids
    renamed = {"<|iw|>": "<|he|>", "<|nospeech|>": "<|nocaptions|>"}
    first_time = real.token_to_id("<|notimestamps|>") + 1
    known = {renamed.get(k, k): v for k, v in real.get_vocab().items() if v < first_time}
    assert ours.get_vocab() == known
    settings = json.loads((folder / "config.json").read_text())
    assert generation.non_speech_tokens(ours) == sorted(settings["suppress_ids"])
    made = generation.generation_config(
        None,
        {"vocab_size": vocab, "max_target_positions": 448, "decoder_layers": 4, "decoder_attention_heads": 6},
        ours,
    )
    assert made["begin_suppress_tokens"] == settings["suppress_ids_begin"]
    if vocab == 51865:
        assert sorted(made["lang_to_id"].values()) == settings["lang_ids"]
        assert made["lang_to_id"]["<|he|>"] == 50279


def test_large_v3_tokens() -> None:
    from convert import generation, tokenizer

    ours = tokenizer.load(tokenizer.bundled(51866, Path("x")), Path("x"))
    config = {
        "vocab_size": 51866,
        "max_target_positions": 448,
        "decoder_layers": 32,
        "decoder_attention_heads": 20,
    }
    made = generation.generation_config(None, config, ours)
    # the values of openai/whisper-large-v3's own generation_config.json
    assert made["lang_to_id"]["<|yue|>"] == 50358
    assert made["task_to_id"] == {"transcribe": 50360, "translate": 50359}
    assert made["no_timestamps_token_id"] == 50364
    assert made["prev_sot_token_id"] == 50362
    assert made["suppress_tokens"][-6:] == [50258, 50359, 50360, 50361, 50362, 50363]
    assert made["begin_suppress_tokens"] == [220, 50257]


def test_tokenizer_from_vocabulary_files(base_ct2: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    from convert import tokenizer

    source = json.loads((base_ct2 / "tokenizer.json").read_text())
    added = {token["content"]: token["id"] for token in source["added_tokens"]}
    (tmp_path / "vocab.json").write_text(json.dumps(source["model"]["vocab"]))
    merges = [" ".join(merge) for merge in source["model"]["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    ours = tokenizer.load(tokenizer.tokenizer_json(tmp_path, 51865), tmp_path)
    real = Tokenizer.from_file(str(base_ct2 / "tokenizer.json"))
    assert ours.get_vocab() == real.get_vocab()
    text = "<|startoftranscript|><|de|><|transcribe|><|0.00|> Grüße aus Köln<|2.00|><|endoftext|>"
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == real.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids) == real.decode(ids)


def test_no_tokenizer_for_an_odd_vocabulary(tmp_path: Path, out: Path) -> None:
    source = write_hf(tmp_path / "hf", vocab_size=300, pad_token_id=0, bos_token_id=0, eos_token_id=0)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json, and Whisper has no vocabulary of 300"):
        convert(source, out)


def test_tokenizer_of_another_model(hf: Path, tmp_path: Path, out: Path) -> None:
    source = break_hf(hf, tmp_path / "mixed", lambda t: None)
    (source / "tokenizer.json").write_text('{"added_tokens": [], "model": {"vocab": {"a": 0}}}')
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: has no <\|startoftranscript\|>"):
        convert(source, out)
    (source / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        convert(source, out)


def test_settings_of_the_source_stay(hf: Path, tmp_path: Path, out: Path) -> None:
    source = break_hf(hf, tmp_path / "fine-tune", lambda t: None)
    own = {"no_timestamps_token_id": 50362, "alignment_heads": [[1, 1]], "forced_decoder_ids": None}
    (source / "generation_config.json").write_text(json.dumps(own))
    convert(source, out)
    made = json.loads((out / "generation_config.json").read_text())
    assert made["alignment_heads"] == [[1, 1]]
    assert (
        made["suppress_tokens"] == []
    )  # it knows Whisper's settings and suppresses nothing, so neither do we
    assert made["max_initial_timestamp_index"] == 50


def test_card_has_no_local_path(hf: Path, out: Path) -> None:
    convert(hf, out)
    card = (out / "README.md").read_text()
    assert "library_name: mlx" in card
    assert str(hf.parent) not in "".join(
        file.read_text() for file in out.iterdir() if file.suffix in (".md", ".json")
    )


# -------------------------------------------------------------------------------------------- memory


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_full_size_model_in_bounded_memory(tmp_path: Path) -> None:
    """whisper-large-v3's shape, 3.1 GB of float16, in under 1 GB: half a minute, 7 GB of disk."""
    from make_random_checkpoint import make

    if shutil.disk_usage(tmp_path).free < 10 << 30:
        pytest.skip("needs 10 GB of free disk")
    make(tmp_path / "large")
    code = (
        "import re, sys; from pathlib import Path; from convert.cli import main; main(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])"
    )
    for options in ([], ["--q-bits", "4"]):
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                code,
                "--base",
                tmp_path / "large",
                "--mlx-path",
                tmp_path / "out",
                *options,
            ],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[1],
            check=True,
        )
        shutil.rmtree(tmp_path / "out")
        assert int(done.stdout.split()[-1]) < 1 << 20, done.stdout
    shutil.rmtree(tmp_path / "large")
