"""The converter: every source gives the same tensors, and every folder has what loading needs."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import (
    DIM,
    Tensors,
    assert_same,
    break_hf,
    config_of,
    ct2_variables,
    read,
    write_ct2,
    write_hf,
    write_mlx_whisper,
    write_openai,
    write_sharded,
)
from safetensors.numpy import load_file, save_file

from convert import convert
from mlx_medusa import models
from mlx_medusa.errors import CheckpointError, OptionError

EMBEDDING = "model.decoder.embed_tokens"


# ------------------------------------------------------------------------------------------ sources


def test_hugging_face(hf: Path, tensors: Tensors, out: Path) -> None:
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


def test_transformers_loads_the_folder(hf: Path, tensors: Tensors, out: Path) -> None:
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


def test_shards_and_tied_projection(hf: Path, tensors: Tensors, tmp_path: Path, out: Path) -> None:
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


def test_names_without_prefix(hf: Path, tensors: Tensors, tmp_path: Path, out: Path) -> None:
    """As transformers' WhisperModel saves them."""
    source = tmp_path / "bare"
    source.mkdir()
    (source / "config.json").write_bytes((hf / "config.json").read_bytes())
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, source / "model.safetensors")
    convert(source, out)
    assert_same(out, tensors)


def test_ctranslate2(tensors: Tensors, tmp_path: Path, out: Path) -> None:
    convert(write_ct2(ct2_variables(tensors), tmp_path / "ct2"), out)
    assert_same(out, tensors)
    generation = json.loads((out / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == [1, 2]
    assert generation["begin_suppress_tokens"] == [3]


def test_ctranslate2_bfloat16(tensors: Tensors, tmp_path: Path, out: Path) -> None:
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
def test_ctranslate2_int8(tensors: Tensors, tmp_path: Path, out: Path, floats: type) -> None:
    variables: Tensors = {}
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


def test_openai(tensors: Tensors, tmp_path: Path, out: Path) -> None:
    convert(write_openai(tensors, tmp_path / "model.pt"), out)
    assert_same(out, tensors)


@pytest.mark.parametrize("kind", ["npz", "weights", "model"])
def test_mlx_whisper(tensors: Tensors, tmp_path: Path, out: Path, kind: str) -> None:
    """Among them the encoder's positions, which such a folder does not have."""
    convert(write_mlx_whisper(tensors, tmp_path / "mlx", kind), out)
    assert_same(out, tensors)
    assert json.loads((out / "generation_config.json").read_text())["alignment_heads"] == [[1, 0], [1, 1]]


@pytest.mark.parametrize("kind", ["npz", "model"])
def test_mlx_whisper_quantized(tensors: Tensors, tmp_path: Path, out: Path, kind: str) -> None:
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
def test_dtype(hf: Path, tensors: Tensors, out: Path, dtype: str) -> None:
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
