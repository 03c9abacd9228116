"""`effjax train --fit` and `effjax memory --budget`."""

import itertools
import json
import os

import platformdirs
import pytest

from effjax.cli.fit import parse_fit
from effjax.cli.shell import describe_changes
from effjax.train.errors import TrainError
from effjax.train.host_memory import VARIABLE
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import memory_choices
from tests.cli.command import TINY, one_line
from tests.programs import needs_gpu_compiler
from tests.train.detection.coco import write_coco, write_detector
from tests.train.text.small import write_base, write_config

GB = 10**9
DETECTOR = "--data", "coco", "--weights", "rtdetr", "--image-size", "32", "--batch-size", "8"
FUSED = {"params_in": "host", "fuse_update": True}
OWN = """
import jax, jax.numpy as jnp

def slow(x):
    return jax.lax.fori_loop(0, 100_000, lambda i, row: jnp.sin(row), x[0])

def steps(batch):
    x = jax.ShapeDtypeStruct((batch, 256), jnp.float32)
    return {"large": (lambda x: x + 1, x), "small": (slow, x)}
"""


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("h100", ("h100", None)),
        ("4090", ("4090", None)),  # of which the planner suggests the name
        ("24GB", ("h200", 24 * GB)),
        ("22.5 GiB", ("h200", 22.5 * 2**30)),
        ("a100-40:500mb", ("a100-40", 500 * 10**6)),
        ("my/gpu.txtpb:2GB", ("my/gpu.txtpb", 2 * GB)),
    ],
)
def test_parse_fit(text, result):
    assert parse_fit(text) == result


@pytest.mark.parametrize("text", ["24", "0GB", "24TB", "h100:", "h100:x", "1e3GB", "-4GB:5"])
def test_parse_fit_rejects(text):
    with pytest.raises(TrainError, match="must be a size, such as 24GB"):
        parse_fit(text)


@pytest.mark.parametrize(
    ("argv", "chosen"),
    [
        (["train", "densenet", *TINY[2:]], dict(save="features")),
        (["train", "detector", *DETECTOR], dict(save="features")),
        (["finetune", "base", "--data", "base/rows.jsonl", "--max-length", "16"], FUSED),
    ],
)
def test_commands_take_the_options_that_fit(
    run_without_training, run, search, tmp_path, argv, chosen
):
    if argv[0] == "finetune":
        pytest.importorskip("tokenizers")
        write_base(tmp_path / "base")
    elif argv[1] == "detector":
        write_coco(tmp_path / "coco")
        write_detector(tmp_path / "rtdetr")
    out = run_without_training(*argv, "--fit", "h100:2GB", "--out", "here")
    options = "--save features" if "save" in chosen else "--params-in host --fuse-update"
    assert f"a table\noptions: {options}\n" in out
    (arguments,) = search
    assert (arguments["target"], arguments["budget"]) == ("h100", 2 * GB)
    # The limit that the run sets itself.
    assert arguments["host_memory_bytes"] == int(os.environ[VARIABLE]) * 2**30
    assert arguments["num_devices"] == 8
    stored = json.loads((tmp_path / "here" / "config.json").read_text())["options"]
    assert stored.items() >= chosen.items()

    code, out, err = run(*argv, "--fit", "1MB", "--out", "there")
    assert code == 1 and "a table" in out
    assert one_line(err) and "nothing fits. effjax memory " in err
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize(
    ("given", "number", "changes"),
    [
        ({}, 48, "--fuse-update --policy everything"),
        ({"params_in": "device"}, 24, "--fuse-update --policy everything"),
        (
            {"params_in": "host", "activations_in": "host"},
            12,
            "--fuse-update --policy everything",
        ),
        ({"fuse_update": False}, 48, "--policy everything"),
        ({"policy": "dots", "fuse_update": True}, 16, ""),
        ({"on_nan": "skip"}, 48, "--policy everything"),
        ({"batch_size": 6}, 24, "--fuse-update --policy everything"),
    ],
)
def test_given_options_stay(tmp_path, given, number, changes):
    file = write_config(tmp_path)
    config = FinetuneConfig(checkpoint=str(file), **{"batch_size": 64} | given).resolve()
    choices = memory_choices(config, {*given, "mlp_chunk_size"}, 1)
    names = "policy", "activations_in", "params_in", "num_microbatches"
    combinations = itertools.product(*(choices.options[name] for name in names))
    changed = [
        choices.change(**dict(zip(names, values, strict=True)), mlp_chunk_size=None)
        for values in combinations
    ]
    same = {name: getattr(config, name) for name in given}
    found = [one for one in changed if one is not None and vars(one).items() >= same.items()]
    assert len(found) == len(set(map(repr, found))) == number
    assert describe_changes(config, found[0]) == changes


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """Use another cache, with the same compilers; return its folder of plans."""
    compilers = platformdirs.user_cache_path("effjax") / "compilers"
    monkeypatch.setenv("EFFJAX_COMPILERS", os.environ.get("EFFJAX_COMPILERS", str(compilers)))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "effjax" / "plans"


@needs_gpu_compiler
def test_memory_of_a_module(run, empty_cache, tmp_path):
    (tmp_path / "own_fit.py").write_text(OWN)
    argv = "memory", "step", "own_fit:steps", "--batch-size", "1024", "--target", "l4"
    code, out, err = run(*argv, "--budget", "1.5MB")
    assert code == 0 and out.startswith("step=small: 1.1 MB at the peak fits in 1.5 MB")
    assert "large  " in out and "does not fit: " in out and "step=large: " in err
    code, out, _ = run(*argv, "--budget", "9MB", "--json")
    assert code == 0 and json.loads(out)["options"] == {"step": "large"}
    assert len(list(empty_cache.iterdir())) == 2


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_memory_of_models(run, empty_cache, tmp_path):
    write_config(tmp_path)
    given = "--policy", "dots", "--num-microbatches", "1", "--max-length", "32"
    code, out, _ = run("memory", "finetune", "config.json", *given, "--budget", "2MB")
    assert code == 0 and out.startswith("policy=dots, ") and "policy=everything" not in out
    last = out.splitlines()[-1]
    assert last.startswith("  effjax finetune CHECKPOINT ") and "--policy dots" in last
