"""Model folders: what is broken is named before use, what is written is whole or not there."""

import json
import re
import socket
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from mlx_medusa import checkpoint, shards
from mlx_medusa.checkpoint import (
    ShardWriter,
    load_into,
    read_arrays,
    read_config,
    read_heads,
    resolve,
    staged_folder,
)
from mlx_medusa.errors import CheckpointError, OutputError

# ------------------------------------------------------------------------------------------- resolve


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any use of a socket fails, as it would in a blackholed network, but at once."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the network was touched")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds the repository "me/model"."""
    from huggingface_hub import constants

    cache = tmp_path / "hub"
    snapshot = cache / "models--me--model" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "models--me--model" / "refs").mkdir()
    (cache / "models--me--model" / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return snapshot


def test_local_path_needs_no_network(
    tmp_path: Path, no_network: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolve(tmp_path) == tmp_path
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name") == Path("owner/name")  # what is here wins over the hub


@pytest.mark.parametrize("hub", [True, False], ids=["online", "offline"])
def test_cached_repository_needs_no_network(
    hub_cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch, hub: bool
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not hub)
    assert resolve("me/model") == hub_cache


@pytest.mark.parametrize("repo", ["me/absent", "me/model"])
def test_offline(hub_cache: Path, no_network: None, monkeypatch: pytest.MonkeyPatch, repo: str) -> None:
    """Not in the cache, or only in part after a download that was cut off."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (hub_cache / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (hub_cache / "model.safetensors.index.json").write_text(json.dumps(index))
    (hub_cache / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"^{repo}: .*hf download {repo}$") as caught:
        resolve(repo)
    assert "\n" not in str(caught.value)


