"""The converter: its command line, and every bad input is one line and leaves nothing behind."""

import errno
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from checkpoints import (
    DIM,
    DIMS,
    Tensors,
    break_hf,
    config_of,
    ct2_variables,
    cut,
    read,
    write_ct2,
    write_mlx_whisper,
    write_openai,
)

from convert import convert
from convert.cli import main
from mlx_medusa.errors import CheckpointError, MedusaError, OutputError

EMBEDDING = "model.decoder.embed_tokens"


# --------------------------------------------------------------------------------------- bad inputs


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/mlx-medusa-was-run",)


def bad_source(case: str, hf: Path, tensors: Tensors, folder: Path) -> Path:
    """A checkpoint with one fault; ``folder`` does not exist yet."""
    if "safetensors" in case:
        break_hf(hf, folder, lambda t: None)
        cut(folder / "model.safetensors", 0 if "empty" in case else -10)
        return folder
    if "tensor" in case:
        return bad_tensor(case, hf, folder)
    if case in BAD_CT2:
        return bad_ct2(case, tensors, folder)
    if case == "truncated npz":
        write_mlx_whisper(tensors, folder)
        cut(folder / "weights.npz", 1_000_000)
        return folder
    folder.mkdir()
    if case in BAD_CONFIGS:
        (folder / "config.json").write_text(BAD_CONFIGS[case])
        return folder
    if "folder" in case:
        return folder / "nowhere" if case == "no such folder" else folder
    return bad_pt(case, tensors, folder / "model.pt")


def bad_tensor(case: str, hf: Path, folder: Path) -> Path:
    name = "model.decoder.layers.0.fc1.bias"

    def change(t: Tensors) -> None:
        if case == "missing tensor":
            del t[name]
        elif case == "extra tensor":
            t["model.decoder.layers.7.fc1.bias"] = t[name].copy()
        elif case == "misshapen tensor":
            t[name] = t[name][:-1].copy()
        else:
            t[name] = np.zeros(t[name].shape, np.int32)

    return break_hf(hf, folder, change)


BAD_CONFIGS = {
    "not whisper": '{"model_type": "gpt2"}',
    "broken config": "{",
    "config without weights": '{"model_type": "whisper"}',
}
BAD_CT2 = {
    "truncated model.bin": 100_000,
    "header of model.bin": 10,
    "half a name in model.bin": 40,
    "last byte of model.bin": -1,
    "old model.bin": None,
    "extra variable": None,
    "missing variable": None,
    "key bias": None,
}


def bad_ct2(case: str, tensors: Tensors, folder: Path) -> Path:
    variables = ct2_variables(tensors)
    if case == "extra variable":
        variables["decoder/new/weight"] = np.zeros((3, 3), np.float16)
    elif case == "missing variable":
        del variables["encoder/conv2/bias"]
    elif case == "key bias":
        variables["encoder/layer_0/self_attention/linear_0/bias"][DIM] = 1
    write_ct2(variables, folder, version=3 if case == "old model.bin" else 6)
    if (size := BAD_CT2[case]) is not None:
        cut(folder / "model.bin", size)
    return folder


def bad_pt(case: str, tensors: Tensors, path: Path) -> Path:
    if case == "hostile pickle":
        torch.save({"dims": DIMS, "model_state_dict": Hostile()}, path)
    elif case == "truncated pt":
        cut(write_openai(tensors, path), 100_000)
    elif case == "text named pt":
        path.write_text("not a model")
    elif case == "pt of something else":
        torch.save({"weights": torch.zeros(3)}, path)
    else:
        write_openai({**tensors, "model.decoder.extra": np.zeros(3, np.float16)}, path)
    return path


CASES = {
    "missing tensor": r"missing tensor 'model\.decoder\.layers\.0\.fc1\.bias'",
    "extra tensor": r"unexpected tensor 'model\.decoder\.layers\.7\.fc1\.bias'",
    "misshapen tensor": r"'model\.decoder\.layers\.0\.fc1\.bias' has shape \[255\], expected \[256\]",
    "integer tensor": r"fc1\.bias' holds .*int32",
    "truncated safetensors": r"model\.safetensors: \d+ bytes, but",
    "empty safetensors": r"model\.safetensors: not a safetensors file",
    "truncated model.bin": r"model\.bin: cut short in 'encoder/",
    "header of model.bin": r"model\.bin: not a CTranslate2 model",
    "half a name in model.bin": r"model\.bin: not a CTranslate2 model",
    "last byte of model.bin": r"model\.bin: not a CTranslate2 model",
    "old model.bin": r"model\.bin: binary version 3",
    "extra variable": r"unexpected variable 'decoder/new/weight'",
    "missing variable": r"missing tensor 'model\.encoder\.conv2\.bias'",
    "key bias": r"has a bias for keys",
    "truncated npz": r"weights\.npz: not an npz archive, or cut short",
    "hostile pickle": r"model\.pt: holds more than tensors, which could run code",
    "truncated pt": r"model\.pt: cut short or damaged",
    "text named pt": r"model\.pt: not a PyTorch file",
    "pt of something else": r"model\.pt: not an openai Whisper checkpoint",
    "pt with one more": r"unexpected tensor 'decoder\.extra'",
    "not whisper": r"model_type 'gpt2'",
    "broken config": r"config\.json: not valid JSON",
    "config without weights": r"no model\.safetensors",
    "empty folder": r"no checkpoint",
    "no such folder": r"no such file or folder",
}


