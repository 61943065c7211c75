"""The transcribe command, with a small random model: what it takes, what it writes, how it fails."""

import io
import json
import os
import re
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from checkpoints import write_hf
from safetensors.numpy import save_file
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from convert import convert
from mlx_medusa import Options, load
from mlx_medusa.errors import OptionError
from mlx_medusa.transcribe import main

SPEECH = (np.random.default_rng(0).normal(size=32_000) * 0.1).astype(np.float32)  # 2 s
HIDDEN = 64


def heads_file(path: Path, hidden: int = HIDDEN, count: int = 3) -> Path:
    rng = np.random.default_rng(1)
    tensors = {}
    for i in range(count):
        tensors[f"medusa_head_{i}.0.linear.weight"] = (
            rng.normal(size=(hidden, hidden)).astype(np.float16) * 0.1
        )
        tensors[f"medusa_head_{i}.0.linear.bias"] = rng.normal(size=hidden).astype(np.float16) * 0.1
    save_file(tensors, path)
    return path


def small_model(folder: Path, vocab_size: int, heads: Path | None) -> Path:
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_source_positions": 1500,
        "max_target_positions": 40,
    }
    write_hf(folder / "hf", vocab_size=vocab_size, **sizes)
    convert(base=folder / "hf", heads=heads, mlx_path=folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """English only, with three heads."""
    folder = tmp_path_factory.mktemp("english")
    return small_model(folder, 51864, heads_file(folder / "heads.safetensors"))


@pytest.fixture(scope="module")
def multilingual(tmp_path_factory):
    """99 languages, without heads."""
    return small_model(tmp_path_factory.mktemp("multilingual"), 51865, None)


@pytest.fixture
def wav(tmp_path):
    path = tmp_path / "speech.wav"
    soundfile.write(path, SPEECH, 16_000)
    return path


def without_cuts(err):
    """A random model seldom ends by itself, and each window that reaches the limit of 20 tokens is reported."""
    return re.sub(r"transcribe: warning: the window at [0-9.]+ s was cut at 20 tokens\n", "", err)


@pytest.fixture
def run(model, capfd):
    """Run the command in this process: (exit status, standard output, standard error)."""

    def command(*args, model=model):
        status = main([*map(str, args), "--model", str(model)])
        out, err = capfd.readouterr()
        return status, out, without_cuts(err)

    return command


def one_line(error, *parts):
    assert error.count("\n") == 1, error
    assert error.startswith("transcribe: error: ")
    assert "Traceback" not in error
    for part in parts:
        assert part in error


# ---- what it writes


def test_json_is_the_result_dict_of_openai_whisper(run, wav):
    status, out, err = run(wav, "--output-format", "json")
    assert (status, err) == (0, "")
    result = json.loads(out)
    assert set(result) == {"text", "language", "segments", "medusa"}
    assert result["language"] == "en"
    assert result["text"] == "".join(segment["text"] for segment in result["segments"])
    (segment,) = result["segments"]
    assert set(segment) == {
        "id", "seek", "start", "end", "text", "tokens", "temperature", "avg_logprob", "compression_ratio",
        "no_speech_prob",
    }  # fmt: skip
    assert (segment["id"], segment["seek"], segment["start"], segment["end"], segment["temperature"]) == (
        0,
        0,
        0,
        2.0,
        0,
    )
    data = segment["text"].strip().encode()  # as openai/whisper and mlx-whisper
    assert segment["compression_ratio"] == pytest.approx(len(data) / len(zlib.compress(data)))
    assert segment["avg_logprob"] < 0
    assert 0 < segment["no_speech_prob"] < 1
    m = result["medusa"]
    assert set(m) == {
        "tokens", "rounds", "drafted", "accepted", "accepted_per_head", "tokens_per_verify", "width",
        "encode_seconds", "decode_seconds", "draft_seconds",
    }  # fmt: skip
    assert m["width"] == 4
    assert len(m["accepted_per_head"]) == 3
    assert sum(m["accepted_per_head"]) == m["accepted"] <= m["drafted"]
    assert m["tokens_per_verify"] == pytest.approx(m["tokens"] / m["rounds"])


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_the_text_does_not_depend_on_the_width(run, wav, width):
    plain = json.loads(run(wav, "--no-medusa", "-f", "json")[1])
    assert (plain["medusa"]["width"], plain["medusa"]["drafted"], plain["medusa"]["tokens_per_verify"]) == (
        1,
        0,
        1.0,
    )
    assert len(plain["segments"][0]["tokens"]) > 10
    wide = json.loads(run(wav, "--width", width, "-f", "json")[1])
    assert wide["segments"][0]["tokens"] == plain["segments"][0]["tokens"]
    assert wide["text"] == plain["text"]


def test_names_lose_their_last_extension_only(run, tmp_path):
    names = ["talk.v2.wav", "a.b.c.wav", "плохо имя.wav", "none"]
    for name in names:
        with (tmp_path / name).open("wb") as file:
            soundfile.write(file, SPEECH, 16_000, format="WAV")
    out = tmp_path / "new" / "folder"
    status, printed, _ = run(*(tmp_path / name for name in names), "--output_dir", out)
    assert (status, printed) == (0, "")
    assert sorted(p.name for p in out.iterdir()) == sorted(
        ["talk.v2.txt", "a.b.c.txt", "плохо имя.txt", "none.txt"]
    )
    assert stat.S_IMODE((out / "none.txt").stat().st_mode) & 0o444


def test_text_on_standard_output_is_the_text_in_the_file(run, wav, tmp_path):
    printed = run(wav)[1]
    run(wav, "--output-dir", tmp_path / "out")
    assert (tmp_path / "out" / "speech.txt").read_text() == printed
    text = json.loads(run(wav, "-f", "json")[1])["text"]
    assert printed == text.strip() + "\n"


def test_two_inputs_of_one_name_are_not_written_over_each_other(run, wav, tmp_path):
    (tmp_path / "b").mkdir()
    other = tmp_path / "b" / "speech.flac"
    soundfile.write(other, SPEECH[:16_000], 16_000)
    status, _, err = run(wav, other, "--output-dir", tmp_path / "out")
    assert status == 1
    one_line(err, "speech.flac", "speech.txt")
    first = run(wav)[1]
    assert (tmp_path / "out" / "speech.txt").read_text() == first


def test_statistics_go_to_standard_error(run, wav):
    status, out, err = run(wav, "--stats")
    assert status == 0
    assert out == run(wav)[1]
    for part in (
        "audio 2.0 s",
        "encode ",
        "decode ",
        "passes of width 4",
        "tokens/s",
        "tokens per verify",
        "per head",
    ):
        assert part in err


def test_standard_input(model, wav):
    for extra, data in (([], wav.read_bytes()), (["--output-format", "json"], wav.read_bytes())):
        run = subprocess.run(
            [sys.executable, "-m", "mlx_medusa.transcribe", "-", "--model", model, *extra],
            input=data, capture_output=True, check=True,
        )  # fmt: skip
        assert without_cuts(run.stderr.decode()) == ""
        assert len(run.stdout) > 10


def test_long_audio_is_cut_at_quiet_points(run, tmp_path):
    """70 s with a pause at 25 s and at 50 s: three windows that join without gap or overlap."""
    audio = (np.random.default_rng(2).normal(size=70 * 16_000) * 0.1).astype(np.float32)
    for second in (25, 50):
        audio[second * 16_000 - 4000 : second * 16_000 + 4000] = 0
    soundfile.write(tmp_path / "long.wav", audio, 16_000)
    segments = json.loads(run(tmp_path / "long.wav", "-f", "json")[1])["segments"]
    assert [s["id"] for s in segments] == [0, 1, 2]
    assert [s["start"] for s in segments] == pytest.approx([0, 25, 50], abs=0.25)
    assert [s["end"] for s in segments] == pytest.approx([*(s["start"] for s in segments[1:]), 70])
    assert [s["seek"] for s in segments] == [round(s["start"] * 100) for s in segments]


def test_api_takes_arrays_bytes_and_files_alike(model, wav):
    transcriber = load(model)
    texts = {
        transcriber.transcribe(source).text
        for source in (wav, str(wav), wav.read_bytes(), io.BytesIO(wav.read_bytes()))
    }
    assert len(texts) == 1
    assert transcriber.transcribe(SPEECH).text
    with pytest.raises(TypeError):
        transcriber.transcribe(SPEECH, langauge="en")


@pytest.mark.parametrize("empty", [np.zeros(0, np.float32), b""])
def test_api_gives_an_empty_result_for_no_audio(model, empty):
    result = load(model).transcribe(empty)
    assert (result.text, result.segments, result.medusa.rounds, result.duration) == ("", [], 0, 0)
    assert result.to_dict()["medusa"]["tokens_per_verify"] == 0


def test_no_speech_probability_is_that_of_transformers(model, wav):
    """The probability of <|nocaptions|> after <|startoftranscript|>, over the whole vocabulary."""
    theirs = WhisperForConditionalGeneration.from_pretrained(model, dtype=torch.float32).eval()
    features = WhisperFeatureExtractor.from_pretrained(model)(
        SPEECH, sampling_rate=16_000, return_tensors="pt"
    )
    with torch.no_grad():
        start = torch.tensor([[50257, 50362]])
        logits = theirs(input_features=features.input_features, decoder_input_ids=start).logits[0, 0]
    (segment,) = load(model).transcribe(SPEECH).segments
    assert segment.no_speech_prob == pytest.approx(torch.softmax(logits, -1)[50361].item(), rel=1e-3)


# ---- languages


def test_language_by_code_name_and_detection(run, wav, multilingual):
    results = {}
    for name in ("fr", "French", "FRENCH", "castilian"):
        results[name] = json.loads(run(wav, "--language", name, "-f", "json", model=multilingual)[1])
    assert [r["language"] for r in results.values()] == ["fr", "fr", "fr", "es"]
    assert results["fr"]["text"] == results["French"]["text"]
    detected = json.loads(run(wav, "-f", "json", model=multilingual)[1])
    code, probability = load(multilingual).detect_language(wav)
    assert detected["language"] == code
    assert 0 < probability < 1


def test_unknown_language(run, wav, multilingual, tmp_path):
    for which in (multilingual, None):
        args = ["--language", "klingon", "--output-dir", tmp_path / "out"]
        status, out, err = run(wav, *args, **({"model": which} if which else {}))
        assert (status, out) == (1, "")
        one_line(err, "klingon")
    assert not list((tmp_path / "out").iterdir())


def test_an_english_model_says_that_it_knows_english_only(run, wav):
    status, out, err = run(wav, "--language", "fr", "-f", "json")
    assert (status, json.loads(out)["language"]) == (0, "en")
    assert "warning" in err
    assert "English only" in err


def test_turbo_says_that_it_does_not_translate(tmp_path_factory, caplog):
    """large-v3-turbo is known by its layers: 32 in the encoder, 4 in the decoder."""
    folder = tmp_path_factory.mktemp("turbo")
    write_hf(folder / "hf", vocab_size=51866, num_mel_bins=128, encoder_layers=32, decoder_layers=4)
    convert(base=folder / "hf", mlx_path=folder / "model")
    transcriber = load(folder / "model")
    transcriber.check(Options(language="yue"))
    assert not caplog.records
    transcriber.check(Options(language="fr", task="translate"))
    assert "not trained to translate" in caplog.text


# ---- how it fails


def broken_inputs(folder: Path) -> dict[Path, str]:
    soundfile.write(folder / "good.wav", SPEECH, 16_000)
    soundfile.write(folder / "good.flac", SPEECH, 16_000)
    wav = (folder / "good.wav").read_bytes()
    contents = {
        "empty.wav": b"",
        "header.wav": wav[:44].replace(wav[40:44], bytes(4)),
        "text.wav": b"this is a text, not a sound\n" * 20,
        "cut.flac": (folder / "good.flac").read_bytes()[:-3000],
        "short.wav": wav[:20],
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return {folder / name: name for name in contents} | {
        folder / "missing.wav": "missing.wav",
        folder: folder.name,
    }


def test_broken_audio_is_one_line_and_leaves_nothing(run, tmp_path):
    for path, name in broken_inputs(tmp_path).items():
        status, out, err = run(path, "--output-dir", tmp_path / "out")
        assert (status, out) == (1, ""), name
        one_line(err, name)
    assert not list((tmp_path / "out").iterdir())


def test_good_inputs_are_written_beside_broken_ones(run, tmp_path):
    broken = list(broken_inputs(tmp_path))
    status, _, err = run(broken[0], tmp_path / "good.wav", *broken[1:], "--output-dir", tmp_path / "out")
    assert status == 1
    assert err.count("\n") == len(broken)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["good.txt"]


def test_a_wav_that_promises_more_than_it_holds_is_transcribed(run, tmp_path, wav):
    (tmp_path / "cut.wav").write_bytes(wav.read_bytes()[: 44 + 32_000])
    status, out, err = run(tmp_path / "cut.wav", "-f", "json")
    assert (status, err) == (0, "")
    assert json.loads(out)["segments"][-1]["end"] == 1.0


@pytest.mark.parametrize("name", ["awful.wav", "bad.wav", "evil.wav", "null.wav"])
def test_broken_files_of_pocketsphinx(run, speech_dir, name):
    status, out, err = run(speech_dir / "broken" / name)
    assert status == 1 or out
    if status:
        one_line(err, name)


def test_no_model(run, wav, tmp_path, monkeypatch, capfd):
    (tmp_path / "folder").mkdir()
    for model in (tmp_path / "folder", tmp_path / "missing", "./nowhere", "nobody/nothing"):
        status, out, err = run(wav, model=model)
        assert (status, out) == (1, "")
        one_line(err, Path(model).name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlx_medusa.command.demo_model", lambda demo: None)
    assert main([str(wav)]) == 1
    one_line(capfd.readouterr().err, "convert --base", "mlx-medusa[demo]")


def test_the_model_in_this_folder_is_the_default(wav, model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlx_model").symlink_to(model)
    assert main([str(wav)]) == 0
    assert capfd.readouterr().out


def test_heads_that_do_not_fit(run, wav, tmp_path):
    status, out, err = run(wav, "--heads", heads_file(tmp_path / "other.safetensors", hidden=32))
    assert (status, out) == (1, "")
    one_line(err, "other.safetensors", "32", "64")


def test_heads_from_a_file_replace_those_of_the_model(run, wav, tmp_path):
    heads = heads_file(tmp_path / "two.safetensors", count=2)
    result = json.loads(run(wav, "--heads", heads, "-f", "json")[1])
    assert result["medusa"]["width"] == 3


def test_options_of_the_api_are_checked(model):
    with pytest.raises(OptionError, match="float8"):
        load(model, dtype="float8")
    with pytest.raises(OptionError, match="dictate"):
        Options(task="dictate")
    with pytest.raises(OptionError, match="max_tokens"):
        Options(max_tokens=0)


@pytest.mark.parametrize(("width", "part"), [("5", "3"), ("0", "at least 1"), ("-2", "at least 1")])
def test_a_width_that_cannot_be(run, wav, width, part):
    status, out, err = run(wav, "--width", width)
    assert (status, out) == (1, "")
    one_line(err, part)


def test_width_without_heads(run, wav, multilingual):
    status, _, err = run(wav, "--width", "2", model=multilingual)
    assert status == 1
    one_line(err, "convert", "--heads")


def test_output_that_cannot_be_written(run, wav, tmp_path):
    (tmp_path / "file").write_text("in the way")
    status, _, err = run(wav, "--output-dir", tmp_path / "file")
    assert status == 1
    one_line(err, "file")
    (tmp_path / "out" / "speech.txt").mkdir(parents=True)
    status, _, err = run(wav, "--output-dir", tmp_path / "out")
    assert status == 1
    one_line(err, "speech.txt")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["speech.txt"]


def test_full_disk(run, wav, tmp_path, monkeypatch):
    """The write fails half-way: nothing is left, and the line says why."""
    real = Path.replace

    def full(self, target):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    status, _, err = run(wav, "--output-dir", tmp_path / "out")
    monkeypatch.setattr(Path, "replace", real)
    assert status == 1
    one_line(err, "speech.txt", "No space left")
    assert not list((tmp_path / "out").iterdir())


def test_debug_shows_the_traceback(model, tmp_path):
    with pytest.raises(Exception, match=r"missing\.wav"):
        main([str(tmp_path / "missing.wav"), "--model", str(model), "--debug"])


def test_help_needs_no_model_code():
    code = (
        "import sys, mlx_medusa.transcribe as t; t.parser().format_help(); print('mlx.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
