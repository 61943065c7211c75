"""Medusa heads: every layout that is around gives the same stacked arrays, and every fault is named."""

import json
import os
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import DIM, VOCAB, write_hf
from safetensors import safe_open
from safetensors.torch import save_file

from convert import convert
from convert.heads import read_heads
from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError, OptionError

HEADS, BLOCKS = 3, 2
State = dict[str, torch.Tensor]


def random_heads(heads: int = HEADS, blocks: int = BLOCKS, dim: int = DIM, own: bool = False) -> State:
    """{i.l.linear.weight, ...}, the layout of FasterDecoding; ``own`` adds the heads' projections {i.L.weight}."""
    torch.manual_seed(1)
    state = {}
    for head in range(heads):
        for block in range(blocks):
            state[f"{head}.{block}.linear.weight"] = torch.randn(dim, dim, dtype=torch.float16) * 0.05
            state[f"{head}.{block}.linear.bias"] = torch.randn(dim, dtype=torch.float16) * 0.05
        if own:
            state[f"{head}.{blocks}.weight"] = torch.randn(VOCAB, dim, dtype=torch.float16) * 0.05
    return state


def stacked(state: State) -> dict[str, np.ndarray]:
    """What they must become."""
    heads = 1 + max(int(name.split(".")[0]) for name in state)
    blocks = sum(name.startswith("0.") and name.endswith("bias") for name in state)
    found = {
        f"layers.{block}.{kind}": torch.stack(
            [state[f"{head}.{block}.linear.{kind}"] for head in range(heads)]
        )
        for block in range(blocks)
        for kind in ("weight", "bias")
    }
    if f"0.{blocks}.weight" in state:
        found["projection.weight"] = torch.stack([state[f"{head}.{blocks}.weight"] for head in range(heads)])
    return {name: tensor.numpy() for name, tensor in found.items()}


def renamed(state: State, pattern: str, text: str) -> State:
    return {re.sub(pattern, text, name): tensor for name, tensor in state.items()}


def whisper_wrapper(state: State, folder: Path) -> Path:
    """jburtoft/whisper-large-v3-medusa-heads."""
    path = folder / "medusa_heads_whisper.pt"
    torch.save({"heads": renamed(state, r"^", "medusa_head_"), "step": 1800, "head0_acc": 0.4}, path)
    return path


def whisper_safetensors(state: State, folder: Path) -> Path:
    path = folder / "heads.safetensors"
    save_file(renamed(state, r"^", "medusa_head_"), path)
    return path


def meralion(state: State, folder: Path) -> Path:
    """kartmannXu/MERaLion-2-3B-Medusa: a folder with adapter_config.json."""
    save_file(renamed(state, r"^(\d+)\.", r"heads.\1.mlp."), folder / "medusa_heads.safetensors")
    config = {"adapter_type": "MEDUSA", "num_heads": HEADS, "num_layers": BLOCKS, "hidden_size": DIM}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def meralion_development(state: State, folder: Path) -> Path:
    path = folder / "medusa_heads_best.pt"
    nested: dict[str, State] = {}
    for name, tensor in state.items():
        head, rest = name.split(".", 1)
        nested.setdefault(f"head_{head}", {})[f"mlp.{rest}"] = tensor
    torch.save({"heads_state": nested, "config": {"num_heads": HEADS}, "step": 1, "val_loss": 4.4}, path)
    return path


def faster_decoding_pt(state: State, folder: Path) -> Path:
    torch.save(state, folder / "medusa_lm_head.pt")
    (folder / "config.json").write_text(
        '{"medusa_num_heads": 2, "medusa_num_layers": 1}'
    )  # vicuna's says 2 of 5
    return folder


def faster_decoding_safetensors(state: State, folder: Path) -> Path:
    save_file(state, folder / "medusa_lm_head.safetensors")
    return folder / "medusa_lm_head.safetensors"


def prefixed(state: State, folder: Path) -> Path:
    path = folder / "heads.pt"
    torch.save(renamed(state, r"^", "medusa_head."), path)
    return path


def ours(state: State, folder: Path) -> Path:
    """What the converter itself wrote."""
    (folder / "first").mkdir()
    source = faster_decoding_safetensors(state, folder / "first")
    base = write_hf(folder / "base")
    convert(base, folder / "converted", heads=source)
    return folder / "converted"


WRITERS = [
    whisper_wrapper,
    whisper_safetensors,
    meralion,
    meralion_development,
    faster_decoding_pt,
    faster_decoding_safetensors,
    prefixed,
    ours,
]


@pytest.mark.parametrize("own", [False, True], ids=["tied", "own projections"])
@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
def test_layouts(write: Any, own: bool, tmp_path: Path) -> None:
    if own and write in (meralion, meralion_development):
        pytest.skip("this layout has no projections")
    state = random_heads(own=own)
    config, arrays = read_heads(write(state, tmp_path))
    expected = stacked(state)
    assert arrays.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(np.array(arrays[name]), array)
    assert (config["num_heads"], config["num_layers"], config["hidden_size"]) == (HEADS, BLOCKS, DIM)
    assert config["tied"] is not own
    assert config["type"] == "medusa"
    assert config.get("vocab_size") == (VOCAB if own else None)


