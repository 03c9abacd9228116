import dataclasses
import json
import re
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from effjax.cli import answer, planning
from effjax.cli.shell import training_command
from effjax.memory import PlanError, list_targets
from effjax.memory.devices import find_target
from effjax.memory.plan import DEFAULT_TARGET
from effjax.train.task import Form
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import smaller_configs
from tests.cli.command import one_line
from tests.programs import needs_gpu_compiler
from tests.train.text.small import write_config

OWN = """
import jax, jax.numpy as jnp

def one(batch):
    return lambda x: x + 1, jax.ShapeDtypeStruct((batch, 256), jnp.float32)

def two(batch):
    return {"sum": (jnp.sum, *one(batch)[1:]), "sin": (jnp.sin, *one(batch)[1:])}

def wrong(batch):
    return batch

def by_four(batch):
    w = jax.ShapeDtypeStruct((256, 8), jnp.float32)
    return lambda w, x: (x.reshape(4, -1, 256) @ w).sum(), w, one(batch)[1]

def on_host(batch):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((2**22, 256), jnp.float32, sharding=place)
    return lambda x: jax.device_put(x[0], jax.memory.Space.Device) + 1, x

def spans(batch):
    mesh = jax.make_mesh((8,), ("rows",), (jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.P("rows"))
    x = jax.ShapeDtypeStruct((batch, 256), jnp.float32, sharding=rows)
    specs = dict(mesh=mesh, in_specs=jax.P("rows"), out_specs=jax.P("rows"))
    return jax.shard_map(lambda x: x + 1, **specs), x

def fails(batch):
    def step(x):
        return x @ x
    return step, one(batch)[1]

def raises(batch):
    return {}["no such key"]

def refused(batch):
    kernel = jax.ffi.ffi_call("TopK", one(batch)[1])  # which returns a tuple
    return {"top_k": (lambda x: kernel(x), one(batch)[1]), "sum": one(batch)}
"""
MODULES = {"own_step": OWN, "mistaken": "x = 1\nx x\n", "exits": "import sys\nsys.exit(0)\n"}
GIB = 2**30
LIMITS = planning.Limits(find_target("h100"), 0.75, GIB)


def compiled(err, *names):
    """Return True if stderr has a line per program with its peak and seconds."""
    found = re.findall(r", (.+): .+B at the peak, \d+\.\d s$", err, re.MULTILINE)
    return f", {len(names)} in all: " in err and sorted(found) == sorted(names)


@pytest.fixture
def run_memory(run, tmp_path, monkeypatch):
    """Run `effjax memory` in a folder with the modules above."""
    for name, source in MODULES.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)
    return lambda *argv: run("memory", *argv)


@needs_gpu_compiler
def test_steps_of_a_module(run_memory, tmp_path):
    options = "--batch-size", "4", "--target", "l4", "--plot", "a.png"
    code, out, err = run_memory("step", "own_step:two", *options)
    assert code == 0 and compiled(err, "sum", "sin")
    assert out.splitlines()[0].split()[:2] == ["peak", "ratio"]
    assert "sin: 8.2 kB at the peak fits in 17.7 GB (75% of NVIDIA L4)" in out
    assert "modelled time of a call, at published peak rates (not measured)" in out
    assert (tmp_path / "a.png").stat().st_size > 1000


