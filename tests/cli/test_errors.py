"""Wrong command lines: one line on stderr, or the help, no traceback, and the right exit code."""

import json
import re
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest

from effjax import convert
from effjax.cli.chat import ChatOptions
from effjax.cli.memory import FunctionOptions
from effjax.cli.options import RunOptions
from effjax.cli.other_names import NAMES
from effjax.train.errors import TrainError
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.tiny import write_checkpoint
from tests.cli.command import TINY, is_escaped, odd_name, one_line
from tests.convert.decoders import WRONG_NUMBERS
from tests.convert.pickles import Global, zipped

TO_NEW = "--model", "resnet18", "--to", "new"
ONE_OF_TWO = "--num-processes", "2", "--process-id", "0"


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
        (["train", "densenet", "--validation", "1.5"], "--validation (=1.5) must be a share"),
        (["train", "densenet", "--coordinator", "host:1"], "must be given together"),
        ([*TINY, "--coordinator", "host", *ONE_OF_TWO], "--coordinator (=host) must be HOST:PORT"),
        ([*TINY, "--batch-size", "12"], "--batch-size (=12)"),
        ([*TINY, "--model", "vgg"], "--model (='vgg')"),
        ([*TINY, "--model", "resnet50"], "Use effjax train resnet --model resnet50."),
        ([*TINY, "--model", "wide_resnet50_2"], "Use effjax train resnet --model wide_resnet50_2."),
        ([*TINY, "--freeze-stages", "1"], "--freeze-stages (=1) needs --init-from"),
        (["train", "densenet", "--resume", "here", "--fit", "1GB"], "--fit cannot be combined"),
        (["train", "resnet", "--compare-plain"], "--compare-plain needs --dcn"),
        (["finetune", "base", "--params-in", "some"], "'--params-in'"),
        ([*TINY, "--fit", "24"], "--fit '24' must be a size, such as 24GB"),
        ([*TINY, "--fit", "h300"], "must be one of h200"),
        ([*TINY, "--fit", "l4:99GB"], "must be at most the memory of NVIDIA L4"),
        (["finetune", "base", "--seed", "1", "--seed=2"], "--seed is given 2 times. Give one."),
        (["memory", "resnet", "--seed", "1", "--seed=2"], "--seed is given 2 times"),
        (["memory", "finetune", "--batch-size", "many"], "'--batch-size'"),
        (["memory", "resnet", "base"], "unexpected extra argument"),
        (["memory", "resnet", "--max-length", "8"], "No such option: --max-length"),
        (["memory", "finetune12"], "No such command 'finetune12'"),
        (["memory", "finetune"], "finetune needs CHECKPOINT"),
        (["memory", "finetune", "nowhere"], "nowhere: not found"),
        (["memory", "finetune", "base", "--width", "8"], "No such option: --width"),
        (["memory", "resnet", "--depth", "77"], "--depth (=77) must be one of"),
        (["memory", "densenet", "--layers", "2"], "No such option: --layers"),
        (["memory", "densenet", "--budget", "a lot"], "--budget 'a lot' must be a size"),
        (["memory", "densenet", "--budget", "1GB", "--max-batch"], "combined with --max-batch"),
        (["memory", "densenet", "--budget", "1GB", "--only", "plain"], "combined with --only"),
    ],
)
def test_wrong_options_are_one_line(refused, tmp_path, argv, message):
    assert message in refused(*argv)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["finetune", "base", "--load-in-4bit"], "Use --quantize nf4 (with --lora). See effjax"),
        (["finetune", "base", "--lora_r=16"], "Use --lora (the rank)."),
        (["finetune", "base", "-r", "16"], "No such option: -r. Use --lora (the rank)."),
        (["finetune", "--model_name_or_path", "base"], "Use the argument CHECKPOINT."),
        (["finetune", "base", "--per-device-train-batch-size", "1"], "Use --batch-size (rows of"),
        (["memory", "finetune", "base", "--max_seq_length=8"], "Use --max-length."),
        (["finetune", "base", "--batch_size", "8"], "No such option: --batch_size. Use --batch-si"),
        (["generate", "base", "--max-new-tokens", "8"], "Use --max-tokens."),
        (["merge", "run", "--base-model", "base"], "Use --base."),
        (["train", "resnet", "--num_epochs", "8"], "Use --epochs."),
        # Of options that the command lacks, and of misspelled ones, typer's message stays.
        (["merge", "run", "--load-in-4bit"], "--load-in-4bit. See effjax merge --help."),
        (["finetune", "base", "--batch-siz", "8"], "(Possible options: --batch-size). See effjax"),
    ],
)
def test_names_of_other_programs(refused, argv, hint):
    assert hint in refused(*argv)


def all_params(command):
    for child in getattr(command, "commands", {}).values():
        yield from all_params(child)
    yield from command.params


