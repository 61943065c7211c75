"""``convert`` of MERaLiON-2 folders as the hub has them. Tiny random models."""

import json

import mlx.core as mx
import numpy as np
import pytest
import torch
from meralion import small_reference, write_heads, write_hf
from safetensors.torch import load_file, save_file

from convert import convert
from convert.cli import main
from mlx_medusa import checkpoint, models
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import chain_pass
from mlx_medusa.models.meralion2 import Speech


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("tied", "kind"), [(True, "gated"), (False, "gated"), (True, "v1"), (False, "plain")]
)
def test_a_converted_folder_equals_pytorch(tied, kind, tmp_path, out):
    more = {"speech_mlp_use_projection": False} if kind == "plain" else {}
    convert(write_hf(tmp_path / "hf", 3, tied=tied, kind=kind, **more), out)
    theirs, *_ = small_reference(3, tied=tied, kind=kind)
    ours, config = models.load(out)
    mel = np.random.default_rng(0).normal(size=(1, 3000, 80)).astype(np.float32)
    tokens = [2, 5, *[383] * 100, 9, 8]
    with torch.no_grad():
        rows = theirs.rows(torch.tensor(mel).swapaxes(1, 2))
        _, logits = theirs(tokens, rows)
    encoded = ours.encode(mx.array(mel))
    assert encoded.shape == (1, 100, 64)
    hidden = chain_pass(ours, tokens, KVCache(ours.num_layers, Speech(encoded, 2)))
    scale = np.abs(logits.numpy()).max()
    np.testing.assert_allclose(np.array(ours.logits(hidden[0])), logits.numpy(), rtol=1e-4, atol=1e-4 * scale)
    assert config["text_config"]["tie_word_embeddings"] is tied
    assert "auto_map" not in config


def test_names_are_those_of_the_source(tmp_path, out):
    source = write_hf(tmp_path / "hf", tied=False)
    convert(source, out)
    names = set(read(source, "model.safetensors.index.json")["weight_map"])
    assert set(checkpoint.read_arrays(out)) == names


def test_files_beside_the_weights(tmp_path, out):
    source = write_hf(tmp_path / "hf")
    convert(source, out)
    decoding = read(out, "generation_config.json")
    assert decoding["eos_token_id"] == [1, 107]
    assert decoding["no_repeat_ngram_size"] == 6
    assert read(out, "preprocessor_config.json")["do_normalize"] is True
    assert read(out, "tokenizer_config.json") == read(source, "tokenizer_config.json")
    assert read(out, "tokenizer.json") == read(source, "tokenizer.json")
    assert "MERaLiON-2 for MLX" in (out / "README.md").read_text(encoding="utf-8")


def test_stop_tokens_and_rule_where_the_source_is_silent(tmp_path, out):
    source = write_hf(tmp_path / "hf")
    (source / "generation_config.json").unlink()
    convert(source, out)
    decoding = read(out, "generation_config.json")
    assert (decoding["eos_token_id"], decoding["no_repeat_ngram_size"]) == ([1, 107], 6)


@pytest.mark.parametrize(("bits", "packed"), [(None, None), (8, 8), (4, 4), (16, None)])
def test_recipe(bits, packed, tmp_path, out):
    """Decoder, embedding and adapter get the bits asked for; the encoder its own, and none by default."""
    report = convert(
        write_hf(tmp_path / "hf", tied=False), out, q_bits=4, q_group_size=32, q_encoder_bits=bits
    )
    arrays = checkpoint.read_arrays(out)
    quantized = {name.removesuffix(".scales") for name in arrays if name.endswith(".scales")}
    for layer in (
        "text_decoder.model.embed_tokens",
        "text_decoder.lm_head",
        "text_decoder.model.layers.1.self_attn.o_proj",
        "text_decoder.model.layers.0.mlp.down_proj",
        "speech_audio_adapter.mlp_adapter.0",
        "speech_audio_adapter.out_proj",
    ):
        assert layer in quantized
        assert arrays[f"{layer}.weight"].shape[-1] * 8 == arrays[f"{layer}.scales"].shape[-1] * 32
    assert ("speech_encoder.layers.0.fc1" in quantized) is (packed is not None)
    if packed:
        settings = checkpoint.settings_for(
            read(out, "config.json")["quantization"], "speech_encoder.layers.0.fc1"
        )
        assert settings["bits"] == packed
    else:
        assert len(report.skipped["speech encoder"]) == 6
    models.load(out)  # strict


def test_dequantize_gives_a_plain_folder(tmp_path, out):
    convert(write_hf(tmp_path / "hf"), tmp_path / "packed", q_bits=8, q_group_size=32)
    convert(tmp_path / "packed", out, dequantize=True)
    one, two = (models.load(folder)[0] for folder in (tmp_path / "packed", out))
    tokens = [2, 4, 6]
    a, b = (np.array(chain_pass(m, tokens, KVCache(2))) for m in (one, two))
    np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_projection_stored_beside_its_equal_embedding_is_tied(tmp_path, out):
    convert(write_hf(tmp_path / "hf", keep_head=True), out)
    assert "text_decoder.lm_head.weight" not in checkpoint.read_arrays(out)


