"""GGUF files: tensors, settings and tokenizers, written by llama.cpp's own Python package. Tiny random models."""

import json
import re
import struct

import gguf
import llama
import mlx.core as mx
import numpy as np
import pytest
import sentencepiece
import torch
from llama_folders import assert_close, logits_of, theirs_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from convert import convert
from convert.sources.gguf_file import GGUFFile
from mlx_medusa import checkpoint
from mlx_medusa import models as verifiers
from mlx_medusa.errors import CheckpointError, OptionError

TEXT = ("the quick brown fox jumps over the lazy dog; 1234 and 56. Don't stop, naïve café! " * 4).split(" ")
Q = gguf.GGMLQuantizationType
PARTS = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name):
    layer = re.match(r"model\.layers\.(\d+)\.(.*)", name)
    module, _, kind = (layer[2] if layer else name).rpartition(".")
    return (f"blk.{layer[1]}." if layer else "") + f"{PARTS[module]}.{kind}"


def permuted(weight, heads):
    """llama.cpp's order of rows: ``permute`` of its convert_hf_to_gguf.py."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(
        weight.shape
    )  # fmt: skip


def bpe(vocab_size=300):
    """(pieces, merges) of a byte-level vocabulary, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|begin|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    content = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(content["vocab"], key=content["vocab"].get)
    return pieces, [" ".join(pair) for pair in content["merges"]]


def write(path, theirs, kinds=lambda name: Q.F32, changes=(), tokenizer=None):
    """A GGUF of a transformers Llama; ``kinds`` gives the type of each tensor of two dimensions."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, "llama")
    settings = {
        "block_count": config.num_hidden_layers, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads, "rope.dimension_count": config.head_dim,
        "attention.key_length": config.head_dim,
    }  # fmt: skip
    for name, value in settings.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    (tokenizer or add_bpe)(writer)
    for change in changes:
        change(writer)
    for name, tensor in theirs.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        array = tensor.numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if count := heads.get(name.split(".")[-2]):
            array = permuted(array, count)
        kind = kinds(name) if array.ndim > 1 else Q.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    return path


def add_bpe(writer, pre="smollm", vocab_size=300):
    pieces, merges = bpe(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types([3, 3, *[1] * (len(pieces) - 2)])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] + '<|im_end|>' }}{% endfor %}")


def reference(seed=0, **changes):
    """Rows of 64, which blocks divide; a vocabulary for the tokenizer."""
    vocab_size = len(bpe()[0])
    fixed = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    fixed |= {
        "head_dim": 16,
        "vocab_size": vocab_size,
        "rope_parameters": {"rope_theta": 5e4, "rope_type": "default"},
    }
    return llama.reference(seed, **{**fixed, "num_hidden_layers": 2, **changes})


def rounded(theirs, kind):
    """Give it the numbers that its file stands for, by the package's own dequantize."""
    with torch.no_grad():
        for tensor in theirs.state_dict().values():
            if tensor.ndim > 1:
                stored = gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), Q[kind]), Q[kind])
                tensor.copy_(torch.tensor(stored.reshape(tensor.shape)))
            elif kind != "F32":  # norms become what the matrices are
                tensor.copy_(tensor.to(torch.bfloat16 if kind == "BF16" else torch.float16))


TOKENS = [3, 40, 7, 99, 250, 12, 12, 8]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers_with_the_same_numbers(kind, tied, tmp_path, out):
    theirs = reference(tie_word_embeddings=tied, attention_bias=False, mlp_bias=False)
    path = write(tmp_path / "model.gguf", theirs, lambda name: Q[kind])
    report = convert(path, out)
    rounded(theirs, kind)
    assert_close(logits_of(out, TOKENS), theirs_of(theirs, TOKENS))
    bits = {"Q8_0": 8, "Q4_0": 4, "Q4_1": 4}.get(kind)
    settings = json.loads((out / "config.json").read_text()).get("quantization")
    assert settings == (bits and {"group_size": 32, "bits": bits, "mode": "affine"})
    assert report.kind == "GGUF"


