"""The benchmark's arithmetic, its report, and that mlx-whisper computes with the very same weights."""

import importlib.util
import json
from pathlib import Path

import pytest

from mlx_medusa import bench
from mlx_medusa.bench import Timing

peer_only = pytest.mark.skipif(
    importlib.util.find_spec("mlx_whisper") is None, reason="mlx-whisper is not installed"
)

SMALL = {
    "model_type": "whisper",
    "vocab_size": 96,
    "num_mel_bins": 80,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 128,
    "max_source_positions": 40,
    "max_target_positions": 64,
}


def small_model():
    """A random model with the encoder positions that Whisper has."""
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_map

    from mlx_medusa import models

    mx.random.seed(7)
    model = models.build(SMALL)
    model.update(tree_map(lambda array: mx.random.normal(array.shape) * 0.2, model.parameters()))
    angles = np.arange(40)[:, None] * np.exp(-np.log(10_000) / 15 * np.arange(16))
    sines = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    model.model.encoder.embed_positions.weight = mx.array(sines.astype(np.float32))
    return model


def mel(seed: int):
    import mlx.core as mx

    return mx.random.normal((80, 80), key=mx.random.key(seed))


def test_actions_run_in_turns_and_the_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    clock = iter([0, 99, 100, 199, 200, 201, 300, 304, 400, 403, 500, 505, 600, 602, 700, 703])  # start, end
    monkeypatch.setattr(bench, "perf_counter", lambda: next(clock))
    found = bench.interleave({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, runs=3)
    assert order == ["a", "b"] * 4
    assert found == {"a": Timing(2, 1, 3, 3), "b": Timing(4, 3, 5, 3)}


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("model.encoder.conv1.weight", "encoder.conv1.weight"),
        ("model.encoder.layers.0.self_attn.q_proj.bias", "encoder.blocks.0.attn.query.bias"),
        ("model.encoder.layers.3.self_attn_layer_norm.weight", "encoder.blocks.3.attn_ln.weight"),
        ("model.encoder.layers.3.final_layer_norm.bias", "encoder.blocks.3.mlp_ln.bias"),
        ("model.encoder.layer_norm.weight", "encoder.ln_post.weight"),
        ("model.decoder.layers.11.encoder_attn.k_proj.weight", "decoder.blocks.11.cross_attn.key.weight"),
        ("model.decoder.layers.2.encoder_attn.out_proj.bias", "decoder.blocks.2.cross_attn.out.bias"),
        ("model.decoder.layers.2.encoder_attn_layer_norm.bias", "decoder.blocks.2.cross_attn_ln.bias"),
        ("model.decoder.layers.2.fc2.weight", "decoder.blocks.2.mlp2.weight"),
        ("model.decoder.layer_norm.bias", "decoder.ln.bias"),
        ("model.decoder.embed_tokens.weight", "decoder.token_embedding.weight"),
        ("model.decoder.embed_positions.weight", "decoder.positional_embedding"),
    ],
)
def test_names_of_mlx_whisper(ours: str, theirs: str) -> None:
    assert bench.peer_name(ours) == theirs


@peer_only
def test_both_decoders_compute_the_same_step(tmp_path: Path) -> None:
    import numpy as np

    model = small_model()
    tokens = [1, 5, 9, 2, 77]
    ours = bench.step_actions(model, mel(1), tokens)
    folder = bench.write_peer_folder(model, "float32", tmp_path / "float32")
    theirs = bench.Peer(folder, "float32").step_action(mel(1), tokens)
    expected = np.array(theirs())[0, 0]
    assert np.abs(expected).max() > 0.1
    np.testing.assert_allclose(np.array(ours["1"]())[0, 0], expected, atol=1e-4)
    np.testing.assert_allclose(np.array(ours["8"]())[0, 0], expected, atol=1e-4)
    np.testing.assert_array_equal(np.array(theirs())[0, 0], expected)  # a step leaves the cache as it was


def test_steps_have_the_rows_they_claim_and_leave_the_cache(tmp_path: Path) -> None:
    import numpy as np

    actions = bench.step_actions(small_model(), mel(2), [1, 2, 3])
    assert [action().shape for action in actions.values()] == [(1, width, 96) for width in range(1, 9)]
    np.testing.assert_array_equal(np.array(actions["3"]()), np.array(actions["3"]()))


def width_times(decode: float, end_to_end: float) -> dict[str, dict]:
    return {"decode": vars(Timing.of([decode])), "end_to_end": vars(Timing.of([end_to_end]))}


