"""The Whisper verifier against transformers' WhisperForConditionalGeneration: random small models, float32."""

import mlx.core as mx
import numpy as np
import pytest
import torch
from transformers import WhisperConfig, WhisperForConditionalGeneration

from mlx_medusa import checkpoint, models
from mlx_medusa.errors import CheckpointError
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import Limits, chain_pass, generate, prefill
from mlx_medusa.models.whisper import ModelArgs

PROMPT = [5, 9, 2]


def pair(seed):
    """(transformers' model, ours) with the same random weights; sizes vary with the seed."""
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([1, 2, 4]))
    config = WhisperConfig(
        vocab_size=int(rng.integers(60, 200)),
        num_mel_bins=int(rng.choice([8, 80, 128])),
        d_model=heads * int(rng.choice([8, 16, 24])),
        encoder_layers=int(rng.integers(1, 4)),
        encoder_attention_heads=heads,
        encoder_ffn_dim=int(rng.choice([32, 72])),
        decoder_layers=int(rng.integers(1, 4)),
        decoder_attention_heads=heads,
        decoder_ffn_dim=int(rng.choice([24, 64])),
        max_source_positions=int(rng.choice([20, 33])),
        max_target_positions=48,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        decoder_start_token_id=1,
    )
    torch.manual_seed(seed)
    theirs = WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "encoder.embed_positions" not in name:
                parameter.normal_(1 if "norm.weight" in name else 0, 0.05 if parameter.ndim == 1 else 0.25)
    ours = models.build(config.to_dict())
    weights = {
        name: mx.array(w.numpy()) for name, w in theirs.state_dict().items() if name != "proj_out.weight"
    }
    checkpoint.load_into(ours, ours.sanitize(weights), quantization=None, dtype=None, source="test")
    return theirs, ours


def mel_of(ours, seed):
    shape = (1, ours.args.max_source_positions * 2, ours.args.num_mel_bins)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("seed", range(20))
def test_encoder_and_decoder_equal_transformers(seed):
    theirs, ours = pair(seed)
    mel = mel_of(ours, seed)
    tokens = np.random.default_rng(seed).integers(1, ours.args.vocab_size, size=12).tolist()
    with torch.no_grad():
        out = theirs(
            torch.tensor(mel).swapaxes(1, 2),
            decoder_input_ids=torch.tensor([tokens]),
            output_hidden_states=True,
        )
    encoded = ours.encode(mx.array(mel))
    np.testing.assert_allclose(np.array(encoded), out.encoder_last_hidden_state.numpy(), rtol=1e-4, atol=1e-4)
    cache = KVCache(ours.num_layers, ours.attend(encoded))
    passes = [chain_pass(ours, part, cache) for part in (tokens[:5], tokens[5:6], tokens[6:])]
    hidden = mx.concatenate(passes, axis=1)
    np.testing.assert_allclose(np.array(hidden), out.decoder_hidden_states[-1].numpy(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(np.array(ours.logits(hidden)), out.logits.numpy(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("seed", range(20, 40))
def test_greedy_tokens_equal_transformers(seed):
    """To the end of the context; transformers counts the prompt in max_length."""
    theirs, ours = pair(seed)
    mel = mel_of(ours, seed)
    with torch.no_grad():
        memory = theirs.get_encoder()(torch.tensor(mel).swapaxes(1, 2))
        tokens = list(PROMPT)
        while len(tokens) < 48:
            logits = theirs(encoder_outputs=memory, decoder_input_ids=torch.tensor([tokens])).logits
            tokens.append(int(logits[0, -1].argmax()))
    cache = KVCache(ours.num_layers, ours.attend(ours.encode(mx.array(mel))))
    limits = Limits(frozenset(), 100)
    state, first = prefill(ours, PROMPT, cache, limits)
    for _ in generate(ours, state, first, limits):
        pass
    assert state.tokens == tokens


def test_batch_rows_do_not_mix():
    """The verifier contract has a batch axis: two rows in one pass equal each alone."""
    _, ours = pair(50)
    mels = [mel_of(ours, seed) for seed in (1, 2)]
    tokens = mx.array([[3, 4, 5], [9, 8, 7]])

    def run(mel, tokens):
        cache = KVCache(ours.num_layers, ours.attend(ours.encode(mx.array(mel))))
        positions = mx.broadcast_to(mx.arange(3), tokens.shape)
        mask = (mx.arange(3)[None] <= mx.arange(3)[:, None])[None, None]
        return np.array(ours.step(tokens, positions, mask, cache))

    both = run(np.concatenate(mels), tokens)
    for row in (0, 1):
        np.testing.assert_allclose(both[row], run(mels[row], tokens[row : row + 1])[0], rtol=1e-4, atol=1e-5)


def test_unknown_architecture_and_broken_settings_are_refused():
    good = WhisperConfig().to_dict()
    with pytest.raises(CheckpointError, match="model_type 'bert' is not supported"):
        models.build({"model_type": "bert"})
    for value in (None, "384", -1, True, 1.5):
        with pytest.raises(CheckpointError, match="somewhere: setting 'd_model'"):
            models.build({**good, "d_model": value}, "somewhere")
    with pytest.raises(CheckpointError, match="encoder_attention_heads"):
        models.build({**good, "encoder_attention_heads": 5}, "somewhere")


def test_unknown_settings_are_ignored():
    args = ModelArgs.from_config({**WhisperConfig().to_dict(), "a_new_setting": {}}, "x")
    assert args.max_source_positions == 1500
