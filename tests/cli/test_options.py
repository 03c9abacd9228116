"""Options are declared in a dataclass, and commands have them as they are declared there."""

import dataclasses
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from effjax.train.errors import TrainError
from effjax.train.images.config import Config
from effjax.train.lm.config import LMConfig
from effjax.train.options import COUNT, MODEL, Option, RunOptions, declared
from tests.cli.command import TINY

OF_THE_COMMAND = {"out", "overwrite", "resume"}


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
    [("densenet", Config, {"deformable"}), ("lm", LMConfig, set())],
)
def test_every_field_is_an_option(command, config, no_option):
    params = params_of("train", command)
    fields = {field.name: field.default for field in dataclasses.fields(config)}
    assert set(params) == set(fields) - no_option | OF_THE_COMMAND
    for name, _, option, default in declared(config):
        param = params[name]
        assert param.opts == [f"--{name.replace('_', '-')}"]
        assert param.default == default == fields[name]
        assert param.help == text_of(option, default)
        assert param.rich_help_panel == option.panel


def test_options_of_deform_resnet():
    """Those of the run but for the model's, with defaults of its own."""
    params = params_of("train", "deform-resnet")
    fields = {one.name: one for one in declared(Config)}
    shared = {name for name, one in fields.items() if one.option.panel != MODEL} - {"flip"}
    assert set(params) == shared | OF_THE_COMMAND | {"baseline"}
    for name in shared:
        assert params[name].help == text_of(fields[name].option, params[name].default)
    other = {name: params[name].default for name in shared}
    other = {name: value for name, value in other.items() if value != fields[name].default}
    assert other == {
        "data": "rotated-digits", "augment": False,
        "epochs": 5, "learning_rate": 0.05, "weight_decay": 5e-4,
    }  # fmt: skip


def test_the_help_shows_what_is_declared(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command, config in (("densenet", Config), ("lm", LMConfig)):
        code, out, _ = run("train", command, "--help")
        assert code == 0
        for _, kind, option, default in declared(config):
            assert text_of(option, default) in out
            assert get_origin(kind) is not Literal or "|".join(get_args(kind)) in out
            assert option.panel is None or f" {option.panel} " in out


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
        size: Annotated[int, Option("Size.", bounds=COUNT)] = 1
        kind: Annotated[Literal["a", "b"], Option("Kind.")] = "a"
        unchecked: int = 0

    assert [one.name for one in declared(Options)] == ["size", "kind"]
    with pytest.raises(TrainError, match=r"^size \(=-1\) must be at least 1$"):
        Options(size=-1)
    with pytest.raises(TrainError, match=r"^kind \(='c'\) must be one of a, b$"):
        Options(kind="c")
    with pytest.raises(TrainError, match="config.json is not of a test, or of another version"):
        Options.from_json({"length": 1})


def test_an_option_that_is_not_known(run):
    code, out, err = run(*TINY, "--dtype", "int8")
    assert (code, out) == (2, "") and "int8" in err and "Traceback" not in err
