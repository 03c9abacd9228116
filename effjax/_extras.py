"""The command that installs an extra of effjax."""


def install_command(extra: str) -> str:
    """Return how to install an extra, as the end of a sentence."""
    # There is no distribution on PyPI yet, so `pip install "effjax[train]"` would fail.
    return f'pip install ".[{extra}]" in a clone of effjax'
