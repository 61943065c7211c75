"""The maker of training speech: what it reads, what it must not read, how it packs, what it leaves behind."""

import json
import random
import wave
from itertools import islice, repeat

import make_speech
import numpy as np
import pytest
import speech_effects
import speech_texts
from make_speech import LIMIT, RATE, draw_items, pack
from speech_texts import KEEP_OUT, KeepOut, Source, SpeechError, made_texts, number, split_sentences
from speech_voices import VOICES, Speaker, installed_voices


@pytest.fixture
def sources():
    made = made_texts(random.Random(1), 900)
    return [Source("one", "none", 2, made[:600]), Source("two", "none", 1, made[600:])]


def test_same_seed_draws_same_files(sources):
    voices = list(VOICES)
    first, again, other = (list(islice(draw_items(seed, sources, voices), 300)) for seed in (3, 3, 4))
    assert first == again
    assert [item.sentences for item in first] != [item.sentences for item in other]
    assert len({item.name for item in first}) == 300


def test_any_prefix_is_a_fair_mix(sources):
    items = list(islice(draw_items(5, sources, list(VOICES)), 600))
    for part in (items[:300], items[300:]):
        assert 0.25 < sum(item.target == 0 for item in part) / 300 < 0.42
        assert 0.25 < sum(item.voice == "piper:joe" for item in part) / 300 < 0.5
        assert 0.2 < sum(item.effects.noise is not None for item in part) / 300 < 0.45
        assert {item.source for item in part} == {"one", "two"}
    assert all(0.85 <= item.speed <= 1.2 for item in items)
    assert all(len(item.sentences) == 1 for item in items if item.target == 0)


def test_texts_of_test_clips_are_kept_out(tmp_path):
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "transcripts.json").write_text(
        json.dumps({"1": "Cut every rose before the first frost."})
    )
    (tmp_path / "lone.txt").write_text("Good evening.")
    keep_out = KeepOut(speech_texts.keep_out_texts([tmp_path]))
    assert all(keep_out.blocks(text.upper()) for text in KEEP_OUT)
    assert keep_out.blocks("We cut every rose before the noon.")
    assert keep_out.blocks("She said, 'Good evening', and left.")
    assert keep_out.blocks("Ten of clubs, two of hearts.")
    assert not keep_out.blocks("Two of hearts, nine of clubs.")
    assert not keep_out.blocks("Cut every rose at noon.")
    with pytest.raises(SpeechError, match="nowhere is no folder"):
        speech_texts.keep_out_texts([tmp_path / "nowhere"])


def test_loaded_sources_hold_nothing_kept_out(monkeypatch):
    kept = "He saw the whole of the garden from the upper window."
    novel = f"{kept} It rained all day on the old house and on the sea. Then he was not an ill disposed young man."
    other = "Nobody saw the whole of the garden from the upper window but she."
    monkeypatch.setattr(speech_texts, "novels", lambda: ({"EMMA": novel}, other))
    for name, result in (
        ("bible", kept),
        ("usage_examples", [kept]),
        ("fortunes", ["A penny saved is earned."]),
    ):
        monkeypatch.setattr(speech_texts, name, lambda result=result: result)
    found = speech_texts.load_sources(1, [])
    assert found[0].sentences == ["It rained all day on the old house and on the sea."]
    keep_out = KeepOut(KEEP_OUT)
    assert not any(keep_out.blocks(text) for source in found for text in source.sentences)
    assert not any(kept in source.sentences for source in found)
    assert len(found[-1].sentences) > 3000


def test_sentences():
    text = 'Mr. Hill _did_ come.  "Is it so?"--he asked; "yes, St. John\'s!" It was\nlate [he said].'
    assert split_sentences(text) == [
        "Mr. Hill did come.",
        "Is it so?, he asked; yes, St. John's!",
        "It was late he said.",
    ]
    long = split_sentences("word " * 40 + "end; " + "more " * 40 + "end.")
    assert len(long) == 2
    assert long[0].endswith("end;")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "zero"), (45, "forty five"), (307, "three hundred and seven"), (2_010, "two thousand and ten")],
)
def test_numbers(value, text):
    assert number(value) == text


