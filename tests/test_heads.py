"""Medusa heads against the formula in torch, and what they guess on a real decode loop. Random weights."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from mlx.nn import quantize

from mlx_medusa.errors import CheckpointError
from mlx_medusa.medusa.drafters import build_heads
from mlx_medusa.medusa.heads import HeadsArgs, MedusaDrafter, MedusaHeads

DIM, VOCAB = 64, 90


def random_heads(tied, layers=2, heads=4, seed=0):
    rng = np.random.default_rng(seed)
    module = MedusaHeads(HeadsArgs(heads, layers, DIM, tied, 0 if tied else VOCAB))
    arrays = {}
    for layer in range(layers):
        arrays[f"layers.{layer}.weight"] = rng.normal(size=(heads, DIM, DIM)).astype(np.float32) * 0.2
        arrays[f"layers.{layer}.bias"] = rng.normal(size=(heads, DIM)).astype(np.float32)
    if not tied:
        arrays["projection.weight"] = rng.normal(size=(heads, VOCAB, DIM)).astype(np.float32)
    module.load_weights([(name, mx.array(value)) for name, value in arrays.items()])
    return module, arrays


def expected_logits(arrays, hidden, shared, head):
    """One head at a time, as the PyTorch seeds write it."""
    h = torch.tensor(hidden)
    for layer in range(2):
        weight, bias = (torch.tensor(arrays[f"layers.{layer}.{kind}"][head]) for kind in ("weight", "bias"))
        h = h + torch.nn.functional.silu(torch.nn.functional.linear(h, weight, bias))
    projection = arrays["projection.weight"][head] if "projection.weight" in arrays else shared
    return (torch.tensor(projection) @ h).numpy()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_guesses_equal_the_formula(tied, count):
    module, arrays = random_heads(tied)
    rng = np.random.default_rng(5)
    shared = rng.normal(size=(VOCAB, DIM)).astype(np.float32)
    drafter = MedusaDrafter(module, lambda h: mx.argmax(h @ mx.array(shared).T, axis=-1))
    for _ in range(20):
        hidden = rng.normal(size=DIM).astype(np.float32)
        expected = [int(expected_logits(arrays, hidden, shared, head).argmax()) for head in range(count)]
        assert drafter.propose(mx.array(hidden)[None, None], pending=3, count=count) == expected


def test_no_more_guesses_than_heads():
    module, _ = random_heads(True)
    drafter = MedusaDrafter(module, lambda h: mx.argmax(h, axis=-1))
    assert drafter.max_drafts == 4
    assert len(drafter.propose(mx.zeros((1, 1, DIM)), 0, count=9)) == 4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("mode", "bits", "group"), [("affine", 8, 64), ("affine", 4, 32), ("mxfp4", 4, 32)])
def test_quantized_heads_equal_their_dequantized_weights(tied, mode, bits, group):
    module, arrays = random_heads(tied)
    for name in list(arrays):
        if name.endswith("weight"):
            packed = mx.quantize(mx.array(arrays[name]), group, bits, mode)
            arrays[name] = np.array(
                mx.dequantize(*packed, group_size=group, bits=bits, mode=mode).astype(mx.float32)
            )
    quantize(module, group, bits, mode=mode)
    hidden = np.random.default_rng(1).normal(size=DIM).astype(np.float32)
    shared = np.eye(DIM, dtype=np.float32)
    states = module(mx.array(hidden)[None], 4)
    logits = states[:, 0] if tied else module.projection(states)[:, 0]
    expected = np.stack([expected_logits(arrays, hidden, shared, head) for head in range(4)])
    np.testing.assert_allclose(np.array(logits), expected, rtol=2e-3, atol=2e-2)


@pytest.mark.parametrize(
    "change",
    [
        {"num_heads": None},
        {"num_layers": 0},
        {"hidden_size": "384"},
        {"type": "eagle"},
        {"tied": False, "vocab_size": 9, "draft_vocabulary": 3},
    ],
)
def test_broken_settings_are_refused(change):
    good = {"type": "medusa", "num_heads": 4, "num_layers": 1, "hidden_size": 64}
    assert HeadsArgs.from_config(good, "x") == HeadsArgs(4, 1, 64)
    with pytest.raises(CheckpointError, match=r"heads\.safetensors"):
        build_heads({**good, **change}, "heads.safetensors")
