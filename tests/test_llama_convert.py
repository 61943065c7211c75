"""``convert`` of Llama folders: safetensors, PyTorch shards, mlx-lm's; tokenizer.model. Tiny random models."""

import json

import llama
import mlx.core as mx
import numpy as np
import pytest
import sentencepiece
import torch
from llama_folders import (
    TOKENS,
    as_torch_shards,
    assert_close,
    edit,
    logits_of,
    read,
    reference,
    rewrite,
    theirs_of,
    write,
)  # fmt: skip
from safetensors.torch import load_file
from text_models import VOCAB
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaTokenizer

from convert import convert
from convert.cli import main
from mlx_medusa import checkpoint, models
from mlx_medusa.errors import CheckpointError, OptionError


@pytest.mark.parametrize("seed", range(6))  # every kind of rotation, biases, tied and untied
def test_a_converted_folder_equals_transformers_and_is_read_by_it(seed, tmp_path, out):
    theirs = reference(seed, tie_word_embeddings=seed % 2 == 0)
    report = convert(write(tmp_path / "hf", theirs), out)
    assert_close(logits_of(out), theirs_of(theirs))
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert_close(theirs_of(again), theirs_of(theirs))
    assert set(checkpoint.read_arrays(out)) == set(load_file(tmp_path / "hf" / "model.safetensors"))
    assert (report.title, report.kind) == ("Llama", "Hugging Face")
    text = "Hi <|im_end|>\n"
    theirs_ids = AutoTokenizer.from_pretrained(tmp_path / "hf")(text).input_ids
    assert AutoTokenizer.from_pretrained(out)(text).input_ids == theirs_ids


@pytest.mark.parametrize("seed", [1, 2, 3])  # linear, llama3, yarn
def test_mlx_lm_computes_the_same(seed, tmp_path, out):
    from mlx_lm import load

    theirs = reference(seed)
    convert(write(tmp_path / "hf", theirs), out)
    model, tokenizer = load(str(out))
    assert_close(np.array(model(mx.array([TOKENS]))[0]), theirs_of(theirs))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_a_folder_of_mlx_lm_and_its_quantization_are_kept(tmp_path, out):
    from mlx_lm import convert as mlx_lm_convert

    theirs = reference()
    made = tmp_path / "mlx"
    source = write(tmp_path / "hf", theirs, rope_parameters=None, rope_theta=1e4, rope_scaling=None)
    mlx_lm_convert(str(source), str(made), quantize=True, q_bits=8, q_group_size=32)
    report = convert(made, out)
    one, two = checkpoint.read_arrays(made), checkpoint.read_arrays(out)
    assert one.keys() == two.keys()
    assert all(mx.array_equal(one[name], two[name]).item() for name in one)
    assert (report.kind, report.quantized) == ("MLX folder", 16)
    convert(out, out.with_name("plain"), dequantize=True)
    assert_close(logits_of(out.with_name("plain")), logits_of(out))


def test_torch_shards(tmp_path, out):
    theirs = reference(dtype=torch.float16).half()
    table = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # in checkpoints of 2023
    source = as_torch_shards(write(tmp_path / "hf", theirs), **table)
    report = convert(source, out)
    assert (report.kind, report.dtype) == ("PyTorch", "float16")
    assert_close(logits_of(out), theirs_of(theirs.float()))
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model-00002-of-00002\.bin is missing"):
        convert(source, out.with_name("other"))


def test_recipe_and_settings(tmp_path, out, capsys):
    main(["--base", str(write(tmp_path / "hf", reference())), "--mlx-path", str(out), "--quant-predicate", "mixed_3_6",
          "--q-group-size", "32"])  # fmt: skip
    assert "Llama, Hugging Face source" in capsys.readouterr().out
    settings = read(out, "config.json")["quantization"]
    assert settings["bits"] == 3
    assert settings["lm_head"]["bits"] == settings["model.layers.1.mlp.down_proj"]["bits"] == 6
    card = (out / "README.md").read_text()
    assert "pipeline_tag: text-generation" in card
    assert "python -m mlx_medusa.generate" in card
    with pytest.raises(OptionError, match="Llama has no speech encoder"):
        convert(tmp_path / "hf", out.with_name("other"), q_bits=4, q_encoder_bits=8)


def test_files_beside_the_weights(tmp_path, out):
    source = write(tmp_path / "hf", reference(2), transformers_version="5", auto_map={"AutoModel": "x.py"})
    (source / "generation_config.json").write_text('{"eos_token_id": [3, 1], "temperature": 0.7}')
    convert(source, out)
    assert read(out, "generation_config.json") == {
        "bos_token_id": 1, "pad_token_id": 0, "eos_token_id": [3, 1], "temperature": 0.7
    }  # fmt: skip
    config = read(out, "config.json")
    assert config["rope_scaling"]["rope_type"] == "llama3"
    assert config["rope_theta"] == read(source, "config.json")["rope_parameters"]["rope_theta"]
    assert not {"rope_parameters", "auto_map", "transformers_version"} & config.keys()
    assert (out / "chat_template.jinja").read_bytes() == (source / "chat_template.jinja").read_bytes()
    assert read(out, "tokenizer.json") == read(source, "tokenizer.json")


