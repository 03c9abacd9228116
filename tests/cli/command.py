"""What the tests of all commands share besides fixtures."""

TINY = ["train", "densenet", "--depth", "10", "--growth-rate", "4"]


def one_line(err: str) -> bool:
    """Whether it is what `effjax` says of an error of the user's."""
    return err.startswith("effjax: ") and err.endswith("\n") and err.count("\n") == 1
