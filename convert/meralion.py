"""The files of a MERaLiON-2 folder beside its weights."""

from typing import TYPE_CHECKING, Any

from convert import tokenizer
from mlx_medusa.checkpoint import read_json
from mlx_medusa.errors import CheckpointError

if TYPE_CHECKING:
    from convert.sources import Source

BASE, HEADS = (
    "MERaLiON/MERaLiON-2-3B",
    "kartmannXu/MERaLion-2-3B-Medusa",
)  # what `convert` takes if told nothing
STOPS = (1, 107)  # <eos> and <end_of_turn>
NO_REPEAT = 6  # no run of so many tokens is written twice
_DROPPED = {
    "quantization",
    "quantization_config",
    "medusa",
    "_name_or_path",
    "transformers_version",
    "torch_dtype",
}
_DROPPED |= {"auto_map"}  # names Python files that are not copied


def tokenizer_json(source: "Source", config: dict[str, Any]) -> dict[str, Any]:
    """The source's tokenizer.json. Raises CheckpointError if it is missing, broken, or has not the model's tokens."""
    path = source.path / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing; make it with transformers: "
            "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    tokens = read_json(path)
    ids = tokenizer.token_ids(tokens, path)
    limit = config["text_config"].get("vocab_size", 256_000)
    for name in ("<bos>", "<start_of_turn>", "<end_of_turn>"):
        if ids.get(name, limit) >= limit:
            raise CheckpointError(
                f"{path}: has no {name} within the model's {limit} tokens; not its tokenizer"
            )
    speech = config.get("speech_token_index", 255_999)
    if speech not in ids.values():
        raise CheckpointError(
            f"{path}: has no token {speech}, which stands for speech; not this model's tokenizer"
        )
    return tokens


def files(
    source: "Source", config: dict[str, Any], tokens: dict[str, Any], dtype: str
) -> dict[str, dict[str, Any]]:
    """config.json, generation_config.json, and the preprocessor's and tokenizer's settings for a source without."""
    tokenizer.load(tokens, source.path)
    kept = {key: value for key, value in config.items() if key not in _DROPPED}
    return {
        "config.json": {"architectures": ["MERaLiON2ForConditionalGeneration"], **kept, "dtype": dtype},
        "generation_config.json": generation_config(source.generation or {}, tokens),
        "preprocessor_config.json": preprocessor_config(config["speech_config"]["num_mel_bins"]),
        "tokenizer_config.json": {
            "tokenizer_class": "GemmaTokenizer", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"
        },
    }  # fmt: skip


def generation_config(said: dict[str, Any], tokens: dict[str, Any]) -> dict[str, Any]:
    """What the source says; both stop tokens and the no-repeat rule where it leaves them out."""
    stops = said.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    ids = {token["content"]: token["id"] for token in tokens["added_tokens"]}
    end = ids.get("<end_of_turn>", STOPS[1])
    kept = {
        key: value for key, value in said.items() if not key.startswith("_") and key != "transformers_version"
    }
    return {
        "bos_token_id": 2,
        "pad_token_id": 0,
        "no_repeat_ngram_size": NO_REPEAT,
        **kept,
        "eos_token_id": sorted({*stops, ids.get("<eos>", STOPS[0]), end}),
    }


def preprocessor_config(mels: int) -> dict[str, Any]:
    """30 s chunks of 16 kHz, each brought to zero mean and unit variance, a spectrum each 10 ms."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "MERaLiON2Processor",
        "feature_size": mels,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "do_normalize": True,
    }
