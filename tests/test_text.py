"""Text in, text out: tokens, whole characters, options. Tiny random models: logic, not numbers."""

import json
import math
from dataclasses import replace
from random import Random

import mlx.core as mx
import pytest
from text_models import CONTEXT, VOCAB, greedy, reference, write_text_heads, write_text_model
from tokenizers import Tokenizer, decoders

import mlx_medusa
from mlx_medusa import TextOptions
from mlx_medusa.errors import CheckpointError, MedusaError, OptionError
from mlx_medusa.loading import load_speech, load_text
from mlx_medusa.text.detokenizer import Detokenizer
from mlx_medusa.tokenizer import render

QUESTION = [{"role": "user", "content": "Who are you?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("text") / "model")


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return write_text_heads(tmp_path_factory.mktemp("heads") / "heads.safetensors")


@pytest.fixture(scope="module")
def theirs(folder):
    return reference(folder)


@pytest.fixture(scope="module")
def generator(folder, heads):
    """With three heads."""
    return mlx_medusa.load(folder, heads=heads)


def copied(folder, target, **files):
    """A copy of a model folder with other files; None leaves one out."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    for name, content in files.items():
        path = target / name.replace("__", ".")
        if content is None:
            path.unlink()
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return target


# ---- whole characters

TEXTS = [
    "Hello, world", "naïve café — “quoted”", "你好，世界！", "வணக்கம் உலகம்", "مرحبا بالعالم", "हिन्दी पाठ", "한국어",
    "👩‍👩‍👧‍👦 family 🏳️‍🌈", "  leading and  double  spaces ", "\n\nnew\tlines\n", "e\u0301 combining", "𝔘𝔫𝔦 🤖x",
    "don 't . , stop", " a", "a ", "the of and",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizers(tiny_en):
    """Byte-level (GPT-2, Llama 3), and bytes as a fallback: keeping a space at the begin (Gemma), or not (Llama 2)."""
    from make_gemma_tokenizer import tokenizer_json

    keeping, dropping = (Tokenizer.from_str(json.dumps(tokenizer_json(384))) for _ in range(2))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    dropping.decoder = decoders.Sequence(parts)
    return [Tokenizer.from_file(str(tiny_en / "tokenizer.json")), keeping, dropping]


def streamed(tokenizer, tokens):
    detokenizer = Detokenizer(tokenizer.decode)
    return [detokenizer.add([token]) for token in tokens]


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_whole_characters_that_join_to_the_text(tokenizers, which, text):
    """Cut at every token: what has come is a beginning of the text, as far as its characters are whole."""
    tokenizer = tokenizers[which]
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    whole = tokenizer.decode(tokens)
    assert whole.strip() == text.strip()
    pieces = streamed(tokenizer, tokens)
    assert "".join(pieces) == whole
    assert not any("\ufffd" in piece for piece in pieces)
    for cut in range(len(tokens)):
        so_far = "".join(pieces[:cut])
        assert whole.startswith(so_far)
        now = tokenizer.decode(tokens[:cut])
        if "\ufffd" not in now:  # no character is under way: nothing is held back
            assert so_far == now


def test_bytes_that_are_no_character_show_as_such_and_hide_no_other(tokenizers):
    byte_level, keeping, _ = tokenizers
    first, _ = byte_level.encode("語", add_special_tokens=False).ids  # of its three bytes
    assert "".join(streamed(byte_level, [first, 64])) == "\ufffda"
    bytes_ = (0xC3, 0xA9, 0xE2, 0x82)  # é and two thirds of €
    broken = [keeping.token_to_id(f"<0x{byte:02X}>") for byte in bytes_]
    letter = keeping.token_to_id("a")
    assert "".join(streamed(keeping, broken)) == "é"
    assert "".join(streamed(keeping, [*broken, letter])) == "é\ufffd\ufffda"
    assert "".join(streamed(keeping, [letter, *broken, letter, letter])) == "aé\ufffd\ufffdaa"


def test_random_tokens_read_as_all_at_once(tokenizers):
    tokenizer, draw = tokenizers[0], Random(0)
    for _ in range(100):
        tokens = [draw.randrange(50_000) for _ in range(30)]
        assert "".join(streamed(tokenizer, tokens)) == tokenizer.decode(tokens).rstrip("\ufffd")


def test_special_tokens_have_no_text(generator):
    detokenizer = generator.tokenizer.detokenizer()
    a = generator.tokenizer.encode("a")[-1]
    assert [detokenizer.add([token]) for token in (0, a, 2, a, 3)] == ["", "a", "", "a", ""]


# ---- prompts


def test_prompts_have_the_tokens_of_transformers(generator, theirs):
    tokenizer = theirs[1]
    chats = [
        QUESTION,
        [{"role": "system", "content": "Be brief."}, *QUESTION],
        [
            *QUESTION,
            {"role": "assistant", "content": "A model.\nOf text."},
            {"role": "user", "content": " So? "},
        ],
    ]
    for messages in chats:
        expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert generator.tokens(messages) == expected
    for text in ("Once upon", "<s>Once upon", " spaced\n"):
        expected = tokenizer(text.removeprefix("<s>")).input_ids  # with one <s>, and not a second one
        assert expected.count(0) == 1
        assert generator.tokens(text) == expected
    assert generator.tokens([5, 6, 7]) == [5, 6, 7]


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m['role'] | upper }}: {{ m.content | trim }}{{ eos_token }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}\n  {{ m.content | tojson }}{% endfor %}",
    "{% if tools is not none %}tools{% endif %}{{ messages | length }}{% if add_generation_prompt %}>{% endif %}",
    "{%- set ns = namespace(n=0) -%}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}\n",
]  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_in_transformers(theirs, template):
    messages = [{"role": "system", "content": "Bë <brief>."}, {"role": "user", "content": " Hi \n"}]
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    expected = theirs[1].apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )
    assert render(template, messages, names, "file") == expected


def test_a_template_that_refuses_or_is_broken(folder, tmp_path):
    template = "{{ raise_exception('roles must alternate') }}"
    refusing = load_text(copied(folder, tmp_path / "a", chat_template__jinja=template))
    with pytest.raises(OptionError, match="roles must alternate"):
        refusing.generate(QUESTION)
    broken = load_text(copied(folder, tmp_path / "b", chat_template__jinja="{% for %}"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*template does not work"):
        broken.generate(QUESTION)


def test_a_model_without_a_template_takes_text_only(folder, tmp_path):
    plain = load_text(copied(folder, tmp_path / "plain", chat_template__jinja=None))
    assert plain.generate("Once", max_tokens=3).tokens
    with pytest.raises(OptionError, match=r"no chat template.*--ignore-chat-template"):
        plain.generate(QUESTION)


@pytest.mark.parametrize("prompt", ["", [], [{"role": "user", "content": " \n"}]])
def test_an_empty_prompt(generator, prompt):
    with pytest.raises(OptionError, match="the prompt is empty"):
        generator.stream(prompt)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": 3}])
def test_a_message_without_text(generator, message):
    with pytest.raises(OptionError, match="is not of the form"):
        generator.stream([message])


def test_a_prompt_that_does_not_fit(generator):
    """A context of n tokens takes a prompt of n - 1, and then writes one."""
    assert generator.generate([5] * (CONTEXT - 1)).finish_reason == "length"
    for length in (CONTEXT, CONTEXT + 1, 10 * CONTEXT):
        with pytest.raises(OptionError, match=f"{length} tokens does not fit a context of {CONTEXT}"):
            generator.stream([5] * length)


def test_tokens_that_the_model_does_not_have(generator, folder, tmp_path):
    for wrong in (VOCAB, -1):
        with pytest.raises(CheckpointError, match=f"{wrong} is not among"):
            generator.stream([5, wrong])
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"é": VOCAB}
    content["added_tokens"].append({**content["added_tokens"][0], "id": VOCAB, "content": "<more>"})
    other = load_text(copied(folder, tmp_path / "other", tokenizer__json=content))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json.*not this model's tokenizer"):
        other.generate("a <more>")


# ---- writing


@pytest.mark.parametrize("number", range(8))
def test_the_tokens_are_those_of_transformers(generator, theirs, number):
    """Greedy, without heads, with chains, and with trees."""
    model, tokenizer = theirs
    messages = [{"role": "user", "content": f"Tell me {number * 7}."}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    expected = greedy(model, prompt, 50)
    ways = (
        {"medusa": False},
        {},
        {"width": 2},
        {"tree": 9},
        {"tree": "mc_sim_7b_63"},
        {"tree": [[0], [1], [0, 1]]},
    )
    for options in ways:
        result = generator.generate(messages, max_tokens=50, **options)
        assert result.tokens == expected, options
        assert result.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert result.finish_reason == ("stop" if expected[-1] == 3 else "length")
        assert result.prompt_tokens == len(prompt)


def test_texts_end_both_ways(generator):
    found = {generator.generate(f"go {n}", max_tokens=60).finish_reason for n in range(12)}
    assert found == {"stop", "length"}


def test_what_is_streamed_is_what_is_generated(generator):
    pieces = list(generator.stream(QUESTION, max_tokens=30))
    result = generator.generate(QUESTION, max_tokens=30)
    assert "".join(piece.text for piece in pieces) == result.text
    assert [token for piece in pieces for token in piece.tokens] == result.tokens
    assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == result.finish_reason
    written = [sum(len(piece.tokens) for piece in pieces[: end + 1]) for end in range(len(pieces))]
    assert [piece.generation_tokens for piece in pieces] == written
    assert [piece.medusa.rounds for piece in pieces] == list(
        range(len(pieces))
    )  # the first one came with the prompt


def test_statistics(generator):
    m = generator.generate(QUESTION, max_tokens=40).medusa
    assert (m.width, len(m.accepted_per_head)) == (4, 3)
    assert 0 < m.accepted == sum(m.accepted_per_head) < m.drafted
    assert m.tokens_per_verify == m.tokens / m.rounds > 1
    plain = generator.generate(QUESTION, max_tokens=40, medusa=False).medusa
    assert (plain.width, plain.drafted, plain.accepted_per_head, plain.tokens_per_verify) == (1, 0, [], 1)
    assert plain.rounds == plain.tokens == m.tokens > m.rounds
    tree = generator.generate(QUESTION, max_tokens=40, tree="mc_sim_7b_63").medusa
    assert (tree.width, len(tree.accepted_per_head)) == (62, 3)  # two of its 63 nodes are four deep
    assert tree.encode_seconds > 0 < tree.decode_seconds


def test_the_dict_of_a_result_is_json(generator):
    result = generator.generate("Once", max_tokens=5)
    found = json.loads(json.dumps(result.to_dict()))
    assert found.pop("medusa")["width"] == 4
    assert set(found) == {
        "text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "seed", "prompt_tps", "generation_tps",
    }  # fmt: skip
    assert (found["tokens"], found["seed"], found["cached_tokens"]) == (result.tokens, None, 0)


# ---- sampling


def test_a_seed_draws_the_same_text_with_and_without_heads(generator):
    drawn = {
        generator.generate(QUESTION, max_tokens=30, temp=0.8, top_p=0.9, seed=5, **options).text
        for options in ({}, {"medusa": False}, {"width": 2}, {"tree": 6})
    }
    assert len(drawn) == 1
    assert len({generator.generate(QUESTION, max_tokens=30, temp=0.8, seed=n).text for n in range(4)}) == 4


def test_without_a_seed_each_text_is_another_and_names_its_seed(generator):
    first, second = (generator.generate(QUESTION, max_tokens=30, temp=1.0) for _ in range(2))
    assert first.text != second.text
    assert generator.generate(QUESTION, max_tokens=30, temp=1.0, seed=first.seed).text == first.text


def test_one_token_to_draw_from_is_the_greedy_text(generator):
    expected = generator.generate(QUESTION, max_tokens=30).tokens
    for options in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert generator.generate(QUESTION, max_tokens=30, temp=0.7, **options).tokens == expected, options


def test_typical_acceptance_is_another_text(generator):
    exact = generator.generate(QUESTION, max_tokens=60, temp=2.0, seed=1)
    typical = generator.generate(QUESTION, max_tokens=60, temp=2.0, seed=1, acceptance="typical")
    assert typical.medusa.tokens_per_verify >= 1
    assert typical.tokens != exact.tokens or typical.medusa.accepted == exact.medusa.accepted


def test_repetition_penalty_is_that_of_mlx_lm(generator):
    """Against mlx-lm's processor in a loop without a cache."""
    from mlx_lm.sample_utils import make_repetition_penalty

    from mlx_medusa.medusa.cache import KVCache
    from mlx_medusa.medusa.decode import chain_pass

    penalty, tokens = make_repetition_penalty(9.0, 30), generator.tokens("aaaa")
    for _ in range(40):
        hidden = chain_pass(generator.model, tokens, KVCache(generator.model.num_layers))
        logits = penalty(mx.array(tokens), generator.model.logits(hidden[0, -1:]))
        tokens.append(int(mx.argmax(logits)))
        if tokens[-1] == 3:
            break
    written = tokens[len(generator.tokens("aaaa")) :]
    options = TextOptions(max_tokens=40, repetition_penalty=9.0, repetition_context_size=30)
    assert generator.generate("aaaa", options).tokens == written
    processors = replace(options, repetition_penalty=None, logits_processors=[penalty])
    assert generator.generate("aaaa", processors).tokens == written
    assert generator.generate("aaaa", max_tokens=40).tokens != written


# ---- how it fails


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -4}, "max_tokens is -4"),
        ({"width": 0}, "width is 0"),
        ({"temp": -1.0}, "temp"),
        ({"temp": math.nan}, "temp"),
        ({"temp": math.inf}, "temp"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"top_p": -0.1, "temp": 1.0}, "top_p is -0.1"),
        ({"min_p": 2.0}, "min_p"),
        ({"top_k": -1}, "top_k"),
        ({"seed": -1}, "seed"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"acceptance": "loose"}, "exact, typical"),
        ({"acceptance": "typical"}, "temperature above 0"),
        ({"width": 2, "tree": 4}, "not both"),
        ({"medusa": False, "width": 2}, "without Medusa"),
        ({"medusa": False, "tree": 4}, "without Medusa"),
    ],
)  # fmt: skip
def test_options_that_cannot_be(options, message):
    with pytest.raises(OptionError, match=message):
        TextOptions(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 5}, "needs 4 heads, and there are 3"),
        ({"tree": "oak"}, "'oak' is not known"),
        ({"tree": [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]}, "needs 4 heads, and there are 3"),
    ],
)
def test_options_that_do_not_fit_the_heads(generator, options, message):
    with pytest.raises(OptionError, match=message):
        generator.stream(QUESTION, **options)


