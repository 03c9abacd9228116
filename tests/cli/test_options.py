"""Options are declared in a dataclass, and commands have them as they are declared there."""

import dataclasses
import json
import re
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from effjax.cli.distributed import OPTIONS
from effjax.train.errors import TrainError
from effjax.train.images.config import Config
from effjax.train.lm.config import LMConfig
from effjax.train.options import COUNT, Option, RunOptions, declared, fingerprint
from tests.cli.command import TINY

OF_THE_COMMAND = {"out", "overwrite", "resume", "fall_back", *OPTIONS}
MODELS = "densenet", "resnet", "lm"
OWN = {"densenet": set(), "lm": {"plan"}}


def params_of(*names: str) -> dict[str, Any]:
    """The parameters of a command, by name."""
    typer = pytest.importorskip("typer")
    from effjax.cli.app import app

    command: Any = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]
    return {param.name: param for param in command.params}


def text_of(option: Option, default: Any) -> str:
    """The help of an option."""
    unset = option.unset is not None and default is None
    return option.help + (f" (default: {option.unset})" if unset else "")


@pytest.mark.parametrize(
    ("command", "config", "no_option"),
    [("densenet", Config, {"dcn"}), ("lm", LMConfig, set())],
)
def test_every_field_is_an_option(command, config, no_option):
    params = params_of("train", command)
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    assert set(params) == set(fields) - no_option | OF_THE_COMMAND | OWN[command]
    for name, _, option, default in declared(config):
        param = params[name]
        assert param.opts == [f"--{name.replace('_', '-')}"]
        assert param.default == default == fields[name]
        assert param.help == text_of(option, default)
        assert param.rich_help_panel == option.panel


def test_options_of_resnet():
    params = params_of("train", "resnet")
    of_densenet = {"model", "growth_rate", "compression", "bn_size", "drop_rate"}
    shared = {one.name for one in declared(Config)} - of_densenet
    assert set(params) == shared | OF_THE_COMMAND | {"dcn", "compare_plain"}
    assert params["depth"].default == "18" and params["dcn"].default == "none"
    assert Config(model="resnet50").command == "resnet"


def test_the_help_shows_what_is_declared(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command, config in (("densenet", Config), ("lm", LMConfig)):
        code, out, _ = run("train", command, "--help")
        assert code == 0
        for _, kind, option, default in declared(config):
            assert text_of(option, default) in out
            assert get_origin(kind) is not Literal or "|".join(get_args(kind)) in out
            assert option.panel is None or f" {option.panel} " in out


@pytest.mark.parametrize("command", [f"train {name}" for name in MODELS] + ["memory"])
def test_the_help_has_two_columns_on_a_narrow_terminal(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(*command.split(), "--help")
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert code == 0 and len(rows) > 30 and max(map(len, out.splitlines())) == 80
    assert not re.search(r"\S…", out)  # a text that was cut off
    for row in rows:
        assert row[32:34] == "  ", row  # between the columns
    assert re.search(r"│ --batch-size <int> +\S", out) and "[default:\N{NO-BREAK SPACE}" in out


def test_none_is_within_bounds_only_where_it_is_a_choice():
    assert Config(growth_rate=None).growth_rate is None
    with pytest.raises(TrainError, match=r"growth_rate \(=0\) must be at least 1"):
        Config(growth_rate=0)
    with pytest.raises(TrainError, match="is not of effjax train lm, or of another version"):
        LMConfig.from_json({"layers": None})
    assert Config.from_json(dataclasses.asdict(Config(depth=40))) == Config(depth=40)


def test_checks_are_those_of_the_declaration():
    @dataclasses.dataclass(frozen=True)
    class Options(RunOptions):
        COMMANDS = "a test"
        command = property(lambda self: "test")
        size: Annotated[int, Option("Size.", bounds=COUNT)] = 1
        kind: Annotated[Literal["a", "b"], Option("Kind.")] = "a"
        unchecked: int = 0

    assert [one.name for one in declared(Options)] == ["size", "kind"]
    with pytest.raises(TrainError, match=r"^size \(=-1\) must be at least 1$"):
        Options(size=-1)
    with pytest.raises(TrainError, match=r"^kind \(='c'\) must be one of a, b$"):
        Options(kind="c")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TrainError, match="config.json is not of a test, or of another version"):
        Options.from_json({"length": 1})


@pytest.mark.parametrize(
    "argv",
    [
        ["--dtype", "int8"], ["--epochs", "many"], ["--epochs", "1.5"], ["--learning-rate", ""],
        ["--validation", "tenth"], ["--seed", "1e3"], ["--batch", "8"], ["--out"],
    ],
)  # fmt: skip
def test_a_wrong_value_names_its_option_on_one_screen(run, argv):
    code, out, err = run(*TINY, *argv)
    assert (code, out) == (2, "") and argv[0] in err and "Traceback" not in err
    assert len(err.splitlines()) < 10


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("epochs", "3", "an integer"), ("epochs", True, "an integer"), ("seed", 1.0, "an integer"),
        ("learning_rate", "0.1", "a number"), ("learning_rate", None, "a number"),
        ("depth", 22.0, "an integer or null"), ("efficient", 1, "true or false"),
        ("data", 3, "text"), ("schedule", None, "one of cosine, step"),
    ],
)  # fmt: skip
def test_a_value_of_another_type_names_its_option(name, value, words):
    options: Any = {name: value}
    with pytest.raises(TrainError, match=rf"^{name} \(={value!r}\) must be {words}$"):
        Config(**options)
    with pytest.raises(TrainError, match=rf"config.json is not of .*{name} \(=.* must be {words}"):
        Config.from_json(options)


def test_what_a_run_of_before_did():
    """It had no validation set."""
    for config in (Config(validation=0), LMConfig(validation=0)):
        options = dataclasses.asdict(config)
        del options["validation"]
        assert type(config).from_json(options) == config
    assert Config(validation=5000).validation == 5000


def test_a_fingerprint_is_of_all_options_but_the_place_of_the_data():
    options = dataclasses.asdict(Config())
    assert fingerprint(options) == fingerprint(json.loads(json.dumps(options)))
    assert fingerprint(options) == fingerprint(options | {"data": "cifar10:elsewhere"})
    assert fingerprint(options) != fingerprint(options | {"momentum": 0.8})
