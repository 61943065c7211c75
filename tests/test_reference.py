"""The oracle itself: its loops against transformers' ``generate`` and against each other. Tiny random models: logic."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from checkpoints import read, write_hf
from meralion import small_reference
from meralion import write_heads as write_meralion_heads
from meralion import write_hf as write_meralion
from safetensors.numpy import save_file
from transformers.modeling_outputs import BaseModelOutput

import mlx_medusa.reference
from convert import convert
from mlx_medusa import checkpoint
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.reference.folder import Folder
from mlx_medusa.reference.meralion2 import Meralion2Sequence

torch.set_num_threads(1)  # models this small are slower on more


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    """A random English Whisper with three heads."""
    folder = tmp_path_factory.mktemp("whisper")
    enliven(write_hf(folder / "hf", dtype=torch.float32, max_target_positions=64))
    heads = folder / "heads.safetensors"
    write_heads(heads)
    convert(base=folder / "hf", heads=heads, mlx_path=folder / "model")
    return folder / "model"


def enliven(folder):
    """Weights large enough that texts are not one token over and over."""
    rng = np.random.default_rng(0)
    tensors = {
        name: (w if w.ndim == 1 else rng.normal(size=w.shape).astype(np.float32) * 0.3)
        for name, w in read(folder).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_heads(path, dim=64, count=3):
    rng = np.random.default_rng(1)
    tensors = {}
    for head in range(count):
        tensors[f"medusa_head_{head}.0.linear.weight"] = rng.normal(size=(dim, dim)).astype(np.float32) * 0.1
        tensors[f"medusa_head_{head}.0.linear.bias"] = rng.normal(size=dim).astype(np.float32) * 0.1
    save_file(tensors, path)


def memories(count, frames=24, dim=64):
    """Random encoder outputs [1, S, D], lively enough that the texts differ."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, frames, dim, generator=generator) * 3 for _ in range(count)]


@pytest.mark.parametrize("timestamps", [False, True])
def test_whisper_greedy_equals_generate(whisper, timestamps):
    """With the folder's suppressed tokens and, with timestamps, their grammar."""
    oracle = mlx_medusa.reference.load(whisper, device="cpu")
    assert oracle.settings.suppress_tokens
    oracle.model.generation_config = oracle.settings
    texts = []
    for memory in memories(4):
        task, detected = oracle.ask(memory, timestamps=timestamps, max_tokens=40)
        found = oracle.decode(memory, task)
        ids = oracle.model.generate(
            encoder_outputs=BaseModelOutput(memory), attention_mask=torch.ones(1, 24), do_sample=False, num_beams=1,
            max_new_tokens=40, return_timestamps=timestamps,
        )[0].tolist()  # fmt: skip
        begin = len(task.prompt) if ids[: len(task.prompt)] == task.prompt else 0
        assert found.tokens[: len(ids) - begin] == ids[begin:]
        assert detected is None
        assert len(found.margins) == len(found.logprobs) == len(found.tokens)
        texts.append(tuple(found.tokens))
    assert len(set(texts)) > 1


def test_medusa_writes_the_greedy_text(whisper):
    """At every width; each pass decides at least one token, and the rounds are all of the text but its first token."""
    oracle = mlx_medusa.reference.load(whisper, medusa=True, device="cpu")
    assert oracle.drafter.max_drafts == 3
    for memory in memories(3):
        task, _ = oracle.ask(memory, max_tokens=30)
        plain = oracle.decode(memory, task)
        for width in (2, 3, 4):
            found = oracle.decode(memory, task, width)
            assert found.tokens == plain.tokens
            np.testing.assert_allclose(found.margins, plain.margins, atol=1e-3)
            assert sum(found.rounds) == len(plain.tokens) - 1
            assert all(1 <= count <= width for count in found.rounds)


class Right:
    """A drafter that knows the text, but for each third guess."""

    def __init__(self, text, most):
        self.text, self.max_drafts, self.at = text, most, 0

    def begin(self, reference, memory):
        self.at, self.states = 0, 0

    def read(self, tokens, states):
        self.states += len(states)

    def propose(self, hidden, pending, count):
        self.at = next(i for i in range(self.at, len(self.text)) if self.text[i] == pending)
        return [token if place % 3 != 2 else token + 1 for place, token in enumerate(self.text)][
            self.at + 1 : self.at + 1 + count
        ]


def test_right_guesses_are_taken_and_wrong_ones_end_a_pass(whisper):
    oracle = mlx_medusa.reference.load(whisper, device="cpu")
    memory = memories(1)[0]
    task, _ = oracle.ask(memory, max_tokens=13)
    plain = oracle.decode(memory, task)
    assert len(set(plain.tokens)) == 13  # so that the drafter finds its place
    oracle.drafter = Right(plain.tokens, 9)
    found = oracle.decode(memory, task, 10)
    assert found.tokens == plain.tokens
    # the first is decided by the prefill; places 2, 5, 8, 11 are guessed wrong, so a pass ends with each of them
    assert found.rounds == [2, 3, 3, 3, 1]
    assert oracle.drafter.states == len(task.prompt) + 12  # of all but the last token, once each