@needs_gpu_compiler
def test_max_batch(run_memory):
    largest = int(0.0001 * 22 * 2**30) // 2048
    limit = "--max-batch", "--target", "l4", "--memory-fraction", "0.0001"
    # The search starts at the answer, to compile two programs only.
    code, out, err = run_memory("step", "own_step:one", *limit, "--batch-size", largest)
    assert code == 0 and f"{largest}, {largest + 1}" in out
    assert f"batch {largest}: " in err and f"batch {largest + 1}: " in err


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_batch_split_over_devices_and_host_memory(run_memory):
    argv = "step", "own_step:by_four", "--batch-size", "4096", "--json"
    arguments = []
    for more in [], ["--num-devices", "4"]:
        code, out, err = run_memory(*argv, *more)
        assert code == 0 and ("over 4 devices" in err) == bool(more), err
        arguments.append(json.loads(out)["by_four"]["device"]["arguments"])
    kernel, batch = 4 * 256 * 8, 4 * 4096 * 256
    assert arguments == [kernel + batch, kernel + batch // 4]
    code, out, err = run_memory(*argv, "--num-devices", "4", "--budget", "1GB")
    assert code == 0 and "over 4 devices" in err, err
    plan = json.loads(out)["plan"]
    assert plan["num_devices"] == 4 and plan["device"]["arguments"] == arguments[1]
    code, out, _ = run_memory("step", "own_step:on_host", "--host-memory-gb", "3")
    assert code == 1 and "4.3 GB of pinned host memory DOES NOT FIT in 3.2 GB" in out
    code, _, err = run_memory("step", "own_step:on_host", "--num-devices", "4")
    assert code == 1 and one_line(err.splitlines(keepends=True)[-1]) and "none grows" in err


@needs_gpu_compiler
def test_rejects_wrong_number_of_devices(run_memory):
    code, _, err = run_memory("step", "own_step:spans", "--num-devices", "4")
    assert code == 2 and "must be the number of devices in the shardings" in err
    assert "in_shardings" not in err


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_densenet(run_memory):
    argv = "densenet", "--depth", "10", "--growth-rate", "1", "--image-size", "4"
    more = "--only", "effjax conv", "--batch-size", "4", "--num-devices", "2"
    code, out, err = run_memory(*argv, *more)
    assert code == 0 and compiled(err, "effjax conv")
    assert "The fastest form that fits is 'effjax conv'" in out and "plain" not in out
    code, out, _ = run_memory(*argv, *more, "--details")
    assert "all-reduce" in out and "each of 2" in out


@pytest.mark.exhaustive
@needs_gpu_compiler
def test_language_model(run_memory, tmp_path):
    write_config(tmp_path)
    size = "--max-length", "4", "--batch-size", "2", "--param-dtype", "float32"
    options = "--num-microbatches", "2", "--policy", "dots"
    name = "offload all, fused"
    argv = "finetune", "config.json", *size, *options, "--only", name, "--json"
    code, out, err = run_memory(*argv)
    assert code == 0 and compiled(err, name)
    host = json.loads(out)["forms"][name]["plan"]["host"]
    # Parameters and two moments, and scalars.
    assert host["arguments"] == host["aliased"] == 3 * 4 * 43168


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["step", "no_such_module:f"], "there is no module no_such_module"),
        (["step", "own_step:nothing"], "own_step has no function 'nothing'"),
        (["step", "own_step:wrong"], "must return (fun, *args) or a dictionary of such tuples"),
        (["step", "own_step:one", "--target", "h300"], "must be one of h200"),
        (["step", "own_step:one", "--target", "4090"], "Did you mean rtx4090?"),
        (["step", "own_step:two", "--only", "cos"], "--only 'cos' must be one of 'sum', 'sin'"),
        (["step", "own_step:one", "--plot", "no/where.png"], "must be a file in an existing"),
        (["step", "own_step:one", "--depth", "22"], "No such option: --depth"),
        (["step", "own_step.one"], "give MODULE:FUNCTION"),
        (["step", "own_step:one", "--multiple-of", "2"], "needs --max-batch"),
        (["resnet", "--model", "resnext50_1x1d"], "--model (='resnext50_1x1d') must be one of"),
        (["step", "a:b", "--budget", "1GB", "--memory-fraction", "1"], "with --memory-fraction"),
    ],
)
def test_usage_errors(run_memory, argv, message):
    code, out, err = run_memory(*argv)
    last = err.splitlines(keepends=True)[-1]  # some errors come when the first step is built
    assert (code, out) == (2, "") and one_line(last) and message in last, err


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--on-nan", "skip"], "'in memory', 'jax.checkpoint', 'offload activations', "),
        (["--params-in", "host"], "must be one of 'as given'"),  # the form that the option chooses
        (["--data", "here.jsonl"], "effjax: a plan reads no data and no weights; unused: --data\n"),
    ],
)
def test_forms_of_a_language_model(run_memory, tmp_path, options, text):
    write_config(tmp_path)
    code, _, err = run_memory("finetune", "config.json", *options, "--only", "none")
    assert code == 2 and one_line(err.splitlines(keepends=True)[-1]) and text in err


