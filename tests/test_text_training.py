"""Harvest, fit and evaluate text heads with a small random Llama: logic, not quality."""

import json
import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from golden import FLOAT32, failures
from make_prompts import prompts as made_prompts
from prompt_parts import KINDS
from text_models import write_text_model

from mlx_medusa import load, reference
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.medusa.causal import CausalArgs, Past
from mlx_medusa.parity.candidate import candidate_of
from mlx_medusa.parity.check import check
from mlx_medusa.parity.inputs import Input
from mlx_medusa.parity.record import record
from mlx_medusa.parity.records import Asked
from mlx_medusa.train import main
from mlx_medusa.training import harvest_text as harvesting
from mlx_medusa.training import regress
from mlx_medusa.training.data_text import find_matches, open_harvest
from mlx_medusa.training.fit import Fit, FitOptions
from mlx_medusa.training.harvest_text import TextOptions, describe, harvest_text, read_prompts
from mlx_medusa.training.harvest_torch import TorchAnswers
from mlx_medusa.training.objective import Scores, guess_states

OPTIONS = TextOptions(max_tokens=30, batch=4, prompts_per_shard=6)
FIT = {
    "kind": "causal",
    "num_heads": 3,
    "ffn_dim": 32,
    "draft_vocabulary": 80,
    "held_out": 0.3,
    "batch": 4,
    "dtype": "float32",
}
UNSEEN = Path(__file__).parent / "unseen_prompts.jsonl"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def generator(model):
    return load(model, medusa=False)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """14 prompts of 1 to 27 letters."""
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    texts = ["".join(rng.choices("abcdef ", k=1 + 2 * n)).strip() or "x" for n in range(14)]
    path.write_text("".join(json.dumps({"prompt": f"{n}{text}"}) + "\n" for n, text in enumerate(texts)))
    return path


def run(generator, model, source, target, options=OPTIONS, answer=None):
    settings = describe(generator.model, model)
    stops = sorted(generator.tokenizer.stops)
    chat, prompts = generator.tokenizer.chat, read_prompts([source])
    return harvest_text(generator.model, chat, stops, settings, prompts, target, options, answer=answer)


