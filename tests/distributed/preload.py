"""The imports of the programs of a `Group`, which its processes share."""

import matplotlib.figure  # noqa: F401
import orbax.checkpoint  # noqa: F401
import pytest  # noqa: F401
import rich.progress  # noqa: F401

import effjax.cli.app
import effjax.train.images.task
import effjax.train.text.task  # noqa: F401
