"""MERaLiON-2 against the golden records of the oracle: small random models, as they are and quantized. Numbers."""

import pytest
from clips import sounds
from golden import FLOAT32, QUANTIZED, failures, golden, is_recorded
from make_small_models import make_meralion2
from meralion import write_heads

from convert import convert
from mlx_medusa import load
from mlx_medusa.parity.candidate import candidate_of
from mlx_medusa.parity.check import check


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return make_meralion2(tmp_path_factory.mktemp("small") / "meralion2")


@pytest.fixture(scope="module")
def clips():
    return list(sounds())


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """Random ones, four: wide passes whose guesses are mostly wrong."""
    return write_heads(tmp_path_factory.mktemp("heads"))


def test_every_width_equals_pytorch(source, clips, heads):
    record = golden("small-meralion2")
    assert is_recorded(record, source)
    candidate = candidate_of(load(source, heads=heads))
    results = list(check(candidate, record.entries, clips, FLOAT32, [1, 3, 5]))
    assert len(results) == 18
    assert sum(result.tokens for result in results) >= 900
    assert not failures(results)


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_models_equal_the_quantized_oracle(source, clips, tmp_path, name, dtype):
    """The weights dequantized at load, and MLX's kernels for quantized matrices."""
    convert(base=source, mlx_path=tmp_path / "model", **QUANTIZED[name])
    record = golden(f"small-meralion2-{name}")
    if not is_recorded(record, tmp_path / "model"):
        pytest.skip("this machine rounds to other quantized weights than those recorded")
    candidate = candidate_of(load(tmp_path / "model", dtype=dtype))
    results = list(check(candidate, record.entries, clips, FLOAT32))
    assert len(results) == 6
    assert not failures(results)
