"""Records, the comparison and the command line. Tiny random models and made-up entries: logic, not numbers."""

import json
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
import soundfile
import torch
from checkpoints import write_hf
from mlx.utils import tree_flatten
from test_transcribe import heads_file
from tiny import new_cache, tiny_whisper

from convert import convert
from mlx_medusa import load
from mlx_medusa.errors import AudioError, OptionError
from mlx_medusa.medusa.decode import Limits, chain_pass, generate, prefill
from mlx_medusa.medusa.heads import HeadsArgs, MedusaDrafter, MedusaHeads
from mlx_medusa.medusa.rules import Suppress
from mlx_medusa.parity import records
from mlx_medusa.parity.__main__ import main
from mlx_medusa.parity.candidate import Decoded, Margins, candidate_of, decode
from mlx_medusa.parity.check import Bounds, bounds_for, compare
from mlx_medusa.parity.inputs import read_inputs
from mlx_medusa.parity.records import Asked, Entry

BOUNDS = Bounds(margin=0.01, drift=0.001)
ENTRY = Entry(
    name="a.wav",
    sha256="0" * 64,
    asked=Asked(max_tokens=9),
    prompt=[1, 2],
    tokens=[5, 6, 7, 8],
    text="abc",
    margins=[1.0, 0.004, 2.0, float("inf")],
    logprobs=[-0.5, -0.7, -0.1, 0.0],
    rounds=[2, 1],
)
FOUND = Decoded(ENTRY.prompt, ENTRY.tokens, ENTRY.margins, ENTRY.logprobs, [2, 1])


# ---- the comparison


def test_the_same_numbers_are_equal():
    result = compare(ENTRY, FOUND, BOUNDS, 3, rounds=True)
    assert (result.verdict, result.tokens, result.drift, result.failed) == ("equal", 4, 0.0, False)


@pytest.mark.parametrize(
    ("changes", "verdict", "failed", "says"),
    [
        (
            {"tokens": [5, 9, 7, 8]},
            "near-tie",
            False,
            "step 1: token 9, reference 6, reference's margin 0.004",
        ),
        ({"tokens": [5, 6, 9, 8]}, "different", True, "step 2: token 9, reference 7, reference's margin 2"),
        ({"tokens": [5, 6, 7, 9]}, "different", True, "step 3: token 9, reference 8, reference's margin inf"),
        ({"tokens": [5, 6, 7]}, "different", True, "step 3: token the end, reference 8"),
        ({"tokens": [5, 6, 7, 8, 9]}, "different", True, "step 4: token 9, reference the end"),
        ({"tokens": [5]}, "near-tie", False, "step 1: token the end, reference 6"),
        ({"margins": [1.0, 0.004, 2.01, float("inf")]}, "drift", True, "0.01 apart"),
        ({"logprobs": [-0.5, -0.702, -0.1, 0.0]}, "drift", True, "0.002 apart"),
        ({"logprobs": [-0.5, float("nan"), -0.1, 0.0]}, "drift", True, "nan apart"),
        ({"margins": [1.0, 0.004, 2.0, 3.0]}, "drift", True, "inf apart"),
        ({"margins": [1.0, 0.0045, 2.0, float("inf")]}, "equal", False, "numbers within 5.0e-04"),
        ({"rounds": [1, 2]}, "rounds", True, "[1, 2], reference [2, 1]"),
        ({"prompt": [1, 3]}, "prompt", True, "tokens [1, 3], reference [1, 2]"),
    ],
)
def test_what_differs_is_said(changes, verdict, failed, says):
    """Of a text that parts at a near-tie the rest is not looked at; one that parts elsewhere has failed."""
    found = replace(FOUND, **changes)
    result = compare(ENTRY, found, BOUNDS, 3, rounds=True)
    assert (result.verdict, result.failed) == (verdict, failed)
    assert says in result.line()


def test_numbers_behind_a_difference_are_not_compared():
    found = replace(FOUND, tokens=[5, 9, 7, 8], margins=[1.0002, 9, 9, 9])
    assert compare(ENTRY, found, BOUNDS, 3).drift == pytest.approx(0.0002)


def test_another_language_is_said():
    entry = replace(ENTRY, detected=("fr", 0.6))
    assert compare(entry, replace(FOUND, detected=("fr", 0.61)), BOUNDS, 1).verdict == "equal"
    assert compare(entry, replace(FOUND, detected=("de", 0.5)), BOUNDS, 1).verdict == "language"


