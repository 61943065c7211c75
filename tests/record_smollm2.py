"""Record what transformers makes of SmolLM2-135M-Instruct in the same GGUF file: ids of texts, logits, greedy tokens.

    python tests/record_smollm2.py > tests/golden/smollm2.json

A process of its own: the OpenBLAS that mlx_medusa loads would slow PyTorch down.
"""

import os

os.environ["MLX_MEDUSA_OPENBLAS"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers

import mlx_medusa  # noqa: F401
from mlx_medusa.demo import TEXT, check_sha256, package_file

MAX_TOKENS = 64
SAMPLE = 97  # of the logits, each 97th is kept
PROMPTS = (
    "Why is the sky blue?",
    "Name three primary colours.",
    "What is the capital of France?",
    "Write a haiku about autumn.",
    "Explain what a hash table is, in two sentences.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is 17 times 23?",
    "Translate 'good morning' into Spanish.",
    "Give me a recipe for pancakes.",
    "Summarise the plot of Romeo and Juliet in one sentence.",
    "List the planets of the solar system.",
    "How do I boil an egg?",
    "Who wrote 'Pride and Prejudice'?",
    "Complete the sentence: The quick brown fox",
    "What are the symptoms of a cold?",
    "Write a short e-mail that declines an invitation.",
    "Sort these numbers: 9, 4, 7, 1.",
    "What does 'HTTP 404' mean?",
    "Tell me a joke about cats.",
    "Give five synonyms of 'happy'.",
    "What is the difference between RAM and a hard disk?",
    "Describe the water cycle to a child.",
)
TEXTS = (
    "Hello world",
    "  two  spaces\n\n\tand a tab",
    "naïve café — 日本語 и русский 🎉👩‍👩‍👧",
    "def f(x):\n    return x**2 + 10\n",
    "I'll we've DON'T you'd",
    "<|im_start|>user\nhi<|im_end|>\n",
    "1 2 34 1,000,000 0.1e-5 v2.0",
    "\r\n\r\n  ",
    "a" * 40,
    "{\"key\": [1, 2, {'nested': null}]}",
    "https://example.org/a?b=c&d=%20#e",
    "",
)


class Reference:
    """transformers' model and tokenizer from the GGUF file."""

    def __init__(self, file: Path):
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        ).eval()

    def chat(self, prompt: str) -> list[int]:
        turns = [{"role": "user", "content": prompt}]
        return self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """Of all rows, [W, V]."""
        return self.model(torch.tensor([tokens])).logits[0]

    @torch.no_grad()
    def greedy(self, tokens: list[int]) -> list[int]:
        ids = torch.tensor([tokens])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )
        return out[0, len(tokens) :].tolist()


def record(reference: Reference, prompt: str) -> dict:
    tokens = reference.chat(prompt)
    last = reference.logits(tokens)[-1]
    return {
        "prompt": tokens,
        "tokens": reference.greedy(tokens),
        "largest": round(last.abs().max().item(), 5),
        "logits": [round(value, 5) for value in last[::SAMPLE].tolist()],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="prompts (default: all)")
    args = parser.parse_args()
    file = package_file(TEXT.package, *TEXT.weights)
    cure = TEXT.install
    if file is None:
        sys.exit(f"{TEXT.package} is not installed: {cure}")
    check_sha256(file, TEXT.sha256, cure=cure)
    reference = Reference(file)
    versions = {"transformers": transformers.__version__, "torch": torch.__version__, "dtype": "float32"}
    head = json.dumps({"model": file.name, **versions, "max_tokens": MAX_TOKENS})
    texts = {text: reference.tokenizer(text).input_ids for text in TEXTS}
    entries = []
    for prompt in args.only or PROMPTS:
        print(prompt, file=sys.stderr)
        entries.append(f"{json.dumps(prompt)}: {json.dumps(record(reference, prompt))}")
    rows = ",\n".join(entries)
    ids = ",\n".join(f"{json.dumps(text)}: {json.dumps(found)}" for text, found in texts.items())
    print(f'{{"recorded_by": {head},\n"texts": {{\n{ids}\n}},\n"prompts": {{\n{rows}\n}}}}')


if __name__ == "__main__":
    main()