def test_bfloat16_pt(tmp_path: Path) -> None:
    state = {name: tensor.to(torch.bfloat16) for name, tensor in random_heads().items()}
    _, arrays = read_heads(whisper_wrapper(state, tmp_path))
    assert arrays["layers.0.weight"].dtype == mx.bfloat16
    np.testing.assert_array_equal(
        np.array(arrays["layers.1.weight"][2].astype(mx.float32)), state["2.1.linear.weight"].float().numpy()
    )


# ------------------------------------------------------------------------------------------ written


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(tmp_path_factory.mktemp("base") / "hf")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "model"


@pytest.fixture
def heads(tmp_path: Path) -> Path:
    (tmp_path / "heads").mkdir()
    return whisper_wrapper(random_heads(), tmp_path / "heads")


def medusa_config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())["medusa"]


def test_written_file(base: Path, heads: Path, out: Path) -> None:
    report = convert(base, out, heads=heads)
    expected = {
        "type": "medusa",
        "num_heads": 3,
        "num_layers": 2,
        "hidden_size": DIM,
        "tied": True,
        "dtype": "float16",
    }
    assert medusa_config(out) == report.heads == expected
    with safe_open(out / "medusa.safetensors", "np") as file:
        assert json.loads(file.metadata()["medusa"]) == expected
        assert file.metadata()["format"] == "mlx"
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    for name, array in stacked(random_heads()).items():
        np.testing.assert_array_equal(found[name], array)
    assert (out / "medusa.safetensors").name not in json.loads(
        (out / "model.safetensors.index.json").read_text()
    )["weight_map"].values()
    config, arrays = checkpoint.read_heads(out / "medusa.safetensors") or ({}, {})
    assert config == expected
    assert arrays["layers.1.bias"].shape == (3, DIM)
    assert "medusa" in (out / "README.md").read_text()


def test_transformers_ignores_the_heads(base: Path, heads: Path, out: Path) -> None:
    from transformers import WhisperForConditionalGeneration

    convert(base, out, heads=heads)
    _, info = WhisperForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())


def test_quantized_heads(base: Path, heads: Path, out: Path) -> None:
    convert(base, out, heads=heads, q_bits=8, q_heads=True)
    settings = {"group_size": 64, "bits": 8, "mode": "affine"}
    assert medusa_config(out)["quantization"] == settings
    _, arrays = checkpoint.read_heads(out) or ({}, {})
    expected = mx.quantize(mx.array(stacked(random_heads())["layers.0.weight"]), 64, 8)
    for part, array in zip(("weight", "scales", "biases"), expected, strict=True):
        assert mx.array_equal(arrays[f"layers.0.{part}"], array).item()
    assert arrays["layers.0.bias"].shape == (3, DIM)
    assert "layers.0.biases" in arrays

    full = out.with_name("full")
    convert(out, full, dequantize=True)  # the heads of the base folder come along
    assert "quantization" not in medusa_config(full)
    _, arrays = checkpoint.read_heads(full) or ({}, {})
    wide = mx.dequantize(expected[0], *(part.astype(mx.float32) for part in expected[1:]), 64, 8)
    assert mx.array_equal(arrays["layers.0.weight"], wide.astype(mx.float16)).item()
    with pytest.raises(OptionError, match="quantized already"):
        convert(base, out.with_name("again"), heads=out, q_bits=8, q_heads=True)


def test_only_the_heads_are_quantized(base: Path, heads: Path, out: Path) -> None:
    convert(base, out, heads=heads, q_heads=True)
    assert medusa_config(out)["quantization"]["bits"] == 4
    assert "quantization" not in json.loads((out / "config.json").read_text())


def test_quantized_base_keeps_plain_heads(base: Path, heads: Path, out: Path) -> None:
    convert(base, out, heads=heads, q_mode="mxfp4")
    assert "quantization" not in medusa_config(out)
    _, arrays = checkpoint.read_heads(out) or ({}, {})
    np.testing.assert_array_equal(
        np.array(arrays["layers.0.weight"]), stacked(random_heads())["layers.0.weight"]
    )


def test_heads_take_the_type_of_the_base(base: Path, heads: Path, out: Path) -> None:
    convert(base, out, heads=heads, dtype="float32")
    assert medusa_config(out)["dtype"] == "float32"
    _, arrays = checkpoint.read_heads(out) or ({}, {})
    assert arrays["layers.0.weight"].dtype == mx.float32


# ----------------------------------------------------------------------------------------- bad heads


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/mlx-medusa-heads-were-run",)