@pytest.mark.parametrize("case", CASES)
def test_bad_source(
    case: str,
    hf: Path,
    tensors: Tensors,
    tmp_path: Path,
    out: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = bad_source(case, hf, tensors, tmp_path / "bad")
    with pytest.raises(SystemExit) as caught:
        main(["--base", str(source), "--mlx-path", str(out)])
    captured = capsys.readouterr()
    assert caught.value.code == 1
    assert captured.out == ""
    assert captured.err.startswith("convert: error: ")
    assert captured.err.count("\n") == 1, captured.err
    assert re.search(CASES[case], captured.err), captured.err
    assert list(out.parent.iterdir()) == []
    assert not Path("/tmp/mlx-medusa-was-run").exists()


def test_existing_target(hf: Path, out: Path) -> None:
    out.mkdir()
    with pytest.raises(OutputError, match="exists already"):
        convert(hf, out)
    assert list(out.iterdir()) == []


def test_parents_are_made_and_removed(hf: Path, tmp_path: Path, out: Path) -> None:
    convert(hf, out / "a" / "b")
    assert (out / "a" / "b" / "config.json").is_file()
    bad = bad_source("missing tensor", hf, read(hf), tmp_path / "bad")
    with pytest.raises(CheckpointError):
        convert(bad, out / "c" / "d")
    assert not (out / "c").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_full_disk(hf: Path, out: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    from mlx_medusa import shards

    written = []

    def write(file: Any, array: mx.array) -> None:
        written.append(array)
        if len(written) == 20:
            raise OSError(code, os.strerror(code))
        file.write(bytes(array.nbytes))

    monkeypatch.setattr(shards, "_write_array", write)
    with pytest.raises(OutputError, match=os.strerror(code)):
        convert(hf, out)
    assert list(out.parent.iterdir()) == []


def test_limit_on_file_size(hf: Path, out: Path) -> None:
    """A write that the system itself refuses, in the command line."""
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (10**6, 10**6)); "
    code += "from convert.cli import main; main(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, "--base", str(hf), "--mlx-path", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    assert done.returncode == 1
    assert re.fullmatch(r"convert: error: .*cannot be written: File too large\n", done.stderr)
    assert list(out.parent.iterdir()) == []


def test_read_only_target(hf: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        out.parent.chmod(0o500)
    else:  # root may write anywhere, so let the system call say what it would say to others

        def refuse(*_: Any, **__: Any) -> str:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        monkeypatch.setattr("tempfile.mkdtemp", refuse)
    try:
        with pytest.raises(OutputError, match=r"cannot be written: (Read-only|Permission)"):
            convert(hf, out)
    finally:
        out.parent.chmod(0o700)
    assert list(out.parent.iterdir()) == []


def test_interrupt_leaves_nothing(hf: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.pipeline._Job._write_settings", stop)
    with pytest.raises(KeyboardInterrupt):
        convert(hf, out)
    assert list(out.parent.iterdir()) == []


def test_missing_torch(tensors: Tensors, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_openai(tensors, tmp_path / "model.pt")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"pip install .*torch"):
        convert(source, out)


# ------------------------------------------------------------------------------------- command line


def test_spellings_and_report(hf: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        [
            "--hf_path",
            str(hf),
            "--mlx_path",
            str(out),
            "--q_bits",
            "8",
            "--q_group_size",
            "32",
            "--q_mode",
            "affine",
        ]
    )
    text = capsys.readouterr().out
    assert config_of(out)["quantization"] == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert "33 layers quantized" in text
    assert re.search(r"\d\.\d+ bits per weight", text)
    assert "left unquantized (convolution)" in text
    assert re.search(r"[\d.]+ MB -> [\d.]+ MB", text)


def test_bits_imply_quantize_and_model_is_an_alias(hf: Path, out: Path) -> None:
    main(["--model", str(hf), "--mlx-path", str(out), "--quant-predicate", "mixed_4_6"])
    assert config_of(out)["quantization"]["bits"] == 4


@pytest.mark.parametrize(
    "arguments", [["--base", "x", "--q-bits", "7"], ["--base"], ["--base", "x", "--nonsense"]]
)
def test_wrong_usage_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    capsys.readouterr()


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(MedusaError):
        main(["--base", str(tmp_path / "nowhere"), "--mlx-path", str(tmp_path / "out"), "--debug"])


def test_help_is_quick() -> None:
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "convert", "--help"],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[1],
            check=True,
        )
        best = min(best, time.perf_counter() - start)
    assert best < 1
    assert not re.search(r"\| +(mlx|torch|numpy|transformers)\b", done.stderr)
