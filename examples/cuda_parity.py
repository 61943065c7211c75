"""Record what PyTorch writes on this machine's GPU in three precisions, and hold MLX against it. At most ten minutes.

    python examples/cuda_parity.py OUT           # small random models of every family, made here
    python examples/cuda_parity.py OUT --demo    # Whisper tiny.en and SmolLM2 too, from pip packages

PyTorch with transformers and this tree are all it needs: models and inputs are made in OUT. Where MLX is installed, its
CPU backend is checked at once; else take OUT to a machine that has it and run the same command there with --check-only.
OUT then holds the records (<model>-<precision>.jsonl), results and report.md; the exit status is that of the checks.
"""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import make_small_models

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the tree need not be installed

DTYPES = ("float32", "bfloat16", "float16")
TOKENS = {"whisper": 64, "meralion2": 64, "llama": 64, "demo": 100}


def jobs(out: Path, demo: bool) -> Iterator[tuple[str, Path, list[str], int]]:
    """(name, model folder, options with the inputs, tokens)"""
    if not (out / "prompts.txt").exists():
        make_small_models.make_all(out)
    for family in make_small_models.MAKERS:
        inputs = "prompts.txt" if family == "llama" else "speech"
        yield f"small-{family}", out / family, [str(out / inputs)], TOKENS[family]
    if demo:
        from fetch_speech import fetch_speech

        from mlx_medusa.demo import SPEECH, TEXT, demo_model

        for model, options in (
            (SPEECH, [str(fetch_speech() / "librivox")]),
            (TEXT, [str(out / "prompts.txt")]),
        ):
            folder = demo_model(model)
            if folder is None:
                sys.exit(f"{model.title} is not installed: pip install -e {ROOT}[demo]")
            yield model.name, folder, options, TOKENS["demo"]


def record(out: Path, demo: bool, device: str, dtypes: list[str]) -> int:
    """Record each model in each precision; the number of records that failed."""
    from mlx_medusa.parity.__main__ import main as parity

    failed = 0
    for name, folder, inputs, tokens in jobs(out, demo):
        for dtype in dtypes:
            if dtype == "float16" and "meralion2" in name:
                continue  # Gemma's numbers leave its range
            command = ["record", *inputs, "--model", str(folder), "--device", device, "--dtype", dtype]
            target = out / f"{name}-{dtype}.jsonl"
            failed += parity([*command, "--max-tokens", str(tokens), "-o", str(target)])
    return failed


def check(out: Path, demo: bool) -> int:
    """Hold MLX against each record, in processes without PyTorch; the number of checks that failed."""
    failed, results = 0, []
    for name, folder, inputs, _ in jobs(out, demo):
        for path in [out / f"{name}-{dtype}.jsonl" for dtype in DTYPES]:
            if path.exists():
                print(f"{path.name}: ", end="", flush=True)
                target = path.with_suffix(".results")
                command = ["check", path, *inputs, "--model", folder, "--json", target, "--quiet"]
                done = subprocess.run(
                    [sys.executable, "-m", "mlx_medusa.parity", *map(str, command)], cwd=ROOT
                )
                failed += done.returncode != 0
                results += [str(target)] if target.exists() else []
    if results:
        report = subprocess.run(
            [sys.executable, "-m", "mlx_medusa.parity", "report", *results], cwd=ROOT, capture_output=True, text=True
        )  # fmt: skip
        (out / "report.md").write_text(report.stdout, encoding="utf-8")
        print(f"\n{report.stdout}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("out", type=Path, help="folder for models, records and results")
    parser.add_argument("--demo", action="store_true", help="the demo models too")
    parser.add_argument(
        "--device", default="auto", help="auto, cpu, cuda or cuda:N (default: CUDA where there is one)"
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), help="precisions (default: all)"
    )
    parser.add_argument("--check-only", action="store_true", help="the records are there")
    args = parser.parse_args()
    out = args.out.resolve()
    if not args.check_only and record(out, args.demo, args.device, args.dtypes):
        return 1
    if importlib.util.find_spec("mlx") is None:
        print(
            f"MLX is not installed here. Where it is: python examples/cuda_parity.py {args.out} --check-only"
        )
        return 0
    return 1 if check(out, args.demo) else 0


if __name__ == "__main__":
    sys.exit(main())