def change(name: str, value: Any) -> Any:
    def apply(state: State) -> None:
        if value is None:
            del state[name]
        else:
            state[name] = value

    return apply


WEIGHT = "1.0.linear.weight"
BAD = {
    "missing tensor": (change(WEIGHT, None), r"layers\.0\.weight of head 1 is missing"),
    "missing bias": (change("2.1.linear.bias", None), r"layers\.1\.bias of head 2 is missing"),
    "gap in the heads": (
        change("5.0.linear.weight", torch.zeros(DIM, DIM)),
        r"of head 3 is missing.* 6 heads",
    ),
    "unknown tensor": (
        change("base_model.lm_head.weight", torch.zeros(3)),
        r"base_model\.lm_head\.weight' is in no",
    ),
    "unequal shapes": (
        change(WEIGHT, torch.zeros(DIM, 32, dtype=torch.float16)),
        r"of head 1 has another shape",
    ),
    "NaN": (change(WEIGHT, torch.full((DIM, DIM), torch.nan).half()), r"layers\.0\.weight holds NaN"),
    "infinity": (
        change("0.1.linear.bias", torch.full((DIM,), torch.inf).half()),
        r"layers\.1\.bias holds NaN",
    ),
    "projection of one head": (
        change("0.2.weight", torch.zeros(VOCAB, DIM).half()),
        r"projection\.weight of head 1",
    ),
    "projection too early": (
        change("0.1.weight", torch.zeros(VOCAB, DIM).half()),
        r"projections are not block 2",
    ),
    "no heads": (lambda state: state.clear(), r"holds no Medusa heads"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tensors(case: str, base: Path, tmp_path: Path, out: Path) -> None:
    spoil, message = BAD[case]
    state = random_heads()
    spoil(state)
    path = prefixed(state, tmp_path) if state else whisper_wrapper(state, tmp_path)
    with pytest.raises(CheckpointError, match=message) as caught:
        convert(base, out, heads=path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(out.parent.iterdir()) == []


def test_other_hidden_size(base: Path, tmp_path: Path, out: Path) -> None:
    path = whisper_wrapper(random_heads(dim=32), tmp_path)
    with pytest.raises(CheckpointError, match="hidden size 32, but the base model has 64"):
        convert(base, out, heads=path)
    assert list(out.parent.iterdir()) == []


def test_other_vocabulary(base: Path, tmp_path: Path, out: Path) -> None:
    state = random_heads()
    state.update(
        {f"{head}.2.weight": torch.zeros(VOCAB + 2, DIM, dtype=torch.float16) for head in range(HEADS)}
    )
    with pytest.raises(CheckpointError, match=f"for {VOCAB + 2} tokens, but the base model has {VOCAB}"):
        convert(base, out, heads=faster_decoding_safetensors(state, tmp_path))


def test_not_square(base: Path, tmp_path: Path, out: Path) -> None:
    state = random_heads()
    for head in range(HEADS):
        state[f"{head}.1.linear.weight"] = torch.zeros(DIM, DIM * 2, dtype=torch.float16)
    with pytest.raises(CheckpointError, match=r"'layers\.1\.weight' has shape \[3, 64, 128\]"):
        convert(base, out, heads=faster_decoding_safetensors(state, tmp_path))


def test_overflow(base: Path, tmp_path: Path, out: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in random_heads().items()}
    state["0.0.linear.bias"][0] = 1e6
    with pytest.raises(CheckpointError, match=r"layers\.0\.bias holds values that float16 cannot"):
        convert(base, out, heads=prefixed(state, tmp_path))
    assert list(out.parent.iterdir()) == []
    convert(base, out, heads=prefixed(state, tmp_path), dtype="bfloat16")


def test_adapter_config_disagrees(tmp_path: Path) -> None:
    folder = meralion(random_heads(), tmp_path)
    (folder / "adapter_config.json").write_text('{"num_heads": 4}')
    with pytest.raises(CheckpointError, match="says num_heads 4, but the weights have 3"):
        read_heads(folder)


def test_hostile_pickle(tmp_path: Path) -> None:
    torch.save({"heads": Hostile()}, tmp_path / "heads.pt")
    with pytest.raises(CheckpointError, match="could run code"):
        read_heads(tmp_path / "heads.pt")
    assert not Path("/tmp/mlx-medusa-heads-were-run").exists()


@pytest.mark.parametrize("name", ["heads.pt", "heads.safetensors"])
def test_truncated(name: str, tmp_path: Path) -> None:
    path = (whisper_wrapper if name.endswith("pt") else whisper_safetensors)(random_heads(), tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        read_heads(path)


def test_folder_without_heads(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no files may hold heads"):
        read_heads(tmp_path)
    with pytest.raises(CheckpointError, match="no such file"):
        read_heads(tmp_path / "heads.pt")


def test_quantizing_without_heads(base: Path, out: Path) -> None:
    with pytest.raises(OptionError, match="no heads"):
        convert(base, out, q_bits=4, q_heads=True)
