"""The program and the shell script in docs/distributed.md."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.distributed.processes import ROOT, environment

PAGE = ROOT / "docs" / "distributed.md"


@pytest.mark.exhaustive
def test_the_script_starts_four_processes(tmp_path):
    page = PAGE.read_text()
    program, script = (
        re.findall(rf"^```{language}\n(.*?)^```", page, re.M | re.S)[0]
        for language in ("python", "bash")
    )
    (tmp_path / "train.py").write_text(program)
    paths = {"PATH": f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    options = dict(cwd=tmp_path, env=environment() | paths | {"PYTHONPATH": str(ROOT)})
    run = ["bash", "-c", script]
    done = subprocess.run(run, capture_output=True, text=True, timeout=540, **options)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^step \d: loss (\S+) over 4 devices$", done.stdout, re.M)
    assert len(found) == 3 and float(found[2]) < float(found[0])
    # The script fails where they do.
    broken = {"env": options["env"] | {"JAX_PLATFORMS": "none"}}
    assert subprocess.run(run, capture_output=True, timeout=540, **options | broken).returncode
