"""OpenBLAS is in place before mlx on Linux, can be turned off, and its absence is said once."""

import os
import subprocess
import sys

import pytest

from mlx_medusa import blas

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux needs OpenBLAS")

LOADED = (
    "print('/libopenblas' in open('/proc/self/maps').read())\n"  # numpy's own is called libscipy_openblas
)


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a fresh interpreter: what is loaded into this one cannot be unloaded."""
    variables = {name: value for name, value in os.environ.items() if name != blas.SWITCH}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**variables, **environment},
        capture_output=True,
        text=True,
        check=True,
    )


@linux_only
def test_openblas_comes_into_place_with_mlx_and_not_before() -> None:
    done = run(
        "import mlx_medusa\n"
        + LOADED
        + "import mlx.core as mx\n"
        + LOADED
        + "a = mx.arange(6.0).reshape(2, 3)\n"
        "print((a @ a.T).tolist())\n"
        "from mlx_medusa import blas; blas.print_notice()"
    )
    assert done.stdout.splitlines() == ["False", "True", "[[5.0, 14.0], [14.0, 50.0]]"]
    assert done.stderr == ""


@linux_only
@pytest.mark.parametrize(
    ("switch", "library"), [({}, "libopenblas"), ({"MLX_MEDUSA_OPENBLAS": "0"}, "libblas")]
)
def test_mlx_multiplies_with_it(switch: dict[str, str], library: str) -> None:
    """The dynamic linker says where MLX's calls go."""
    code = "import mlx_medusa, mlx.core as mx; a = mx.ones((4, 4)); mx.eval(a @ a)"
    log = run(code, LD_DEBUG="bindings", **switch).stderr
    bindings = [line for line in log.splitlines() if "libmlx" in line and line.endswith("`cblas_sgemm'")]
    assert len(bindings) == 1
    assert library in bindings[0].split(" to ")[1]


@linux_only
def test_the_switch_turns_it_off_without_a_word() -> None:
    done = run(
        "import mlx_medusa, mlx.core\n" + LOADED + "from mlx_medusa import blas; blas.print_notice()",
        MLX_MEDUSA_OPENBLAS="0",
    )
    assert done.stdout == "False\n"
    assert done.stderr == ""


@linux_only
def test_a_library_that_is_not_there_is_said_once_with_the_cure() -> None:
    done = run(
        "import mlx_medusa\nfrom mlx_medusa import blas\nprint(blas.preload())\n"
        "blas.print_notice(); blas.print_notice()",
        MLX_MEDUSA_OPENBLAS="libnowhere.so.7",
    )
    assert done.stdout == "False\n"
    assert len(done.stderr.splitlines()) == 1
    for part in ("libnowhere.so.7", "apt-get install libopenblas0-pthread", "MLX_MEDUSA_OPENBLAS=0"):
        assert part in done.stderr


@linux_only
def test_mlx_before_the_package_is_said() -> None:
    done = run("import mlx.core\nimport mlx_medusa\nfrom mlx_medusa import blas\nblas.print_notice()")
    assert len(done.stderr.splitlines()) == 1
    assert "import mlx_medusa first" in done.stderr


def test_other_systems_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(blas, "_notice", None)
    assert blas.preload() is False
    blas.print_notice()
    assert capsys.readouterr().err == ""


def test_importing_the_package_imports_nothing_heavy() -> None:
    done = run(
        "import sys, mlx_medusa\n"
        "heavy = ('mlx.core', 'numpy', 'tokenizers', 'soundfile', 'torch')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert done.stdout == "[]\n"