def planned(device, host=0):
    """Return what a row reads of the plan of a step of these bytes, for an H100 with 1 GiB."""
    fits = device <= LIMITS.device_bytes and host <= GIB
    return cast(Any, SimpleNamespace(
        peak_device_bytes=device, peak_host_bytes=host, refusal="", fits=fits, step_seconds=1.0,
        step_time=SimpleNamespace(recomputed_flops=0, total_flops=1),
    ))  # fmt: skip


def no_step(config):
    return (lambda: None,)


@pytest.mark.parametrize(("step_bytes", "phase"), [(3.0e9, "step"), (1.1e9, "saving")])
def test_names_the_phase_that_needs_the_most_host_memory(step_bytes, phase):
    """A run whose step needs little more than its state needs the most while it saves it."""
    form = Form(FinetuneConfig().resolve(), no_step)
    row = planning.Row("offloaded", form, LIMITS, (0, 10**9), planned(0, int(step_bytes)))
    text = answer.describe_nearest(row)
    assert f"short on the host, because of the activations, in the phase {phase!r}" in text
    assert phase in str(answer.phases_report([row])).splitlines()[-1]


def test_says_that_a_time_is_a_lower_bound():
    config, plan = FinetuneConfig(batch_size=2, max_length=512).resolve(), planned(10**6)
    plan.step_time = SimpleNamespace(**vars(plan.step_time), is_lower_bound=True, seconds=1.0)
    row = planning.Row("in memory", Form(config, no_step), LIMITS, plan=plan)
    table = str(answer.forms_report([row], config))
    assert re.search("≥ 1.0 s +≤ 1024 ", table)  # tokens a second
    assert "≥ 1.0 s a step" in answer.describe_fastest(row)


def test_finds_the_first_change_that_fits(monkeypatch):
    """Steps are compiled one after the other; one that the compiler refuses is left out."""
    config, compiled = FinetuneConfig(checkpoint="a/b", batch_size=16).resolve(), []

    def compile_rows(rows, run):
        (row,) = rows
        compiled.append(row.form.config.batch_size)
        if compiled[-1] == 4:
            raise PlanError("refused")
        row.plan = planned(compiled[-1] * 15 * 10**9)

    monkeypatch.setattr(planning, "compile_rows", compile_rows)
    row = planning.Row("in memory", Form(config, no_step), LIMITS, plan=planned(240 * 10**9))
    run = planning.PlannedRun(config, {"batch_size": 16}, {}, smaller_configs, 1)
    smaller = planning.find_smaller(row, run)
    assert smaller is not None and compiled == [8, 4, 2]
    assert answer.describe_smaller(row, smaller) == "With --batch-size 2 it fits."
    command = "effjax finetune a/b --data FILE.jsonl --batch-size 2"
    given = {"checkpoint": "a/b", "batch_size": 16}
    assert training_command(FinetuneConfig, given, smaller.form.config, LIMITS) == command
    none = run._replace(smaller_configs=lambda config, of_state: iter(()))
    assert planning.find_smaller(row, none) is None


