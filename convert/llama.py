"""The files of a Llama folder beside its weights."""

from typing import TYPE_CHECKING, Any

from convert import spm, tokenizer, vocabulary
from mlx_medusa.checkpoint import read_json
from mlx_medusa.errors import CheckpointError
from mlx_medusa.models.llama import ModelArgs

if TYPE_CHECKING:
    from convert.sources import Source

_DROPPED = {
    "quantization",
    "quantization_config",
    "medusa",
    "_name_or_path",
    "transformers_version",
    "auto_map",
}
_DROPPED |= {"torch_dtype", "rope_parameters", "medusa_num_heads", "medusa_num_layers", "version"}
_DROPPED |= {"base_model_name_or_path"}
_CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}


def tokenizer_json(source: "Source", config: dict[str, Any]) -> dict[str, Any]:
    """The source's tokenizer.json, or one made of its tokenizer.model.

    Added tokens that the model has no row for are left out, with a note. Raises CheckpointError if there is no
    tokenizer, it is broken, or another model's.
    """
    folder = source.tokenizer or source.path
    path = folder / "tokenizer.json"
    if "tokenizer.json" in source.made:
        tokens = source.made["tokenizer.json"]
    elif path.is_file():
        tokens = read_json(path)
    elif (folder / "tokenizer.model").is_file():
        tokens = _from_sentencepiece(source)
    else:
        raise CheckpointError(
            f"{path}: missing, and no tokenizer.model either; make it with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    rows = config["vocab_size"]
    ids = tokenizer.token_ids(tokens, path)
    left_out = [token["content"] for token in tokens["added_tokens"] if token["id"] >= rows]
    most = max((number for name, number in ids.items() if name not in left_out), default=-1)
    if most >= rows:
        raise CheckpointError(
            f"{path}: has token {most}, but the model has {rows} rows; not this model's tokenizer"
        )
    if left_out:
        names = ", ".join(repr(name) for name in left_out[:4])
        source.notes.append(f"{len(left_out)} added tokens without a row in the model left out: {names}")
        kept = [token for token in tokens["added_tokens"] if token["id"] < rows]
        tokens = {**tokens, "added_tokens": kept}
    tokenizer.load(tokens, path)
    return tokens


def _from_sentencepiece(source: "Source") -> dict[str, Any]:
    """tokenizer.model with the tokens that the files beside it add."""
    folder = source.tokenizer or source.path
    said = _said(folder / "tokenizer_config.json")
    tokens = spm.tokenizer_json(folder / "tokenizer.model", bos=bool(said.get("add_bos_token", True)))
    more = {token["content"]: int(i) for i, token in said.get("added_tokens_decoder", {}).items()}
    more = {**_said(folder / "added_tokens.json"), **more}
    known = tokens["model"]["vocab"]
    new = {text: number for text, number in more.items() if text not in known}
    tokens["added_tokens"] += [
        vocabulary.added_token(text, number, special=True)
        for text, number in sorted(new.items(), key=lambda item: item[1])
    ]
    return tokens


def _said(path: Any) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def files(
    source: "Source", config: dict[str, Any], tokens: dict[str, Any], dtype: str
) -> dict[str, dict[str, Any]]:
    """config.json, generation_config.json and tokenizer_config.json, as transformers 4 and 5 and mlx-lm read them."""
    args = ModelArgs.from_config(config, source.path)
    stops = _stops(source.generation or {}, config)
    kept = {key: value for key, value in config.items() if key not in _DROPPED}
    model_type = config["model_type"]
    return {
        "config.json": {
            **kept,
            "model_type": model_type,
            "architectures": [_CLASSES[model_type]],
            "eos_token_id": stops,
            "num_key_value_heads": args.num_key_value_heads,
            "max_position_embeddings": config.get("max_position_embeddings") or args.max_position_embeddings,
            "rms_norm_eps": args.rms_norm_eps,
            "rope_theta": args.rope_theta,
            "rope_scaling": args.rope_scaling or None,
            "tie_word_embeddings": args.tie_word_embeddings,
            "dtype": dtype,
        },
        "generation_config.json": _generation_config(source.generation or {}, config, stops),
        "tokenizer_config.json": _tokenizer_config(source, config),
    }


def _stops(said: dict[str, Any], config: dict[str, Any]) -> int | list[int] | None:
    """The ids that end a text: those of generation_config.json, else of config.json."""
    return said.get("eos_token_id", config.get("eos_token_id"))


def _generation_config(
    said: dict[str, Any], config: dict[str, Any], stops: int | list[int] | None
) -> dict[str, Any]:
    kept = {
        key: value for key, value in said.items() if not key.startswith("_") and key != "transformers_version"
    }
    ids = {key: config[key] for key in ("bos_token_id", "pad_token_id") if config.get(key) is not None}
    return {**ids, **kept, "eos_token_id": stops}


def _tokenizer_config(source: "Source", config: dict[str, Any]) -> dict[str, Any]:
    """The source's, without added tokens that the model has no row for."""
    said = source.made.get("tokenizer_config.json")
    if said is None:
        said = _said((source.tokenizer or source.path) / "tokenizer_config.json")
    said = {"tokenizer_class": "PreTrainedTokenizerFast", **said}
    if "added_tokens_decoder" in said:
        rows = config["vocab_size"]
        said["added_tokens_decoder"] = {
            number: token for number, token in said["added_tokens_decoder"].items() if int(number) < rows
        }
    return said
