"""The network of the quickstart notebook."""

import functools
import json
import types

from tests.distributed.processes import ROOT

NOTEBOOK = ROOT / "notebooks" / "quickstart.ipynb"


@functools.cache
def network() -> types.SimpleNamespace:
    """Return the names that the cells tagged `network` define."""
    names: dict = {"__name__": "network"}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if "network" in cell["metadata"].get("tags", ()):
            exec(compile("".join(cell["source"]), NOTEBOOK, "exec"), names)
    return types.SimpleNamespace(**names)