@pytest.mark.parametrize(
    ("checkpoint", "typed", "note"),
    [
        ("here", "here", ""),
        ("a/b", "a/b", "downloads the weights of a/b"),
        ("config.json", "CHECKPOINT", "which config.json lacks"),
        ("without", "CHECKPOINT", "which without lacks"),
    ],
)
def test_says_that_weights_are_needed(monkeypatch, tmp_path, checkpoint, typed, note):
    monkeypatch.chdir(tmp_path)
    for name in "here", "without":
        (tmp_path / name).mkdir()
    for file in "config.json", "without/config.json", "here/model.safetensors":
        (tmp_path / file).touch()
    given = {"checkpoint": checkpoint, "data": ["x y.jsonl"], "packing": False}
    config = FinetuneConfig(**given).resolve()
    run = planning.PlannedRun(config, given, {}, smaller_configs, 1)
    assert note in answer.describe_weights(run) and bool(answer.describe_weights(run)) == bool(note)
    command = training_command(FinetuneConfig, given, config, LIMITS)
    assert command == f"effjax finetune {typed} --data 'x y.jsonl' --no-packing"


LEAST = "--optimizer", "adamw8bit", "--lora", "16", "--quantize", "nf4"


@pytest.mark.parametrize(
    ("layers", "options", "short", "end"),
    [
        # State alone: only the step that may fit is compiled.
        pytest.param(
            128, (), "the optimizer state, in all phases of a run. With --optimizer adamw8bit it",
            "--params-in host --fuse-update --optimizer adamw8bit", marks=pytest.mark.exhaustive,
        ),
        (9999, LEAST, "the parameters", "No smaller step fits. Use a machine with more memory."),
    ],
)  # fmt: skip
@needs_gpu_compiler
def test_what_helps_if_nothing_fits(run_memory, tmp_path, layers, options, short, end):
    """A model whose state exceeds both memories gets the change that makes it smaller."""
    size = dict(hidden_size=2048, intermediate_size=5504, num_attention_heads=16, head_dim=128)
    write_config(tmp_path, num_hidden_layers=layers, num_key_value_heads=16, **size)
    argv = "finetune", "config.json", "--max-length", "64", "--param-dtype", "float32"
    code, out, err = run_memory(*argv, *options, "--target", "rtx4090", "--host-memory-gb", "60")
    assert code == 1 and short in out and "short on the host" in out
    assert err.count("compiling for") == (not options)
    assert "no: at least" in out and "--params-in host --fuse-update" in out
    last = out.splitlines()[-1]
    assert last.endswith(end) and last.startswith("  effjax finetune CHECKPOINT ") != bool(options)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("function", "line", "message"),
    [
        ("own_step:raises", 'return {}["no such key"]', "KeyError: 'no such key'"),
        ("own_step:fails", "return x @ x", "TypeError: dot_general requires"),
        ("exits:f", "sys.exit(0)", "SystemExit: 0"),
        ("mistaken:f", "x x", "SyntaxError"),
    ],
)
def test_errors_name_the_users_line(run_memory, function, line, message):
    code, out, err = run_memory("step", function)
    last = err.splitlines(keepends=True)[-1]
    name = function.partition(":")[0]
    number = next(i for i, text in enumerate(MODULES[name].splitlines(), 1) if line in text)
    assert (code, out) == (1, "") and one_line(last)
    assert f"{name}.py:{number}" in last and message in last


@needs_gpu_compiler
def test_a_form_that_cannot_be_compiled(run_memory):
    code, out, _ = run_memory("step", "own_step:refused")
    assert code == 0 and "top_k: the compiler for NVIDIA H200 141GB HBM3e ended with exit" in out


def test_names_of_targets():
    """The help of the command is written without importing the planner."""
    pytest.importorskip("typer")
    from effjax.cli import fit
    from effjax.cli.memory import PlanOptions

    (target,) = (f for f in dataclasses.fields(PlanOptions) if f.name == "target")
    names, _, _ = target.metadata["help"].partition(", or a file")
    assert tuple(names.split(", ")) == list_targets()
    assert target.default == fit.DEFAULT_TARGET == DEFAULT_TARGET