def test_biases_are_turned_as_their_rows(tmp_path, out):
    theirs = reference(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    convert(write(tmp_path / "model.gguf", theirs), out)
    assert_close(logits_of(out, TOKENS), theirs_of(theirs, TOKENS))


def test_types_may_differ_by_tensor(tmp_path, out):
    theirs = reference(tie_word_embeddings=True, attention_bias=False, mlp_bias=False)
    kinds = {"model.embed_tokens.weight": Q.Q8_0, "model.layers.0.mlp.up_proj.weight": Q.F16}
    convert(write(tmp_path / "model.gguf", theirs, lambda name: kinds.get(name, Q.Q4_1)), out)
    arrays = checkpoint.read_arrays(out)
    assert arrays["model.embed_tokens.weight"].shape == (298, 64 * 8 // 32)
    assert arrays["model.layers.1.mlp.up_proj.weight"].shape == (96, 64 * 4 // 32)
    assert "model.layers.0.mlp.up_proj.scales" not in arrays
    settings = json.loads((out / "config.json").read_text())["quantization"]
    assert settings["bits"] == 4
    assert settings["model.embed_tokens"]["bits"] == 8
    verifiers.load(out, mx.float16)  # quantized, as on a GPU; strict


def test_mlx_lm_and_transformers_read_the_folder(tmp_path, out):
    from mlx_lm import load
    from transformers import AutoModelForCausalLM

    theirs = reference(tie_word_embeddings=True, attention_bias=False, mlp_bias=False)
    convert(write(tmp_path / "plain.gguf", theirs), out)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert_close(theirs_of(again, TOKENS), theirs_of(theirs, TOKENS))
    packed = out.with_name("packed")
    convert(write(tmp_path / "packed.gguf", theirs, lambda name: Q.Q8_0), packed)
    model, tokenizer = load(str(packed))
    found = np.array(model(mx.array([TOKENS]))[0].astype(mx.float32))
    rounded(theirs, "Q8_0")
    assert_close(found, theirs_of(theirs, TOKENS), 0.02)  # it computes in float16
    assert tokenizer.eos_token_ids == {1}
    assert (
        tokenizer.apply_chat_template([{"role": "user", "content": "fox"}], tokenize=False) == "fox<|im_end|>"
    )


def test_dequantize_and_bits_of_ones_own(tmp_path, out):
    theirs = reference(tie_word_embeddings=True, attention_bias=False, mlp_bias=False)
    path = write(tmp_path / "model.gguf", theirs, lambda name: Q.Q8_0)
    with pytest.raises(OptionError, match="quantized already"):
        convert(path, out, q_bits=4)
    convert(path, out, dequantize=True)
    assert {str(a.dtype) for a in checkpoint.read_arrays(out).values()} == {"mlx.core.float16"}
    plain = write(tmp_path / "plain.gguf", theirs, lambda name: Q.F16)
    assert convert(plain, out.with_name("four"), q_bits=4, q_group_size=32).quantized == 15
    rounded(theirs, "Q8_0")
    assert_close(logits_of(out, TOKENS), theirs_of(theirs, TOKENS), 0.01)  # numbers of float16


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions(kind, tmp_path, out):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
    theirs = reference(rope_parameters=scaling, attention_bias=False, mlp_bias=False)

    def add(writer):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)

    convert(write(tmp_path / "model.gguf", theirs, changes=[add]), out)
    assert_close(logits_of(out, TOKENS * 9), theirs_of(theirs, TOKENS * 9))


def test_llama_3_positions_come_from_their_outcome(tmp_path, out):
    """llama.cpp stores by how much each frequency is divided, and not the settings."""
    scaling = {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 5e5,
    }  # fmt: skip
    theirs = reference(rope_parameters=scaling, attention_bias=False, mlp_bias=False)
    plain = 5e5 ** -(np.arange(0, 16, 2) / 16)
    factors = (plain / theirs.model.rotary_emb.inv_freq.numpy()).astype(np.float32)
    path = write(tmp_path / "a.gguf", theirs, changes=[lambda w: w.add_tensor("rope_freqs.weight", factors)])
    convert(path, out)
    assert_close(logits_of(out, TOKENS * 9), theirs_of(theirs, TOKENS * 9))
    said = json.loads((out / "config.json").read_text())["rope_scaling"]
    assert said == {key: value for key, value in scaling.items() if key != "rope_theta"}
    factors[3] *= 2
    path = write(tmp_path / "b.gguf", theirs, changes=[lambda w: w.add_tensor("rope_freqs.weight", factors)])
    with pytest.raises(CheckpointError, match="not Llama 3's scaling"):
        convert(path, out.with_name("other"))


SAMPLES = [
    "the quick brown fox", " jumps over  the lazy dog ", "1234 and 5 6", "don't naïve ☕ café\n\n", "<|im_end|>fox",
    "", "  ", "日本語",
]  # fmt: skip


def test_byte_level_tokenizer_equals_the_one_that_was_stored(tmp_path, out):
    convert(write(tmp_path / "model.gguf", reference(attention_bias=False, mlp_bias=False)), out)
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    pieces, merges = bpe()
    stored = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [tuple(pair.split(" ")) for pair in merges])
    )
    stored.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    stored.decoder = decoders.ByteLevel()
    stored.add_special_tokens(["<|begin|>", "<|im_end|>"])
    for text in SAMPLES:
        ids = found.encode(text).ids
        assert ids == stored.encode(text).ids, text
        assert found.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a  12345", ["a", "Ġ", "Ġ12345"]),
        ("smollm", "a  12345", ["a", "ĠĠ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", "a  12345 DON'T", ["a", "Ġ", "Ġ", "123", "45", "ĠDON", "'T"]),
        ("qwen2", "a 12\n\nb", ["a", "Ġ", "1", "2", "ĊĊ", "b"]),
        ("tekken", "a 12 HelloWorld", ["a", "Ġ", "1", "2", "ĠHello", "World"]),
    ],
)
def test_text_is_cut_by_the_rules_that_the_file_names(pre, text, pieces, tmp_path, out):
    """What each of these rules does is plain to see from its published pattern."""
    theirs = reference(attention_bias=False, mlp_bias=False)
    convert(write(tmp_path / "model.gguf", theirs, tokenizer=lambda writer: add_bpe(writer, pre)), out)
    found = Tokenizer.from_file(str(out / "tokenizer.json")).pre_tokenizer.pre_tokenize_str(text)
    assert [piece for piece, _ in found] == pieces
    begins = Tokenizer.from_file(str(out / "tokenizer.json")).encode("fox").tokens[0] == "<|begin|>"
    assert begins is (pre == "llama-bpe")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizer_equals_sentencepiece(prefix, tmp_path, out):
    path = tmp_path / "spm.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(TEXT)] * 4), model_writer=path.open("wb"), model_type="bpe", vocab_size=300,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=prefix, character_coverage=1.0, hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    stored = sentencepiece.SentencePieceProcessor(str(path))
    size = stored.get_piece_size()

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list([stored.id_to_piece(i) for i in range(size)])
        writer.add_token_scores([stored.get_score(i) for i in range(size)])
        special = [2 if stored.is_unknown(i) else 3 if stored.is_control(i) else 1 for i in range(size)]
        writer.add_token_types([6 if stored.is_byte(i) else kind for i, kind in enumerate(special)])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_add_space_prefix(prefix)

    theirs = reference(vocab_size=size, attention_bias=False, mlp_bias=False)
    convert(write(tmp_path / "model.gguf", theirs, tokenizer=add), out)
    found = Tokenizer.from_file(str(out / "tokenizer.json"))
    for text in SAMPLES:
        if "<|" not in text:
            assert found.encode(text).ids == [1, *stored.encode(text)], text
            assert found.decode(found.encode(text).ids) == text
    assert found.encode("</s>fox").ids == [1, 2, *stored.encode("fox")]
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 2


