"""A real text model, SmolLM2-135M-Instruct, against the golden records of the oracle, in float16 and quantized."""

import pytest
from conftest import unavailable
from golden import FLOAT32, QUANTIZED, failures, golden, is_recorded

from convert import convert
from mlx_medusa import load
from mlx_medusa.demo import TEXT, package_file
from mlx_medusa.parity.candidate import candidate_of
from mlx_medusa.parity.check import check
from mlx_medusa.parity.inputs import Input


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """As the GGUF file has it, its 4 bits expanded to float16."""
    file = package_file(TEXT.package, *TEXT.weights)
    if file is None:
        unavailable(f"{TEXT.package} is not installed: {TEXT.install}")
    target = tmp_path_factory.mktemp("smollm2") / "model"
    convert(base=file, mlx_path=target, dequantize=True)
    return target


def held(folder, record, count, widths):
    """What is not equal among the first ``count`` prompts."""
    entries = record.entries[:count]
    prompts = [Input(entry.name, entry.input) for entry in entries]
    results = list(check(candidate_of(load(folder, medusa=False)), entries, prompts, FLOAT32, widths))
    assert len(results) == len(entries) * len(widths)
    return failures(results)


def test_float16_weights(folder):
    """Without heads the recorded tokens are the guesses: wide passes, few of them."""
    record = golden("smollm2-135m")
    assert is_recorded(record, folder)
    assert len(record.entries) == 22
    assert not held(folder, record, 22, [16])
    assert not held(folder, record, 2, [1, 3, 5])


@pytest.mark.parametrize("name", ["8bit", "4bit"])
def test_quantized_weights(folder, tmp_path, name):
    convert(base=folder, mlx_path=tmp_path / "model", **QUANTIZED[name])
    record = golden(f"smollm2-135m-{name}")
    if not is_recorded(record, tmp_path / "model"):
        pytest.skip("this machine rounds to other quantized weights than those recorded")
    assert not held(tmp_path / "model", record, 3, [8])