def test_guesses_need_heads(folder):
    for options in ({"width": 2}, {"tree": 4}):
        with pytest.raises(OptionError, match="convert with --heads"):
            load_text(folder).generate(QUESTION, **options)


def test_a_model_of_the_other_kind(folder, tiny_en):
    with pytest.raises(OptionError, match=r"mlx_medusa\.generate"):
        load_speech(folder)
    with pytest.raises(OptionError, match=r"mlx_medusa\.transcribe"):
        load_text(tiny_en)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer__json": None}, r"tokenizer\.json: missing"),
        ({"tokenizer__json": "{}"}, r"tokenizer\.json: cannot be read"),
        ({"tokenizer_config__json": "[]"}, r"tokenizer_config\.json: expected a JSON object"),
        ({"generation_config__json": "{"}, r"generation_config\.json: not valid JSON"),
    ],
)
def test_a_broken_folder(folder, tmp_path, files, message):
    with pytest.raises(CheckpointError, match=message):
        load_text(copied(folder, tmp_path / "broken", **files))


def test_end_tokens_come_from_every_file_that_may_name_them(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"]
    bare = {"config__json": config, "generation_config__json": None, "tokenizer_config__json": None}
    cases = [
        ({"generation_config__json": {"eos_token_id": [3, 1]}}, {1, 3}),
        ({"generation_config__json": None}, {3}),
        ({**bare, "tokenizer_config__json": {"eos_token": "</s>"}}, {1}),
        ({**bare, "special_tokens_map__json": {"eos_token": {"content": "<|im_end|>"}}}, {3}),
    ]
    for number, (files, stops) in enumerate(cases):
        assert load_text(copied(folder, tmp_path / str(number), **files)).tokenizer.stops == stops
    with pytest.raises(CheckpointError, match="eos_token_id"):
        load_text(copied(folder, tmp_path / "none", **bare))


def test_numbers_that_are_not_finite(folder):
    broken = load_text(folder)
    broken.model.lm_head.weight = broken.model.lm_head.weight * mx.inf
    with pytest.raises(MedusaError, match="not finite"):
        broken.generate(QUESTION)