def test_fetch(hub_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not in the cache is fetched, with the patterns of the caller and no others."""
    calls = []

    def snapshot_download(repo: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        calls.append((repo, allow_patterns, local_files_only))
        if local_files_only:
            raise FileNotFoundError(repo)
        return str(hub_cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("me/other", patterns=("*.pt",)) == hub_cache
    assert calls == [("me/other", ["*.pt"], True), ("me/other", ["*.pt"], False)]


def test_other_files_are_fetched_only_where_there_are_no_weights(
    hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Vicuna v1.3 has PyTorch files only; a repository that has safetensors too is not fetched twice."""
    wanted = []

    def snapshot_download(repo: str, *, allow_patterns: list[str], local_files_only: bool) -> str:
        wanted.append(allow_patterns)
        if "*.bin" in allow_patterns:
            (hub_cache / "pytorch_model.bin").touch()
        return str(hub_cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve("me/other", patterns=("*.safetensors",), otherwise=("*.bin",)) == hub_cache
    assert wanted == [["*.safetensors"]]
    (hub_cache / "model.safetensors").unlink()
    assert resolve("me/other", patterns=("*.safetensors",), otherwise=("*.bin",)) == hub_cache
    assert wanted[1:] == [["*.safetensors"], ["*.safetensors", "*.bin"]]
    wanted.clear()
    assert resolve("me/other", patterns=("*.json",), weights=False) == hub_cache
    assert wanted == [["*.json"]]


@pytest.mark.parametrize(
    "text",
    [
        "./owner/name",
        "~/owner",
        "/owner/name",
        "name",
        "a/b/c",
        "../x",
        "owner/heads.pt",
        "",
        "a b/c",
        "x" * 5000,
    ],
)
def test_looks_like_a_path(text: str, no_network: None) -> None:
    with pytest.raises(CheckpointError, match=r"no such file or folder|not a"):
        read_config(resolve(text)) if text == "" else resolve(text)


# ---------------------------------------------------------------------------------------------- read


@pytest.mark.parametrize("content", ["{", "[]", "null", '{"a": ' * 2000, "\udcff"])
def test_broken_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json: ") as caught:
        read_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        read_config(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        read_arrays(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="save the model as safetensors"):
        read_arrays(tmp_path)


def safetensors_bytes(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16], **changes}


BROKEN = {
    "empty": b"",
    "seven bytes": b"\0" * 7,
    "huge header": struct.pack("<Q", 1 << 60) + b"{}",
    "header past the end": struct.pack("<Q", 100) + b"{}",
    "header is no JSON": safetensors_bytes(b"{{{{", b""),
    "header is a list": safetensors_bytes(b"[1]", b""),
    "entry is a number": safetensors_bytes({"a": 3}, b""),  # type: ignore[dict-item]
    "cut data": safetensors_bytes({"a": entry()}, b"\0" * 15),
    "trailing data": safetensors_bytes({"a": entry()}, b"\0" * 17),
    "offsets do not fit the shape": safetensors_bytes({"a": entry(shape=[3, 2])}, b"\0" * 16),
    "gap": safetensors_bytes({"a": entry(data_offsets=[4, 20])}, b"\0" * 20),
    "overlap": safetensors_bytes({"a": entry(), "b": entry(data_offsets=[8, 24])}, b"\0" * 24),
    "unknown type": safetensors_bytes({"a": entry(dtype="F7")}, b"\0" * 16),
    "negative": safetensors_bytes({"a": entry(shape=[-2, -2], data_offsets=[0, -16])}, b"\0" * 16),
    "LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n",
    "text": b"Not Found\n" * 100,
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_safetensors(case: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BROKEN[case])
    with pytest.raises(CheckpointError, match=re.escape(str(path))) as caught:
        read_arrays(tmp_path)
    assert "\n" not in str(caught.value)
    if case == "LFS pointer":
        assert "git lfs pull" in str(caught.value)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((3, 5), np.float16), "b": np.ones(7, np.float32)}, path)
    whole = path.read_bytes()
    assert read_arrays(path)["a"].shape == (3, 5)
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            read_arrays(path)


def test_missing_shard_and_escape(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-00001-of-00001.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"model-00001-of-00001\.safetensors is missing"):
        read_arrays(tmp_path)
    index.write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(CheckpointError, match="outside its folder"):
        read_arrays(tmp_path)


def test_npz(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    arrays = {
        "a": mx.array([1.5, -2.0], mx.bfloat16),
        "b": mx.arange(6).reshape(2, 3),
        "c": mx.ones(3, mx.float16),
    }
    mx.savez(str(path), **arrays)
    found = read_arrays(tmp_path)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert mx.array_equal(found[name], array).item()
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(CheckpointError, match="not an npz archive, or cut short"):
        read_arrays(tmp_path)


def test_npz_with_pickles(tmp_path: Path) -> None:
    np.savez(tmp_path / "weights.npz", a=np.array([{"x": 1}], dtype=object))
    with pytest.raises(CheckpointError, match="'a' cannot be read"):
        read_arrays(tmp_path)


# ---------------------------------------------------------------------------------------------- load


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.layers = [nn.Linear(64, 64), nn.Linear(64, 32, bias=False)]
        self.norm = nn.LayerNorm(64)


def weights_of(module: nn.Module, dtype: mx.Dtype = mx.float16) -> dict[str, mx.array]:
    rng = np.random.default_rng(0)
    parameters: Any = tree_flatten(module.parameters())
    return {name: mx.array(rng.normal(size=array.shape)).astype(dtype) for name, array in parameters}


def parameters_of(module: nn.Module) -> dict[str, mx.array]:
    parameters: Any = tree_flatten(module.parameters())
    return dict(parameters)


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="the rule for CPU backends")
def test_cpu_default_is_float32() -> None:
    module, weights = Net(), weights_of(Net())
    expected = {name: np.array(array).astype(np.float32) for name, array in weights.items()}
    load_into(module, weights, quantization=None, dtype=None, source="x")
    assert weights == {}
    for name, array in parameters_of(module).items():
        assert array.dtype == mx.float32
        np.testing.assert_array_equal(np.array(array), expected[name])


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_dtype_is_kept_when_asked(dtype: mx.Dtype) -> None:
    module = Net()
    load_into(module, weights_of(module), quantization=None, dtype=dtype, source="x")
    assert {array.dtype for array in parameters_of(module).values()} == {dtype}


def quantized_weights() -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The embedding in 8 bits, the first layer in 4, the second not at all."""
    weights = weights_of(Net())
    quantization = {
        "group_size": 64,
        "bits": 4,
        "mode": "affine",
        "embed": {"group_size": 32, "bits": 8, "mode": "affine"},
        "layers.1": False,
    }
    for layer, size, bits in (("embed", 32, 8), ("layers.0", 64, 4)):
        parts = mx.quantize(weights[f"{layer}.weight"], size, bits)
        weights.update(
            zip((f"{layer}.{part}" for part in ("weight", "scales", "biases")), parts, strict=True)
        )
    return weights, quantization


def test_settings_per_layer() -> None:
    module: Any = Net()
    weights, quantization = quantized_weights()
    expected = dict(weights)
    load_into(module, weights, quantization=quantization, dtype=mx.float16, source="x")
    assert (module.embed.bits, module.embed.group_size) == (8, 32)
    assert (module.layers[0].bits, module.layers[0].group_size) == (4, 64)
    assert type(module.layers[1]) is nn.Linear
    for name, array in parameters_of(module).items():
        assert mx.array_equal(array, expected[name]).item()


@pytest.mark.skipif(mx.default_device().type != mx.DeviceType.cpu, reason="the rule for CPU backends")
def test_cpu_default_dequantizes() -> None:
    module: Any = Net()
    weights, quantization = quantized_weights()
    packed, scales, biases = (np.array(weights[f"embed.{part}"]) for part in ("weight", "scales", "biases"))
    q = ((packed[:, :, None] >> np.arange(0, 32, 8, dtype=np.uint32)) & 255).reshape(10, 2, 32)
    expected = q * scales[..., None].astype(np.float32) + biases[..., None].astype(np.float32)
    load_into(module, weights, quantization=quantization, dtype=None, source="x")
    assert type(module.embed) is nn.Embedding
    np.testing.assert_allclose(np.array(module.embed.weight), expected.reshape(10, 64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [None, mx.float16])
def test_strict(dtype: mx.Dtype | None) -> None:
    def attempt(change: Any, quantized: bool = False) -> str:
        weights, quantization = quantized_weights() if quantized else (weights_of(Net()), {})
        change(weights, quantization)
        with pytest.raises(CheckpointError, match=r"^folder: ") as caught:
            load_into(Net(), weights, quantization=quantization, dtype=dtype, source="folder")
        return str(caught.value)

    assert "missing tensor 'norm.bias'" in attempt(lambda w, _: w.pop("norm.bias"))
    assert "unexpected tensor 'more'" in attempt(lambda w, _: w.update(more=mx.zeros(3)))
    assert "'norm.bias' has shape [3], expected [64]" in attempt(
        lambda w, _: w.update({"norm.bias": mx.zeros(3)})
    )
    assert "no 'quantization'" in attempt(lambda _, q: q.clear(), quantized=True)
    assert "embed" in attempt(lambda _, q: q.update(embed={"group_size": 64, "bits": 8}), quantized=True)
    assert "embed.weight'" in attempt(lambda w, _: w.pop("embed.weight"), quantized=True)
    assert "norm" in attempt(lambda w, _: w.update({"norm.scales": mx.zeros(3)}), quantized=True)
    assert "\n" not in attempt(lambda _, q: q.update(bits=7), quantized=True)


# --------------------------------------------------------------------------------------------- heads


def write_lone_heads(folder: Path, config: dict[str, Any], arrays: dict[str, mx.array]) -> Path:
    writer = ShardWriter(folder, "medusa", metadata={"medusa": json.dumps(config)})
    for name, array in arrays.items():
        writer.add(name, array)
    writer.close(index=False)
    return folder / "medusa.safetensors"


HEADS = {"type": "medusa", "num_heads": 2, "num_layers": 1, "hidden_size": 8, "tied": True}


def test_heads_of_a_folder(tmp_path: Path) -> None:
    assert read_heads(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"medusa": HEADS}))
    with pytest.raises(CheckpointError, match=r"medusa\.safetensors is missing"):
        read_heads(tmp_path)
    arrays = {"layers.0.weight": mx.ones((2, 8, 8)), "layers.0.bias": mx.zeros((2, 8))}
    write_lone_heads(tmp_path, HEADS, arrays)
    for path in (tmp_path, tmp_path / "medusa.safetensors"):
        found = read_heads(path)
        assert found is not None
        assert found[0] == HEADS
        assert found[1].keys() == arrays.keys()


def test_heads_that_do_not_fit_their_config(tmp_path: Path) -> None:
    path = write_lone_heads(tmp_path, HEADS, {"layers.0.weight": mx.ones((2, 8, 8))})
    with pytest.raises(CheckpointError, match=r"missing tensor 'layers\.0\.bias'"):
        read_heads(path)
    path = write_lone_heads(tmp_path, {**HEADS, "tied": False}, {"layers.0.weight": mx.ones((2, 8, 8))})
    with pytest.raises(CheckpointError, match="not Medusa heads"):
        read_heads(path)
    mx.save_safetensors(str(path), {"0.0.linear.weight": mx.ones(3)})
    with pytest.raises(CheckpointError, match="convert --base MODEL --heads"):
        read_heads(path)


# --------------------------------------------------------------------------------------------- write


def test_shard_writer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    kinds = [np.float32, np.float16, np.uint32, np.uint8, np.int32]
    arrays = {f"t{i}": (rng.normal(size=(7, i + 1)) * 9).astype(kinds[i % 5]) for i in range(12)}
    writer = ShardWriter(tmp_path, shard_bytes=400)
    for name, array in arrays.items():
        writer.add(name, mx.array(array))
    writer.add("strided", mx.arange(12, dtype=mx.float32).reshape(3, 4).T)
    writer.add("half", mx.array([1.5, 3.25], mx.bfloat16))
    writer.add("scalar", mx.array(3.0))
    writer.close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 3
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    expected = {**arrays, "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T, "scalar": np.float32(3)}
    found = {name: array for name, array in read_arrays(tmp_path).items() if name != "half"}
    for name, array in expected.items():
        np.testing.assert_array_equal(np.array(found[name]), array)
        if name != "scalar":
            np.testing.assert_array_equal(load_part(tmp_path / index["weight_map"][name], name), array)
    assert found.keys() == expected.keys()
    assert read_arrays(tmp_path)["half"].tolist() == [1.5, 3.25]
    assert index["metadata"]["total_size"] == sum(a.nbytes for a in map(np.asarray, expected.values())) + 4
    assert index["metadata"]["total_parameters"] == sum(np.size(a) for a in expected.values()) + 2
    for file in files:
        with safe_open(file, "np") as opened:
            assert opened.metadata() == {"format": "mlx"}


def load_part(path: Path, name: str) -> np.ndarray:
    with safe_open(path, "np") as file:
        return file.get_tensor(name)


def test_one_shard_and_many_names(tmp_path: Path) -> None:
    """A header that is full starts a new shard, so no number of tensors breaks the file."""
    writer = ShardWriter(tmp_path, header_bytes=1)
    for i in range(100):
        writer.add(f"a.rather.long.name.of.a.tensor.{i}", mx.full((3,), i))
    writer.close()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert len(read_arrays(tmp_path)) == 100
    alone = tmp_path / "alone"
    alone.mkdir()
    writer = ShardWriter(alone)
    writer.add("a", mx.ones(3))
    writer.close()
    assert load_file(alone / "model.safetensors")["a"].tolist() == [1, 1, 1]


def test_staged_folder(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "folder"
    with staged_folder(target) as folder:
        assert folder.parent == target.parent
        (folder / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert list(target.parent.iterdir()) == [target]
    with pytest.raises(OutputError, match="exists already"), staged_folder(target):
        pass
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OutputError, match="exists already"), staged_folder(link):
        pass


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), CheckpointError("x")]
)
def test_staged_folder_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    target = tmp_path / "deep" / "folder"

    def fill() -> None:
        with staged_folder(target) as folder:
            (folder / "file").write_text("x")
            raise error

    expected = OutputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        fill()
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"), staged_folder(tmp_path / "file" / "model"):
        pass


def test_public_names() -> None:
    assert set(checkpoint.__all__) <= set(dir(checkpoint))
    assert shards.ShardWriter is checkpoint.ShardWriter