BROKEN = {
    "empty": (lambda data: b"", "not a GGUF file"),
    "magic": (lambda data: b"GGML" + data[4:], "not a GGUF file"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "GGUF version 1 is not read"),
    "byte order": (lambda data: data[:4] + struct.pack(">I", 3) + data[8:], r"\(or its byte order\)"),
    "counts": (lambda data: data[:8] + b"\xff" * 8 + data[16:], "header is broken or cut short"),
    "header cut": (lambda data: data[:900], "header is broken or cut short"),
    "data cut": (lambda data: data[:-5], "cut short within tensor"),
    "type": (lambda data: data.replace(b"general.architecture\x08", b"general.architecture\x63"), "broken"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_named(case, tmp_path, out):
    whole = write(tmp_path / "model.gguf", reference(attention_bias=False, mlp_bias=False)).read_bytes()
    change, message = BROKEN[case]
    path = tmp_path / "broken.gguf"
    path.write_bytes(change(whole))
    with pytest.raises(CheckpointError, match=rf"broken\.gguf: .*{message}"):
        convert(path, out)
    assert not out.exists()


def test_a_type_that_is_not_read_is_named_with_the_cure(tmp_path, out):
    theirs = reference(attention_bias=False, mlp_bias=False)
    kinds = {"model.layers.1.mlp.up_proj.weight": Q.Q5_0}
    path = write(tmp_path / "model.gguf", theirs, lambda name: kinds.get(name, Q.Q8_0))
    with pytest.raises(CheckpointError, match=r"'blk\.1\.ffn_up\.weight' is of type Q5_0.*llama-quantize"):
        convert(path, out)


REFUSED = {
    "split": (lambda w: w.add_uint16("split.count", 3), "one of 3 parts; join them with"),
    "experts": (lambda w: w.add_expert_count(8), "a mixture of experts"),
    "tensor": (
        lambda w: w.add_tensor("blk.0.ffn_gate_inp.weight", np.ones((2, 2), np.float32)),
        "ffn_gate_inp",
    ),
    "token id": (lambda w: w.add_eot_token_id(999), "eot token is 999, of 298"),
    "positions": (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_models_that_are_not_ours_are_refused(case, tmp_path, out):
    change, message = REFUSED[case]
    changes = [change] if message else [change, lambda w: w.add_rope_scaling_factor(4.0)]
    path = write(tmp_path / "model.gguf", reference(attention_bias=False, mlp_bias=False), changes=changes)
    with pytest.raises(CheckpointError, match=message or "rope type 'longrope'"):
        convert(path, out)
    assert not out.exists()


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (lambda w: add_bpe(w, "deepseek-llm"), "cuts text by the rules 'deepseek-llm'"),
        (lambda w: w.add_tokenizer_model("bert"), "its tokenizer is 'bert'"),
        (lambda w: add_bpe(w, vocab_size=280), "280 tokens, but 298 rows"),
    ],
)
def test_tokenizers_that_are_not_ours_are_refused(tokenizer, message, tmp_path, out):
    theirs = reference(attention_bias=False, mlp_bias=False)
    with pytest.raises(CheckpointError, match=message):
        convert(write(tmp_path / "model.gguf", theirs, tokenizer=tokenizer), out)


def test_another_architecture_is_refused(tmp_path, out):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen2")
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    with pytest.raises(CheckpointError, match="architecture 'qwen2' is not read"):
        convert(tmp_path / "model.gguf", out)


def test_a_folder_with_one_gguf_is_that_file(tmp_path, out):
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "model.gguf", reference(attention_bias=False, mlp_bias=False))
    assert convert(tmp_path / "folder", out).kind == "GGUF"


def test_rows_are_read_a_few_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr("convert.sources.gguf_file._STEP", 500)  # bytes: seven rows
    theirs = reference(attention_bias=False, mlp_bias=False)
    file = GGUFFile(write(tmp_path / "model.gguf", theirs, lambda name: Q.Q8_0))
    packed = file.read("blk.0.attn_v.weight")
    expected = theirs.state_dict()["model.layers.0.self_attn.v_proj.weight"].numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(expected, Q.Q8_0), Q.Q8_0)
    np.testing.assert_array_equal(np.array(packed.dequantize(mx.float32)), expected)