def test_other_names_stand_for_options():
    typer = pytest.importorskip("typer")
    from effjax.cli.app import app

    params = {param.name for param in all_params(typer.main.get_command(app))}
    options, kinds = {name.replace("_", "-") for name in params}, get_type_hints(FinetuneConfig)
    for own, _, note in NAMES:
        name, _, value = own.partition(" ")
        assert name in params
        kind = str(kinds.get(name))
        assert not value or "Literal" not in kind or f"'{value}'" in kind
        assert {*re.findall("--([a-z-]+)", note)} <= options


def test_long_messages_are_cut(refused):
    """A key of a file or an option may have any length."""
    err = refused("k" * 10**5)
    assert len(err) < 3000 and "kk […] kk" in err and err.endswith("See effjax --help.\n")


@pytest.mark.parametrize(
    ("argv", "option"),
    [
        (["convert", "in.safetensors", *TO_NEW], "--num-classes"),
        (["memory", "densenet"], "--batch-size"),
        (["train", "resnet"], "--freeze-stages"),
        (["finetune", "base", "--data", "rows.jsonl"], "--seed"),
    ],
)
@pytest.mark.parametrize("value", [10**30, -1])
def test_integers_have_bounds(refused, tmp_path, argv, option, value):
    assert option[2:].split("-")[0] in refused(*argv, option, value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("digits", [400, 5000])
@pytest.mark.parametrize(
    ("option", "form"), [("--stop-after", "{}h"), ("--fit", "{}GB"), ("--mesh", "data={}")]
)
def test_texts_with_large_numbers(refused, option, form, digits):
    """Python converts no text of more than 4300 digits."""
    assert "must" in refused(*TINY, option, form.format("9" * digits))


@pytest.mark.parametrize("command", [RunOptions, ChatOptions, FunctionOptions])
def test_all_numbers_have_bounds(command):
    needed = {"checkpoint": "m"} if command is ChatOptions else {}
    for name, hint in get_type_hints(command).items():
        for value in WRONG_NUMBERS if {int, float} & {hint, *get_args(hint)} else ():
            with pytest.raises(TrainError, match=f"`{name}`"):
                command(**needed, **{name: value})


@pytest.mark.parametrize(
    ("package", "argv", "extra"),
    [
        ("typer", ["train", "densenet", "--help"], "train"),
        ("rich", ["train", "densenet", "--help"], "train"),
        ("tokenizers", ["finetune", "base", "--data", "rows.jsonl"], "finetune"),
        ("tokenizers", ["generate", "base", "--prompt", "a"], "finetune"),
        ("transformers", ["generate", "base", "--prompt", "a"], "finetune"),
    ],
)
def test_missing_packages(run, refused, monkeypatch, tmp_path, package, argv, extra):
    if extra == "finetune":
        write_checkpoint(tmp_path / "base")
    monkeypatch.setitem(sys.modules, package, None)
    assert f'{package} is missing. Run pip install ".[{extra}]" in a clone' in refused(*argv)
    if extra == "train":
        code, out, _ = run("doctor", "--json")
        assert code == 0 and json.loads(out)["devices"]


def write_odd_files():
    """Write files with odd names: of an array, of a dtype, and of a function."""
    convert.save_weights("names.safetensors", {odd_name(): np.ones(2)})
    info = {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}
    header = json.dumps({odd_name(): info}).encode()
    Path("dtype.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"1")
    Path("in.pth").write_bytes(zipped({"a": Global(f"os {odd_name().replace(chr(13), '')}")}))


@pytest.mark.parametrize(
    "argv",
    [
        ["convert", "names.safetensors", *TO_NEW],
        ["convert", "dtype.safetensors", *TO_NEW],
        ["convert", "in.pth", *TO_NEW],
        ["convert", "names.safetensors", "--model", odd_name(), "--to", "new"],
        ["convert", odd_name(".safetensors"), *TO_NEW],
        ["train", odd_name()],
        ["finetune", odd_name(), "--data", "rows.jsonl"],
        ["finetune", "\x1b2J\x9b1m\u202e\udcff", "--data", "rows.jsonl"],
        ["train", "densenet", "--mesh", odd_name()],
        ["finetune", "--resume", odd_name()],
        ["memory", odd_name()],
        ["memory", "step", f"{odd_name()}:steps"],
    ],
)
def test_names_in_errors_are_escaped(refused, argv):
    write_odd_files()
    assert is_escaped(refused(*argv))


@pytest.mark.parametrize("path", ["run[1]", "run\udcff"])
def test_rejects_paths_that_orbax_cannot_read(run, tmp_path, path):
    convert.save_weights("in.safetensors", {"a": np.ones(2)})
    for argv in (
        [*TINY, "--out", path],
        ["convert", "in.safetensors", "--model", "resnet18", "--to", path],
    ):
        code, _, err = run(*argv)
        assert code == 2 and one_line(err) and "must be UTF-8, without a [" in err
    assert [file.name for file in tmp_path.iterdir()] == ["in.safetensors"]
