"""MERaLiON-2 from audio to text: processor and prompt against transformers, options, parts. Tiny random models."""

import json
import logging
import wave

import mlx.core as mx
import numpy as np
import pytest
import torch
from meralion import small_reference, write_heads, write_hf
from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor
from transformers.generation.logits_process import NoRepeatNGramLogitsProcessor

import mlx_medusa
from convert import convert
from mlx_medusa.audio import log_mel
from mlx_medusa.errors import CheckpointError, OptionError
from mlx_medusa.speech import meralion
from mlx_medusa.speech.chat import ChatTokenizer
from mlx_medusa.transcribe import main

SECOND = 16_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With four heads, float32."""
    path = tmp_path_factory.mktemp("meralion")
    convert(write_hf(path / "hf", 1), path / "model", heads=write_heads(path / "heads"))
    return path / "model"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Without heads."""
    path = tmp_path_factory.mktemp("meralion_plain")
    convert(write_hf(path / "hf", 1), path / "model")
    return path / "model"


@pytest.fixture(scope="module")
def loaded(folder):
    return mlx_medusa.load(folder)


def noise(seconds, seed=0):
    return (np.random.default_rng(seed).normal(size=int(seconds * SECOND)) * 0.1).astype(np.float32)


def edited(folder, target, **files):
    """A copy of a model folder with other JSON or text files."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        name = name.replace("__", ".")
        text = content if isinstance(content, str) else json.dumps(content)
        (target / name).write_text(text, encoding="utf-8")
    return target


@pytest.mark.parametrize("seconds", [0.3, 12.0, 30.0])
def test_features_equal_transformers(seconds):
    """Each chunk to mean 0 and variance 1 before the spectrum, as the published processor asks for."""
    samples = noise(seconds) + 0.05
    theirs = WhisperFeatureExtractor(feature_size=80)(
        [samples], sampling_rate=SECOND, return_tensors="np", padding="max_length", do_normalize=True,
        return_attention_mask=True,
    )["input_features"][0]  # fmt: skip
    ours = np.array(log_mel(meralion.normalized(samples), 80))
    np.testing.assert_allclose(ours.T, theirs, atol=2e-3)


@pytest.mark.parametrize("query", ["Transcribe the speech", "What is it? 你好"])
def test_prompt_equals_transformers(folder, query):
    """Ids of the chat template rendered by transformers, with exactly one <bos>, 100 speech tokens for each chunk."""
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    content = f"Instruction: {query} \nFollow the text instruction based on the following audio: <SpeechHere>"
    text = theirs.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    expected = theirs(text.replace("<SpeechHere>", "<SpeechHere>" * 200), add_special_tokens=False)[
        "input_ids"
    ]
    tokens, start = ChatTokenizer.from_folder(folder, 383).prompt(query, 200)
    assert tokens == expected
    assert tokens.count(2) == 1
    assert (tokens.index(383), tokens.count(383)) == (start, 200)


def test_text_equals_pytorch(loaded):
    """A clip of two chunks, from samples to tokens, with heads: what PyTorch writes one token at a time."""
    theirs, *_ = small_reference(1)
    samples = noise(31, seed=3)
    prompt, _ = loaded.tokenizer.prompt("Transcribe the speech", 200)
    features = WhisperFeatureExtractor(feature_size=80)(
        [samples[: 30 * SECOND], samples[30 * SECOND :]], sampling_rate=SECOND, return_tensors="pt",
        padding="max_length", do_normalize=True, return_attention_mask=True,
    )["input_features"]  # fmt: skip
    rule, tokens = NoRepeatNGramLogitsProcessor(6), list(prompt)
    with torch.no_grad():
        rows = theirs.rows(features)
        for _ in range(24):
            tokens.append(int(rule(torch.tensor([tokens]), theirs(tokens, rows)[1][-1:]).argmax()))
            if tokens[-1] in (1, 107):
                break
    result = loaded.transcribe(samples, max_tokens=24)
    assert result.segments[0].tokens == [token for token in tokens[len(prompt) :] if token not in (1, 107)]


def test_text_is_that_of_plain_decoding(folder, loaded):
    """At every width, and with heads that were not loaded: the prompt goes with the folder."""
    samples = noise(5)
    without = mlx_medusa.load(folder, medusa=False).transcribe(samples, max_tokens=40)
    assert len(without.segments[0].tokens) > 5
    for width in range(1, 6):
        result = loaded.transcribe(samples, max_tokens=40, width=width)
        assert (result.text, result.segments[0].tokens) == (without.text, without.segments[0].tokens)
        assert result.medusa.width == width


def test_queries(loaded, plain):
    """The heads' query where the folder has heads, else that of the model; every task has its own."""
    assert loaded.instruction(mlx_medusa.Options()) == "Transcribe the speech"
    other = mlx_medusa.load(plain)
    assert other.instruction(mlx_medusa.Options()) == "Please transcribe this speech."
    seen = set()
    for task in meralion.TASKS:
        needs = "who?" if task in ("question", "instruction") else None
        options = other.check(mlx_medusa.Options(task=task, instruction=needs))
        seen.add(other.instruction(options))
    assert len(seen) == len(meralion.TASKS)
    assert "who?" in seen
    assert other.transcribe(noise(1), task="translate-ta", max_tokens=1).language == "ta"
    assert other.transcribe(noise(1), max_tokens=1).language == "und"
    assert "Based on the audio, answer the following question: who?" in seen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"task": "translate"},
            "task 'translate' is not one of this model's: transcribe, singlish, translate-zh",
        ),
        ({"task": "question"}, "'question' needs an instruction"),
        ({"task": "singlish", "instruction": "x"}, "'singlish' takes no instruction"),
        ({"instruction": "say <SpeechHere>"}, "has 2 tokens <SpeechHere>"),
        ({"instruction": "say <bos>"}, "has 2 tokens <bos>"),
        ({"width": 6}, "width 6 needs 5 heads, and there are 4"),
        ({"language": "klingon"}, "language 'klingon' is not known"),
    ],
)
def test_options_that_cannot_be_are_refused(loaded, options, message):
    with pytest.raises(OptionError, match=message):
        loaded.transcribe(noise(1), **options)


