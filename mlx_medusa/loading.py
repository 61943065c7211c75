"""From a model folder to something that transcribes or writes: the families of models, by config.json's model_type."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlx_medusa import blas, checkpoint, models
from mlx_medusa.errors import OptionError
from mlx_medusa.medusa.decode import Drafter
from mlx_medusa.medusa.drafters import load_drafter

if TYPE_CHECKING:
    from mlx_medusa.speech.transcriber import SpeechToText
    from mlx_medusa.text.generator import TextGenerator

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
SPEECH = ("whisper", "meralion2")  # model types that hear; every other one writes text


def load(
    model: str | Path,
    *,
    heads: str | Path | None = None,
    medusa: bool = True,
    dtype: str | None = None,
) -> "SpeechToText | TextGenerator":
    """Load a model folder or hub repository, with its heads (or those of ``heads``, in any format that convert reads).

    A speech model gives a ``Transcriber`` or ``MeralionTranscriber``, a text model a ``TextGenerator``. ``dtype``:
    float16, bfloat16 or float32; None keeps the folder's, except on a CPU backend (float32). Raises CheckpointError if
    the files are not a model, or the heads do not fit it.
    """
    blas.print_notice()
    if dtype is not None and dtype not in DTYPES:
        raise OptionError(f"dtype {dtype!r} is not known: use one of {', '.join(DTYPES)}")
    kind = DTYPES[dtype] if dtype else None
    folder = checkpoint.resolve(model)
    verifier, config = models.load(folder, kind)
    drafter = _drafter(folder, verifier, heads, medusa, kind)
    if config["model_type"] == "whisper":
        from mlx_medusa.speech.tokenizer import WhisperTokenizer
        from mlx_medusa.speech.transcriber import Transcriber

        return Transcriber(verifier, WhisperTokenizer.from_folder(folder), drafter)
    if config["model_type"] == "meralion2":
        return _meralion(folder, verifier, drafter, heads is not None or "medusa" in config)
    from mlx_medusa.text.generator import TextGenerator
    from mlx_medusa.text.tokenizer import TextTokenizer

    return TextGenerator(verifier, TextTokenizer.from_folder(folder, verifier.args.vocab_size), drafter)


def load_speech(model: str | Path, **settings: Any) -> "SpeechToText":
    """``load``, but OptionError for a model of text, before its weights are read."""
    if not hears(model):
        raise OptionError(f"{model}: is a model of text and hears nothing: use python -m mlx_medusa.generate")
    return load(model, **settings)  # type: ignore[return-value]


def load_text(model: str | Path, **settings: Any) -> "TextGenerator":
    """``load``, but OptionError for a model of speech, before its weights are read."""
    if hears(model):
        raise OptionError(f"{model}: is a model of speech: use python -m mlx_medusa.transcribe")
    return load(model, **settings)  # type: ignore[return-value]


def hears(model: str | Path) -> bool:
    """Whether a model folder or hub repository is one of speech."""
    return checkpoint.read_config(checkpoint.resolve(model)).get("model_type") in SPEECH


def _drafter(
    folder: Path, verifier: Any, heads: str | Path | None, medusa: bool, dtype: mx.Dtype | None
) -> Drafter | None:
    """The drafter of ``heads``, else of the folder if ``medusa``; None if there are no heads."""
    found = None
    if heads is not None:
        from convert.heads import read_heads  # other people's formats; not needed otherwise

        found = read_heads(heads)
    elif medusa:
        found = checkpoint.read_heads(folder)
    if found is None:
        return None
    args = verifier.args
    return load_drafter(
        *found, verifier, args.hidden_size, args.vocab_size, dtype=dtype, source=heads or folder
    )


def _meralion(folder: Path, verifier: Any, drafter: Drafter | None, with_heads: bool) -> "SpeechToText":
    from mlx_medusa.speech import tasks
    from mlx_medusa.speech.chat import ChatTokenizer
    from mlx_medusa.speech.meralion import MeralionTranscriber

    tokenizer = ChatTokenizer.from_folder(folder, verifier.args.speech_token_index)
    # the query goes with the folder and not with the use of its heads, so that the text does not depend on that
    return MeralionTranscriber(verifier, tokenizer, drafter, tasks.HEADS_QUERY if with_heads else tasks.QUERY)
