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
        (["--nope"], "No such option: --nope"),
        (["doctor", "--nope"], "--nope. See effjax doctor --help."),
        (["convert", "nowhere.pth", "--to", "new"], "Missing option '--model'"),
        (["convert", "nowhere.pth", "--model", "alexnet", "--to", "new"], "model (=alexnet)"),
        (["memory"], "Missing argument"),
        (["memory", "lm", "--batch-size", "many"], "'--batch-size'"),
        (["train", "vgg"], "No such command 'vgg'"),
        (["train", "densenet", "--epochs", "x"], "'--epochs'"),
        (["train", "densenet", "--epochs", "0"], "'--epochs'"),
        (["train", "densenet", "--save", "all"], "'--save'"),
        (["train", "densenet", "--batch", "8"], "No such option: --batch"),
        (["train", "densenet", "--out"], "'--out' requires an argument"),
        (["train", "densenet", "--validation", "1.5"], "validation (=1.5) must be a share"),
        (["train", "densenet", "--coordinator", "host:1"], "must be given together"),
        (["train", "resnet", "--depth", "20"], "depth (=20) must be one of 8, 18, 34"),
        (["train", "resnet", "--compare-plain"], "--compare-plain needs --dcn"),
        (["train", "lm", "--offload", "some"], "'--offload'"),
        (["train", "lm", "--width", "7"], "width (=7) must be divisible"),
    ],
)
def test_wrong_options_are_one_line(run, tmp_path, argv, message):
    code, out, err = run(*argv)
    assert (code, out) == (2, "") and one_line(err) and message in err, err
    assert not list(tmp_path.iterdir())
