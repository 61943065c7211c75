"""Heads for MERaLiON-2, from audio to use, with a small random model and noise: logic, not quality."""

import json

import mlx.core as mx
import numpy as np
import pytest
import soundfile
from meralion import write_hf

from convert import convert
from mlx_medusa.errors import OptionError
from mlx_medusa.loading import load
from mlx_medusa.train import main
from mlx_medusa.training.data import Harvest
from mlx_medusa.training.harvest import HarvestOptions, harvest


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("meralion")
    convert(write_hf(folder / "hf", 1), folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audio")
    for number in range(4):
        sound = np.random.default_rng(number).normal(size=16_000 * (1 + number)) * 0.1
        soundfile.write(folder / f"{number}.wav", sound.astype(np.float32), 16_000)
    return folder


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_from_audio_to_use(kind, model, audio, tmp_path, capsys):
    """Harvest, fit, evaluate by the command line: the text stays, and the measured rounds are those expected."""
    arguments = ["--model", str(model)]
    assert main(["harvest", str(audio), "-o", str(tmp_path / "h"), "--batch", "3", *arguments]) == 0
    fit = ["fit", str(tmp_path / "h"), "-o", str(tmp_path / "heads"), "--kind", kind, "--num-heads", "3", "--epochs",
           "2", "--held-out", "0.3", "--memory-pool", "2"]  # fmt: skip
    assert main([*fit, *arguments]) == 0
    log = json.loads((tmp_path / "heads" / "log.json").read_text())
    assert log["epochs"][-1]["loss_per_guess"] < log["epochs"][0]["loss_per_guess"]
    report = tmp_path / "report.json"
    heads = ["--heads", str(tmp_path / "heads"), "--json", str(report)]
    assert main(["evaluate", str(audio), *heads, *arguments]) == 0
    measured = json.loads(report.read_text())
    assert measured["same_text"] == measured["files"] == 4
    assert measured["expected"]["tokens_per_verify"] == pytest.approx(measured["tokens_per_verify"], abs=2e-3)


def test_a_harvest_holds_rows_of_speech_and_what_the_engine_writes(model, audio, tmp_path):
    transcriber = load(model)
    assert harvest(transcriber, model, [audio], tmp_path / "h", HarvestOptions(batch=3, language=None)) == []
    found = Harvest(tmp_path / "h")
    query = load(model, heads=_plain_heads(tmp_path)).query  # a model with heads is asked in other words
    for one in found.sequences:
        memory = found.read(one.shard, one.memory)
        assert memory.shape == (transcriber.model.args.rows_per_chunk, transcriber.model.args.hidden_size)
        segment = transcriber.transcribe(one.file, instruction=query).segments
        written = [
            token
            for token in found.read(one.shard, one.tokens).tolist()
            if token not in transcriber.tokenizer.stops
        ]
        assert written == (segment[0].tokens if segment else [])


def _plain_heads(folder):
    from meralion import write_heads

    return write_heads(folder / "plain")


def test_timestamps_are_refused(model):
    transcriber = load(model)
    with pytest.raises(OptionError, match="no timestamps"):
        transcriber.opening(mx.zeros((1, 100, transcriber.model.args.hidden_size)), None, timestamps=True)