def test_a_language_is_warned_about(loaded, caplog):
    with caplog.at_level(logging.WARNING, "mlx_medusa"):
        assert loaded.transcribe(noise(1), language="Malay", max_tokens=2).language == "ms"
    assert "changes nothing" in caplog.text


def test_audio_past_300_s_comes_in_parts(loaded, monkeypatch):
    """Cut at the quiet, each part with all of its chunks; the texts are joined. Chunks of 1 s stand for those of 30."""
    monkeypatch.setattr(meralion, "CHUNK", SECOND)
    audio = noise(27)
    audio[8 * SECOND : 9 * SECOND] = 0  # the quiet place of the first part
    rows = []
    encode = loaded.encode
    monkeypatch.setattr(loaded, "encode", lambda part: rows.append(encode(part)) or rows[-1])
    result = loaded.transcribe(audio, max_tokens=6)
    assert result.segments[0].start == 0
    assert 8 < result.segments[1].start < 9
    ends, starts = ([getattr(segment, side) for segment in result.segments] for side in ("end", "start"))
    assert ends[:-1] == pytest.approx(starts[1:])
    assert [row.shape[1] for row in rows] == [
        100 * -(-round((segment.end - segment.start) * SECOND) // SECOND) for segment in result.segments
    ]
    assert max(row.shape[1] for row in rows) <= 1000
    assert result.text == "".join(segment.text for segment in result.segments)
    assert result.duration == 27


@pytest.mark.parametrize(("samples", "chunks"), [(1, 1), (480_000, 1), (480_001, 2)])
def test_speech_tokens_of_a_chunk_begun(loaded, samples, chunks):
    part = mlx_medusa.speech.windows.Window(0, noise(samples / SECOND))
    assert loaded.encode(part).shape == (1, 100 * chunks, 64)


def test_no_audio_gives_no_text(loaded):
    result = loaded.transcribe(np.zeros(0, np.float32))
    assert (result.text, result.segments, result.duration) == ("", [], 0)


def test_stop_tokens_end_the_text_and_are_not_in_it(folder, tmp_path):
    """Both ids, whichever comes: made to come by a rule of this test that forbids all else after 5 tokens."""
    for stop in (1, 107):
        transcriber = mlx_medusa.load(folder)
        logits = transcriber.model.logits

        def only(hidden, logits=logits, stop=stop):
            return logits(hidden) + 1000 * (mx.arange(384) == stop)

        transcriber.model.logits = only
        result = transcriber.transcribe(noise(1))
        assert result.text == ""
        assert result.medusa.rounds == 0


def test_speaker_tags(folder):
    tokenizer = ChatTokenizer.from_folder(folder, 383)
    ids = tokenizer._tokenizer.encode("<Speaker1>: the one <Speaker2>: had", add_special_tokens=False).ids
    assert tokenizer.decode([*ids, 107]) == "the one had"
    assert tokenizer.decode([*ids, 107], speakers=True) == "<Speaker1>: the one <Speaker2>: had"


def test_text_of_any_script_comes_back(folder):
    tokenizer = ChatTokenizer.from_folder(folder, 383)
    for text in ("你好，世界", "வணக்கம்", "apa khabar 😀"):
        assert tokenizer.decode(tokenizer._tokenizer.encode(text, add_special_tokens=False).ids) == text


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ bos_token }}<start_of_turn>user\nhello<end_of_turn>\n", "has 0 tokens <SpeechHere>"),
        ("{{ messages[0]['content'] }}", "has 0 tokens <bos>"),
        ("{{ bos_token }}{{ bos_token }}{{ messages[0]['content'] }}", "has 2 tokens <bos>"),
        ("{% for %}", "the chat template does not work"),
    ],
)
def test_a_broken_chat_template_is_refused(folder, tmp_path, template, message):
    with pytest.raises(CheckpointError, match=message):
        mlx_medusa.load(edited(folder, tmp_path / "other", chat_template__jinja=template))


