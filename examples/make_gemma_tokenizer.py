"""Make a small tokenizer in the style of Gemma's, for tests and random checkpoints: no training, no download.

    python examples/make_gemma_tokenizer.py /tmp/tokenizer                # 384 tokens, the last one <SpeechHere>
    python examples/make_gemma_tokenizer.py /tmp/tokenizer --size 256000  # ids as in MERaLiON-2, the rest is filler

It has <pad>, <eos>, <bos> and <unk> as 0 to 3, the turn marks as 106 and 107, a token for each byte (so that any text
comes back whole), some letters and words, and the speech token last. Its chat template is that of one user turn.
"""

import argparse
import json
from pathlib import Path
from typing import Any

SMALLEST = 384
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\n' + "
    "message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
SPECIAL = {0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 106: "<start_of_turn>", 107: "<end_of_turn>"}
WORDS = (
    "the", "of", "and", "to", "in", "is", "it", "you", "that", "he", "was", "for", "on", "are", "with", "as", "his",
    "they", "at", "be", "this", "have", "from", "or", "one", "had", "by",
)  # fmt: skip


def vocabulary(size: int) -> dict[str, int]:
    """Token -> id."""
    tokens = [f"<unused{i}>" for i in range(size)]
    for number, name in SPECIAL.items():
        tokens[number] = name
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    words = [part for word in WORDS for part in pieces(word)]
    known = list(dict.fromkeys([*bytes_, *letters, *words]))
    free = [number for number in range(4, size - 1) if number not in SPECIAL]
    for number, token in zip(free, known, strict=False):
        tokens[number] = token
    tokens[size - 1] = "<SpeechHere>"
    return {token: number for number, token in enumerate(tokens)}


def pieces(word: str) -> list[str]:
    """The tokens on the way from letters to ▁word, each one letter longer."""
    whole = f"▁{word}"
    return [whole[:end] for end in range(2, len(whole) + 1)]


def tokenizer_json(size: int) -> dict[str, Any]:
    """The content of tokenizer.json: BPE with byte fallback, spaces as ▁."""
    vocab = vocabulary(size)
    merges = [[token[:-1], token[-1]] for token in vocab if len(token) > 1 and token[0] == "▁"]
    special = {**SPECIAL, size - 1: "<SpeechHere>"}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": number, "content": name, **flags} for number, name in sorted(special.items())
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [
                {"SpecialToken": {"id": "<bos>", "type_id": 0}},
                {"Sequence": {"id": "A", "type_id": 0}},
            ],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def make(folder: Path, size: int = SMALLEST) -> None:
    """Write tokenizer.json and tokenizer_config.json into ``folder``, which is made if it is not there."""
    if size < SMALLEST:
        raise ValueError(f"{size} tokens are too few: {SMALLEST} at least")
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "chat_template": TEMPLATE,
    }
    for name, content in (("tokenizer.json", tokenizer_json(size)), ("tokenizer_config.json", settings)):
        text = json.dumps(content, ensure_ascii=False, indent=None if size > 10_000 else 1)
        (folder / name).write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", type=int, default=SMALLEST, help="number of tokens (default: %(default)s)")
    args = parser.parse_args()
    make(args.folder, args.size)


if __name__ == "__main__":
    main()
