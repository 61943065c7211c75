"""The Llama verifier against transformers. Random small models, float32."""

import subprocess
import sys
from itertools import pairwise

import llama
import mlx.core as mx
import numpy as np
import pytest
import torch

from mlx_medusa import models
from mlx_medusa.errors import CheckpointError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, chain_pass, generate, prefill
from mlx_medusa.mlx_lm_parts import part
from mlx_medusa.models.layers import attention

SEEDS = 24  # in turn: six rotations, grouping, head sizes, biases, tied and untied


def assert_close(ours, theirs):
    """Within 1e-4 of the largest number."""
    theirs = theirs.numpy()
    np.testing.assert_allclose(np.array(ours), theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def run(theirs, tokens):
    """(hidden after the norm [W, D], logits [W, V]) of one pass of transformers"""
    with torch.no_grad():
        out = theirs(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return out.hidden_states[-1][0], out.logits[0]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_hidden_states_and_logits_equal_transformers(seed):
    theirs = llama.reference(seed)
    ours = llama.ours_of(theirs)
    prompt = llama.prompt_of(ours, seed, 40 + seed)
    hidden, logits = run(theirs, prompt)
    cache = KVCache(ours.num_layers)
    cuts = [0, len(prompt) // 3, len(prompt) // 3 + 1, len(prompt)]
    found = mx.concatenate([chain_pass(ours, prompt[a:b], cache) for a, b in pairwise(cuts)], axis=1)
    assert_close(found[0], hidden)
    assert_close(ours.logits(found[0]), logits)


def decode(ours, prompt, steps):
    limits = Limits(frozenset(), steps)
    state, first = prefill(ours, prompt, KVCache(ours.num_layers), limits)
    for _ in generate(ours, state, first, limits, width=1):
        pass
    return state.tokens[len(prompt) :]


@pytest.mark.parametrize("block", range(4))
def test_greedy_tokens_equal_transformers(block):
    for seed in range(block * SEEDS // 4, (block + 1) * SEEDS // 4):
        theirs = llama.reference(seed)
        ours = llama.ours_of(theirs)
        prompt = llama.prompt_of(ours, seed, 9)
        with torch.no_grad():
            expected = theirs.generate(
                torch.tensor([prompt]), max_new_tokens=128, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert decode(ours, prompt, 128) == expected[0, len(prompt) :].tolist(), seed


@pytest.mark.parametrize("seed", range(6))
def test_nodes_of_a_tree_equal_the_sequences_that_they_end(seed):
    """Rows at equal positions, apart by the mask only: the rule of tree attention."""
    theirs = llama.reference(seed)
    ours = llama.ours_of(theirs)
    prompt = llama.prompt_of(ours, seed, 12)
    root, *guesses = llama.prompt_of(ours, seed + 100, 7)
    paths = [[], [0], [1], [0, 2], [0, 3], [1, 4], [0, 2, 5]]  # of the root and six nodes, by their guesses
    nodes = [root, *guesses]
    cache = KVCache(ours.num_layers)
    chain_pass(ours, prompt, cache)
    seen = [[0, *(guess + 1 for guess in path)] for path in paths]
    mask = np.concatenate([np.ones((7, 12), bool), np.array([[k in s for k in range(7)] for s in seen])], 1)
    positions = [12 + len(path) for path in paths]
    found = ours.step(mx.array([nodes]), mx.array([positions]), mx.array(mask)[None, None], cache)
    assert cache.length == 19
    for index, path in enumerate(paths):
        hidden, _ = run(theirs, [*prompt, root, *(guesses[guess] for guess in path)])
        assert_close(found[0, index], hidden[-1])


def test_rows_of_a_batch_have_their_own_positions():
    theirs = llama.reference(2)
    ours = llama.ours_of(theirs)
    tokens = [llama.prompt_of(ours, seed, 5) for seed in (0, 1)]
    shift = 7  # of the second row: what it sees, it sees at the same distances
    positions = mx.array([[0, 1, 2, 3, 4], [shift + i for i in range(5)]])
    mask = mx.tri(5, 5, dtype=mx.bool_)[None, None]
    found = ours.step(mx.array(tokens), positions, mask, KVCache(ours.num_layers))
    for row in (0, 1):
        assert_close(found[row], run(theirs, tokens[row])[0])


@pytest.mark.parametrize(("window", "context"), [(None, 256), (48, 48)])
def test_mistral_is_read_up_to_its_window(window, context):
    theirs = llama.mistral(5, sliding_window=window)
    ours = llama.ours_of(theirs)
    assert ours.max_length == context
    prompt = llama.prompt_of(ours, 5, 48)
    hidden = chain_pass(ours, prompt, KVCache(ours.num_layers))
    assert_close(hidden[0], run(theirs, prompt)[0])


def test_a_mistral_that_does_not_name_its_window_has_transformers_own():
    config = llama.mistral(5).config.to_dict()
    for name in ("sliding_window", "max_position_embeddings"):
        del config[name]
    assert models.build(config).max_length == 4096


def test_settings_of_transformers_4_give_the_same_model():
    theirs = llama.reference(2)
    config = theirs.config.to_dict()
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
    ours = llama.ours_of(theirs, config)
    prompt = llama.prompt_of(ours, 0, 30)
    assert_close(chain_pass(ours, prompt, KVCache(ours.num_layers))[0], run(theirs, prompt)[0])


def test_settings_that_a_config_leaves_out_are_those_of_llama():
    """As in the first LLaMA checkpoints, Vicuna's among them."""
    config = {
        "model_type": "llama", "vocab_size": 32000, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_sequence_length": 4096, "rope_scaling": None,
    }  # fmt: skip
    ours = models.build(config)
    args = ours.args
    assert (args.num_key_value_heads, args.head_dim, args.rope_theta) == (4, 16, 10_000)
    assert (args.tie_word_embeddings, args.rms_norm_eps) == (False, 1e-6)
    assert ours.max_length == 4096


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' does not divide"),
        ({"num_hidden_layers": None}, "'num_hidden_layers' is missing"),
        ({"num_attention_heads": "four"}, "'num_attention_heads' is 'four'"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not known"),
        ({"rope_scaling": {"type": "linear"}}, "rope type 'linear' needs a 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}}, "'truncate' is not supported"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "'partial_rotary_factor'"),
        ({"rope_scaling": "linear"}, "setting of positions"),
        ({"max_position_embeddings": "many"}, "setting of positions"),
        ({"hidden_size": "wide"}, "'hidden_size' is 'wide'"),
    ],
)
def test_arithmetic_that_is_not_ours_is_refused(changes, message):
    config = {
        "model_type": "llama", "vocab_size": 50, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 4, **changes,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match=message):
        models.build(config)


@pytest.mark.parametrize("width", [1, 5, 300])
def test_grouped_attention_equals_softmax(width, monkeypatch):
    """On a CPU it is made of other elements, in blocks of rows."""
    monkeypatch.setattr("mlx_medusa.models.layers._BLOCK", 1 << 14)
    rng = np.random.default_rng(width)
    shapes = ((2, 6, width, 8), (2, 2, width + 40, 8), (2, 2, width + 40, 8))
    queries, keys, values = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    mask = np.tri(width, width + 40, 40, dtype=bool)[None, None]
    found = attention(mx.array(queries), mx.array(keys), mx.array(values), 0.3, mx.array(mask))
    wide = [torch.tensor(array).repeat_interleave(3, dim=1).double() for array in (keys, values)]
    scores = torch.tensor(queries).double() @ wide[0].swapaxes(-1, -2) * 0.3
    scores = scores.masked_fill(~torch.tensor(np.broadcast_to(mask, scores.shape)), -torch.inf)
    expected = torch.softmax(scores, dim=-1) @ wide[1]
    np.testing.assert_allclose(np.array(found), expected.numpy(), rtol=1e-4, atol=1e-5)


def test_mlx_lm_is_read_without_what_it_imports():
    """Its __init__ imports transformers, which takes seconds: not for the sake of one function."""
    code = (
        "import sys; from mlx_medusa import models; config = {'model_type': 'llama', 'vocab_size': 9, 'hidden_size': 8,"
        "'intermediate_size': 8, 'num_hidden_layers': 1, 'num_attention_heads': 1}; models.build(config);"
        "assert not {'transformers', 'torch', 'mlx_lm'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_missing_part_of_mlx_lm_is_named():
    with pytest.raises(ImportError, match=r"no_such_part\.py: not there"):
        part("no_such_part")
