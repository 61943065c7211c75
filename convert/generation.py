"""generation_config.json and preprocessor_config.json: what transformers and our decoder must know beside
the weights.
"""

from itertools import product
from typing import Any

from convert.tokenizer import END, NO_TIMESTAMPS, START

# openai/whisper's list of what is not speech; from its tokenizer.py.
_SINGLE = '"#()*+/:;<=>@[\\]^_`{|}~「」『』'
_LONGER = "<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪"
_SYMBOLS = [*_SINGLE, *_LONGER.split()]
_MUSIC = "♩♪♫♬♭♮♯"  # these share their first token, which stands for all of them


def generation_config(
    source: dict[str, Any] | None, config: dict[str, Any], tokenizer: Any
) -> dict[str, Any]:
    """The generation config: what the source says, and the rest by Whisper's rules.

    ``tokenizer`` is a ``tokenizers.Tokenizer``. A source that knows Whisper's settings but leaves out the
    suppressed tokens suppresses none, as in transformers; one that says nothing gets openai's lists.
    """
    ids = {name: tokenizer.token_to_id(name) for name in (START, END, NO_TIMESTAMPS, "<|startofprev|>")}
    multilingual = config["vocab_size"] >= 51865
    made: dict[str, Any] = {
        "alignment_heads": _alignment_heads(config),
        "begin_suppress_tokens": _known([first_token(tokenizer, " "), ids[END]]),
        "decoder_start_token_id": ids[START],
        "eos_token_id": ids[END],
        "bos_token_id": ids[END],
        "pad_token_id": ids[END],
        "is_multilingual": multilingual,
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "no_timestamps_token_id": ids[NO_TIMESTAMPS],
        "prev_sot_token_id": ids["<|startofprev|>"],
        "return_timestamps": False,
        "suppress_tokens": non_speech_tokens(tokenizer),
    }
    if multilingual:
        made["lang_to_id"] = languages(tokenizer)
        made["task_to_id"] = {
            task: tokenizer.token_to_id(f"<|{task}|>") for task in ("transcribe", "translate")
        }
    made = {key: value for key, value in made.items() if value is not None}
    # what transformers notes for itself would not be true of this file, and "_from_model_config" makes it ignored
    known = {
        key: value
        for key, value in (source or {}).items()
        if value is not None and not key.startswith("_") and key != "transformers_version"
    }
    if "no_timestamps_token_id" in known or "lang_to_id" in known:
        made["suppress_tokens"] = made["begin_suppress_tokens"] = []
    elif source is not None or "suppress_tokens" in config:  # older checkpoints have these in config.json
        for key in ("suppress_tokens", "begin_suppress_tokens"):
            if config.get(key):
                made[key] = config[key]
    return {**made, **known}


def languages(tokenizer: Any) -> dict[str, int]:
    """{"<|en|>": id, ...}: the tokens between start of transcript and the tasks."""
    start, stop = tokenizer.token_to_id(START), tokenizer.token_to_id("<|translate|>")
    if start is None or stop is None:
        return {}
    names = (tokenizer.id_to_token(number) for number in range(start + 1, stop))
    # early tokenizers of transformers call Hebrew "iw", where openai and later ones say "he"
    return {"<|he|>" if name == "<|iw|>" else name: start + 1 + i for i, name in enumerate(names)}


def non_speech_tokens(tokenizer: Any) -> list[int]:
    """openai's default for ``suppress_tokens``: speaker tags, brackets, music, and the control tokens."""
    found = {first_token(tokenizer, " -"), first_token(tokenizer, " '")}
    for symbol in [*_SYMBOLS, *_MUSIC]:
        for text in (symbol, f" {symbol}"):
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if tokens and (len(tokens) == 1 or symbol in _MUSIC):
                found.add(tokens[0])
    control = (START, "<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>")
    found.update(tokenizer.token_to_id(name) for name in (*control, "<|nocaptions|>", "<|nospeech|>"))
    return _known(found)


def first_token(tokenizer: Any, text: str) -> int | None:
    """The first token of a text; None if it has none."""
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return tokens[0] if tokens else None


def _known(numbers: Any) -> list[int]:
    return sorted(number for number in numbers if number is not None)


def _alignment_heads(config: dict[str, Any]) -> list[list[int]]:
    """All heads of the upper half of the decoder: openai's default for models it has not measured."""
    layers, heads = config["decoder_layers"], config["decoder_attention_heads"]
    return [list(pair) for pair in product(range(layers // 2, layers), range(heads))]


def model_config(config: dict[str, Any], generation: dict[str, Any], dtype: str) -> dict[str, Any]:
    """config.json of the folder: the source's, with the keys that transformers and ``mlx_medusa.models``
    need.
    """
    made = {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        **{key: generation[f"{key}"] for key in _IDS if key in generation},
    }
    # these are settings of generation, which transformers refuses to find in config.json
    dropped = {"suppress_tokens", "begin_suppress_tokens", "forced_decoder_ids", "max_length", "torch_dtype"}
    dropped |= {"quantization", "quantization_config", "medusa", "_name_or_path", "transformers_version"}
    kept = {key: value for key, value in config.items() if key not in dropped}
    return {**made, **kept, "dtype": dtype}


_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def preprocessor_config(config: dict[str, Any]) -> dict[str, Any]:
    """preprocessor_config.json: 30 s windows of 16 kHz, a spectrum each 10 ms."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": config["num_mel_bins"],
        "sampling_rate": 16_000,
        "hop_length": 160,
        "chunk_length": 30,
        "n_fft": 400,
        "n_samples": 480_000,
        "nb_max_frames": 3000,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": False,
    }


def tokenizer_config() -> dict[str, Any]:
    """tokenizer_config.json for a tokenizer that came without one."""
    names = {f"{kind}_token": END for kind in ("bos", "eos", "pad", "unk")}
    return {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor", **names}
