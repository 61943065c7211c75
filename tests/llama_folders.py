"""Small random Llama folders as transformers saves them, what to do to them, and what they compute."""

import json

import llama
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from text_models import VOCAB, write_tokenizer

from mlx_medusa import models
from mlx_medusa.medusa.cache import KVCache
from mlx_medusa.medusa.decode import chain_pass

TOKENS = [3, 40, 7, 99, 50, 12, 12, 8]
DIM = 32


def reference(seed=0, **changes):
    fixed = {"vocab_size": VOCAB, "hidden_size": DIM, "num_attention_heads": 4, "num_key_value_heads": 2}
    fixed |= {"head_dim": 8, "num_hidden_layers": 2, "tie_word_embeddings": False, "intermediate_size": 64}
    return llama.reference(seed, **{**fixed, **changes})


def write(folder, theirs, template="{{ messages[0]['content'] }}", **changes):
    """As transformers saves it, with a tokenizer."""
    theirs.save_pretrained(folder)
    write_tokenizer(folder, template)
    return edit(folder, **changes)


def edit(folder, **changes):
    """Change settings of config.json; those that are None go."""
    config = {**read(folder, "config.json"), **changes}
    kept = {name: value for name, value in config.items() if name not in changes or value is not None}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def read(folder, name):
    return json.loads((folder / name).read_text(encoding="utf-8"))


def as_torch_shards(folder, **extra):
    """The same folder with pytorch_model-*.bin in place of safetensors."""
    tensors = load_file(folder / "model.safetensors") | extra
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def rewrite(folder, change):
    """Tensors of model.safetensors through ``change``."""
    file = folder / "model.safetensors"
    save_file(
        {n: t.contiguous() for n, t in change(load_file(file)).items()}, file, metadata={"format": "pt"}
    )
    return folder


def logits_of(folder, tokens=TOKENS):
    ours, _ = models.load(folder)
    return np.array(ours.logits(chain_pass(ours, tokens, KVCache(ours.num_layers))[0]))


def theirs_of(theirs, tokens=TOKENS):
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0].float().numpy()


def assert_close(found, expected, most=1e-4):
    np.testing.assert_allclose(found, expected, rtol=most, atol=most * np.abs(expected).max())
