"""Exported MLX functions: real tiny.en in a fresh process without this package, and what both formats refuse."""

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from clips import librivox_texts
from golden import golden
from test_transcribe import heads_file, small_model

from convert import convert
from mlx_medusa import export, load
from mlx_medusa.demo import SPEECH as DEMO
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import chain_pass

EXAMPLE = Path(__file__).parents[1] / "examples" / "mlxfn_transcribe.py"
HEADS = DEMO.shipped
END = 50256  # in the records, but not among the tokens of a text
GOLDEN = {  # what transformers writes: name -> tokens
    entry.name: [token for token in entry.tokens if token != END]
    for entry in golden("whisper-tiny.en").entries
    if not entry.asked.timestamps
}


def with_openblas():
    """The environment, with the BLAS of this package where there is one: only for speed, and only on Linux."""
    try:
        ctypes.CDLL("libopenblas.so.0")
    except OSError:
        return {**os.environ}
    return {**os.environ, "LD_PRELOAD": "libopenblas.so.0"}


def fresh(folder, *audio):
    """What the example prints for each file, in a process that has no module of this package."""
    code = (
        "import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
        "assert not [name for name in sys.modules if name.split('.')[0] in ('mlx_medusa', 'convert')]"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, EXAMPLE, folder, *audio, "--json"],
        capture_output=True, text=True, check=True, env=with_openblas(),
    )  # fmt: skip
    return [json.loads(line) for line in ran.stdout.splitlines()]


@pytest.fixture(scope="module")
def recurrent(tiny_en, tmp_path_factory):
    """tiny.en with its recurrent heads."""
    output = tmp_path_factory.mktemp("mlxfn") / "recurrent"
    export.export_mlxfn(tiny_en, HEADS / "recurrent", output)
    return output


@pytest.fixture(scope="module")
def plain(tiny_en, tmp_path_factory):
    output = tmp_path_factory.mktemp("mlxfn") / "plain"
    export.export_mlxfn(tiny_en, HEADS / "medusa", output)
    return output