def test_bounds_are_those_of_the_coarser_precision():
    assert bounds_for("float32", "float32", None, None) == bounds_for("float32", "float32", 1e-3, None)
    assert bounds_for("bfloat16", "float32", None, None) == bounds_for("float16", "bfloat16", None, None)
    assert bounds_for("float32", "float16", None, None).drift is None
    assert bounds_for("float32", "float16", 7.0, 8.0) == Bounds(7.0, 8.0)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_margins_are_those_of_plain_decoding(width):
    """Under a rule, with guesses that are mostly wrong: from a loop of this test, without a cache or drafts."""
    model, encoded = tiny_whisper(3)
    rules, prompt = [Suppress([7, 11], 61)], [1, 2]
    heads = MedusaHeads(HeadsArgs(3, 1, 32))
    rng = np.random.default_rng(0)
    heads.load_weights(
        [(name, mx.array(rng.normal(size=w.shape) * 0.2)) for name, w in tree_flatten(heads.parameters())]
    )
    drafter = MedusaDrafter(heads, lambda states: mx.argmax(model.logits(states), axis=-1))
    margins = Margins()
    limits = Limits(frozenset([60]), 20)
    state, first = prefill(model, prompt, new_cache(model, encoded), limits, [*rules, margins])
    list(generate(model, state, first, limits, rules=[*rules, margins], drafter=drafter, width=width))
    expected = []
    for end in range(len(prompt), len(state.tokens)):
        row = np.array(model.logits(chain_pass(model, state.tokens[:end], new_cache(model, encoded))[0, -1]))
        row[[7, 11]] = -np.inf
        second, best = np.sort(row)[-2:]
        expected.append(best - second)
    found = margins.of(len(prompt), len(state.tokens) - len(prompt))
    np.testing.assert_allclose(found, expected, atol=1e-4)


# ---- the format


def test_a_record_comes_back_as_it_was(tmp_path):
    head = records.Head("whisper", "m", "f" * 64, None, "CPU", "float32", {"torch": "2"}, 4, "h" * 64)
    entries = [ENTRY, replace(ENTRY, start=29.5, detected=("fr", 0.75), input="naïve 日本", rounds=None)]
    path = tmp_path / "record.jsonl"
    path.write_text("".join(records.Record(head, entries).lines()), encoding="utf-8")
    assert records.read(path) == records.Record(head, entries)


@pytest.mark.parametrize(
    ("content", "line"),
    [("", 1), ("{}\n", 1), ("no json\n", 1), ('{"format": "mlx-medusa parity 1", "family": 1}\n', 1)],
)
def test_what_is_no_record_is_refused(tmp_path, content, line):
    path = tmp_path / "record.jsonl"
    path.write_text(content)
    with pytest.raises(OptionError, match=f"record.jsonl: line {line} is not"):
        records.read(path)


def test_a_record_that_was_cut_is_refused(tmp_path):
    head = records.Head("whisper", "m", "f" * 64, None, "CPU", "float32", {"torch": "2"})
    text = "".join(records.Record(head, [ENTRY, ENTRY]).lines())
    path = tmp_path / "record.jsonl"
    path.write_text(text[:-20])
    with pytest.raises(OptionError, match="line 3"):
        records.read(path)


def test_prompts_are_read_from_text_and_json_lines(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo words\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "three\\nlines", "name": "x"}\n')
    (tmp_path / "c.wav").write_text("not read")
    found = list(read_inputs([str(tmp_path)], "llama"))
    assert [(i.content, i.name.rsplit("/")[-1]) for i in found] == [
        ("one", "a.txt:1"), ("two words", "a.txt:3"), ("three\nlines", "x"),
    ]  # fmt: skip
    (tmp_path / "d.jsonl").write_text('{"text": "three"}\n')
    with pytest.raises(OptionError, match=r"d\.jsonl: line 1"):
        list(read_inputs([str(tmp_path / "d.jsonl")], "llama"))
    with pytest.raises(OptionError, match=r"nowhere\.txt"):
        list(read_inputs([str(tmp_path / "nowhere.txt")], "llama"))
    with pytest.raises(AudioError, match=r"c\.wav"):
        list(read_inputs([str(tmp_path)], "whisper"))


# ---- the command line


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random English Whisper that hears 30 s, with three heads."""
    folder = tmp_path_factory.mktemp("parity")
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_source_positions": 1500,
        "max_target_positions": 40,
    }
    write_hf(folder / "hf", dtype=torch.float32, **sizes)
    convert(base=folder / "hf", heads=heads_file(folder / "heads.safetensors"), mlx_path=folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def speech(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    rng = np.random.default_rng(0)
    for name, seconds in (("short.wav", 1), ("long.wav", 36)):
        soundfile.write(folder / name, (rng.normal(size=seconds * 16_000) * 0.1).astype(np.float32), 16_000)
    return folder


@pytest.fixture(scope="module")
def record(model, speech, tmp_path_factory):
    """Of both files, the long one in two windows, with the heads at width 4."""
    torch.set_num_threads(1)
    path = tmp_path_factory.mktemp("records") / "record.jsonl"
    command = ["record", str(speech), "--model", str(model), "--medusa", "--device", "cpu", "-o", str(path)]
    assert main([*command, "--max-tokens", "12"]) == 0
    return path


def test_record_and_check(model, record, tmp_path, capsys):
    """In float32 the engine writes the oracle's tokens at every width, and its passes decide as many."""
    entries = records.read(record).entries
    assert [(entry.name.rsplit("/")[-1], entry.start > 0) for entry in entries] == [
        ("long.wav", False), ("long.wav", True), ("short.wav", False),
    ]  # fmt: skip
    assert all(entry.rounds for entry in entries)
    results = tmp_path / "results.jsonl"
    command = ["check", str(record), "--model", str(model), "--medusa", "--json", str(results)]
    assert main([*command, "--width", "1", "2", "4"]) == 0
    out = capsys.readouterr().out
    assert out.count("equal     ") == 9
    assert "9 of 9 equal (108 tokens), 0 near-ties, 0 failed" in out
    assert main(["report", str(record), str(results)]) == 0
    table = capsys.readouterr().out
    assert "| model | weights | reference | inputs | tokens | smallest margin |" in table
    assert "| 1, 2, 4 | 9 of 9 | 0 | 0 |" in table


