"""A small random Llama as transformers saves it, with a tokenizer of single characters and a chat template."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
LETTERS = ["\n", *map(chr, range(32, 127))]
VOCAB = len(SPECIAL) + len(LETTERS)
HIDDEN, CONTEXT = 32, 200
TEMPLATE = (  # SmolLM2's, without its own system prompt
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_text_model(folder: Path, seed: int = 0, template: str | None = TEMPLATE) -> Path:
    """The folder of a model that writes letters, and sometimes <|im_end|>, which ends its text."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=CONTEXT, tie_word_embeddings=False, bos_token_id=0,
            eos_token_id=3, pad_token_id=1,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
        model.lm_head.weight[:3] = 0  # not what it writes, so that its text has the tokens that it wrote
    model.save_pretrained(folder)
    write_tokenizer(folder, template)
    return folder


def write_tokenizer(folder: Path, template: str | None) -> None:
    vocab = {token: number for number, token in enumerate([*SPECIAL, *(byte_name(x) for x in LETTERS)])}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": name, **flags} for number, name in enumerate(SPECIAL)
        ],
        "pre_tokenizer": level,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
        },
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def byte_name(letter: str) -> str:
    """How byte-level tokenizers (GPT-2) write a character below 128."""
    return letter if letter > " " else chr(256 + ord(letter))


def write_text_heads(path: Path, count: int = 3, hidden: int = HIDDEN) -> Path:
    """Heads in the layout of FasterDecoding/Medusa; near zero, they guess the last token again, which is often right
    with a random model.
    """
    rng = np.random.default_rng(1)
    tensors = {}
    for head in range(count):
        tensors[f"{head}.0.linear.weight"] = rng.normal(size=(hidden, hidden)).astype(np.float32) * 0.02
        tensors[f"{head}.0.linear.bias"] = rng.normal(size=hidden).astype(np.float32) * 0.02
    save_file(tensors, path)
    return path


def reference(folder: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """The model and the tokenizer of transformers."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokenizer


def greedy(model: LlamaForCausalLM, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers writes after a prompt, the end token included."""
    tokens = torch.tensor([prompt])
    written = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=max_tokens
    )
    return written[0, len(prompt) :].tolist()