@pytest.fixture(scope="module")
def harvested(generator, model, prompts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harvest") / "h"
    assert run(generator, model, prompts, folder) == 0
    return folder


@pytest.fixture(scope="module")
def fitted(generator, model, harvested, tmp_path_factory):
    fit = Fit(
        generator.model, model, open_harvest(harvested), tmp_path_factory.mktemp("fit"), FitOptions(epochs=6, **FIT)
    )  # fmt: skip
    fit.run()
    return fit


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------------- harvest


def test_harvest_holds_what_the_engine_writes(harvested, generator, prompts):
    found = open_harvest(harvested)
    by_prompt = {tuple(found.prompt(one).tolist()): one for one in found.sequences}
    assert len(by_prompt) == 14
    for messages in read_prompts([prompts]):
        result = generator.generate(messages, max_tokens=OPTIONS.max_tokens)
        prompt = generator.tokenizer.chat(messages)
        one = by_prompt[tuple(prompt)]
        assert found.read(one.shard, one.tokens).tolist() == result.tokens
        memory, hidden = (found.read(one.shard, name) for name in (one.memory, one.hidden))
        assert memory.dtype == np.float16
        assert memory.shape[0] == len(prompt) - 1
        assert mx.argmax(generator.model.logits(mx.array(hidden)), axis=-1).tolist() == result.tokens


@pytest.mark.parametrize("stop_at", [1, 3])
def test_a_killed_harvest_goes_on_to_the_same_shards(
    stop_at, harvested, generator, model, prompts, tmp_path, monkeypatch
):
    calls, real = [], harvesting.greedy_batch

    def broken(*arguments):
        calls.append(1)
        if len(calls) == stop_at + 1:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(harvesting, "greedy_batch", broken)
    with pytest.raises(KeyboardInterrupt):
        run(generator, model, prompts, tmp_path / "h")
    run(generator, model, prompts, tmp_path / "h")
    assert contents(tmp_path / "h") == contents(harvested)
    done = len(calls)
    twice = tmp_path / "twice.jsonl"
    twice.write_text(prompts.read_text() * 2)
    run(generator, model, twice, tmp_path / "h")
    assert len(calls) == done
    assert contents(tmp_path / "h") == contents(harvested)


def test_harvests_of_other_settings_and_prompts_that_do_not_fit(
    harvested, generator, model, prompts, tmp_path
):
    with pytest.raises(CheckpointError, match="max_tokens 30, not 31"):
        run(generator, model, prompts, harvested, TextOptions(31, 4, 6))
    with pytest.raises(OptionError, match="batch is 0"):
        TextOptions(batch=0)
    long = tmp_path / "long.jsonl"
    long.write_text(
        json.dumps({"messages": [{"role": "user", "content": "x" * 300}]}) + "\n" + '{"prompt": "a"}\n'
    )
    assert run(generator, model, long, tmp_path / "h") == 1
    assert len(open_harvest(tmp_path / "h").sequences) == 1


@pytest.mark.parametrize("text", ["{}", "[1]", '{"prompt"', '{"messages": [{"role": "user"}]}', ""])
def test_broken_prompts(text, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "good"}\n' + text + "\n" if text else "")
    with pytest.raises(OptionError, match="line 2" if text else "no prompts"):
        read_prompts([path])


# ------------------------------------------------------------------------------------------- matches


def by_hand(tokens: list[int], newest: int, seen: int, longest: int) -> tuple[int, int]:
    """(place, length) of the longest and then latest earlier run that ends as tokens[: newest + 1] do."""
    best = (0, 0)
    for place in range(seen):
        length = 0
        while length < min(longest, place + 1) and tokens[place - length] == tokens[newest - length]:
            length += 1
        if length and length >= best[1]:
            best = (place, length)
    return best


@pytest.mark.parametrize("seed", range(5))
def test_matches_are_those_of_a_search_by_hand(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2 + seed, 30).tolist()
    begin, guesses, longest = 1 + 3 * seed, 3, 1 + seed
    places, lengths = find_matches(np.array(tokens), begin, guesses, longest)
    for row in range(len(tokens) - begin - 1):
        past = Past(longest)
        states = rng.normal(size=(1, begin + row, 4)).astype(np.float32)
        past.add(mx.array(states), tokens[: begin + row + 1])
        for guess in range(guesses):
            newest = begin + row + guess
            if newest >= len(tokens):
                continue
            place, length = by_hand(tokens, newest, begin + row, longest)
            assert lengths[guess, row] == length
            recent = ([-1] * longest + tokens[: newest + 1])[-longest:]
            state, followed, found = past.find(mx.array([recent]))
            assert found.item() == length
            if length:
                assert places[guess, row] == place
                assert followed.item() == tokens[place + 1]
                assert np.array_equal(state[0, 0], states[0, place])


# ------------------------------------------------------------------------------------------- fit


def test_padding_changes_nothing(fitted, harvested):
    several = fitted.harvest.sequences[:4]
    together = guess_states(fitted.heads, fitted.harvest.batch(several, 3), 3, fitted.target)
    for row, one in enumerate(several):
        alone = guess_states(fitted.heads, fitted.harvest.batch([one], 3), 3, fitted.target)
        there = alone.shape[2] - 2  # rows whose guesses are all real
        assert mx.allclose(together[:, row, :there], alone[:, 0, :there], atol=1e-4)


def test_written_heads_propose_what_they_did_in_training(fitted, model):
    """Row by row, as the loop would: guesses are the teacher-forced ones while those before them are right."""
    drafter = load(model, heads=fitted.folder).drafter
    scores, checked = Scores(3), 0
    for one in fitted.held_out:
        batch = fitted.harvest.batch([one], 3)
        scores.add(drafter.heads, batch, fitted.target)
        best = mx.argmax(guess_states(drafter.heads, batch, 3, fitted.target) @ fitted.target.rows.T, axis=-1)
        expected = fitted.target.ids[np.array(best)][:, 0]
        tokens, answer = fitted.harvest.prompt(one).tolist(), batch.tokens[0].tolist()
        drafter.begin(None)
        drafter.follow(tokens)
        hidden = mx.concatenate([batch.memory, batch.hidden[:, :1]], axis=1)
        for row in range(one.length - 1):
            tokens.append(answer[row])
            guesses = drafter.propose(hidden, tokens[-1], 3)
            for guess in range(3):
                assert guesses[guess] == expected[guess, row]
                checked += 1
                if guesses[guess] != answer[row + 1 + guess]:
                    break
            hidden = batch.hidden[:, row + 1 : row + 2]
    assert checked > 50
    assert scores.tokens_per_verify == fitted.progress.best


def test_training_lowers_the_loss_and_raises_acceptance(fitted, generator, model, tmp_path):
    log = fitted.progress.log
    assert log[-1]["loss_per_guess"][0] < log[0]["loss_per_guess"][0]
    untrained = Fit(generator.model, model, fitted.harvest, tmp_path / "x", FitOptions(epochs=1, **FIT))
    untrained.heads.joint.weight = mx.zeros_like(untrained.heads.joint.weight)
    for heads, least in ((untrained.heads, 1.0), (fitted.heads, 1.2)):
        scores = Scores(3)
        scores.add(heads, fitted.harvest.batch(fitted.train, 3), fitted.target)
        assert scores.tokens_per_verify >= least
    assert fitted.progress.best > 1.05
    accuracies = np.array(log[-1]["held_out"]["accuracies"])
    assert accuracies.shape == (3, 8)
    assert (accuracies.sum(axis=1) <= 1).all()
    assert accuracies[0, 0] == pytest.approx(log[-1]["held_out"]["top1"][0])


def test_a_map_is_solved_by_least_squares():
    rng = np.random.default_rng(0)
    given = rng.normal(size=(90, 7)).astype(np.float32)
    wanted = given @ rng.normal(size=(7, 3)).astype(np.float32) + 0.1 * rng.normal(size=(90, 3)).astype(
        np.float32
    )
    pieces = [(mx.array(given[a:b]), mx.array(wanted[a:b])) for a, b in ((0, 40), (40, 90))]
    found = np.array(regress._solve(iter(pieces), (3, 7)))
    expected = np.linalg.lstsq(given, wanted, rcond=None)[0].T
    assert np.abs(found - expected).max() < 0.03  # a small ridge


# ------------------------------------------------------------------------------------------- PyTorch


def test_pytorch_decides_as_many_tokens_a_pass(fitted, model, prompts):
    """A Medusa loop and causal heads written for PyTorch, against the engine, both in float32."""
    oracle = reference.load(model, heads=fitted.folder, device="cpu")
    questions = [messages[0]["content"] for messages in read_prompts([prompts])]
    inputs = [Input(question, question) for question in questions]
    asked = [Asked(max_tokens=40, chat=True)]
    entries = list(record(oracle, ((one, asked) for one in inputs), width=4))
    assert sum(map(len, (entry.rounds for entry in entries))) < 0.8 * sum(
        len(entry.tokens) for entry in entries
    )
    candidate = candidate_of(load(model, heads=fitted.folder))
    results = list(check(candidate, entries, inputs, FLOAT32, [4], rounds_width=4))
    assert len(results) == 14
    assert not failures(results)


def test_pytorch_answers_as_mlx_does(harvested, generator, model, prompts, tmp_path):
    run(generator, model, prompts, tmp_path / "h", answer=TorchAnswers(model, "float32", "cpu"))
    ours, theirs = open_harvest(harvested), open_harvest(tmp_path / "h")
    assert [one.file for one in ours.sequences] == [one.file for one in theirs.sequences]
    for mine, one in zip(ours.sequences, theirs.sequences, strict=True):
        assert theirs.prompt(one).tolist() == ours.prompt(mine).tolist()
        assert theirs.read(one.shard, one.tokens).tolist() == ours.read(mine.shard, mine.tokens).tolist()
        for name in ("memory", "hidden"):
            found = theirs.read(one.shard, getattr(one, name)).astype(np.float32)
            expected = ours.read(mine.shard, getattr(mine, name)).astype(np.float32)
            assert found.shape == expected.shape
            assert np.abs(found - expected).max() < 2e-3 * np.abs(expected).max()


def test_pytorch_in_half_precision_by_command(model, prompts, harvested, tmp_path, capsys):
    harvest = ["harvest", str(prompts), "-o", str(tmp_path / "h"), "--max-tokens", "30", "--batch", "4"]
    harvest += ["--prompts-per-shard", "6", "--model", str(model)]
    assert main([*harvest, "--torch", "bfloat16"]) == 0
    index, other = (json.loads((folder / "index.json").read_text()) for folder in (tmp_path / "h", harvested))
    assert index.pop("torch") == "bfloat16"
    assert other.pop("torch") is None
    assert index == other
    assert main(harvest) == 1
    assert "torch 'bfloat16', not None" in capsys.readouterr().err
    options = FitOptions(epochs=1, **FIT)
    Fit(load(model, medusa=False).model, model, open_harvest(tmp_path / "h"), tmp_path / "f", options).run()


def test_pytorch_answers_for_llamas_only(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "whisper"}')
    with pytest.raises(OptionError, match="only for llama, mistral"):
        TorchAnswers(tmp_path, "float32")


# ------------------------------------------------------------------------------------------- settings and commands


def test_command_lines(model, prompts, harvested, tmp_path, capsys):
    common = ["--model", str(model)]
    harvest = ["harvest", str(prompts), "-o", str(tmp_path / "h"), "--max-tokens", "30", "--batch", "4"]
    assert main([*harvest, "--prompts-per-shard", "6", *common]) == 0
    assert contents(tmp_path / "h") == contents(harvested)
    fit = ["fit", str(tmp_path / "h"), "-o", str(tmp_path / "heads"), "--epochs", "1", "--num-heads", "2"]
    assert main([*fit, "--held-out", "0.3", "--data", "letters", *common]) == 0
    assert "letters" in (tmp_path / "heads" / "README.md").read_text()
    report = tmp_path / "report.json"
    evaluate = [
        "evaluate",
        str(prompts),
        "--heads",
        str(tmp_path / "heads"),
        "--max-tokens",
        "20",
        "--nodes",
        "3",
    ]
    assert main([*evaluate, "--json", str(report), *common]) == 0
    found = json.loads(report.read_text())
    assert found["prompts"] == 14
    assert found["chain"]["same_text"] == found["tree"]["same_text"] == 14
    assert len(found["paths"]) <= 3
    chain = found["chain"]
    assert chain["tokens_per_verify"] == pytest.approx(chain["tokens"] / chain["rounds"], abs=1e-3)
    assert chain["tokens_per_verify"] == pytest.approx(found["expected"]["tokens_per_verify"], abs=0.02)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 7}, "head_dim"),
        ({"key_value_heads": 3}, "key_value_heads"),
        ({"ffn_dim": "x"}, "ffn_dim"),
        ({"norm_eps": 2.0}, "norm_eps"),
        ({"match_length": -1}, "match_length"),
    ],
)
def test_broken_settings(change, words):
    names = (
        "num_heads",
        "num_layers",
        "hidden_size",
        "attention_heads",
        "key_value_heads",
        "head_dim",
        "ffn_dim",
    )
    good = dict(zip(names, (2, 1, 32, 4, 2, 8, 48), strict=True)) | {"rope_theta": 10_000, "match_length": 4}
    CausalArgs.from_config(good, "x")
    with pytest.raises(CheckpointError, match=words):
        CausalArgs.from_config(good | change, "x")


def test_made_prompts_are_seeded_and_of_other_kinds_than_the_unseen_ones():
    few = [prompt for prompt, _ in zip(made_prompts(5), range(300), strict=False)]
    more = [prompt for prompt, _ in zip(made_prompts(5), range(500), strict=False)]
    assert more[:300] == few
    texts = [prompt.get("prompt") or prompt["messages"][-1]["content"] for prompt in more]
    assert len(set(texts)) == 500
    unseen = [json.loads(line) for line in UNSEEN.read_text().splitlines()]
    assert len(unseen) >= 30
    assert not {entry["kind"] for entry in unseen} & set(KINDS)
    assert not {entry["prompt"] for entry in unseen} & set(texts)
