"""Helpers of the tests of the commands."""

TINY = ["train", "densenet", "--depth", "10", "--growth-rate", "4"]


def one_line(err: str) -> bool:
    """Return True for the one line of an error of the user."""
    return err.startswith("effjax: ") and err.endswith("\n") and err.count("\n") == 1


def odd_name(ending=""):
    """Return a name with escape sequences, a bidirectional override, mathtext, markup and emoji."""
    return f"\x1b2J\x9b1m\u202e\x7f\r$x_^$:cat:{ending}"


def is_escaped(text):
    """Return True if a terminal shows the text as it is."""
    return (
        all(char.isprintable() or char == "\n" for char in text) and r"\x1b2J\x9b1m\u202e" in text
    )
