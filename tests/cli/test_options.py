from tests.cli.command import TINY


def test_an_option_that_is_not_known(run):
    code, out, err = run(*TINY, "--dtype", "int8")
    assert (code, out) == (2, "") and "int8" in err and "Traceback" not in err