def report(*peers: str) -> bench.Report:
    steps = {str(width): Timing(0.010 + 0.001 * width, 0.010, 0.030, 30) for width in range(1, 9)}
    whole = {"mlx-medusa": Timing(2.0, 1.9, 2.2, 5)}
    for peer in peers:
        steps[peer] = Timing(0.055, 0.050, 0.060, 30)
        whole[peer] = Timing(8.0, 7.0, 9.0, 5)
    return {
        "machine": {"processor": "A processor", "cores": 2, "device": "cpu"},
        "versions": {"mlx": "1.2.3"},
        "model": "a-model",
        "clips": ["a.wav", "b.wav", "c.wav"],
        "audio_seconds": 24.7,
        "step_seconds": {name: vars(timing) for name, timing in steps.items()},
        "transcription_seconds": {name: vars(timing) for name, timing in whole.items()},
        "clips_with_the_same_text": dict.fromkeys(peers, 2),
        "widths": {
            "1": {**width_times(1.5, 6.0), "tokens_per_verify": 1.0, "same_text_as_width_1": True},
            "4": {**width_times(1.0, 5.0), "tokens_per_verify": 2.5, "same_text_as_width_1": False},
        },
        "ratios": bench.ratios(steps, whole),
    }


def test_the_ratios_are_of_medians() -> None:
    assert report("peer")["ratios"] == {
        "5 rows / 1 row": 1.364,  # 15 ms over 11 ms
        "step of 1 row / peer": 0.2,
        "transcription / peer": 0.25,
    }
    assert report()["ratios"] == {"5 rows / 1 row": 1.364}


def test_the_table_says_it_all() -> None:
    lines = [" ".join(line.split()) for line in bench.table(report("peer")).splitlines()]
    assert lines[0] == "A processor, 2 cores, MLX 1.2.3 on cpu, a-model"
    assert "step, 1 row 11.0 ms 10.0 ms 30.0 ms" in lines
    assert "step, 5 rows 15.0 ms 10.0 ms 30.0 ms" in lines
    assert "step, 1 row, peer 55.0 ms 50.0 ms 60.0 ms" in lines
    assert "24.7 s of speech, mlx-medusa 2000.0 ms 1900.0 ms 2200.0 ms" in lines
    assert "step of 1 row / peer: 0.2" in lines
    assert lines[-1] == "same text as peer: 2 of 3 clips"
    four = (
        "width 4: 2.50 tokens per verify, decode loop 1000 ms, 1.50 x as fast as width 1, end to end 1.20 x"
    )
    assert f"{four}, ANOTHER TEXT" in lines
    assert "peer" not in bench.table(report())


def test_json_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "measure", lambda folder, clips, runs: report())
    arguments = ["--model", str(tmp_path), "--audio", "a.wav", "--json"]
    assert bench.main([*arguments, str(tmp_path / "bench.json")]) == 0
    assert json.loads((tmp_path / "bench.json").read_text())["step_seconds"]["5"]["median"] == 0.015
    capsys.readouterr()

    (tmp_path / "taken").mkdir()
    for place in (tmp_path / "nowhere" / "bench.json", tmp_path / "taken"):
        assert bench.main([*arguments, str(place)]) == 1
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bench.json", "taken"]


@pytest.mark.slow
def test_a_real_run(
    tiny_en: Path,
    speech_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "PEERS", {"mlx-whisper float32": "float32"})  # half precision takes long here
    clip = speech_dir / "librivox" / "sense_and_sensibility_01_austen_64kb-0880.wav"
    place = tmp_path / "bench.json"
    assert (
        bench.main(["--model", str(tiny_en), "--audio", str(clip), "--runs", "1", "--json", str(place)]) == 0
    )
    found = json.loads(place.read_text())
    assert {"date", "machine", "versions", "model", "clips", "cached_rows"} < set(found)
    assert found["audio_seconds"] == 2.99
    peers = ["mlx-whisper float32"] if importlib.util.find_spec("mlx_whisper") else []
    assert list(found["step_seconds"]) == [str(width) for width in range(1, 9)] + peers
    assert list(found["transcription_seconds"]) == ["mlx-medusa", *peers]
    for timing in [*found["step_seconds"].values(), *found["transcription_seconds"].values()]:
        assert 0 < timing["minimum"] <= timing["median"] <= timing["maximum"]
    assert found["clips_with_the_same_text"] == dict.fromkeys(peers, 1)
    assert "step, 8 rows" in capsys.readouterr().out


def test_without_mlx_whisper_its_rows_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert bench.make_peers(None, tmp_path) == {}
    assert "mlx-whisper is not installed" in capsys.readouterr().err


def test_preparation_comes_before_an_action_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def spend(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(bench, "perf_counter", lambda: now[0])
    found = bench.interleave({"a": lambda: spend(2)}, runs=2, warm_up=0, prepare={"a": lambda: spend(100)})
    assert found == {"a": Timing(2, 2, 2, 2)}
    assert now == [204]