def test_packing_stops_at_the_target_and_below_the_limit():
    rate = 1000.0
    second = np.ones(1000, np.float32)
    sound, taken = pack(repeat(second), repeat(0.5), rate, 9.9)
    assert taken == 7  # 0.25 before, then 1.5 each
    assert len(sound) == 250 + 7 * 1500
    assert sound.sum() == 7000
    sound, taken = pack(repeat(np.ones(9_000, np.float32)), repeat(0.5), rate, LIMIT)
    assert taken == 3
    assert len(sound) <= LIMIT * rate
    assert pack([second, second], repeat(0.2), rate, 0.0)[1] == 1
    assert pack([np.ones(31_000, np.float32)], repeat(0.2), rate, 20.0)[1] == 0


def test_effects_follow_their_seed():
    rng = np.random.default_rng(0)
    tone = np.sin(np.arange(RATE) * 0.2).astype(np.float32) * (rng.random(RATE) > 0.2)
    effects = speech_effects.Effects(noise="pink", snr=20.0, reverb=0.3, telephone=True, mp3=False, peak=0.5)
    once, again, other = (speech_effects.apply_effects(tone, effects, seed) for seed in (1, 1, 2))
    assert np.array_equal(once, again)
    assert not np.array_equal(once, other)
    assert len(once) == RATE
    assert np.abs(once).max() == pytest.approx(0.5, abs=1e-3)
    noise = speech_effects.apply_effects(tone, speech_effects.Effects(noise="white", snr=20.0, peak=1.0), 1)
    gain = float(np.dot(noise, tone) / np.dot(tone, tone))
    left = noise - gain * tone
    assert 10 * np.log10(np.mean((gain * tone) ** 2) / np.mean(left**2)) == pytest.approx(20, abs=0.5)


class _InProcess:
    """Stands for the pool of processes."""

    def __init__(self, *_, **__):
        pass

    def submit(self, function, *arguments):
        future = make_speech.Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **_):
        pass


@pytest.fixture
def toneful(monkeypatch):
    """A voice that needs no package: a tone as long as the text."""
    monkeypatch.setattr(make_speech, "ProcessPoolExecutor", _InProcess)
    monkeypatch.setattr(make_speech, "_speaker", None)
    monkeypatch.setattr(Speaker, "begin", lambda *_: None)
    said = []

    def say(self, voice, text, pace):
        said.append(text)
        return np.sin(np.arange(int(self.rate(voice) * len(text) / 16 / pace)) * 0.1).astype(np.float32)

    monkeypatch.setattr(Speaker, "say", say)
    return said


def test_files_manifest_and_resuming(tmp_path, sources, toneful):
    def make(folder, hours):
        items = draw_items(9, sources, list(VOICES))
        return make_speech.make_speech(items, folder, hours, 1)

    make(tmp_path / "whole", 0.06)
    make(tmp_path / "parts", 0.02)
    manifest = tmp_path / "parts" / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b'{"file": "s9-0')  # as a kill leaves it
    spoken = len(toneful)
    assert make(tmp_path / "parts", 0.02) >= 0.02
    assert len(toneful) <= spoken + 60  # nothing that was kept is spoken again, at most what is made ahead
    make(tmp_path / "parts", 0.06)
    assert manifest.read_bytes() == (tmp_path / "whole" / "manifest.jsonl").read_bytes()
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    assert {path.name for path in (tmp_path / "parts").iterdir()} == {row["file"] for row in rows} | {
        manifest.name
    }
    for row in rows:
        with wave.open(str(tmp_path / "parts" / row["file"])) as file:
            assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)
            assert file.getnframes() / RATE == pytest.approx(row["seconds"], abs=1e-3)
            assert file.readframes(10**7) == (tmp_path / "whole" / row["file"]).open("rb").read()[44:]
        assert row["seconds"] <= 30
        assert row["text"]
        assert row["licence"] == "none"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hours", "0"], "--hours must be above 0"),
        (["--hours", "1", "--voices", "nobody"], "voice nobody is not"),
    ],
)
def test_wrong_options_are_one_line(arguments, message, tmp_path, capsys):
    assert make_speech.main([*arguments, "--to", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_no_voice_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(make_speech, "installed_voices", list)
    assert make_speech.main(["--hours", "1", "--to", str(tmp_path)]) == 1
    assert "no voice is installed" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["piper", "flite", "festival", "espeak"])
def test_installed_voices_say_the_same_twice(engine):
    voices = [voice for voice in installed_voices() if voice.startswith(f"{engine}:")]
    if not voices:
        pytest.skip(f"{engine} is not installed")
    speaker = Speaker()
    said = []
    for _ in range(2):
        speaker.begin(voices[0], 11)
        said.append(speaker.say(voices[0], "A short walk.", 1.0))
    assert np.array_equal(*said)
    assert 0.3 < len(said[0]) / speaker.rate(voices[0]) < 3
