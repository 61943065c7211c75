"""Recurrent heads against the formula in torch, draft vocabularies of both kinds, and heads files. Random weights."""

import json

import mlx.core as mx
import numpy as np
import pytest
import test_decode
import torch
from mlx.nn import quantize
from mlx.utils import tree_flatten
from tiny import ARGS, tiny_whisper
from torch.nn import functional

from convert.heads import check_fit, read_heads, unquantized, write_heads
from convert.quantize import recipe
from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError
from mlx_medusa.medusa.drafters import build_heads, load_drafter, new_drafter

DIM, VOCAB = ARGS["d_model"], ARGS["vocab_size"]
RECURRENT = {
    "type": "recurrent", "num_heads": 7, "num_layers": 2, "hidden_size": DIM, "attention_heads": 2, "ffn_dim": 64,
    "tied": True,
}  # fmt: skip
PLAIN = {"type": "medusa", "num_heads": 7, "num_layers": 2, "hidden_size": DIM, "tied": True}


def random_arrays(config, seed=0):
    """Names and shapes as the heads file has them."""
    rng = np.random.default_rng(seed)
    return {
        name: mx.array(rng.normal(size=shape).astype(np.float32) * (0.3 if len(shape) > 1 else 0.5))
        for name, shape in checkpoint.heads_shapes(config).items()
        if not name.startswith("draft_")
    }


def random_drafter(config, model, seed=0, ids=None, rank=0):
    arrays = random_arrays(config, seed)
    if rank:
        config = {**config, "draft_rank": rank}
        arrays["draft_basis"] = mx.array(
            np.linalg.qr(np.random.default_rng(seed).normal(size=(DIM, DIM)))[0][:, :rank]
        )
    if ids is not None:
        config = {**config, "draft_vocabulary": len(ids)}
        arrays["draft_vocabulary"] = mx.array(np.array(ids, dtype=np.int32))
    return load_drafter(config, arrays, model, DIM, VOCAB, dtype=None, source="x")


