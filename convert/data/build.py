"""Write the bundled tokenizers from two tokenizer.json files of Whisper.

    python convert/data/build.py ENGLISH_TOKENIZER_JSON MULTILINGUAL_TOKENIZER_JSON
 A byte-level BPE is its list of merges: token i is byte i for i < 256, then what merge i - 256 joins.
Languages, tasks and timestamps follow by rule (``convert.tokenizer``), so the merges are all that is
stored.
"""

import gzip
import json
import sys
from pathlib import Path

from convert.tokenizer import byte_tokens


def build(source: Path, target: Path) -> None:
    """Compress the merges of ``source``; fails if the rule above does not give its vocabulary."""
    model = json.loads(source.read_text(encoding="utf-8"))["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in merges)]
    if any(model["vocab"].get(token) != number for number, token in enumerate(tokens)):
        raise SystemExit(f"{source}: not the vocabulary that its merges give")
    # no time and no name in the gzip header, so that the same input gives the same bytes
    target.write_bytes(gzip.compress("\n".join(merges).encode(), 9, mtime=0))


if __name__ == "__main__":
    for name, path in zip(("english", "multilingual"), sys.argv[1:3], strict=True):
        build(Path(path), Path(__file__).with_name(f"{name}.merges.gz"))