def test_mistral(tmp_path, out):
    theirs = llama.mistral(0, vocab_size=VOCAB, sliding_window=64, tie_word_embeddings=False)
    assert convert(write(tmp_path / "hf", theirs), out).title == "Mistral"
    assert_close(logits_of(out), theirs_of(theirs))
    assert models.load(out)[0].max_length == 64


def test_projections_that_are_tied(tmp_path, out):
    theirs = reference(tie_word_embeddings=True)
    source = write(tmp_path / "hf", theirs)
    rewrite(source, lambda w: {**w, "lm_head.weight": w["model.embed_tokens.weight"].clone()})
    convert(source, out)
    assert "lm_head.weight" not in checkpoint.read_arrays(out)
    rewrite(source, lambda w: {**w, "lm_head.weight": w["lm_head.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from"):
        convert(source, out.with_name("other"))
    edit(
        rewrite(source, lambda w: {n: t for n, t in w.items() if n != "lm_head.weight"}),
        tie_word_embeddings=None,
    )
    convert(source, out.with_name("silent"))  # mlx-lm's folders may not say it
    assert read(out.with_name("silent"), "config.json")["tie_word_embeddings"] is True


def spm(folder, text="the quick brown fox jumps over the lazy dog. USER: hi! ASSISTANT: ", size=310):
    """A tokenizer.model of Llama's kind."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text] * 4), model_writer=(folder / "tokenizer.model").open("wb"), model_type="bpe",
        vocab_size=size, byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        character_coverage=1.0, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    return sentencepiece.SentencePieceProcessor(str(folder / "tokenizer.model"))


def test_a_tokenizer_model_gives_the_ids_of_sentencepiece(tmp_path, out):
    """Vicuna's folder has no tokenizer.json."""
    source = write(tmp_path / "hf", reference(vocab_size=340))
    stored = spm(source)
    size = stored.get_piece_size()
    said = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_bos_token": True}
    (source / "tokenizer_config.json").write_text(json.dumps(said))
    (source / "added_tokens.json").write_text(json.dumps({"<pad>": size, "<beyond>": 340}))
    report = convert(source, out)
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in ("the fox", " two  spaces ", "naïve ☕\n\nUSER: 12", "", "over the lazy dog."):
        assert found.encode(text).ids == [1, *stored.encode(text)], text
        assert found.decode(found.encode(text).ids) == text
    assert found.encode("fox</s>the").ids == [1, *stored.encode("fox"), 2, *stored.encode("the")]
    assert found.encode("<pad>").ids == [1, size]
    assert "'<beyond>'" in "\n".join(report.lines())  # no row of the model is its
    legacy = LlamaTokenizer.from_pretrained(source, legacy=True)
    assert legacy("the fox").input_ids == found.encode("the fox").ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:100], "not a SentencePiece model, or cut short"),
        (lambda data: b"", "not a SentencePiece model"),
        (lambda data: b"no protobuf at all", "not a SentencePiece model"),
    ],
)
def test_a_broken_tokenizer_model_is_named(change, message, tmp_path, out):
    source = write(tmp_path / "hf", reference(vocab_size=340))
    spm(source)
    file = source / "tokenizer.model"
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(CheckpointError, match=rf"tokenizer\.model: {message}"):
        convert(source, out)


def test_a_sentencepiece_model_of_another_kind_is_refused(tmp_path, out):
    source = write(tmp_path / "hf", reference(vocab_size=340))
    spm(source)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the quick brown fox"] * 9), model_writer=(source / "tokenizer.model").open("wb"),
        model_type="unigram", vocab_size=20, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    with pytest.raises(CheckpointError, match="not Llama's kind of SentencePiece model"):
        convert(source, out)


def test_tokenizers_that_are_missing_or_another_models(tmp_path, out):
    source = write(tmp_path / "hf", reference(vocab_size=VOCAB - 3))
    with pytest.raises(CheckpointError, match=rf"has token {VOCAB - 1}, but the model has {VOCAB - 3} rows"):
        convert(source, out)
    (source / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing, and no tokenizer\.model either"):
        convert(source, out)
    assert not out.exists()


def test_weights_of_another_model_are_named(tmp_path, out):
    source = write(tmp_path / "hf", reference(), num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"missing tensor 'model\.layers\.2\."):
        convert(source, out)
    edit(source, num_hidden_layers=2, vocab_size=VOCAB + 2)
    with pytest.raises(CheckpointError, match=rf"shape \[{VOCAB}, 32\], expected \[{VOCAB + 2}, 32\]"):
        convert(source, out)
    edit(source, vocab_size=VOCAB, quantization_config={"quant_method": "gptq"})
    with pytest.raises(CheckpointError, match="quantized by gptq"):
        convert(source, out)