def torch_chain(config, arrays, embeddings, projection, memory, hidden, pending, count):
    """The block one sequence and one guess at a time, on torch's own functions: (guesses, states)."""
    weights = {name: torch.tensor(np.array(array)) for name, array in arrays.items()}

    def norm(name, x):
        return functional.layer_norm(x, (DIM,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    def linear(name, x):
        return functional.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def cross(prefix, x):
        def split(y):
            return y.view(-1, config["attention_heads"], DIM // config["attention_heads"]).transpose(0, 1)

        q, k, v = (linear(f"{prefix}.{part}_proj", y) for part, y in (("q", x), ("k", memory), ("v", memory)))
        out = functional.scaled_dot_product_attention(split(q), split(k), split(v))
        return linear(f"{prefix}.out_proj", out.transpose(0, 1).reshape(1, DIM))

    state, token, guesses, states = hidden, pending, [], []
    for _ in range(count):
        joined = torch.cat([norm("state_norm", state), norm("token_norm", embeddings[token][None])], dim=-1)
        state = linear("joint", joined)
        for layer in range(config["num_layers"]):
            p = f"layers.{layer}"
            state = state + cross(f"{p}.encoder_attn", norm(f"{p}.encoder_attn_layer_norm", state))
            inner = functional.gelu(linear(f"{p}.fc1", norm(f"{p}.final_layer_norm", state)))
            state = state + linear(f"{p}.fc2", inner)
        states.append(state)
        token = int((norm("layer_norm", state) @ projection.T)[0].argmax())
        guesses.append(token)
    return guesses, states


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("layers", "pool"), [(1, 1), (2, 1), (1, 3)])
def test_guesses_equal_the_formula(seed, layers, pool):
    model, encoded = tiny_whisper(seed)
    config = {**RECURRENT, "num_layers": layers, "memory_pool": pool}
    arrays = random_arrays(config, seed)
    drafter = random_drafter(config, model, seed)
    memory = functional.avg_pool1d(
        torch.tensor(np.array(encoded[0])).T, pool
    ).T  # of 10 rows the last is left out
    drafter.begin(encoded)
    rng = np.random.default_rng(seed)
    embeddings = torch.tensor(np.array(model.model.decoder.embed_tokens.weight))
    for count in (1, 3, 7):
        hidden, pending = rng.normal(size=(1, DIM)).astype(np.float32), int(rng.integers(VOCAB))
        expected, states = torch_chain(
            config, arrays, embeddings, embeddings, memory, torch.tensor(hidden), pending, count)  # fmt: skip
        assert drafter.propose(mx.array(hidden)[None], pending, count) == expected
        state = drafter.heads(
            mx.array(hidden)[None], model.embed(mx.array([[pending]])), drafter.heads.attend(encoded)
        )
        np.testing.assert_allclose(np.array(state[0]), states[0].numpy(), rtol=2e-4, atol=2e-4)
    assert len(drafter.propose(mx.array(hidden)[None], 0, count=9)) == drafter.max_drafts == 7


@pytest.mark.parametrize("config", [RECURRENT, PLAIN], ids=["recurrent", "medusa"])
@pytest.mark.parametrize("vocabulary", ["all", "some", "screened"])
def test_text_equals_plain_greedy_at_every_width(config, vocabulary):
    for seed in range(100, 106):
        model, encoded, prompt, limits, rules, expected = test_decode.case(seed)
        ids = (
            sorted(np.random.default_rng(seed).choice(VOCAB, size=10, replace=False))
            if vocabulary != "all"
            else None
        )
        drafter = random_drafter(config, model, seed, ids, rank=8 * (vocabulary == "screened"))
        for width in range(2, 9):
            tokens, _, statistics, _ = test_decode.decode(
                model, encoded, prompt, limits, width, drafter, rules
            )
            assert tokens == expected, (seed, width)
            assert statistics.drafted or len(expected) < 3


@pytest.mark.parametrize("config", [RECURRENT, PLAIN], ids=["recurrent", "medusa"])
def test_a_draft_vocabulary_guesses_the_best_of_its_tokens(config):
    """The first guess, where both kinds see the same input, is the best of the full logits among those ids."""
    model, encoded = tiny_whisper(2)
    ids = [3, 8, 9, 20, 44, 60]
    full, few = random_drafter(config, model), random_drafter(config, model, ids=ids)
    full.begin(encoded)
    few.begin(encoded)
    outside = 0
    for seed in range(30):
        hidden = mx.random.normal((1, 1, DIM), key=mx.random.key(seed))
        states = (
            full.heads(hidden[0], 1)[0] if config is PLAIN
            else full.heads.layer_norm(full.heads(hidden, model.embed(mx.array([[5]])), full.heads.attend(encoded))[0])
        )  # fmt: skip
        logits = np.array(model.logits(states))[0]
        assert full.propose(hidden, 5, 1) == [int(logits.argmax())]
        assert few.propose(hidden, 5, 1) == [ids[int(logits[ids].argmax())]]
        assert set(few.propose(hidden, 5, 7)) <= set(ids)
        outside += int(logits.argmax()) not in ids
    assert outside > 10


def test_a_screen_of_full_rank_guesses_as_if_there_were_none():
    """Of every block of 32 the best passes, and so does the best of all; fewer directions may miss it."""
    model, _ = tiny_whisper(4)
    ids = sorted(set(range(VOCAB)) - {0, 7, 30})  # 58 ids: a block and a part of one
    exact, whole, few = (random_drafter(PLAIN, model, ids=ids, rank=rank) for rank in (0, DIM, 4))
    same = 0
    for seed in range(40):
        hidden = mx.random.normal((1, 1, DIM), key=mx.random.key(seed))
        guesses = exact.propose(hidden, 5, 7)
        assert whole.propose(hidden, 5, 7) == guesses
        assert set(few.propose(hidden, 5, 7)) <= set(ids)
        same += few.propose(hidden, 5, 7) == guesses
    assert same < 40


def test_of_equal_logits_the_lowest_id_is_guessed():
    class Equal:
        embed = staticmethod(lambda tokens: mx.ones((*tokens.shape, DIM)))
        projection_rows = staticmethod(lambda tokens: mx.ones((len(tokens), DIM)))
        logits = staticmethod(lambda hidden: mx.zeros((*hidden.shape[:-1], VOCAB)))

    for config in (RECURRENT, PLAIN):
        for ids, basis, lowest in (
            (None, None, 0),
            (mx.array([7, 11, 30]), None, 7),
            (mx.arange(9, 50), mx.eye(DIM)[:, :3], 9),
        ):
            drafter = new_drafter(config, build_heads(config, "x"), Equal(), ids, basis)
            drafter.begin(mx.zeros((1, 4, DIM)))
            assert drafter.propose(mx.zeros((1, 1, DIM)), 1, 4) == [lowest] * 4


@pytest.mark.parametrize("config", [RECURRENT, PLAIN], ids=["recurrent", "medusa"])
@pytest.mark.parametrize("quantized", [False, True])
def test_shapes_of_the_file_are_those_of_the_module(config, quantized):
    settings = {"group_size": 32, "bits": 8, "mode": "affine"}
    module = build_heads(config, "x")
    if quantized:
        quantize(module, **settings)
        config = {**config, "quantization": settings}
    shapes = {name: array.shape for name, array in tree_flatten(module.parameters())}
    assert checkpoint.heads_shapes(config) == shapes


@pytest.mark.parametrize(
    "ids", [[], [3, 3, 4], [5, 4], [-1, 2], [0, VOCAB]], ids=["none", "twice", "falling", "negative", "high"]
)
def test_a_broken_draft_vocabulary_is_refused(ids):
    model, _ = tiny_whisper(0)
    with pytest.raises(CheckpointError, match="rising ids below 61"):
        random_drafter(PLAIN, model, ids=ids)


def written(folder, config, ids=(1, 5, 9), dtype=mx.float32, **settings):
    """(config, arrays as they were, file)"""
    config = {**config, "draft_vocabulary": len(ids), "draft_rank": 4}
    arrays = {
        **random_arrays(config),
        "draft_vocabulary": mx.array(ids, dtype=mx.int32),
        "draft_basis": mx.random.normal((DIM, 4)),
    }
    config = write_heads(folder, config, dict(arrays), dtype, **{"recipe": None, **settings})
    return config, arrays, folder / "medusa.safetensors"


@pytest.mark.parametrize("config", [RECURRENT, PLAIN], ids=["recurrent", "medusa"])
def test_a_heads_file_round_trip(config, tmp_path):
    config, arrays, path = written(tmp_path, config)
    for found in (checkpoint.read_heads(path), checkpoint.read_heads(tmp_path), read_heads(path)):
        assert found[0] == config
        assert found[1].keys() == arrays.keys()
        assert all(mx.array_equal(found[1][name], array).item() for name, array in arrays.items())
    check_fit(*read_heads(path), {"d_model": DIM, "vocab_size": VOCAB}, path)
    with pytest.raises(CheckpointError, match="rising ids below 9"):
        check_fit(*read_heads(path), {"d_model": DIM, "vocab_size": 9}, path)
    with pytest.raises(CheckpointError, match="hidden size"):
        check_fit(*read_heads(path), {"d_model": 8, "vocab_size": VOCAB}, path)


def test_quantized_recurrent_heads(tmp_path):
    """Norms, biases and ids stay as they are; what is loaded is what dequantizing gives."""
    _, arrays, path = written(tmp_path, RECURRENT, recipe=recipe(8, 32, "affine", None))
    model, encoded = tiny_whisper(1)
    found = read_heads(path)
    plain_config, plain = unquantized(*read_heads(path), mx.float32)
    assert plain.keys() == arrays.keys()
    assert mx.array_equal(plain["state_norm.weight"], arrays["state_norm.weight"]).item()
    assert mx.allclose(plain["joint.weight"], arrays["joint.weight"], atol=0.02).item()
    drafters = [
        load_drafter(*heads, model, DIM, VOCAB, dtype=None, source=path)
        for heads in (found, (plain_config, plain))
    ]
    for drafter in drafters:
        drafter.begin(encoded)
    hidden = mx.random.normal((1, 1, DIM), key=mx.random.key(0))
    assert drafters[0].propose(hidden, 3, 5) == drafters[1].propose(hidden, 3, 5)


def test_tensors_that_do_not_fit_are_named(tmp_path):
    config, arrays, path = written(tmp_path, RECURRENT)
    metadata = {"medusa": json.dumps(config)}
    for change, words in (
        (lambda a: a.pop("layers.1.fc1.bias"), r"missing tensor 'layers\.1\.fc1\.bias'"),
        (lambda a: a.pop("draft_vocabulary"), "missing tensor 'draft_vocabulary'"),
        (lambda a: a.update(extra=mx.zeros(1)), "unexpected tensor 'extra'"),
        (lambda a: a.update({"joint.weight": mx.zeros((DIM, DIM))}), r"'joint\.weight' has shape \[32, 32\]"),
    ):
        changed = dict(arrays)
        change(changed)
        mx.save_safetensors(str(path), changed, metadata)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.read_heads(path)


@pytest.mark.parametrize(
    "change", [{"num_heads": 0}, {"ffn_dim": None}, {"attention_heads": 5}, {"draft_vocabulary": -1},
               {"num_layers": True}, {"hidden_size": "384"}, {"memory_pool": 0}]
)  # fmt: skip
def test_broken_settings_are_refused(change):
    with pytest.raises(CheckpointError, match=r"^heads\.safetensors: "):
        build_heads({**RECURRENT, **change}, "heads.safetensors")