def test_a_projection_that_should_be_tied_and_differs_is_refused(tmp_path, out):
    source = write_hf(tmp_path / "hf", tied=False)
    config = read(source, "config.json")
    del config["text_config"]["tie_word_embeddings"]
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from"):
        convert(source, out)


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_heads_of_both_forms(form, tmp_path, out):
    folder = write_heads(tmp_path / "heads", seed=7)
    tensors = load_file(folder / "medusa_heads.safetensors")
    heads = folder
    if form == "pt":
        state = {f"head_{i}": {} for i in range(4)}
        for name, value in tensors.items():
            _, head, rest = name.split(".", 2)
            state[f"head_{head}"][rest] = value
        heads = tmp_path / "medusa_heads_v2_best.pt"
        config = {"num_heads": 4, "num_layers": 1, "hidden_size": 64}
        torch.save({"heads_state": state, "config": config, "step": 1782, "val_loss": 4.424}, heads)
    report = convert(write_hf(tmp_path / "hf"), out, heads=heads)
    assert report.heads["num_heads"] == 4
    config, arrays = checkpoint.read_heads(out)
    expected = torch.stack([tensors[f"heads.{i}.mlp.0.linear.weight"] for i in range(4)])
    np.testing.assert_array_equal(
        np.array(arrays["layers.0.weight"].astype(mx.float32)), expected.float().numpy()
    )


def test_heads_of_another_width_are_refused(tmp_path, out):
    heads = write_heads(tmp_path / "heads", dim=48)
    with pytest.raises(CheckpointError, match="hidden size 48, but the base model has 64"):
        convert(write_hf(tmp_path / "hf"), out, heads=heads)
    assert not out.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speech_config": None}, "'speech_config' is missing"),
        ({"text_config": None}, "'text_config' is missing"),
        ({"speech_mlp_scale_factor": 7}, "does not divide 1500"),
        ({"speech_token_index": 384}, "outside the vocabulary"),
        ({"speech_adapter": "v9"}, "'speech_adapter' is 'v9'"),
    ],
)
def test_broken_settings_are_refused(changes, message, tmp_path, out):
    with pytest.raises(CheckpointError, match=message):
        convert(write_hf(tmp_path / "hf", **changes), out)
    assert not out.exists()


def test_text_settings_that_cannot_be_are_refused(tmp_path, out):
    source = write_hf(tmp_path / "hf")
    config = read(source, "config.json")
    config["text_config"]["num_key_value_heads"] = 3
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        convert(source, out)


def test_a_tokenizer_of_another_model_is_refused(tmp_path, out):
    source = write_hf(tmp_path / "hf")
    content = (source / "tokenizer.json").read_text(encoding="utf-8")
    (source / "tokenizer.json").write_text(content.replace("<start_of_turn>", "<other>"), encoding="utf-8")
    with pytest.raises(CheckpointError, match="no <start_of_turn>"):
        convert(source, out)
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer.json: missing; make it"):
        convert(source, out)


def test_float16_is_refused(tmp_path, out):
    with pytest.raises(OptionError, match="leave its range; use --dtype bfloat16"):
        convert(write_hf(tmp_path / "hf"), out, dtype="float16")


def test_a_float16_source_becomes_bfloat16(tmp_path, out):
    report = convert(write_hf(tmp_path / "hf", dtype=torch.float16), out)
    assert report.dtype == "bfloat16"
    assert {array.dtype for array in checkpoint.read_arrays(out).values()} == {mx.bfloat16}


def test_no_base_means_meralion_with_its_heads(tmp_path, out, monkeypatch, capsys):
    """`convert --q-bits 4` alone; the hub's two repositories are two folders here."""
    local = {
        "MERaLiON/MERaLiON-2-3B": write_hf(tmp_path / "hf"),
        "kartmannXu/MERaLion-2-3B-Medusa": write_heads(tmp_path / "heads"),
    }
    for module in ("convert.sources", "convert.heads"):
        monkeypatch.setattr(f"{module}.resolve", lambda name, **_: local[name])
    monkeypatch.chdir(tmp_path)
    main(["--q-bits", "4"])
    printed = capsys.readouterr().out
    assert "MERaLiON-2, Hugging Face source" in printed
    assert "4 Medusa heads, tied, float32" in printed
    assert read(tmp_path / "mlx_model", "config.json")["quantization"]["bits"] == 4


def test_no_base_and_no_network_names_the_repository(out, capsys):
    with pytest.raises(SystemExit):
        main(["--q-bits", "4", "--mlx-path", str(out)])
    assert "MERaLiON/MERaLiON-2-3B" in capsys.readouterr().err


def test_encoder_bits_of_whisper(hf, out):
    """The flag is for any speech encoder."""
    convert(hf, out, q_bits=4, q_group_size=32, q_encoder_bits=16)
    packed = [name for name in checkpoint.read_arrays(out) if name.endswith(".scales")]
    assert packed
    assert not any(".encoder." in name for name in packed)


def test_encoder_bits_without_quantizing_are_refused(hf, out):
    with pytest.raises(OptionError, match="--q-encoder-bits does nothing"):
        convert(hf, out, q_encoder_bits=8)


def test_tensors_of_another_model_are_named(tmp_path, out):
    source = write_hf(tmp_path / "hf")
    file = source / "model-00002-of-00002.safetensors"
    tensors = load_file(file)
    gone = sorted(tensors)[0]
    save_file({name: w for name, w in tensors.items() if name != gone}, file)
    index = read(source, "model.safetensors.index.json")
    del index["weight_map"][gone]
    (source / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"missing tensor '{gone}'"):
        convert(source, out)
