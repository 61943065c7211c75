"""Harvest, fit, evaluate and export with a small random Whisper and made-up sounds: logic, not quality."""

import json
import os

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import soundfile
import torch
from checkpoints import read, write_hf
from mlx.utils import tree_flatten
from safetensors.numpy import save_file
from torch.nn import functional

from convert import convert
from convert.heads import read_heads
from mlx_medusa import checkpoint
from mlx_medusa.errors import AudioError, CheckpointError, MedusaError, OptionError
from mlx_medusa.loading import load
from mlx_medusa.train import main
from mlx_medusa.training import harvest as harvesting
from mlx_medusa.training.data import Batch, Harvest, batches, draft_vocabulary, text_counts
from mlx_medusa.training.export import export_heads
from mlx_medusa.training.fit import Fit, FitOptions
from mlx_medusa.training.harvest import HarvestOptions, harvest, list_audio
from mlx_medusa.training.objective import Scores, attend, cross_entropy, guess_states, labels

OPTIONS = HarvestOptions(batch=3, files_per_shard=2, prompts="both")
FIT = {"epochs": 2, "num_heads": 3, "held_out": 0.3, "draft_vocabulary": 2000}


def new_model(folder, seed=0):
    """Its text depends on the place more than on the token before, so it does not repeat one word for ever."""
    sizes = {
        "encoder_layers": 1,
        "decoder_layers": 1,
        "max_source_positions": 1500,
        "max_target_positions": 40,
    }
    write_hf(folder / "hf", torch.float32, **sizes, init_std=0.1 + 0.01 * seed)
    tensors = read(folder / "hf")
    tensors["model.decoder.embed_positions.weight"] *= 4
    save_file(tensors, folder / "hf" / "model.safetensors")
    convert(base=folder / "hf", mlx_path=folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def transcriber(model):
    return load(model)


@pytest.fixture(scope="module")
def audio(tmp_path_factory):
    """Seven files; the fourth has two windows."""
    folder = tmp_path_factory.mktemp("audio")
    rng = np.random.default_rng(0)
    for number in range(7):
        seconds = 40 if number == 3 else 1 + number
        pitch = np.sin(np.arange(seconds * 16_000) * (0.02 + 0.03 * number))
        sound = 0.2 * pitch + 0.02 * rng.normal(size=len(pitch))
        soundfile.write(folder / f"{number}.wav", sound.astype(np.float32), 16_000)
    return folder


@pytest.fixture(scope="module")
def harvested(model, transcriber, audio, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harvest") / "h"
    assert harvest(transcriber, model, [audio], folder, OPTIONS) == []
    return folder


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------- harvest


def test_harvest_holds_what_the_engine_writes(harvested, transcriber, audio):
    found = Harvest(harvested)
    assert len(found.sequences) == 16  # eight windows, two prompts
    for number in range(7):
        result = transcriber.transcribe(audio / f"{number}.wav")
        texts = [
            one for one in found.sequences if one.file.endswith(f"{number}.wav") and ".text." in one.tokens
        ]
        tokens = [found.read(one.shard, one.tokens).tolist() for one in texts]
        eot = transcriber.tokenizer.eot
        assert [t for row in tokens for t in row if t != eot] == [
            t for s in result.segments for t in s.tokens
        ]
    for one in found.sequences:
        stamped = ".stamped." in one.tokens
        tokens, hidden = (found.read(one.shard, name) for name in (one.tokens, one.hidden))
        assert hidden.dtype == np.float32
        assert found.read(one.shard, one.memory).dtype == np.float16
        prompt = transcriber.tokenizer.prompt("en", "transcribe", timestamps=stamped)
        rules = transcriber.rules(len(prompt), timestamps=stamped)
        prefixes = [prompt + tokens[:row].tolist() for row in range(len(tokens))]
        logits = transcriber.model.logits(mx.array(hidden)).astype(mx.float32)
        assert harvesting.pick(rules, prefixes, logits)[0] == tokens.tolist()


@pytest.mark.parametrize("stop_at", [1, 5])
def test_a_killed_harvest_goes_on_to_the_same_shards(
    stop_at, harvested, model, transcriber, audio, tmp_path, monkeypatch
):
    folder, calls, real = tmp_path / "h", [], harvesting.read_windows

    def read(path):
        calls.append(path.name)
        if len(calls) == stop_at + 1:
            raise KeyboardInterrupt
        return real(path)

    monkeypatch.setattr(harvesting, "read_windows", read)
    with pytest.raises(KeyboardInterrupt):
        harvest(transcriber, model, [audio], folder, OPTIONS)
    whole = (stop_at // 2) * 2
    assert len(list(folder.glob("shard-*.safetensors"))) == whole // 2
    del calls[:]
    calls += ["x"] * (stop_at + 1)
    assert harvest(transcriber, model, [audio], folder, OPTIONS) == []
    assert calls[stop_at + 1 :] == [f"{number}.wav" for number in range(whole, 7)]  # nothing twice
    assert contents(folder) == contents(harvested)
    harvest(transcriber, model, [audio], folder, OPTIONS)
    assert contents(folder) == contents(harvested)


def test_a_harvest_of_another_model_or_kind_is_refused(harvested, model, transcriber, audio, tmp_path):
    other = new_model(tmp_path, seed=1)
    with pytest.raises(CheckpointError, match="fingerprint"):
        harvest(load(other), other, [audio], harvested, OPTIONS)
    with pytest.raises(CheckpointError, match="prompts"):
        harvest(transcriber, model, [audio], harvested, HarvestOptions(batch=3, files_per_shard=2))
    with pytest.raises(CheckpointError, match="fingerprint"):
        Fit(load(other).model, other, Harvest(harvested), tmp_path / "fit")
    with pytest.raises(CheckpointError, match="dtype float32, not float16"):
        Fit(load(model, dtype="float16").model, model, Harvest(harvested), tmp_path / "fit")
    assert not (tmp_path / "fit").exists()


def test_unreadable_audio_is_skipped_and_named(model, audio, tmp_path, capsys):
    (tmp_path / "bad.wav").write_bytes(b"RIFFnonsense")
    lines = [{"audio": str(audio / "0.wav")}, {"audio": "bad.wav"}, {"file": str(audio / "1.wav")}]
    manifest = tmp_path / "list.jsonl"
    manifest.write_text("\n".join(map(json.dumps, lines)) + "\n")
    arguments = ["harvest", str(manifest), "--model", str(model), "-o", str(tmp_path / "h")]
    assert main(arguments) == 1
    assert "skipped: " in (error := capsys.readouterr().err)
    assert "bad.wav" in error
    assert [entry["name"][-5:] for entry in Harvest(tmp_path / "h").index["files"]] == ["0.wav", "1.wav"]


def test_lists_of_audio(audio, tmp_path):
    assert [path.name for path in list_audio([audio / "2.wav", audio])] == [
        f"{n}.wav" for n in (2, 0, 1, 3, 4, 5, 6)
    ]
    with pytest.raises(AudioError, match=r"nothing\.wav"):
        list_audio([tmp_path / "nothing.wav"])
    (tmp_path / "x.jsonl").write_text('{"text": "no audio"}\n')
    with pytest.raises(OptionError, match="line 1"):
        list_audio([tmp_path / "x.jsonl"])


def test_a_shard_cut_short_is_detected(harvested, tmp_path):
    for path in harvested.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / "shard-00001.safetensors"
    with shard.open("rb+") as file:
        file.truncate(shard.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors"):
        Harvest(tmp_path)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"shard-00001\.safetensors"):
        Harvest(tmp_path)


# ---------------------------------------------------------------------------------------------- data


def test_split_is_by_file_and_stays(harvested):
    found = Harvest(harvested)
    train, out = found.split(0.3)
    files = {one.file for one in train}, {one.file for one in out}
    assert files[0]
    assert files[1]
    assert not files[0] & files[1]
    assert len(train) + len(out) == 16
    few, same = found.split(0.3, hours=3 / 3600)
    assert same == out
    assert {one.file for one in few} < files[0]


def test_every_sequence_comes_once_an_epoch(harvested):
    sequences = Harvest(harvested).sequences
    rounds = [list(batches(sequences, 3, (0, epoch))) for epoch in (0, 0, 1)]
    assert rounds[0] == rounds[1] != rounds[2]
    usable = [one for one in sequences if one.length > 1]
    assert sorted(one.tokens for batch in rounds[2] for one in batch) == sorted(one.tokens for one in usable)


def test_draft_vocabulary_is_by_frequency():
    counts = np.array([0, 5, 0, 9, 1, 5, 0, 0])
    assert draft_vocabulary(counts, 3, eos=7).tolist() == [1, 3, 7]
    assert draft_vocabulary(counts, None, eos=7).tolist() == [1, 3, 4, 5, 7]
    assert draft_vocabulary(counts, 7, eos=7).tolist() == [0, 1, 2, 3, 4, 5, 7]
    with pytest.raises(OptionError):
        draft_vocabulary(counts, 9, eos=7)


def test_counts_of_texts(transcriber, tmp_path):
    (tmp_path / "a.txt").write_text("one two\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n')
    encode = transcriber.tokenizer.encode
    counts = text_counts([tmp_path / "a.txt", tmp_path / "b.jsonl"], encode, 51864)
    assert counts[encode(" two")[0]] == 3
    assert counts[encode(" one")[0]] == 1
    (tmp_path / "c.jsonl").write_text('{"words": "two"}\n')
    with pytest.raises(OptionError, match=r"c\.jsonl"):
        text_counts([tmp_path / "c.jsonl"], encode, 51864)


# ----------------------------------------------------------------------------------------- objective


def test_labels_by_hand():
    """Row j holds the state that predicted token j, which is pending: guess k is token j + 1 + k."""
    tokens = np.array([[10, 11, 12, 13, 0, 0], [20, 21, 0, 0, 0, 0]])
    batch = Batch(mx.zeros((2, 1, 1)), mx.zeros((2, 3, 1)), tokens, np.array([4, 2]))
    assert labels(batch, 3).tolist() == [
        [[11, 12, 13], [21, -1, -1]],
        [[12, 13, -1], [-1, -1, -1]],
        [[13, -1, -1], [-1, -1, -1]],
    ]


@pytest.mark.parametrize("count", [3, 1100])
def test_cross_entropy_equals_torch(count):
    rng = np.random.default_rng(count)
    states, rows = (rng.normal(size=(n, 16)).astype(np.float32) * 3 for n in (count, 50))
    columns, weights = rng.integers(50, size=count), rng.random(count).astype(np.float32)

    def loss(states):
        return 3 * cross_entropy(states, mx.array(rows), mx.array(rows[columns]), mx.array(weights))[0]

    value, gradient = mx.value_and_grad(loss)(mx.array(states))
    x = torch.tensor(states, requires_grad=True)
    each = functional.cross_entropy(x @ torch.tensor(rows).T, torch.tensor(columns), reduction="none")
    expected = 3 * (each * torch.tensor(weights)).sum()
    expected.backward()
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    np.testing.assert_allclose(np.array(gradient), x.grad.numpy(), rtol=1e-3, atol=1e-4)


def test_attention_and_its_gradient_equal_torch():
    rng = np.random.default_rng(0)
    queries, keys, values = (rng.normal(size=(2, 3, rows, 8)).astype(np.float32) for rows in (5, 11, 11))
    outer = rng.normal(size=queries.shape).astype(np.float32)

    def total(*arrays):
        return mx.sum(attend(*arrays, 0.35) * mx.array(outer))

    gradients = mx.grad(total, argnums=(0, 1, 2))(*map(mx.array, (queries, keys, values)))
    theirs = [torch.tensor(array, requires_grad=True) for array in (queries, keys, values)]
    out = functional.scaled_dot_product_attention(*theirs, scale=0.35)
    (out * torch.tensor(outer)).sum().backward()
    ours = attend(*map(mx.array, (queries, keys, values)), 0.35)
    np.testing.assert_allclose(np.array(ours), out.detach().numpy(), rtol=1e-4, atol=1e-5)
    for found, tensor in zip(gradients, theirs, strict=True):
        np.testing.assert_allclose(np.array(found), tensor.grad.numpy(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_parallel_guesses_equal_the_drafter(kind, model, transcriber, harvested, tmp_path):
    """Teacher forcing with what the drafter guessed gives the states that the drafter had."""
    fit = Fit(transcriber.model, model, Harvest(harvested), tmp_path, FitOptions(kind=kind, **FIT))
    mx.random.seed(3)
    fit.heads.update(nn.utils.tree_map(lambda p: p + 0.2 * mx.random.normal(p.shape), fit.heads.parameters()))
    from mlx_medusa.medusa.drafters import new_drafter

    drafter = new_drafter(fit.config, fit.heads, transcriber.model, mx.array(fit.target.ids))
    hidden, memory = mx.random.normal((1, 1, 64)), mx.random.normal((1, 1500, 64))
    drafter.begin(memory)
    guesses = drafter.propose(hidden, 77, 3)
    batch = Batch(memory, hidden, np.array([[77, *guesses]]), np.array([5]))
    states = guess_states(fit.heads, batch, 3, fit.target)
    best = fit.target.ids[np.array(mx.argmax(states[:, 0, 0] @ fit.target.rows.T, axis=-1))]
    assert best.tolist() == guesses


# ----------------------------------------------------------------------------------------------- fit


def settled(log):
    """A log without what depends on the clock."""
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in log]


def weights_of(fit):
    return {name: np.array(array) for name, array in tree_flatten(fit.heads.parameters())}


@pytest.mark.parametrize("kind", ["recurrent", "medusa"])
def test_training_end_to_end(kind, model, harvested, audio, tmp_path, capsys):
    """Loss falls, acceptance rises, and the written heads do in the engine what they did in training."""
    out = tmp_path / "heads"
    arguments = ["fit", str(harvested), "-o", str(out), "--model", str(model), "--kind", kind, "--num-heads", "3",
                 "--epochs", "4", "--draft-vocabulary", "2000", "--held-out", "0.3", "--data", "made-up sounds",
                 "--imitation", "0.1", "--draft-rank", "64",
                 "--learning-rate", "0.02" if kind == "medusa" else "0.001"]  # fmt: skip
    assert main(arguments) == 0
    log = json.loads((out / "log.json").read_text())
    losses = [sum(entry["loss_per_guess"]) for entry in log["epochs"]]
    assert losses[-1] < 0.8 * losses[0]
    transcriber = load(model)
    fit = Fit(
        transcriber.model, model, Harvest(harvested), tmp_path / "untrained", FitOptions(kind=kind, **FIT)
    )
    assert log["best"] > fit.score(fit.held_out).tokens_per_verify
    assert {"README.md", "curves.png", "medusa.safetensors", "checkpoint.safetensors"} <= {
        p.name for p in out.iterdir()
    }
    assert "made-up sounds" in (out / "README.md").read_text()

    texts = [one for one in fit.held_out if ".text." in one.tokens]
    scores = Scores(3)
    config, arrays = checkpoint.read_heads(out)
    assert config["draft_vocabulary"] == 2000
    fit.heads.load_weights(
        [(name, a.astype(mx.float32)) for name, a in arrays.items() if not name.startswith("draft_")]
    )
    for one in texts:
        scores.add(fit.heads, fit.harvest.batch([one], 3), fit.target)
    report = tmp_path / "report.json"
    files = sorted({one.file for one in texts})
    assert main(["evaluate", *files, "--heads", str(out), "--model", str(model), "--json", str(report)]) == 0
    measured = json.loads(report.read_text())
    assert (measured["tokens"], measured["rounds"]) == (scores.tokens, scores.rounds)
    assert measured["expected"]["tokens_per_verify"] == pytest.approx(measured["tokens_per_verify"], abs=2e-3)
    assert measured["same_text"] == measured["files"] == len(files)
    assert "tokens per verify" in capsys.readouterr().out


def test_a_killed_fit_goes_on_to_the_same_heads(model, transcriber, harvested, tmp_path):
    def fit(folder, **changes):
        options = FitOptions(**{**FIT, "epochs": 3, **changes})
        return Fit(transcriber.model, model, Harvest(harvested), tmp_path / folder, options)

    def interrupt():
        raise KeyboardInterrupt

    whole = fit("whole")
    whole.run()
    with pytest.raises(KeyboardInterrupt):
        fit("killed").run(after=interrupt)
    again = fit("killed")
    assert again.progress.epoch == 1
    again.run()
    assert settled(again.progress.log) == settled(whole.progress.log)
    for name, array in weights_of(whole).items():
        np.testing.assert_array_equal(weights_of(again)[name], array)
    with pytest.raises(OptionError, match="epochs 3, not 4"):
        fit("killed", epochs=4)


def test_a_loss_that_is_not_finite_stops_and_keeps_the_best(model, transcriber, harvested, tmp_path):
    fit = Fit(transcriber.model, model, Harvest(harvested), tmp_path / "f", FitOptions(**FIT))

    def spoil():
        fit.heads.update(nn.utils.tree_map(lambda p: p * mx.nan, fit.heads.parameters()))

    with pytest.raises(MedusaError, match=r"loss is nan at step \d+"):
        fit.run(after=spoil)
    _, arrays = checkpoint.read_heads(tmp_path / "f")
    assert all(
        mx.all(mx.isfinite(array)).item() for name, array in arrays.items() if not name.startswith("draft_")
    )


@pytest.mark.parametrize(
    "change", [{"kind": "eagle"}, {"epochs": 0}, {"held_out": 1.0}, {"batch": 0}, {"num_layers": 0}]
)
def test_options_that_cannot_work(change):
    with pytest.raises(OptionError, match=next(iter(change))):
        FitOptions(**change)


# -------------------------------------------------------------------------------------------- export


@pytest.mark.parametrize("layout", ["whisper", "meralion", "vicuna"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32], ids=str)
def test_exported_heads_come_back_bit_for_bit(layout, dtype, tmp_path):
    config = {"type": "medusa", "num_heads": 3, "num_layers": 2, "hidden_size": 16, "tied": True}
    arrays = {
        name: mx.random.normal(shape).astype(dtype) for name, shape in checkpoint.heads_shapes(config).items()
    }
    path = tmp_path / "medusa.safetensors"
    mx.save_safetensors(str(path), arrays, {"medusa": json.dumps(config)})
    export_heads(path, layout, tmp_path / "out")
    found_config, found = read_heads(tmp_path / "out")
    assert found_config == config
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == dtype
        assert mx.array_equal(found[name], array).item()
    with pytest.raises(MedusaError, match="exists already"):
        export_heads(path, layout, tmp_path / "out")


def test_recurrent_heads_have_no_other_layout(capsys):
    assert main(["fit", os.devnull, "-o", os.devnull, "--export", "whisper"]) == 1
    assert "--kind medusa" in capsys.readouterr().err
