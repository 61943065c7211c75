"""A conversation that keeps its cache: what is read anew, what is answered, how it ends. Tiny random models."""

import json
import os
import select
import subprocess
import sys
import time

import pytest
from text_models import CONTEXT, greedy, reference, write_text_heads, write_text_model

import mlx_medusa
from mlx_medusa import Conversation, TextOptions
from mlx_medusa.chat import answer, main
from mlx_medusa.errors import OptionError

QUESTIONS = ["Who is it?", "And now?", "Really?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_text_model(tmp_path_factory.mktemp("chat") / "model", seed=3)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    return write_text_heads(tmp_path_factory.mktemp("heads") / "heads.safetensors")


@pytest.fixture(scope="module")
def theirs(folder):
    return reference(folder)


@pytest.fixture(scope="module")
def generator(folder, heads):
    return mlx_medusa.load(folder, heads=heads)


@pytest.fixture
def read(generator, monkeypatch):
    """The widths of the model's passes: how many tokens each of them read."""
    widths = []
    step = type(generator.model).step

    def counted(self, tokens, *args):
        widths.append(tokens.shape[1])
        return step(self, tokens, *args)

    monkeypatch.setattr(type(generator.model), "step", counted)
    return widths


def fresh(theirs, questions, system=None, max_tokens=15):
    """transformers' answers, each to all that was said before, and the lengths of the prompts."""
    model, tokenizer = theirs
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers, lengths = [], []
    for question in questions:
        messages.append({"role": "user", "content": question})
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        text = tokenizer.decode(greedy(model, prompt, max_tokens), skip_special_tokens=True)
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
        lengths.append(len(prompt))
    return answers, lengths


def text_of(pieces):
    return "".join(piece.text for piece in pieces)


@pytest.mark.parametrize("options", [{"medusa": False}, {}, {"tree": 5}])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_each_turn_reads_only_what_is_new(generator, theirs, read, options, system):
    """The second prompt goes on with the first, the first answer, its end and the next question."""
    answers, lengths = fresh(theirs, QUESTIONS, system)
    chat = Conversation(generator, system, TextOptions(max_tokens=15, **options))
    cached = 0
    for question, text, length in zip(QUESTIONS, answers, lengths, strict=True):
        read.clear()
        pieces = list(chat.ask(question))
        assert text_of(pieces) == text
        last = pieces[-1]
        assert (last.prompt_tokens, last.cached_tokens) == (length, cached)
        assert read[0] == length - cached  # one pass reads the new part of the prompt
        # all that is in the cache comes again in the next prompt: the answer's tokens but the last, which was not read
        cached = length + last.generation_tokens - 1
    assert [message["content"] for message in chat.messages if message["role"] == "assistant"] == answers


def test_a_seed_draws_the_answers_of_a_fresh_run(generator):
    chat = Conversation(generator, options=TextOptions(max_tokens=15, temp=0.8, seed=4))
    for question in QUESTIONS:
        text = text_of(chat.ask(question))
        assert text == generator.generate(chat.messages[:-1], chat.options).text


def test_reset(generator, theirs):
    chat = Conversation(generator, "Be brief.", TextOptions(max_tokens=15))
    answers, lengths = fresh(theirs, QUESTIONS[:1], "Be brief.")
    for _ in range(2):
        pieces = list(chat.ask(QUESTIONS[0]))
        assert (text_of(pieces), pieces[-1].prompt_tokens, pieces[-1].cached_tokens) == (
            answers[0],
            lengths[0],
            0,
        )
        chat.reset()
        assert chat.messages == [{"role": "system", "content": "Be brief."}]


def test_an_answer_that_is_left_stays_as_far_as_it_was_given(generator, theirs):
    chat = Conversation(generator, options=TextOptions(max_tokens=30, medusa=False))
    answer = chat.ask("Who?")
    given = text_of(next(answer) for _ in range(4))
    follow_up = list(chat.ask("What?"))  # the first answer ends here
    assert list(answer) == []
    assert chat.messages[1] == {"role": "assistant", "content": given}
    assert follow_up[-1].cached_tokens > 20
    assert text_of(follow_up) == generator.generate(chat.messages[:-1], chat.options).text


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("options", [{"medusa": False}, {}, {"tree": 5}])
def test_an_interrupt_in_any_pass_leaves_a_sound_conversation(generator, monkeypatch, at, options):
    """Ctrl-C in the ``at``-th pass of the second turn; the first pass reads the prompt."""
    chat = Conversation(generator, options=TextOptions(max_tokens=12, **options))
    list(chat.ask("Who?"))
    step, passes = type(generator.model).step, []

    def interrupted(self, *args):
        passes.append(1)
        hidden = step(self, *args)
        if len(passes) == at:
            raise KeyboardInterrupt
        return hidden

    monkeypatch.setattr(type(generator.model), "step", interrupted)
    pieces = []

    def listen():
        for piece in chat.ask("What?"):
            pieces.append(piece)

    with pytest.raises(KeyboardInterrupt):
        listen()
    monkeypatch.setattr(type(generator.model), "step", step)
    assert len(pieces) == at - 1
    if pieces:  # else nothing was said
        assert chat.messages[-1] == {"role": "assistant", "content": text_of(pieces)}
    text = text_of(chat.ask("Where?"))
    assert text == generator.generate(chat.messages[:-1], chat.options).text


def test_what_cannot_be_answered_is_not_remembered(generator):
    chat = Conversation(generator, options=TextOptions(max_tokens=10))
    list(chat.ask("Who?"))
    before = list(chat.messages)
    for question, message in (("x" * CONTEXT, "does not fit a context"), (" ", "prompt is empty")):
        with pytest.raises(OptionError, match=message):
            chat.ask(question)
    with pytest.raises(OptionError, match="there are 3"):
        chat.ask("What?", width=7)
    assert chat.messages == before
    text = text_of(chat.ask("What?"))
    assert text == generator.generate(chat.messages[:-1], chat.options).text


# ---- the command


def piped(folder, lines, *args):
    """(exit status, lines of standard output, standard error) of a chat whose questions come through a pipe."""
    found = subprocess.run(
        [sys.executable, "-m", "mlx_medusa.chat", "--model", folder, "--max-tokens", "15", *args],
        input=lines, capture_output=True, check=False,
    )  # fmt: skip
    return found.returncode, found.stdout.decode(), found.stderr.decode()


def test_a_piped_conversation(folder, heads, theirs):
    """Blank lines are no questions, and the input may end without q; standard output has the answers only."""
    answers, lengths = fresh(theirs, QUESTIONS)
    again, _ = fresh(theirs, QUESTIONS[1:])
    lines = "Who is it?\n\nAnd now?\nReally?\nh\nr\nAnd now?\nReally?"
    status, out, err = piped(folder, lines.encode(), "--heads", heads, "--stats")
    assert (status, out) == (0, "".join(text + "\n" for text in [*answers, *again]))
    assert f"prompt {lengths[0]} tokens, 0 of them kept" in err
    assert err.count(" 0 of them kept") == 2  # at the begin, and after r
    for part in ("q ends the chat", "a new chat", "cut at 15 tokens", "tokens per verify"):
        assert part in err
    assert piped(folder, b"Who is it?\nq\nAnd now?\n", "--no-medusa")[:2] == (0, answers[0] + "\n")
    assert piped(folder, b"") == (0, "", "")


def test_a_full_context_is_a_clear_stop(folder, theirs):
    """The chat goes on after r; that a question went without an answer is in the exit status."""
    short = fresh(theirs, ["Who?"], max_tokens=15)[0][0]
    question = "x" * (CONTEXT - 60)
    lines = f"{question}\n{question}\nr\nWho?\n"
    status, out, err = piped(folder, lines.encode())
    assert status == 1
    assert out.endswith("\n" + short + "\n")
    assert "Traceback" not in err
    assert f"tokens does not fit a context of {CONTEXT}" in err
    full = "x" * (CONTEXT - 24)  # its chat has 19 tokens more, which leaves 5
    status, out, err = piped(folder, f"{full}\n".encode())
    assert (status, len(out)) == (0, 6)
    assert err == f"chat: warning: the text was cut where the model's context of {CONTEXT} tokens was full\n"


@pytest.mark.parametrize(
    ("data", "args", "part"),
    [
        (b"\xff\xfe\n", (), "not UTF-8"),
        (b"a\n", ("--max-tokens", "0"), "max_tokens is 0"),
        (b"a\n", ("--temp", "-1"), "temp"),
        (b"a\n", ("--tree", "oak", "--no-medusa"), "without Medusa"),
        (b"a\n", ("--width", "2"), "convert with --heads"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(folder, data, args, part):
    status, out, err = piped(folder, data, *args)
    assert (status, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("chat: error: ")
    assert part in err


def test_a_model_of_speech_or_without_a_chat_template(tiny_en, tmp_path):
    status, _, err = piped(tiny_en, b"a\n")
    assert status == 1
    assert "python -m mlx_medusa.transcribe" in err
    status, _, err = piped(write_text_model(tmp_path / "plain", template=None), b"a\n")
    assert status == 1
    assert "no chat template" in err


def test_ctrl_c_stops_the_answer_and_not_the_program(generator, monkeypatch, capsys):
    step, passes = type(generator.model).step, []

    def interrupted(self, *args):
        passes.append(1)
        if len(passes) == 4:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(type(generator.model), "step", interrupted)
    chat = Conversation(generator, options=TextOptions(max_tokens=15, medusa=False))
    answer(chat, "Who?", stats=True)
    out, err = capsys.readouterr()
    assert out == chat.messages[-1]["content"] + "\n"
    assert len(out) == 4
    assert "(stopped)" in err
    answer(chat, "What?", stats=False)
    assert len(capsys.readouterr().out) > 4


def test_a_terminal_gets_a_prompt_and_ctrl_c_drops_a_line(folder):
    terminal = (  # a job in the background is started with Ctrl-C ignored, and would hand that on
        "import os, pty, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL);"
        "sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
    )
    chat = [sys.executable, "-m", "mlx_medusa.chat", "--model", str(folder), "--max-tokens", "5"]
    steps = [  # what is waited for, and what is typed then
        ("q ends the chat", b""),
        (">> ", b"not sent\x03"),
        ("(q ends the chat)", b""),
        (">> ", b"Who?\n"),
        ("cut at 5 tokens", b""),
        (">> ", b"q\n"),
    ]
    seen, end = "", time.monotonic() + 60
    with subprocess.Popen(
        [sys.executable, "-c", terminal, *chat], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        keys = b""
        for part, following in steps:
            while part not in seen:
                ready, _, _ = select.select([process.stdout], [], [], 2)
                if not ready and time.monotonic() > end:
                    process.kill()
                    pytest.fail(f"no {part!r} in {seen!r}")
                if not ready:
                    if b"\x03" in keys:  # Python's readline misses a signal right before it starts to wait
                        process.stdin.write(b"\x03")
                        process.stdin.flush()
                    continue
                seen += os.read(process.stdout.fileno(), 4096).decode(errors="replace")
            seen = seen.split(part, 1)[1]
            keys = following
            process.stdin.write(keys)
            process.stdin.flush()
        process.stdout.read()
        assert process.wait(timeout=30) == 0


def test_the_options_are_those_of_generate(folder, capfd, monkeypatch):
    """In this process, with a standard input that ends at once."""
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: PTH123, SIM115
    settings = ["--temp", "0.5", "--top-p", "0.9", "--seed", "1", "--system-prompt", "Be brief.", "--stats"]
    assert main([*settings, "--model", str(folder)]) == 0
    assert capfd.readouterr().out == ""
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
