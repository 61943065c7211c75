"""Give every model folder a tokenizer.json: the source's own, one built from its vocabulary, or a bundled
one.
"""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_medusa.checkpoint import read_json
from mlx_medusa.errors import CheckpointError

# In the order of their token ids. The last one came with large-v3.
_CODES = (
    "en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la "
    "mi ml cy sk te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be "
    "tg sd gu am yi lo uz fo ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue"
)
LANGUAGES = _CODES.split()
END, START, NO_TIMESTAMPS = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"
ENGLISH_VOCABULARY, MULTILINGUAL_VOCABULARY = 51864, 51865  # one more for each language past the 99th
_DATA = Path(__file__).with_name("data")


def byte_tokens() -> list[str]:
    """The 256 tokens of single bytes: printable ones stand for themselves, as in GPT-2, and come first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [*map(chr, printable), *(chr(256 + i) for i in range(256 - len(printable)))]


def special_tokens(languages: int) -> list[str]:
    """End of text to no-timestamps, in the order of their ids."""
    silence = "<|nospeech|>" if languages > 99 else "<|nocaptions|>"  # as transformers names them
    codes = [f"<|{code}|>" for code in LANGUAGES[:languages]]
    tasks = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>"]
    return [END, START, *codes, *tasks, silence, NO_TIMESTAMPS]


def tokenizer_json(source: Path | None, vocab_size: int) -> dict[str, Any]:
    """The tokenizer of the folder ``source``, else the bundled one for ``vocab_size``.

    Raises CheckpointError if it is broken or not this model's, or if there is neither.
    """
    if source is not None and (source / "tokenizer.json").is_file():
        path = source / "tokenizer.json"
        tokenizer = read_json(path)
    elif source is not None and (source / "vocab.json").is_file() and (source / "merges.txt").is_file():
        path = source / "vocab.json"
        tokenizer = _from_vocabulary(source)
    else:
        path = source or Path("tokenizer.json")
        tokenizer = bundled(vocab_size, path)
    ids = token_ids(tokenizer, path)
    for name in (START, END, NO_TIMESTAMPS):
        if ids.get(name, vocab_size) >= vocab_size:
            raise CheckpointError(
                f"{path}: has no {name} within the model's {vocab_size} tokens; not its tokenizer"
            )
    return tokenizer


def bundled(vocab_size: int, path: Path) -> dict[str, Any]:
    """Whisper's tokenizer for a vocabulary of this size. Raises CheckpointError if Whisper has none of that
    size.
    """
    languages = 99 + max(0, vocab_size - MULTILINGUAL_VOCABULARY)
    if vocab_size < ENGLISH_VOCABULARY or languages > len(LANGUAGES):
        raise CheckpointError(
            f"{path}: no tokenizer.json, and Whisper has no vocabulary of {vocab_size}; add the file"
        )
    english = vocab_size == ENGLISH_VOCABULARY
    packed = _DATA / f"{'english' if english else 'multilingual'}.merges.gz"
    merges = gzip.decompress(packed.read_bytes()).decode().split("\n")
    tokens = [*byte_tokens(), *(merge.replace(" ", "") for merge in merges), *([] if english else [""])]
    vocab = {token: number for number, token in enumerate(tokens)}
    return _assemble(
        vocab, merges, {name: len(tokens) + i for i, name in enumerate(special_tokens(languages))}
    )


def token_ids(tokenizer: dict[str, Any], path: Path) -> dict[str, int]:
    """Every token of a tokenizer.json with its id. Raises CheckpointError if that has none."""
    try:
        added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
        return {**tokenizer["model"]["vocab"], **added}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a tokenizer with a vocabulary; fetch the file again") from error


def _from_vocabulary(folder: Path) -> dict[str, Any]:
    """A tokenizer.json out of vocab.json, merges.txt and added_tokens.json."""
    vocab = read_json(folder / "vocab.json")
    added = folder / "added_tokens.json"
    specials = read_json(added) if added.is_file() else {}
    known = {**vocab, **specials}
    specials.update({name: known[name] for name in special_tokens(len(LANGUAGES)) if name in known})
    try:
        lines = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / 'merges.txt'}: cannot be read ({error})") from error
    merges = [line for line in lines if line and not line.startswith("#version")]
    return _assemble(vocab, merges, dict(sorted(specials.items(), key=lambda item: item[1])))


def _assemble(vocab: dict[str, int], merges: Sequence[str], specials: dict[str, int]) -> dict[str, Any]:
    """The tokenizer.json of transformers' WhisperTokenizer for these parts."""
    end, start, plain = (specials.get(name) for name in (END, START, NO_TIMESTAMPS))
    frame = [{"SpecialToken": {"id": name, "type_id": 0}} for name in (START, NO_TIMESTAMPS, END)]
    sequence = [{"Sequence": {"id": "A", "type_id": 0}}]
    post_processor = {
        "type": "TemplateProcessing",
        "single": [*frame[:2], *sequence, frame[2]],
        "pair": [*frame[:2], *sequence, {"Sequence": {"id": "B", "type_id": 1}}, frame[2]],
        "special_tokens": {
            name: {"id": name, "ids": [number], "tokens": [name]}
            for name, number in ((END, end), (START, start), (NO_TIMESTAMPS, plain))
        },
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            # timestamps are text to the tokenizer: only what comes before them is hidden from a transcript
            {
                "id": number,
                "content": name,
                **flags,
                "normalized": name[2].isdigit(),
                "special": not name[2].isdigit(),
            }
            for name, number in specials.items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "post_processor": None if None in (end, start, plain) else post_processor,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "vocab": vocab,
            "merges": list(merges),
        },
    }


def load(tokenizer: dict[str, Any], path: Path) -> Any:
    """A ``tokenizers.Tokenizer``. Raises CheckpointError if the library rejects it."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(json.dumps(tokenizer))
    except Exception as error:  # the library raises plain Exception
        raise CheckpointError(f"{path}: {' '.join(str(error).split())}") from error
