"""Medusa heads of text models, alone and in one checkpoint with their model. Tiny random models."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from llama_folders import (
    DIM,
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
from make_random_checkpoint import make_vicuna, vicuna_config
from safetensors.torch import load_file, save_file
from text_models import VOCAB

import mlx_medusa
from convert import convert
from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError

SEED = {"medusa_num_heads": 3, "medusa_num_layers": 1, "version": "2"}  # theharshithh/vicuna-7b-speculative


def heads(prefix="", count=3, own=False, rows=VOCAB):
    torch.manual_seed(1)
    found = {}
    for head in range(count):
        found[f"{prefix}{head}.0.linear.weight"] = torch.randn(DIM, DIM) * 0.05
        found[f"{prefix}{head}.0.linear.bias"] = torch.randn(DIM) * 0.05
        if own:
            found[f"{prefix}{head}.1.weight"] = torch.randn(rows, DIM) * 0.05
    return found


def assert_heads(folder, prefix="", count=3, own=False):
    config, arrays = checkpoint.read_heads(folder)
    expected = heads(prefix, count, own)
    assert (config["num_heads"], config["tied"]) == (count, not own)
    parts = {"layers.0.weight": "0.linear.weight", "layers.0.bias": "0.linear.bias"}
    parts |= {"projection.weight": "1.weight"} if own else {}
    assert arrays.keys() == parts.keys()
    for ours, name in parts.items():
        stacked = torch.stack([expected[f"{prefix}{head}.{name}"] for head in range(count)])
        np.testing.assert_array_equal(np.array(arrays[ours]), stacked.numpy())


@pytest.mark.parametrize(
    ("form", "own", "count"), [("safetensors", False, 3), ("pt", False, 3), ("pt", True, 5)]
)
def test_heads_folders(form, own, count, tmp_path, out):
    """The seed's (tied) and FasterDecoding's (own projections; its config says 2 heads where there are 5)."""
    folder = tmp_path / "heads"
    folder.mkdir()
    if form == "pt":
        torch.save(heads(count=count, own=own), folder / "medusa_lm_head.pt")
    else:
        save_file(heads(count=count, own=own), folder / "medusa_lm_head.safetensors")
    said = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    (folder / "config.json").write_text(json.dumps(said))
    convert(write(tmp_path / "hf", reference()), out, heads=folder)
    assert_heads(out, count=count, own=own)
    with pytest.raises(CheckpointError, match="holds Medusa heads and no model; name the model with --base"):
        convert(folder, out.with_name("other"))


def seed_save(tmp_path, theirs, *, extra_rows=2, tokenizer=True):
    """What the seed's trainer saves: base_model.*, medusa_head.*, two more rows, a config of the heads only."""
    folder = write(tmp_path / "full", theirs)

    def wrap(weights):
        torch.manual_seed(2)
        more = torch.randn(extra_rows, DIM)
        ends = ("lm_head.weight", "embed_tokens.weight")
        wider = {name: torch.cat([w, more]) if name.endswith(ends) else w for name, w in weights.items()}
        return {f"base_model.{name}": w for name, w in wider.items()} | heads("medusa_head.")

    rewrite(folder, wrap)
    if not tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).unlink()
    return folder


@pytest.mark.parametrize("form", ["safetensors", "bin"])
def test_a_full_save_of_the_seeds_trainer(form, tmp_path, out):
    """Its config names the base model, whose settings and tokenizer are taken; rows that no token has are left out."""
    theirs = reference()
    base = write(tmp_path / "base", theirs)
    full = seed_save(tmp_path, theirs, tokenizer=False)
    (full / "config.json").write_text(json.dumps({**SEED, "base_model_name_or_path": str(base)}))
    if form == "bin":
        as_torch_shards(full)
    report = convert(full, out)
    assert_close(logits_of(out), theirs_of(theirs))
    assert_heads(out, "medusa_head.")
    assert f"2 rows of the vocabulary left out: the base model's {VOCAB} tokens" in "\n".join(report.lines())
    assert read(out, "tokenizer.json") == read(base, "tokenizer.json")
    config = read(out, "config.json")
    assert (config["model_type"], config["vocab_size"]) == ("llama", VOCAB)
    assert not {"medusa_num_heads", "version", "base_model_name_or_path"} & config.keys()
    convert(base, out.with_name("heads"), heads=full)  # or only its heads, for the base that one has
    assert_heads(out.with_name("heads"), "medusa_head.")