def test_a_folder_without_a_template_gets_gemmas(folder, tmp_path):
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["chat_template"]
    other = ChatTokenizer.from_folder(
        edited(folder, tmp_path / "other", tokenizer_config__json=settings), 383
    )
    assert other.prompt("Do it.", 100) == ChatTokenizer.from_folder(folder, 383).prompt("Do it.", 100)


def test_float16_becomes_bfloat16(folder, caplog):
    with caplog.at_level(logging.WARNING, "mlx_medusa"):
        transcriber = mlx_medusa.load(folder, dtype="float16")
    assert "bfloat16 is used" in caplog.text
    assert transcriber.model.text_decoder.model.embed_tokens.weight.dtype == mx.bfloat16
    transcriber.transcribe(noise(2), max_tokens=4)  # a number that is not finite is an error


def test_whisper_refuses_what_is_meralions(tiny_en):
    whisper = mlx_medusa.load(tiny_en)
    for options in ({"task": "singlish"}, {"instruction": "x"}, {"speaker_tags": True}):
        with pytest.raises(OptionError):
            whisper.check(mlx_medusa.Options(**options))


def test_command_line(folder, tmp_path, capsys):
    path = tmp_path / "a.wav"
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SECOND)
        file.writeframes((noise(2) * 32_000).astype("<i2").tobytes())
    assert (
        main([str(path), "--model", str(folder), "--task", "question", "--instruction", "who?", "--stats"])
        == 0
    )
    assert "tokens per verify" in capsys.readouterr().err
    assert main([str(path), "--model", str(folder), "--task", "question"]) == 1
    assert "needs an instruction" in capsys.readouterr().err
