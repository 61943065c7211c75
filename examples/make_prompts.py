"""Make prompts to train text heads on, without a hub: requests of many kinds about many things.

    python examples/make_prompts.py --count 3000 --seed 5 --to prompts.jsonl

Each line is {"prompt": ...}, or, one time in eight, {"messages": [...]} with a system message. A kind is drawn
first, then one of its templates, then the words for its gaps (prompt_parts.py), so that all kinds come equally
often. No prompt comes twice, and the order is random: the first N lines are as fair a mix as the whole, and a larger
--count with the same seed begins with the same lines. All templates and words were written for this file.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prompt_parts import FIELDS, KINDS, PASSAGES, SYSTEMS

_WORDS = {name: [" ".join(word.split()) for word in text.split(";")] for name, text in FIELDS.items()}
_TRIES = 2000  # prompts in a row that were there before: then there are no more


def fill(template: str, rng: random.Random) -> str:
    """Put words into the gaps of a template; no word comes twice in a prompt."""
    used: set[str] = set()

    def choose(gap: re.Match[str]) -> str:
        if gap[1] == "passage":
            sentences = rng.sample(PASSAGES, rng.randint(3, 6))
            return " ".join(fill(sentence, rng) for sentence in sentences)
        word = rng.choice([word for word in _WORDS[gap[1]] if word not in used])
        used.add(word)
        return word

    text = re.sub(r"\{(\w+)\}", choose, template)
    return text[0].upper() + text[1:]


def prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Different prompts, as long as there are any."""
    rng = random.Random(seed)
    seen: set[str] = set()
    kinds = sorted(KINDS)
    failed = 0
    while failed < _TRIES:
        text = fill(rng.choice(KINDS[rng.choice(kinds)]), rng)
        system = fill(rng.choice(SYSTEMS), rng) if rng.random() < 1 / 8 else None
        if text in seen:
            failed += 1
            continue
        failed = 0
        seen.add(text)
        if system is None:
            yield {"prompt": text}
        else:
            roles = (("system", system), ("user", text))
            yield {"messages": [{"role": role, "content": content} for role, content in roles]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Make prompts to train text heads on.")
    parser.add_argument("--count", type=int, default=3000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=5, help="default: %(default)s")
    parser.add_argument("--to", type=Path, required=True, metavar="FILE", help="JSON lines")
    args = parser.parse_args()
    lines = [
        json.dumps(prompt, ensure_ascii=False)
        for prompt, _ in zip(prompts(args.seed), range(args.count), strict=False)
    ]
    temporary = args.to.with_name(f".{args.to.name}")
    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    temporary.replace(args.to)
    print(f"{len(lines)} prompts of {len(KINDS)} kinds: {args.to}")
    return 0 if len(lines) == args.count else 1


if __name__ == "__main__":
    sys.exit(main())
