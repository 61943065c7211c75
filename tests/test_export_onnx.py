"""Exported ONNX files under onnxruntime: real tiny.en on real speech, and a small random model for the logic."""

import json
import subprocess
import sys

import numpy as np
import onnx
import pytest
import soundfile
import torch
from clips import english, librivox_texts, samples_of
from golden import golden
from safetensors.numpy import load_file
from test_transcribe import SPEECH, heads_file, small_model
from transformers import GenerationConfig
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from mlx_medusa import export, load
from mlx_medusa.demo import SPEECH as DEMO
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.exporting.onnx_loop import OnnxTranscriber, Rules

HEADS = DEMO.shipped
END = 50256  # in the records, but not among the tokens of a text
GOLDEN, STAMPED = (  # what transformers writes: name -> tokens
    {
        entry.name: [token for token in entry.tokens if token != END]
        for entry in golden("whisper-tiny.en").entries
        if entry.asked.timestamps == timestamps
    }
    for timestamps in (False, True)
)


def tokens_of(result):
    return [token for segment in result.segments for token in segment.tokens]


# ---- tiny.en


@pytest.fixture(scope="module")
def folder(tiny_en, tmp_path_factory):
    """tiny.en with its recurrent heads."""
    output = tmp_path_factory.mktemp("onnx") / "tiny.en"
    export.export_onnx(tiny_en, HEADS / "recurrent", output)
    return output


@pytest.fixture(scope="module")
def tiny(folder):
    return OnnxTranscriber(folder)


@pytest.fixture(scope="module")
def books(speech_dir):
    """The five LibriVox clips."""
    return {f"librivox/{path.name}": samples_of(path) for path in librivox_texts(speech_dir)}


def test_tokens_are_those_of_transformers_in_a_third_of_the_passes(tiny, books):
    decided = rounds = 0
    for name, samples in books.items():
        written = tiny.transcribe(samples)
        assert (name, written.tokens) == (name, GOLDEN[name])
        decided, rounds = decided + written.decided, rounds + written.rounds
    assert decided == sum(len(GOLDEN[name]) for name in books)  # the end for the prompt's token
    assert decided / rounds > 2.8


def test_the_passes_are_those_of_the_mlx_engine(tiny, tiny_en, books):
    """Heads, draft vocabulary and rewinding are the same."""
    engine = load(tiny_en, heads=HEADS / "recurrent")
    for samples in list(books.values())[1:3]:
        ours, theirs = tiny.transcribe(samples), engine.transcribe(samples).medusa
        assert (ours.decided, ours.rounds) == (theirs.tokens, theirs.rounds)
        assert ours.accepted_per_head == theirs.accepted_per_head


@pytest.mark.parametrize("width", [1, 3])
def test_the_text_does_not_depend_on_the_width(tiny, books, width):
    name, samples = next(iter(books.items()))
    written = tiny.transcribe(samples, width=width)
    assert written.tokens == GOLDEN[name]
    if width == 1:
        assert written.decided == written.rounds
    else:
        assert 1.5 < written.tokens_per_verify <= 3


def test_other_recordings_and_no_speech(tiny, speech_dir, languages_dir):
    names = {"cards/005.wav", "silence", "backwards"}
    clips = {name: samples for name, samples in english(speech_dir, languages_dir) if name in names}
    assert len(clips) == len(names)
    for name, samples in clips.items():
        assert (name, tiny.transcribe(samples).tokens) == (name, GOLDEN[name])


def test_timestamps_are_those_of_transformers(tiny, books):
    names = [name for name in books if name in STAMPED][1:3]
    assert len(names) == 2
    for name in names:
        written = tiny.transcribe(books[name], timestamps=True)
        assert written.tokens == STAMPED[name]
        text = tiny.text(written.tokens, timestamps=True)
        assert text.startswith("<|0.00|>")
        assert text.endswith("|>")
        assert "<|" not in tiny.text(written.tokens)


def test_weights_that_were_half_precision_stay_so_in_the_files(folder, tiny_en):
    """Each large constant of the step is in float16, and is to the bit what the folder holds."""
    weights = load_file(tiny_en / "model.safetensors").values()
    held = {array.tobytes() for array in weights} | {array.T.tobytes() for array in weights}
    model = onnx.load(folder / "step.onnx")
    large = [value for value in model.graph.initializer if np.prod(value.dims) > 10_000]
    assert len(large) == 4 * 8 + 2  # the matrices of four layers, the embeddings of tokens and positions
    assert {value.data_type for value in large} == {onnx.TensorProto.FLOAT16}
    assert all(value.raw_data in held for value in large)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 150e6
    onnx.checker.check_model(model)


def test_the_command_runs_without_mlx_and_torch(folder, speech_dir):
    path = next(iter(librivox_texts(speech_dir)))
    code = (
        "import sys; from mlx_medusa.export import main; status = main(sys.argv[1:]); "
        "assert not {'mlx.core', 'torch', 'transformers'} & set(sys.modules); sys.exit(status)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "run", folder, path, "--stats"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout == (
        "And Mr. John Dashwood had then leisure to consider how much there might be prudently in his power to do for "
        "them.\n"
    )
    assert "26 tokens in 6 passes, 4.33 tokens per verify" in ran.stderr


