"""A real text model: SmolLM2-135M-Instruct from its 4-bit GGUF file, against transformers reading the same file.

What transformers makes of it is recorded in golden/smollm2.json (record_smollm2.py), and a part of that anew.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from conftest import converted, unavailable
from tokenizers import Tokenizer

from convert import convert
from mlx_medusa import models
from mlx_medusa.demo import TEXT, check_sha256, package_file
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, chain_pass, generate, prefill
from mlx_medusa.text.tokenizer import TextTokenizer

GOLDEN = json.loads(Path(__file__).with_name("golden").joinpath("smollm2.json").read_text(encoding="utf-8"))
PROMPTS = GOLDEN["prompts"]
SAMPLE = 97  # of the logits, each 97th is recorded
END = 2  # <|im_end|>


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    file = package_file(TEXT.package, *TEXT.weights)
    if file is None:
        unavailable(f"{TEXT.package} is not installed: {TEXT.install}")
        raise AssertionError
    check_sha256(file, TEXT.sha256, cure=TEXT.install)
    return converted(file, tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def model(folder):
    return models.load(folder)[0]


def assert_agree(found, expected, largest):
    """Within a thousandth of the largest logit."""
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3 * largest)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_every_greedy_choice_equal_transformers(prompt, model):
    """Of one pass over the prompt and the recorded answer, each row chooses the token that was recorded next."""
    entry = PROMPTS[prompt]
    tokens = entry["prompt"] + entry["tokens"][:-1]
    logits = model.logits(chain_pass(model, tokens, KVCache(model.num_layers))[0])
    begin = len(entry["prompt"]) - 1
    assert_agree(np.array(logits[begin, ::SAMPLE]), entry["logits"], entry["largest"])
    assert mx.argmax(logits[begin:], axis=-1).tolist() == entry["tokens"]


def test_the_answers_are_long_enough_to_tell():
    assert len(PROMPTS) >= 20
    assert sum(len(entry["tokens"]) for entry in PROMPTS.values()) > 1000
    assert all(len(e["tokens"]) == 64 or e["tokens"][-1] == END for e in PROMPTS.values())


@pytest.mark.parametrize("prompt", list(PROMPTS)[2:4])
def test_plain_decoding_writes_what_transformers_writes(prompt, model):
    """One token at a time."""
    entry = PROMPTS[prompt]
    limits = Limits(frozenset({END}), 64)
    state, first = prefill(model, entry["prompt"], KVCache(model.num_layers), limits)
    for _ in generate(model, state, first, limits, width=1):
        pass
    assert state.tokens[len(entry["prompt"]) :] == entry["tokens"]


def test_texts_have_the_ids_that_transformers_gives_them(folder):
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert len(GOLDEN["texts"]) > 10
    for text, ids in GOLDEN["texts"].items():
        assert tokenizer.encode(text).ids == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_are_cut_off_before_words(folder):
    """As in SmolLM2's own tokenizer.json; transformers ignores the rule that the GGUF file names, and only spaces
    before a digit show that: "a  1" is a, two spaces, 1.
    """
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("a  12").tokens == ["a", "ĠĠ", "1", "2"]


def test_the_chat_template_gives_the_prompts_of_transformers(folder, model):
    tokenizer = TextTokenizer.from_folder(folder, model.args.vocab_size)
    for prompt, entry in PROMPTS.items():
        assert tokenizer.chat([{"role": "user", "content": prompt}]) == entry["prompt"]


def test_mlx_lm_writes_the_same(folder, out):
    """With the numbers expanded: on a CPU it would take minutes with 4 bits (tests of tiny models have those)."""
    from mlx_lm import load

    convert(folder, out, dequantize=True, dtype="float32")
    loaded, tokenizer = load(str(out))
    entry = PROMPTS["What is the capital of France?"]
    found = loaded(mx.array([entry["prompt"] + entry["tokens"][:-1]]))[0]
    assert mx.argmax(found[len(entry["prompt"]) - 1 :], axis=-1).tolist() == entry["tokens"]
    assert tokenizer.eos_token_ids == {END}


@pytest.mark.slow
def test_a_record_made_anew_is_the_golden_one():
    """In a process of its own, as all records are."""
    prompt = "What is the capital of France?"
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("record_smollm2.py")), "--only", prompt],
        capture_output=True, check=False, text=True, timeout=500, cwd=Path(__file__).parent.parent,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-800:]
    made = json.loads(run.stdout)
    assert made["texts"] == GOLDEN["texts"]
    entry = made["prompts"][prompt]
    assert (entry["prompt"], entry["tokens"]) == (PROMPTS[prompt]["prompt"], PROMPTS[prompt]["tokens"])
    np.testing.assert_allclose(entry["logits"], PROMPTS[prompt]["logits"], atol=1e-3)
