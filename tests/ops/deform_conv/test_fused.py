"""The forward pass without columns: interpreted on a CPU, and compiled for GPUs."""

import functools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from effjax import deform_conv2d, native
from effjax.memory import plan
from effjax.ops.deform_conv import chunks, fused, xla
from effjax.ops.deform_conv.chunks import Static
from effjax.ops.deform_conv.reference import Geometry
from tests.contexts import assert_trees_close
from tests.programs import needs_gpu_compiler
from tests.tiers import exhaustive

# Of the newest JAX, when it compiles for a GPU.
pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")

ODD = Geometry((3, 2), (2, 1), ((1, 1), (0, 1)), (2, 1), 2)
PLAIN = Geometry((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1)


def make(geometry, dtype, size, channels, outputs, masked=True, batch=2, examples=1, kernels=1):
    """Static and the operands of `chunks.forward`; some positions are no numbers."""
    rng = np.random.default_rng(0)
    wide = np.float64 if dtype == "float64" else np.float32
    normal = lambda *shape: rng.normal(size=shape)  # noqa: E731
    rows = [
        (s + sum(p) - (k - 1) * d - 1) // t + 1
        for s, p, k, d, t in zip(size, geometry.padding, geometry.kernel_size,
                                 geometry.kernel_dilation, geometry.strides, strict=True)
    ]  # fmt: skip
    taps = geometry.offset_groups * geometry.taps
    offset = 1.5 * normal(examples, batch, *rows, 2 * taps)
    offset[0, :1, 0, 0, :6] = [np.nan, 0, np.inf, -np.inf, 1e30, -1e30]
    offset[0, :1, 0, 1, :4] = [-1, 0, 2, 1]
    operands = (
        jnp.asarray(normal(examples, batch, *size, channels), dtype),
        jnp.asarray(offset.astype(wide)),
        jnp.asarray(normal(examples, batch, *rows, taps if masked else 0).astype(wide)),
        jnp.asarray(normal(kernels, *geometry.kernel_size, channels, outputs), dtype),
    )
    return Static(geometry, 1, xla.SAMPLER, "highest", 10**8), operands


CASES = {
    "odd": dict(geometry=ODD, size=(5, 4), channels=6, outputs=5, masked=False),
    "examples": dict(geometry=PLAIN, size=(4, 5), channels=3, outputs=2, examples=2, batch=1),
    "kernels": dict(geometry=ODD, size=(5, 4), channels=4, outputs=3, examples=2, kernels=2),
    # More pixels, channels and outputs than a tile has.
    "tiles": dict(geometry=PLAIN, size=(9, 9), channels=70, outputs=300),
    "nothing": dict(geometry=PLAIN, size=(4, 5), channels=3, outputs=2, batch=0),
}


@pytest.mark.covering
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_equals_the_reference(dtype, case):
    with jax.enable_x64(dtype == "float64"):
        static, operands = make(dtype=dtype, **CASES[case])
        got, want = (
            jax.jit(functools.partial(run, static))(*operands)
            for run in (functools.partial(fused.forward, interpret=True), chunks.forward)
        )
        assert got.dtype == want.dtype and got.shape == want.shape
        # In half precision samples may be rounded otherwise.
        limits = {"float64": 1e-13, "float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}
        assert_trees_close(got, want, limits[dtype])


def test_a_bad_pixel_stays_where_it_is():
    """Corners outside and channels that a tile has too many of read nothing that is no number."""
    static, (x, *others) = make(PLAIN, "float32", (4, 5), 3, 2)
    bad = x.at[0, 0, 0, 0].set(jnp.nan).at[0, 1, 3, 4].set(jnp.inf)
    run = jax.jit(functools.partial(fused.forward, static, interpret=True))
    got, clean = run(bad, *others), run(x, *others)
    want = jax.jit(functools.partial(chunks.forward, static))(bad, *others)
    np.testing.assert_array_equal(jnp.isfinite(got), jnp.isfinite(want))
    good = np.asarray(jnp.isfinite(want))
    assert good.any() and not good.all()
    np.testing.assert_array_equal(np.asarray(got)[good], np.asarray(clean)[good])


def shapes(dtype, batch, channels, outputs, groups=1):
    image = batch, 28, 30
    sizes = (*image, channels), (*image, 18 * groups), (3, 3, channels, outputs)
    sizes += ((*image, 9 * groups),)
    types = dtype, "float32", dtype, "float32"
    return [jax.ShapeDtypeStruct(s, t) for s, t in zip(sizes, types, strict=True)]


conv = functools.partial(deform_conv2d, padding=1, implementation="fused")


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("target", "dtype", "batch", "channels", "outputs", "groups"),
    [
        ("h200", "bfloat16", 2, 64, 128, 1),
        exhaustive("h100", "bfloat16", 37, 512, 512, 1),
        exhaustive("h100", "float32", 1, 256, 300, 4),
        exhaustive("h200", "float16", 256, 6, 5, 2),
        exhaustive("h200", "float32", 37, 64, 64, 1),
    ],
)
def test_one_kernel_without_temporaries(target, dtype, batch, channels, outputs, groups):
    found = plan(conv, *shapes(dtype, batch, channels, outputs, groups), target=target)
    assert found.device.temporaries == 0
    entry = found.hlo[found.hlo.index("ENTRY") :]
    assert re.findall(r'custom_call_target="(.*?)"', entry) == ["__gpu$xla.gpu.triton"]
    assert "fusion(" not in entry and "copy(" not in entry


@needs_gpu_compiler
def test_the_gradient_is_that_of_columns():
    def loss(*args):
        return jnp.sum(jnp.sin(conv(*args)))

    found = plan(jax.grad(loss, argnums=(0, 1, 2, 3)), *shapes("float32", 2, 16, 8))
    calls = set(re.findall(r'custom_call_target="(effjax_\w+|__gpu\$xla.gpu.triton)"', found.hlo))
    of_native = {"effjax_deform_columns", "effjax_deform_columns_backward"}
    assert calls == {"__gpu$xla.gpu.triton"} | (of_native if native.available("cuda") else set())


def test_types_in_shard_map(mesh8):
    """The result varies over devices as the images do."""
    args = shapes("float32", 8, 4, 2)
    batch = P("data")
    mapped = jax.shard_map(
        conv, mesh=mesh8, in_specs=(batch, batch, P(), batch), out_specs=batch, check_vma=True
    )
    assert jax.eval_shape(jax.jit(mapped), *args).shape == (8, 28, 30, 2)
    loss = lambda *args: jnp.sum(mapped(*args))  # noqa: E731
    assert jax.eval_shape(jax.grad(loss, argnums=2), *args).shape == (3, 3, 4, 2)


def test_without_pallas(monkeypatch):
    monkeypatch.setitem(sys.modules, "effjax.ops.deform_conv.fused", None)
    args = shapes("float32", 3, 4, 2)
    with pytest.raises(RuntimeError, match="needs Pallas for Triton.*Pass `implementation=None`"):
        jax.eval_shape(conv, *args)


def test_elsewhere_it_is_refused():
    args = [jnp.ones(a.shape, a.dtype) for a in shapes("float32", 1, 4, 2)]
    with pytest.raises(RuntimeError, match="NVIDIA GPUs alone, not on 'cpu'.*implementation=None"):
        conv(*args)
    with pytest.raises(ValueError, match=r"`feature_group_count` \(=2\) must be 1"):
        conv(*args[:2], jnp.ones((3, 3, 2, 2)), feature_group_count=2)
    x, offset, kernel = (
        jax.ShapeDtypeStruct(s, "float16")
        for s in ((2**11, 2**10, 2**10, 1), (2**11, 2**10, 2**10, 2), (1, 1, 1, 1))
    )
    with pytest.raises(ValueError, match="too large for `implementation='fused'`"):
        jax.eval_shape(functools.partial(deform_conv2d, implementation="fused"), x, offset, kernel)