# ---- a small random model


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(model folder, exported folder), multilingual, with three plain heads."""
    folder = tmp_path_factory.mktemp("plain")
    model = small_model(folder, 51865, heads_file(folder / "heads.safetensors"))
    export.export_onnx(model, None, folder / "onnx")
    return model, folder / "onnx"


@pytest.mark.parametrize("width", [None, 1, 2])
def test_plain_heads_and_detected_language_as_the_mlx_engine(plain, width):
    model, exported = plain
    ours, theirs = (
        OnnxTranscriber(exported).transcribe(SPEECH, width=width),
        load(model).transcribe(SPEECH, width=width),
    )
    assert ours.language == theirs.language
    assert ours.tokens == tokens_of(theirs)
    assert (ours.decided, ours.rounds) == (theirs.medusa.tokens, theirs.medusa.rounds)
    assert ours.accepted_per_head == theirs.medusa.accepted_per_head


def test_language_and_task(plain):
    transcriber = OnnxTranscriber(plain[1])
    theirs = load(plain[0]).transcribe(SPEECH, language="fr", task="translate")
    assert transcriber.transcribe(SPEECH, "fr", "translate").tokens == tokens_of(theirs)
    with pytest.raises(OptionError, match="'xx'"):
        transcriber.transcribe(SPEECH, "xx")
    with pytest.raises(OptionError, match="1 to 4"):
        transcriber.transcribe(SPEECH, width=5)


def test_the_sizes_that_change_are_named(plain):
    """As export.json says them, and with a past of no rows at all."""
    content = json.loads((plain[1] / "export.json").read_text())
    model = onnx.load(plain[1] / "step.onnx")
    for kind, values in (("inputs", model.graph.input), ("outputs", model.graph.output)):
        found = [
            (value.name, [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim])
            for value in values
        ]
        assert found == [(port["name"], port["shape"]) for port in content["functions"]["step"][kind]]


# ---- the rules


def test_rules_equal_transformers():
    vocab, eos, no_stamps, stamps, begin = 50, 20, 29, 30, 3
    settings = {
        "suppressed": [4, 11], "suppressed_at_begin": [5, eos], "timestamp_begin": stamps, "eot": eos,
        "no_timestamps": no_stamps, "max_initial_timestamp": 6,
    }  # fmt: skip
    config = GenerationConfig(
        no_timestamps_token_id=no_stamps, eos_token_id=eos, max_initial_timestamp_index=6
    )
    rng = np.random.default_rng(0)
    seen = set()
    for timestamps in (True, False):
        processors = [
            SuppressTokensLogitsProcessor(settings["suppressed"]),
            SuppressTokensAtBeginLogitsProcessor(settings["suppressed_at_begin"], begin),
            *([WhisperTimeStampLogitsProcessor(config, begin_index=begin)] if timestamps else []),
        ]
        rules = Rules(settings, begin, timestamps)
        for _ in range(300):
            times = iter(sorted(rng.integers(stamps, vocab, size=6).tolist()))
            written = [next(times) if rng.random() < 0.4 else int(rng.integers(0, eos)) for _ in range(6)]
            prefix = [1, 2, 3, *written[: rng.integers(0, 7)]]
            row = rng.normal(size=vocab).astype(np.float32)
            row[stamps:] += rng.normal() * 2
            scores = torch.tensor(row)[None]
            for process in processors:
                scores = process(torch.tensor([prefix]), scores)
            (picked,) = rules.pick([prefix], row[None])
            assert picked == int(scores.argmax())
            seen.add((timestamps, picked >= stamps))
    assert len(seen) == 4  # text and timestamps were picked, with and without the grammar


# ---- what goes wrong


def test_what_is_no_export_is_one_line(plain, tmp_path, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in plain[1].iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    (broken / "step.onnx").write_bytes(b"not a graph")
    lacking = tmp_path / "lacking"
    lacking.mkdir()
    (lacking / "export.json").write_bytes((plain[1] / "export.json").read_bytes())
    wav = tmp_path / "speech.wav"
    soundfile.write(wav, SPEECH, 16_000)
    for folder, part in (
        (broken, "step.onnx"),
        (lacking, "encoder.onnx: missing"),
        (tmp_path, "no export.json"),
    ):
        assert export.main(["run", str(folder), str(wav)]) == 1
        error = capsys.readouterr().err
        assert part in error
        assert error.startswith("export run: error: ")
        assert error.count("\n") == 1


def test_audio_that_cannot_be_read_is_one_line(plain, tmp_path, capsys):
    (tmp_path / "text.wav").write_text("no audio")
    soundfile.write(tmp_path / "empty.wav", np.zeros(0, np.float32), 16_000)
    status = export.main(["run", str(plain[1]), str(tmp_path / "text.wav"), str(tmp_path / "empty.wav")])
    out, error = capsys.readouterr()
    assert (status, out, error.count("\n")) == (1, "", 2)
    assert "empty.wav: holds no audio" in error


def test_heads_that_do_not_fit(plain, tmp_path):
    with pytest.raises(CheckpointError, match="hidden size 384"):
        export.export_onnx(plain[0], HEADS / "recurrent", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
