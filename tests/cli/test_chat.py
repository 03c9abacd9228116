import io
import json
import signal
import sys

import jax
import pytest

from effjax.train.text.decode import printable_lines
from effjax.train.text.tiny import write_checkpoint

OPTIONS = "--max-tokens", "9", "--temperature", "0"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints") / "base"
    write_checkpoint(
        folder, num_hidden_layers=1, max_position_embeddings=999, initializer_range=1.0
    )
    return folder


@pytest.fixture
def talk(run, base, monkeypatch):
    """Send lines to the chat, and return its exit code, stdout and stderr."""

    def talk(*lines, options=OPTIONS):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", base, *options)

    return talk


def test_a_conversation(talk, run, base, tmp_path):
    """An answer is that to all messages before it, and /clear forgets them."""
    first, second = "for the class", "é?"
    code, out, err = talk(first, second, "", "/clear", first, "/exit", "unread")
    assert (code, err) == (0, "")
    (tmp_path / "a.txt").write_text(first)
    assert run("generate", base, "--prompts", "a.txt", "--out", "a.jsonl", *OPTIONS)[0] == 0
    answer = json.loads((tmp_path / "a.jsonl").read_text())["generated"]
    contents = ("user", first), ("assistant", answer), ("user", second)
    messages = [{"role": role, "content": content} for role, content in contents]
    (tmp_path / "b.jsonl").write_text(json.dumps({"messages": messages}))
    rest = run("generate", base, "--prompts", "b.jsonl", *OPTIONS)[1]
    shown = printable_lines(answer) + "\n"
    assert out == shown + rest + shown and rest != shown


def test_ctrl_c_stops_an_answer(talk, when_printed):
    _, whole, _ = talk("for the class", "and")
    when_printed(whole[:1], lambda: signal.raise_signal(signal.SIGINT))
    code, out, _ = talk("for the class")
    assert code == 0 and whole.startswith(out.removesuffix("\n")) and len(out) < len(whole) / 2

    def press_twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    when_printed(whole[:1], press_twice)
    assert talk("for the class")[::2] == (130, "effjax: interrupted\n")


def test_ctrl_c_after_a_stop_ends(talk, monkeypatch):
    """A stop ends an answer before its tokens end, and the next Ctrl-C is not that of an answer."""
    whole = talk("for the class")[1]
    lines = ["for the class"]

    def read_line(_):
        if not lines:
            signal.raise_signal(signal.SIGINT)
        return lines.pop()

    monkeypatch.setattr("builtins.input", read_line)
    ended = talk(options=["--stop", whole[2:4], *OPTIONS])
    assert ended == (130, f"{whole[:2]}\n", "effjax: interrupted\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [["--params-in", "host"], ["--mesh", f"fsdp={jax.device_count()}"]]
)
def test_places_of_the_parameters(talk, options):
    lines = "for the class", "é?"
    assert talk(*lines, options=[*options, *OPTIONS]) == talk(*lines)


def test_a_message_that_is_too_long_is_left_out(talk):
    options = "--context", "60", "--system", "a", *OPTIONS
    code, out, err = talk("x" * 99, "if", options=options)
    assert code == 0 and "must have fewer than 60. /clear starts a new one" in err
    assert talk("if", options=options) == (0, out, "") and out.strip()


def test_errors(refused, base, tmp_path):
    err = refused("chat", base, *OPTIONS, "--context", "99999")
    assert "--context 99999 must be at most" in err
    err = refused("chat", base, *OPTIONS, "--mesh", f"data={jax.device_count()}")
    assert "one prompt is completed at a time" in err
    config = tmp_path / "plain" / "tokenizer_config.json"
    write_checkpoint(config.parent)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": None}))
    assert "lacks a chat template" in refused("chat", "plain")