def test_check_needs_no_pytorch(model, record):
    code = (
        "import sys\n"
        "sys.modules.update(torch=None, transformers=None)\n"
        "from mlx_medusa.parity.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", record, "--model", model, "--quiet"],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("3 of 3 equal")


def test_record_without_pytorch_says_how_to_get_it(model, speech):
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from mlx_medusa.parity.__main__ import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "record", speech, "--model", model], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr == 'parity: error: torch is missing: pip install "mlx-medusa[reference]"\n'


def test_without_heads_the_recorded_tokens_are_the_guesses(model, record, speech):
    """Twelve tokens, the first decided by the prefill: at width 4 three passes, all of whose guesses are right."""
    candidate = candidate_of(load(model, medusa=False))
    entry = records.read(record).entries[-1]
    (clip,) = read_inputs([str(speech / "short.wav")], "whisper")
    memory = candidate.encode(clip.content)
    assert decode(candidate, memory, entry.asked, 4, entry.tokens).rounds == [4, 4, 3]
    wrong = decode(candidate, memory, entry.asked, 4, [token + 1 for token in entry.tokens])
    assert (wrong.tokens, wrong.rounds) == (entry.tokens, [1] * 11)


def scaled(model, folder, name, factor):
    """A folder with one tensor multiplied."""
    arrays = {key: np.array(value) for key, value in mx.load(str(model / "model.safetensors")).items()}
    arrays[name] = arrays[name] * np.float32(factor)
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    mx.save_safetensors(
        str(folder / "model.safetensors"), {key: mx.array(value) for key, value in arrays.items()}
    )
    return folder


def test_other_weights_are_refused_and_told_apart(model, record, tmp_path, capsys):
    other = scaled(model, tmp_path / "other", "model.decoder.layer_norm.weight", 1.1)
    assert main(["check", str(record), "--model", str(other)]) == 1
    assert "recorded with other weights" in capsys.readouterr().err
    assert main(["check", str(record), "--model", str(other), "--any-weights"]) == 1
    assert "3 failed" in capsys.readouterr().out


def test_inputs_that_are_not_there_fail(model, record, speech, tmp_path, capsys):
    """By content: another name is the same input, another sample is not."""
    (tmp_path / "renamed.flac").write_bytes((speech / "short.wav").read_bytes())
    assert main(["check", str(record), str(tmp_path), "--model", str(model)]) == 1
    out = capsys.readouterr().out
    assert "1 of 3 equal" in out
    assert out.count("missing   ") == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["record", "SPEECH", "--model", "MODEL", "--width", "2"],
            "--width 2: must be 1 to 1; for more, use --medusa",
        ),
        (["record", "SPEECH", "--model", "MODEL", "--dtype", "float32", "--device", "abacus"], "'abacus'"),
        (["record", "SPEECH", "--model", "MODEL", "--instruction", "Sing"], "no instruction"),
        (["record", "EMPTY", "--model", "MODEL"], "no input"),
        (["record", "nowhere.wav", "--model", "MODEL"], "nowhere.wav"),
        (["record", "SPEECH", "--model", "nowhere"], "nowhere: no such folder"),
        (["check", "nowhere.jsonl", "--model", "MODEL"], "nowhere.jsonl"),
        (["check", "RECORD", "--model", "MODEL", "--medusa", "--width", "9"], "must be 1 to 4"),
        (["report", "MODEL/config.json"], "config.json"),
        (["report", "nowhere"], "nowhere"),
    ],
)
def test_bad_input_is_one_line(model, record, speech, tmp_path, capsys, options, says):
    (tmp_path / "empty").mkdir()
    places = {"SPEECH": speech, "MODEL": model, "EMPTY": tmp_path / "empty", "RECORD": record}
    for name, place in places.items():
        options = [option.replace(name, str(place)) for option in options]
    out = tmp_path / "out.jsonl"
    assert main([*options, "-o", str(out)] if options[0] == "record" else options) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("parity: error: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]


def test_json_of_results_can_be_read_line_by_line(model, record, tmp_path):
    path = tmp_path / "results.jsonl"
    main(["check", str(record), "--model", str(model), "--json", str(path), "--margin", "0.5", "--quiet"])
    head, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert (head["margin"], head["widths"], head["head"]["family"]) == (0.5, [1], "whisper")
    assert [row["verdict"] for row in rows] == ["equal"] * 3
