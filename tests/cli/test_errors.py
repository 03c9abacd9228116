"""Wrong command lines: one line on stderr, or the help, no traceback, and the right exit code."""

import json

import numpy as np
import pytest

from effjax import convert
from tests.cli.command import is_escaped, odd_name, one_line
from tests.convert.pickles import Global, zipped


@pytest.mark.parametrize("argv", [[], ["train"]])
def test_no_command_shows_the_help(run, argv):
    code, out, err = run(*argv)
    assert code == 2 and "Usage: effjax" in out + err and "Traceback" not in err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "No such command 'trian'"),
        (["doctor", "--nope"], "--nope. See effjax doctor --help."),
        (["convert", "nowhere.pth", "--model", "alexnet", "--to", "new"], "--model alexnet must"),
        (["memory", "lm", "--batch-size", "many"], "'--batch-size'"),
        (["train", "densenet", "--validation", "1.5"], "--validation (=1.5) must be a share"),
        (["train", "densenet", "--coordinator", "host:1"], "must be given together"),
        (["train", "resnet", "--compare-plain"], "--compare-plain needs --dcn"),
        (["train", "lm", "--offload", "some"], "'--offload'"),
    ],
)
def test_wrong_options_are_one_line(run, tmp_path, argv, message):
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err
    assert not list(tmp_path.iterdir())


def test_long_messages_are_cut(run):
    """A key of a file or an option may have any length."""
    code, _, err = run("k" * 10**5)
    assert code == 2 and one_line(err) and len(err) < 3000
    assert "kk […] kk" in err and err.endswith("See effjax --help.\n")


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["convert", "in.safetensors", "--model", "resnet18", "--to", "new"], "--num-classes"),
        (["memory", "densenet"], "--batch-size"),
        (["train", "resnet"], "--freeze-stages"),
        (["train", "lm"], "--layers"),
        (["finetune", "base", "--data", "rows.jsonl"], "--seed"),
    ],
)
@pytest.mark.parametrize("value", [10**30, -1])
def test_integers_have_bounds(run, tmp_path, argv, option, value):
    code, out, err = run(*argv, option, value)
    assert (code, out) == (2, "") and one_line(err) and option[2:].split("-")[0] in err, err
    assert not list(tmp_path.iterdir())


def write_odd_files(kind):
    """Write a file with odd names."""
    if kind == "names":
        convert.save_weights("in.safetensors", {odd_name(): np.ones(2)})
    elif kind == "dtype":
        info = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}
        header = json.dumps({odd_name(): info}).encode()
        with open("in.safetensors", "wb") as file:
            file.write(len(header).to_bytes(8, "little") + header + b"1")
    elif kind == "pth":
        with open("in.pth", "wb") as file:
            file.write(zipped({"a": Global(f"os {odd_name().replace(chr(13), '')}")}))


@pytest.mark.parametrize(
    ("kind", "argv"),
    [
        ("names", ["convert", "in.safetensors", "--model", "resnet18", "--to", "new"]),
        ("dtype", ["convert", "in.safetensors", "--model", "resnet18", "--to", "new"]),
        ("pth", ["convert", "in.pth", "--model", "resnet18", "--to", "new"]),
        ("names", ["convert", "in.safetensors", "--model", odd_name(), "--to", "new"]),
        (None, ["convert", odd_name(".safetensors"), "--model", "resnet18", "--to", "new"]),
        (None, ["train", odd_name()]),
        (None, ["train", "lm", "--data", f"text:{odd_name()}"]),
        (None, ["train", "lm", "--data", "text:\x1b2J\x9b1m\u202e\udcff"]),
        (None, ["train", "lm", "--mesh", odd_name()]),
        (None, ["train", "lm", "--resume", odd_name()]),
        (None, ["memory", odd_name()]),
        (None, ["memory", "step", f"{odd_name()}:steps"]),
    ],
)
def test_names_in_errors_are_escaped(run, kind, argv):
    write_odd_files(kind)
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and one_line(err) and is_escaped(err), err


@pytest.mark.parametrize("path", ["run[1]", "run\udcff"])
def test_rejects_paths_that_orbax_cannot_read(run, tmp_path, path):
    convert.save_weights("in.safetensors", {"a": np.ones(2)})
    for argv in (
        ["train", "lm", "--layers", "1", "--width", "8", "--out", path],
        ["convert", "in.safetensors", "--model", "resnet18", "--to", path],
    ):
        code, _, err = run(*argv)
        assert code == 2 and one_line(err) and "must be UTF-8, without a [" in err
    assert [file.name for file in tmp_path.iterdir()] == ["in.safetensors"]
