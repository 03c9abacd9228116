"""Which kernels run on GPUs by default: verdicts on disk, and `set_default`."""

import functools
import hashlib
import json
import logging
import os
import re
import types

import jax
import pytest

import effjax
from effjax import native
from effjax.memory.compiler._device_queries_shim import answer_queries
from effjax.memory.devices import find_target
from effjax.native import defaults
from effjax.native.defaults import Key
from effjax.ops._common.platform import trace_for_platform
from tests.native.test_cuda import PROGRAMS, aggregate, attend, convolve, pool

KEY = Key("NVIDIA H100 80GB HBM3", "580.95.05", "13.1", "0" * 64)
FASTER = {"float32": "faster"}
find_key = defaults.find_key  # which the tests replace, except one


@pytest.fixture(autouse=True)
def _gpu(monkeypatch, tmp_path):
    """Simulate a machine with a GPU, with CUDA kernels and with an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(defaults.VARIABLE, raising=False)
    monkeypatch.setattr(native, "_choice", None)
    monkeypatch.setattr(native, "_load", lambda platform: native.LOADED)
    monkeypatch.setattr(defaults, "find_key", lambda _: KEY)
    caches = defaults._outcomes_here, defaults.warn_of_slow_sums
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def trace(operator, dtype="float32", positions=None, **options):
    """Trace an operator with arrays of a dtype."""
    x, *others = (a.shape for a in PROGRAMS[operator][0])
    others = [jax.ShapeDtypeStruct(shape, positions or dtype) for shape in others]
    call = functools.partial(operator, **options)
    return jax.jit(call).trace(jax.ShapeDtypeStruct(x, dtype), *others)


def calls(operator, *args, **options) -> set[str]:
    """Return the kernels in the program for a GPU."""
    with trace_for_platform("cuda"):
        lowered = trace(operator, *args, **options).lower(lowering_platforms=("cuda",))
    return set(re.findall(r"@effjax_(\w+)", lowered.as_text()))


@pytest.mark.parametrize(
    ("kernel", "operator", "options", "target"),
    [
        ("deform_conv2d", convolve, {}, "deform_columns"),
        ("deform_conv2d_deterministic", convolve, {"deterministic": True}, "deform_columns"),
        ("roi_pool", pool, {}, "roi_pool"),
        ("ms_deform_attn", attend, {}, "ms_deform_attn"),
        ("ms_deform_attn", aggregate, {}, "ms_deform_attn"),
    ],
)
def test_validated_kernels_run_by_default(kernel, operator, options, target):
    assert calls(operator, **options) == set()
    defaults.write_verdict(KEY, {kernel: FASTER | {"bfloat16": "slower", "float16": "wrong"}})
    assert calls(operator, **options) == {target}
    for dtype in ("bfloat16", "float16"):
        assert calls(operator, dtype, **options) == set()
    defaults.write_verdict(KEY, {"another": FASTER})
    assert calls(operator, **options) == set()


def test_dtype_of_the_kernel(x64):
    """float64 positions make the kernel run in float64."""
    for dtype, found in (("float32", set()), ("float64", {"roi_pool"})):
        defaults.write_verdict(KEY, {"roi_pool": {dtype: "faster"}})
        assert calls(pool, positions="float64") == found


@pytest.mark.parametrize(
    ("choice", "value", "pools", "convolves"),
    [("xla", "off", False, False), ("cuda", "on", True, True), ("validated", "", True, False)],
)
def test_choices(monkeypatch, choice, value, pools, convolves):
    defaults.write_verdict(KEY, {"roi_pool": FASTER})
    monkeypatch.setenv(defaults.VARIABLE, value)
    assert (bool(calls(pool)), bool(calls(convolve))) == (pools, convolves)
    monkeypatch.setenv(defaults.VARIABLE, "maybe")
    with pytest.raises(ValueError, match=r"EFFJAX_CUDA \(='maybe'\)"):
        calls(pool)
    native.set_default(choice)
    assert (bool(calls(pool)), bool(calls(convolve))) == (pools, convolves)
    with pytest.raises(ValueError, match=r"`choice` \(='on'\)"):
        native.set_default("on")  # pyright: ignore


def test_all_kernels_without_their_library(monkeypatch):
    monkeypatch.setattr(native, "_load", lambda platform: "not built")
    monkeypatch.setenv(defaults.VARIABLE, "on")
    with pytest.raises(RuntimeError, match="EFFJAX_CUDA=on.* CUDA kernels are not built"):
        calls(pool)
    trace(pool)  # on a CPU
    native.set_default("xla")
    assert not calls(pool)


def test_other_platforms_decide_nothing(monkeypatch):
    monkeypatch.setenv(defaults.VARIABLE, "maybe")
    trace(pool)
    assert calls(pool, implementation="xla") == set()


def test_missing_verdict_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "effjax.native")
    assert not any(defaults.uses_cuda("roi_pool", dtype) for dtype in ("float32", "float16"))
    assert len(caplog.messages) == 1 and "`effjax doctor --gpu`" in caplog.messages[0]
    defaults.write_verdict(KEY, {})
    assert not defaults.uses_cuda("roi_pool", "float32") and len(caplog.messages) == 1


def test_verdicts_do_not_count_in_a_job(monkeypatch):
    """They may differ between its machines."""
    defaults.write_verdict(KEY, {"roi_pool": FASTER})
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    for processes in 1, 2:
        defaults._outcomes_here.cache_clear()
        monkeypatch.setattr(jax, "process_count", lambda processes=processes: processes)
        assert defaults.uses_cuda("roi_pool", "float32") == (processes == 1)


@pytest.mark.parametrize("field", Key._fields)
def test_verdict_of_another_machine_or_library(field):
    path = defaults.write_verdict(KEY, {"roi_pool": FASTER})
    other = KEY._replace(**{field: "1" * 64})
    assert defaults.read_verdict(KEY) == {"roi_pool": FASTER}
    assert defaults.read_verdict(other) is None and defaults.verdict_file(other) != path
    defaults.write_verdict(other, {})
    assert defaults.read_verdict(KEY) == {"roi_pool": FASTER}
    assert defaults.read_verdict(other) == {}


def damage(**changes):
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def replace_by(make):
    def change(path):
        path.unlink()
        make(path)

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_text(path.read_text()[:40]),
        lambda path: path.write_text("[]"),
        damage(format=0),
        damage(key=KEY._replace(driver="1")._asdict()),
        damage(outcomes={"roi_pool": {"float32": "good"}}),
        damage(outcomes={"roi_pool": "faster"}),
        damage(outcomes=None),
        replace_by(os.mkdir),
        replace_by(os.mkfifo),  # reading it would block
    ],
)
def test_damaged_verdicts_are_ignored(change, caplog):
    path = defaults.write_verdict(KEY, {"roi_pool": FASTER})
    change(path)
    assert not defaults.uses_cuda("roi_pool", "float32")
    assert caplog.records[0].levelname == "WARNING" and str(path) in caplog.messages[0]


def test_folder_is_that_of_platformdirs(monkeypatch):
    platformdirs = pytest.importorskip("platformdirs.unix")
    for _ in range(2):
        assert defaults.cache_folder() == platformdirs.Unix("effjax").user_cache_path / "kernels"
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)


def test_user_without_a_home_directory(monkeypatch):
    """Some containers run as a user without an entry in /etc/passwd. Operators run as plain XLA."""

    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(defaults.Path, "home", fail)
    assert defaults.read_verdict(KEY) is None and not defaults.uses_cuda("roi_pool", "float32")


def device(kind):
    return types.SimpleNamespace(device_kind=kind)


@pytest.mark.parametrize(
    ("devices", "count", "gpu"),
    [
        ([device("A"), device("A")], 2, "A"),
        ([device("A"), device("B")], 2, None),
        ([device("A")], 0, None),
    ],
)
def test_key_of_a_machine(monkeypatch, tmp_path, devices, count, gpu):
    (tmp_path / "libeffjax_cuda13.so").write_bytes(b"kernels")
    monkeypatch.setattr(native.resources, "files", lambda _: tmp_path)
    monkeypatch.setattr(native, "gpus", lambda: native.Gpus(13000, 12080, count, 90))
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    digest = hashlib.sha256(b"kernels").hexdigest()
    assert find_key("cuda") == (gpu and Key(gpu, defaults._driver_version(), "12.8", digest))


@pytest.mark.parametrize("outcome", ["faster", "slower", "wrong"])
def test_attention_of_cudnn_unless_it_is_wrong_here(outcome):
    """It is the default without a verdict too, because it is not a kernel of effjax."""
    defaults.write_verdict(KEY, {"dot_product_attention": {"bfloat16": outcome}})
    q = jax.ShapeDtypeStruct((2, 128, 2, 64), "bfloat16")
    gpu = find_target("h100")
    with answer_queries(gpu), trace_for_platform("cuda"):
        program = str(jax.make_jaxpr(lambda *a: effjax.dot_product_attention(*a))(q, q, q))
    assert ("dot_product_attention_fwd" in program) == (outcome != "wrong")
    assert ("scan" in program) == (outcome == "wrong")


@pytest.fixture
def pretend_gpu(monkeypatch):
    """Return a function that pretends a version of jaxlib, and a GPU."""

    def pretend(jaxlib, capability=None):
        monkeypatch.setattr(defaults.metadata, "version", lambda name: jaxlib)
        if capability:
            gpu = types.SimpleNamespace(compute_capability=capability)
            monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
            monkeypatch.setattr(jax, "local_devices", lambda: [gpu])

    return pretend


@pytest.mark.parametrize(
    ("jaxlib", "capability", "told"),
    [
        ("0.10.2", None, None),  # on a CPU
        ("0.10.2", "8.0", "compare-and-swap, which"),
        ("0.11.0", "9.0", "compare-and-swap for some shapes, which"),
        ("0.11.1", "8.0", None),
        ("0.12.0.1", "8.9", None),
    ],
)
def test_slow_sums_on_gpus(pretend_gpu, jaxlib, capability, told):
    pretend_gpu(jaxlib, capability)
    text = defaults.describe_slow_sums()
    assert text is None if told is None else told in text and f"jaxlib {jaxlib}" in text


def test_slow_sums_are_logged_once(pretend_gpu, caplog):
    """Where plain XLA runs on a GPU, and not where the CUDA kernels do."""
    pretend_gpu("0.10.2", "8.0")
    counts = []
    for platform, implementation in (
        ("cpu", "xla"), ("cuda", "native"), ("cuda", "xla"), ("cuda", None)
    ):  # fmt: skip
        with trace_for_platform(platform):
            trace(pool, implementation=implementation)
        counts.append(sum("compare-and-swap" in message for message in caplog.messages))
    assert counts == [0, 0, 1, 1]
