"""fp8_linear: values, errors beside float64, numbers that are not finite, and compiled kernels."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import fp8_linear
from effjax.memory import plan
from tests import oracles
from tests.contexts import DEVICES, mesh_of
from tests.programs import collective_sizes, needs_gpu_compiler, needs_tpu_compiler
from tests.tiers import vary


def results(op, x, kernel, dy, **options):
    """Return y, dx and dkernel."""
    y, pull_back = jax.vjp(functools.partial(op, **options), x, kernel)
    return y, *pull_back(dy.astype(y.dtype))


def draw(kind, tokens=96, width=80, outputs=64):
    """Return rows of x, a kernel and a cotangent in float64."""
    rng = np.random.default_rng(0)
    x, kernel, dy = (
        rng.normal(size=s) for s in ((tokens, width), (width, outputs), (tokens, outputs))
    )
    if kind == "heavy-tailed":
        x, dy = x / rng.chisquare(2, x.shape) ** 0.5, dy / rng.chisquare(2, dy.shape) ** 0.5
    if kind == "sparse":
        x, dy = (a * (rng.random(a.shape) < 0.05) for a in (x, dy))
    return x, kernel, dy * 1e-6


def relative(got, want):
    return [
        np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for a, b in zip(got, want, strict=True)
    ]


@vary("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "stored", "tolerance"),
    [
        ("float32", "float32", 1e-6), ("bfloat16", "bfloat16", 4e-3), ("float16", "float16", 5e-4),
        ("bfloat16", "float32", 4e-3),
    ],
)  # fmt: skip
def test_products_of_rounded_numbers(dtype, stored, tolerance, transposed, x64):
    x, kernel, dy = draw("normal")
    x, kernel, dy = jnp.asarray(x, dtype), jnp.asarray(kernel, stored), jnp.asarray(dy * 1e3, dtype)
    kernel = kernel.T if transposed else kernel
    got = jax.jit(functools.partial(results, fp8_linear, transposed=transposed))(x, kernel, dy)
    assert [a.dtype for a in got] == [dtype, dtype, stored]
    want = results(oracles.fp8_linear, x, kernel, dy.astype("f8"), transposed=transposed)
    assert max(relative(got, [np.asarray(a, np.float64) for a in want])) < tolerance


# The rounding errors of a product's terms, 2^-4 / sqrt(3) at most for e4m3 and twice that for
# e5m2, are independent. Those of numbers below the range of the format add to them.
@pytest.mark.parametrize("kind", ["normal", "heavy-tailed", "sparse"])
def test_error_beside_float64(kind, x64):
    x, kernel, dy = draw(kind)
    got = results(fp8_linear, *(jnp.asarray(a, "float32") for a in (x, kernel, dy)))
    y, dx, dkernel = relative(got, results(jnp.matmul, x, kernel, dy))
    assert y < 0.045 and dx < 0.07 and dkernel < 0.07


def test_the_largest_number_is_never_beyond_the_range():
    """Powers of two, and the numbers just beside them."""
    power = 2.0 ** np.arange(-90, 127, 3)
    for most in (power, np.nextafter(np.float32(power), 0), 1.75 * power, 1.8 * power):
        x = jnp.asarray(most, "float32")[:, None]
        one = jax.vmap(lambda x: fp8_linear(x[None], jnp.ones((1, 1))))(x)[:, 0]
        np.testing.assert_allclose(one, x, rtol=2**-4)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_not_finite(value, dtype):
    """What uses the number is NaN, and nothing else changes."""
    x, kernel, dy = (jnp.asarray(a, dtype) for a in draw("normal"))
    run = jax.jit(functools.partial(results, fp8_linear))
    want = run(x.at[2, 3].set(0), kernel, dy.at[4, 5].set(0))
    got = run(x.at[2, 3].set(value), kernel, dy.at[4, 5].set(value))
    bad = [np.zeros(a.shape, bool) for a in want]
    bad[0][2], bad[1][4], bad[2][3], bad[2][:, 5] = True, True, True, True
    for a, b, is_bad in zip(got, want, bad, strict=True):
        a, b = (np.asarray(array, np.float64) for array in (a, b))
        np.testing.assert_array_equal(np.isnan(a), is_bad)
        np.testing.assert_allclose(a[~is_bad], b[~is_bad], rtol=1e-2, atol=1e-6 * np.abs(b).max())


@pytest.mark.parametrize("tokens", [(0,), (), (2, 0, 3), (2, 3)])
def test_shapes_and_zeros(tokens):
    x, kernel, dy = jnp.zeros((*tokens, 5)), jnp.zeros((5, 7)), jnp.zeros((*tokens, 7))
    for a, shape in zip(results(fp8_linear, x, kernel, dy), (dy, x, kernel), strict=True):
        assert a.shape == shape.shape and not np.any(a)


def test_rounding_does_not_depend_on_the_other_rows():
    """So that chunks and microbatches give the same results."""
    x, kernel, _ = (jnp.asarray(a, "float32") for a in draw("normal"))
    parts = [fp8_linear(rows, kernel) for rows in jnp.split(x * jnp.float32(0.9), 8)]
    np.testing.assert_allclose(
        jnp.concatenate(parts), fp8_linear(x * jnp.float32(0.9), kernel), rtol=0, atol=1e-4
    )


@vary("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_keep_their_rows(kind):
    """Only largest magnitudes and the gradient of the kernel are reduced."""
    mesh = mesh_of((DEVICES,), ("i",), kind)
    x, kernel, dy = (jnp.asarray(a, "float32") for a in draw("normal"))
    x, dy = (jax.device_put(a, NamedSharding(mesh, P("i"))) for a in (x, dy))
    kernel = jax.device_put(kernel, NamedSharding(mesh, P()))
    run = jax.jit(functools.partial(results, fp8_linear))
    sent = collective_sizes(run.lower(x, kernel, dy).compile(), "f4")
    assert {kind for kind, _ in sent} == {"all-reduce"}
    assert sum(size for _, size in sent) <= kernel.size + 3


def plan_results(target, tokens=2048, width=1024, outputs=3072, **options):
    x, kernel, dy = (
        jax.ShapeDtypeStruct(shape, "bfloat16")
        for shape in ((2, tokens // 2, width), (outputs, width), (2, tokens // 2, outputs))
    )
    run = functools.partial(results, fp8_linear, transposed=True)
    return plan(run, x, kernel, dy, target=target, compiler_options=options)


def kernels(planned):
    """Return the shapes and kinds of the kernels that write large arrays."""
    entry = planned.hlo[planned.hlo.index("\nENTRY") :]
    found = re.findall(r" = (.*?) (fusion|custom-call|copy|transpose)\(", entry)
    return [(shape, kind) for shape, kind in found if re.search(r"\d{4,}", shape)]


# Without a GPU to time kernels on, XLA takes its own kernels for the 8-bit products of an H100.
@needs_gpu_compiler
@vary("target, options", [("rtx4090", {}), ("h100", {"xla_gpu_enable_triton_gemm": False})])
def test_cublas_products_without_transposes(target, options):
    p = plan_results(target, **options)
    assert p.hlo.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert p.step_time.flops == {"f8": 6 * 2048 * 1024 * 3072}
    # Each 8-bit array is written once, from 16 bits: x and the kernel in two layouts, and dy in
    # both by one kernel. Products are scaled and written in bfloat16.
    narrow = [shape for shape, kind in kernels(p) if "f8" in shape]
    assert sum(shape.count("f8") for shape in narrow) == 6
    assert not any("f32[" in shape for shape, _ in kernels(p))
    of_16_bits = [shape for shape, kind in kernels(p) if "bf16" in shape and kind != "custom-call"]
    assert all(re.fullmatch(r"bf16\[\d+\]\S*", shape) for shape in of_16_bits)  # maxima


@needs_gpu_compiler
@vary("target", ["rtx4090", "h100"])
def test_sizes_are_padded(target):
    options = {} if target == "rtx4090" else {"xla_gpu_enable_triton_gemm": False}
    p = plan_results(target, 1002, 203, 305, **options)
    assert p.hlo.count('custom_call_target="__cublas$lt$matmul$f8"') == 3
    assert set(p.step_time.flops) == {"f8"}


@needs_gpu_compiler
def test_products_of_rounded_numbers_on_a_gpu_without_8_bits():
    p = plan_results("a100-80")
    assert set(p.step_time.flops) == {"bf16"}
    # Neither conversion of x, the kernel and dy is simplified away.
    rounded = re.findall(r"= f8\w+\[([\d,]+)\]\S* select\(", p.hlo)
    sizes = {math.prod(map(int, shape.split(","))) for shape in rounded}
    assert sizes == {2048 * 1024, 3072 * 1024, 2048 * 3072}


@pytest.mark.exhaustive
@needs_tpu_compiler
def test_tpu():
    p = plan_results("v5e")
    assert sum(p.step_time.flops.values()) == 6 * 2048 * 1024 * 3072