@pytest.mark.parametrize("kind", ["gated", "plain"])
def test_meralion_with_a_cache_equals_one_pass_over_all(kind):
    """A window of 64 tokens that the prompt outgrows, rows of speech, and a rewind on the way."""
    model, _, _ = small_reference(3, kind=kind)
    rng = np.random.default_rng(0)
    rows = torch.tensor(rng.normal(size=(30, 64)).astype(np.float32))
    tokens = [2, 5, *[383] * 30, *rng.integers(3, 380, size=60).tolist(), 383]
    with torch.inference_mode():
        hidden, logits = model(tokens, rows)
        sequence = Meralion2Sequence(model, rows[None])
        parts = [sequence.step(tokens[:40])]
        sequence.step([7, 8, 9])
        sequence.rewind(3)
        parts += [sequence.step(tokens[40:80]), sequence.step(tokens[80:])]
    for place, whole in enumerate((hidden, logits)):
        found = torch.cat([part[place] for part in parts])
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_meralion_folder(tmp_path):
    """Prompt with the speech in its place, the six-token rule, and heads that change nothing."""
    (tmp_path / "hf").mkdir()
    write_meralion(tmp_path / "hf")
    write_meralion_heads(tmp_path / "heads")
    convert(base=tmp_path / "hf", heads=tmp_path / "heads", mlx_path=tmp_path / "model", dtype="float32")
    oracle = mlx_medusa.reference.load(tmp_path / "model", medusa=True, device="cpu")
    memory = oracle.encode(np.random.default_rng(0).normal(size=32_000).astype(np.float32))
    assert memory.shape == (1, 100, 64)
    task, _ = oracle.ask(memory, instruction="Transcribe the speech", max_tokens=60)
    assert task.prompt.count(383) == 100
    plain = oracle.decode(memory, task)
    grams = [tuple(plain.tokens[i : i + 6]) for i in range(len(plain.tokens) - 5)]
    assert len(grams) == len(set(grams))
    assert oracle.decode(memory, task, 4).tokens == plain.tokens


@pytest.mark.parametrize("settings", [{"q_bits": 6}, {"q_bits": 4, "q_group_size": 32}, {"q_mode": "mxfp4"}])
def test_a_quantized_folder_is_read_as_mlx_reads_it(tmp_path, settings):
    """Every tensor, with the settings of single layers."""
    write_hf(tmp_path / "hf")
    convert(base=tmp_path / "hf", mlx_path=tmp_path / "model", **settings)
    mlx_medusa.reference.load(tmp_path / "model")  # which fits transformers' model
    theirs = Folder.find(tmp_path / "model").tensors()
    arrays, config = checkpoint.read_arrays(tmp_path / "model"), checkpoint.read_config(tmp_path / "model")
    layers = [name.removesuffix(".scales") for name in arrays if name.endswith(".scales")]
    assert len(layers) >= 20
    for layer in layers:
        settings = checkpoint.settings_for(config["quantization"], layer)
        biases = arrays.pop(f"{layer}.biases", None)
        scales = arrays.pop(f"{layer}.scales")
        arrays[f"{layer}.weight"] = checkpoint.dequantize(
            arrays[f"{layer}.weight"], scales, biases, settings, checkpoint.mx.float32
        )
    assert theirs.keys() == arrays.keys()
    for name, array in arrays.items():
        expected = np.array(array.astype(checkpoint.mx.float32))
        np.testing.assert_allclose(theirs[name].float().numpy(), expected, rtol=1e-6, atol=1e-8, err_msg=name)


def test_what_cannot_be_is_said_in_a_line(whisper, tmp_path):
    with pytest.raises(OptionError, match="float64"):
        mlx_medusa.reference.load(whisper, dtype="float64")
    with pytest.raises(OptionError, match="tpu"):
        mlx_medusa.reference.load(whisper, device="tpu")
    with pytest.raises(CheckpointError, match="no such folder"):
        mlx_medusa.reference.load(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match="bert"):
        mlx_medusa.reference.load(tmp_path)


def test_weights_that_do_not_fit_are_refused(whisper, tmp_path):
    from safetensors.torch import load_file
    from safetensors.torch import save_file as save

    for file in whisper.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(whisper / "model.safetensors")
    gone = tensors.pop("model.decoder.layers.1.fc2.bias")
    save(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"fc2\.bias"):
        mlx_medusa.reference.load(tmp_path)
    save({**tensors, "model.decoder.layers.1.fc2.bias": gone[:3].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not of this model"):
        mlx_medusa.reference.load(tmp_path)


def test_the_oracle_imports_no_mlx_and_no_model_of_ours():
    code = (
        "import sys\n"
        "from mlx_medusa.reference import FAMILIES, decode, heads, runtime, folder\n"
        "from importlib import import_module\n"
        "for name in FAMILIES.values(): import_module('mlx_medusa.reference.' + name)\n"
        "import mlx_medusa.parity.record\n"
        "ours = ('mlx', 'mlx_medusa.models', 'mlx_medusa.medusa')\n"
        "print([name for name in sys.modules if name in ours or name.startswith(tuple(o + '.' for o in ours))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