@pytest.mark.parametrize(("kind", "heads", "clips"), [("recurrent", "recurrent", 3), ("plain", "medusa", 1)])
def test_a_fresh_process_writes_the_tokens_of_transformers(kind, heads, clips, tiny_en, speech_dir, request):
    """In the very passes of the engine from which the functions were traced."""
    paths = list(librivox_texts(speech_dir))[:clips]
    engine = load(tiny_en, heads=HEADS / heads)
    decided = rounds = 0
    for path, found in zip(paths, fresh(request.getfixturevalue(kind), *paths), strict=True):
        assert found["tokens"] == GOLDEN[f"librivox/{path.name}"], path.name
        counts = engine.transcribe(path).medusa
        decided, rounds = decided + counts.tokens, rounds + counts.rounds
        assert (found["decided"], found["rounds"]) == (decided, rounds)
    assert decided / rounds > (2.5 if kind == "recurrent" else 1.2)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_example_in_cpp(recurrent, speech_dir, tmp_path):
    """Built as its first lines say, against the headers and the library of the MLX wheel."""
    home, program = Path(mx.__file__).parent, tmp_path / "transcribe"
    subprocess.run(
        ["g++", "-std=c++20", EXAMPLE.with_suffix(".cpp"), "-I", home / "include", "-L", home / "lib", "-lmlx",
         f"-Wl,-rpath,{home / 'lib'}", "-o", program],
        check=True,
    )  # fmt: skip
    path = list(librivox_texts(speech_dir))[-1]
    ran = subprocess.run(
        [program, recurrent, path], capture_output=True, text=True, check=True, env=with_openblas()
    )
    assert [int(token) for token in ran.stdout.split()] == GOLDEN[f"librivox/{path.name}"]
    assert ran.stderr == "10 tokens in 2 passes\n"
    ran = subprocess.run([program, tmp_path, path], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert ran.stderr == f"transcribe: error: {tmp_path}/export.json: cannot be read\n"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Small, random, with three plain heads."""
    folder = tmp_path_factory.mktemp("model")
    return small_model(folder, 51864, heads_file(folder / "heads.safetensors"))


def call(folder, name, rows):
    """(ports of a function, its outputs for zeros of the shapes that export.json says)"""
    described = json.loads((folder / "export.json").read_text())["functions"][name]

    def shape(port):
        return [rows if size == "rows" else size for size in port["shape"]]

    inputs = [mx.zeros(shape(port), getattr(mx, port["dtype"])) for port in described["inputs"]]
    outputs = mx.import_function(str(folder / described["file"]))(*inputs)
    expected = [(tuple(shape(port)), f"mlx.core.{port['dtype']}") for port in described["outputs"]]
    assert [(out.shape, str(out.dtype)) for out in outputs] == expected
    return outputs


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_description_is_what_the_functions_take_and_give(model, tmp_path, dtype):
    export.export_mlxfn(model, None, tmp_path / "out", dtype)
    content = json.loads((tmp_path / "out" / "export.json").read_text())
    assert content["functions"]["step"]["inputs"][2]["dtype"] == dtype
    call(tmp_path / "out", "encoder", 1)
    call(tmp_path / "out", "heads", 1)
    for rows in (1, 2, 3, 4):
        logits, *_ = call(tmp_path / "out", "step", rows)
        assert np.isfinite(np.array(logits)).all()


def test_quantized_weights_stay_quantized(model, tmp_path):
    """With a dtype, as on a GPU; the numbers are those of the quantized engine."""
    convert(base=model.parent / "hf", heads=None, mlx_path=tmp_path / "q4", q_bits=4)
    export.export_mlxfn(tmp_path / "q4", None, tmp_path / "out", "float16")
    export.export_mlxfn(model, None, tmp_path / "whole", "float16")
    size, whole = ((tmp_path / folder / "step.mlxfn").stat().st_size for folder in ("out", "whole"))
    assert size < whole / 2.5
    engine = load(tmp_path / "q4", dtype="float16")
    assert not (tmp_path / "out" / "heads.mlxfn").exists()
    ports = json.loads((tmp_path / "out" / "export.json").read_text())["functions"]["step"]["inputs"]
    rng = np.random.default_rng(0)
    past = [mx.zeros(port["shape"], mx.float16) for port in ports if port["name"].startswith("past_")]
    memory = [
        mx.array(rng.normal(size=port["shape"]), mx.float16)
        for port in ports
        if port["name"].startswith("memory_")
    ]
    tokens = [50257, 50362, 11, 12]
    step = mx.import_function(str(tmp_path / "out" / "step.mlxfn"))
    logits, *_ = step(mx.array([tokens]), mx.array([0]), *past, *memory)
    cache = KVCache(1, [(memory[0], memory[1])])
    expected = engine.model.logits(chain_pass(engine.model, tokens, cache)).astype(mx.float32)
    np.testing.assert_allclose(np.array(logits), np.array(expected), atol=2e-2)


# ---- what goes wrong


def refused(capsys, *args):
    assert export.main([*map(str, args)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("export: error: ")
    assert error.count("\n") == 1
    return error


@pytest.mark.parametrize("form", export.FORMATS)
def test_folders_that_cannot_be(form, model, tmp_path, capsys):
    there = tmp_path / "there"
    there.mkdir()
    assert "exists already" in refused(capsys, "--model", model, "--format", form, "-o", there)
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text('{"model_type": "meralion2"}')
    for folder, part in (
        (tmp_path / "missing", "no such file or folder"),
        (there, "no config.json"),
        (other, "only Whisper models"),
    ):
        assert part in refused(capsys, "--model", folder, "--format", form, "-o", tmp_path / "out")
        assert not (tmp_path / "out").exists()
    assert "float32" in refused(
        capsys, "--model", model, "--format", "onnx", "-o", other / "x", "--dtype", "float16"
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "there"]


def test_missing_extras_are_named(model, tmp_path, capsys, monkeypatch):
    found = export.find_spec
    monkeypatch.setattr(export, "find_spec", lambda name: None if name.startswith("onnx") else found(name))
    error = refused(capsys, "--model", model, "--format", "onnx", "-o", tmp_path / "out")
    assert error.endswith('onnx, onnxscript not installed: pip install "mlx-medusa[onnx,reference]"\n')
    assert export.main(["run", str(tmp_path), "a.wav"]) == 1
    assert 'pip install "mlx-medusa[onnx]"' in capsys.readouterr().err


def test_a_full_disk_leaves_nothing(model, tmp_path):
    """The limit on a file's size stands for it: MLX's own error of writing becomes one line."""
    command = f'ulimit -f 2000; exec "{sys.executable}" -m mlx_medusa.export --model "{model}" --format mlxfn -o out'
    ran = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])},
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.count("\n") == 1, ran.stderr
    assert "step.mlxfn: cannot be written" in ran.stderr
    assert list(tmp_path.iterdir()) == []
