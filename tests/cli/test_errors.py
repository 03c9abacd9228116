"""Wrong command lines: one line on stderr, or the help, no traceback, and the right exit code."""

import pytest

from tests.cli.command import one_line


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
        (["train", "densenet", "--validation", "1.5"], "`validation` (=1.5) must be a share"),
        (["train", "densenet", "--coordinator", "host:1"], "must be given together"),
        (["train", "resnet", "--compare-plain"], "--compare-plain needs --dcn"),
        (["train", "lm", "--offload", "some"], "'--offload'"),
    ],
)
def test_wrong_options_are_one_line(run, tmp_path, argv, message):
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err
    assert not list(tmp_path.iterdir())
