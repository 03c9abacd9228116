"""The options of the commands, and their help."""

import dataclasses
import re

import pytest

from effjax.cli.distributed import OPTIONS as DISTRIBUTED
from effjax.train.images.config import DenseNetConfig, ResNetConfig
from effjax.train.lm.config import LMConfig
from tests.cli.command import one_line

CONFIGS = {"densenet": DenseNetConfig, "resnet": ResNetConfig, "lm": LMConfig}
# Options that are not stored in config.json.
OF_THE_COMMAND = {"out", "overwrite", "resume", *DISTRIBUTED}
OWN = {"densenet": {"fit"}, "resnet": {"fit", "compare_plain"}, "lm": {"fit", "plan"}}


@pytest.mark.parametrize("name", CONFIGS)
def test_options_are_the_fields_of_the_configuration(name):
    typer = pytest.importorskip("typer")
    from effjax.cli.app import app

    command = typer.main.get_command(app).commands["train"].commands[name]
    defaults = {param.name: param.default for param in command.params}
    fields = {field.name: field.default for field in dataclasses.fields(CONFIGS[name])}
    assert defaults.keys() == fields.keys() | OF_THE_COMMAND | OWN[name]
    assert {name: defaults[name] for name in fields} == fields
    assert all(param.help for param in command.params)


@pytest.mark.parametrize("command", ["train densenet", "train lm", "memory"])
def test_help_has_two_columns_on_a_narrow_terminal(run, monkeypatch, command):
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(*command.split(), "--help")
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert code == 0 and len(rows) > 30 and max(map(len, out.splitlines())) == 80
    assert not re.search(r"\S…", out)  # truncated text
    for row in rows:
        assert row[32:34] == "  ", row  # between the columns
    assert re.search(r"│ --batch-size <int> +\S", out) and "[default:\N{NO-BREAK SPACE}" in out


@pytest.mark.parametrize(
    ("argv", "number"),
    [
        (["convert", "in.npz", "--model", "resnet18", "--to", "new"], 1),
        (["memory", "densenet"], 13),
        (["train", "densenet"], 12),
        (["train", "resnet"], 9),
        (["train", "lm"], 14),
    ],
)
def test_integers_have_bounds(run, monkeypatch, tmp_path, argv, number):
    monkeypatch.setenv("COLUMNS", "80")
    _, help_text, _ = run(*argv, "--help")
    names = re.findall(r"│ (--[\w-]+) <int>", help_text)
    assert len(names) >= number
    for name in names:
        for value in (2**32, 10**30, -1):
            code, out, err = run(*argv, name, value)
            assert (code, out) == (2, "") and one_line(err) and name[2:].split("-")[0] in err, err
    assert not list(tmp_path.iterdir())