def test_a_full_save_with_settings_and_tokens_of_its_own_keeps_its_rows(tmp_path, out):
    theirs = reference()
    full = seed_save(tmp_path, theirs, extra_rows=2)
    tokens = read(full, "tokenizer.json")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    tokens["added_tokens"] += [
        {"id": VOCAB + i, "content": name, **flags} for i, name in enumerate(("Human:", "Assistant:"))
    ]
    (full / "tokenizer.json").write_text(json.dumps(tokens))
    edit(full, **SEED, vocab_size=VOCAB + 2, model_type="medusa")
    convert(full, out)
    assert logits_of(out).shape == (8, VOCAB + 2)
    assert_close(logits_of(out)[:, :VOCAB], theirs_of(theirs))
    assert len(read(out, "tokenizer.json")["added_tokens"]) == len(tokens["added_tokens"])


def test_a_medusa_2_model(tmp_path, out):
    """Heads beside ``model.*``, with projections of their own."""
    theirs = reference()
    full = write(
        tmp_path / "full", theirs, **SEED, architectures=["MedusaLlamaModel"], model_type="medusa_llama"
    )
    rewrite(full, lambda weights: weights | heads("medusa_head.", 5, own=True))
    convert(full, out)
    assert_close(logits_of(out), theirs_of(theirs))
    assert_heads(out, "medusa_head.", 5, own=True)
    assert read(out, "config.json")["architectures"] == ["LlamaForCausalLM"]


def test_a_full_save_that_does_not_say_what_its_base_is(tmp_path, out):
    full = seed_save(tmp_path, reference())
    (full / "config.json").write_text(json.dumps(SEED))
    with pytest.raises(CheckpointError, match=r"does not describe the model .*names no base model.*--heads"):
        convert(full, out)
    (full / "config.json").write_text(json.dumps({**SEED, "base_model_name_or_path": str(tmp_path / "gone")}))
    with pytest.raises(CheckpointError, match="gone: no such file"):
        convert(full, out)


def test_heads_that_do_not_fit_are_refused(tmp_path, out):
    """Projections for the seed's 32002 rows, beside a base of 32000; another width."""
    base = write(tmp_path / "hf", reference())
    path = tmp_path / "medusa_lm_head.safetensors"
    save_file(heads(own=True, rows=VOCAB + 2), path)
    with pytest.raises(
        CheckpointError, match=rf"projections are for {VOCAB + 2} tokens, but the base model has {VOCAB}"
    ):
        convert(base, out, heads=path)
    save_file(
        {name: (w[:16, :16] if w.ndim > 1 else w[:16]).contiguous() for name, w in heads().items()}, path
    )
    with pytest.raises(CheckpointError, match="hidden size 16, but the base model has 32"):
        convert(base, out, heads=path)


def test_a_model_without_heads_is_no_heads(tmp_path, out):
    base = write(tmp_path / "hf", reference())
    with pytest.raises(CheckpointError, match="holds no Medusa heads"):
        convert(base, out, heads=base)
    assert len(load_file(base / "model.safetensors")) > 3


@pytest.mark.parametrize(("kind", "count", "own"), [("tied", 3, False), ("own", 5, True)])
def test_the_random_vicuna_of_the_examples(kind, count, own, tmp_path, out):
    """The script's checkpoint, small, from shards to a 4-bit folder with heads of either layout and on to text."""
    config = vicuna_config(
        vocab_size=400, hidden_size=128, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4
    )
    make_vicuna(tmp_path / "random", config=config, shard_bytes=400_000)
    assert len(list((tmp_path / "random").glob("model-*.safetensors"))) > 1
    report = convert(tmp_path / "random", out, tmp_path / "random" / f"heads-{kind}", q_bits=4, q_heads=own)
    assert (report.heads["num_heads"], report.heads["tied"]) == (count, not own)
    result = mlx_medusa.load(out).generate("hi", max_tokens=12)
    assert len(result.tokens) == 12


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_memory_is_bounded_by_the_heads_and_a_tensor(tmp_path, out):
    """0.5 GB of model and 0.7 GB of heads with projections, in less than the heads and half a gigabyte."""
    config = vicuna_config(
        hidden_size=2048, intermediate_size=5504, num_hidden_layers=2, num_attention_heads=16
    )
    make_vicuna(tmp_path / "random", config=config)
    code = (
        "import re, sys; from pathlib import Path; from convert.cli import main; main(sys.argv[1:]); "
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', Path('/proc/self/status').read_text())[1])"
    )
    heads = tmp_path / "random" / "heads-own"
    command = [sys.executable, "-c", code, "--base", tmp_path / "random", "--heads", heads, "--q-bits", "4"]
    command += ["--mlx-path", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True)
    peak = int(done.stdout.split()[-1]) * 1024
    assert peak < (heads / "medusa_lm_head.safetensors").stat().st_size + 5e8
