"""Under jit over meshes, shard_map, pmap, vmap, scan and remat; and what the programs exchange."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import deform_conv2d
from effjax.memory import collectives
from tests.contexts import (
    CONTEXTS,
    assert_trees_close,
    gradients_with_parameters_of_each_device,
    mesh_of,
)
from tests.ops.deform_conv import oracle
from tests.ops.deform_conv.implementations import Case, all_implementations, all_rules

pytestmark = pytest.mark.usefixtures("x64_everywhere")
SLICES = 3000  # bytes of workspace: less than two rows


def setup(conv):
    """As tests.contexts wants it: kernel and bias are the parameters, all else is the batch."""
    c = Case("plain", batch=16)
    x, offset, kernel, mask, bias = c.args

    def op(params, batch, axis_name):
        kernel, bias = params
        args = batch["x"], batch["offset"], kernel, batch["mask"], bias
        return conv(*args, **c.options), ()

    batch = {"x": x, "offset": offset, "mask": mask, "w": c.dy}
    return op, (kernel, bias), batch


@functools.cache
def want():
    """By the definition; the loss is that of tests.contexts."""
    c = Case("plain", batch=16)
    y = oracle.deform_conv(*c.args, **c.oracle_options)
    loss = np.mean(np.sin(y) * c.dy + 0.3 * y * y)
    dy = (np.cos(y) * c.dy + 0.6 * y) / y.size
    _, (dx, _, dkernel, _, dbias) = oracle.deform_conv(*c.args, dy=dy, **c.oracle_options)
    return loss, (), (dkernel, dbias), dx


# Each transformation once for each implementation; the other ways to write them once for any.
EACH = ("jit_auto", "jit_explicit", "pmap", "vmap_of_grad", "shard_map_of_grad")
EACH += ("shard_map_of_grad_unchecked",)


@all_implementations
@pytest.mark.parametrize(
    "context",
    [pytest.param(c, marks=() if c in EACH else pytest.mark.covering) for c in CONTEXTS],
)
def test_equals_the_definition(conv, context):
    op, params, batch = setup(functools.partial(conv, workspace_bytes=SLICES))
    assert_trees_close(CONTEXTS[context](op, params, batch), want(), 1e-12)


@pytest.mark.covering
@all_rules
@pytest.mark.parametrize("how", ["vmap", "shard_map"])
def test_parameters_may_differ_by_device(conv, how):
    """In shard_map: the gradient of a parameter that varies is not summed."""
    run = functools.partial(gradients_with_parameters_of_each_device, how=how)
    op, params, batch = setup(conv)
    xla, _, _ = setup(functools.partial(deform_conv2d, implementation="xla"))
    got = run(lambda *a: op(*a)[0], params, batch)
    assert_trees_close(got, run(lambda *a: xla(*a)[0], params, batch, how="vmap"), 1e-12)


@all_rules
def test_the_gradient_of_a_replicated_kernel_is_summed_over_devices(conv):
    """The trap: a custom call whose result is declared like its operand drops this sum.

    Inside shard_map(check_vma=True) the kernel does not vary, each device computes a gradient of
    its own images, and no type error tells of the missing all-reduce: the result of the first
    device would be taken for that of all.
    """
    op, (kernel, bias), batch = setup(conv)
    specs = {"in_specs": (P(), P("i")), "out_specs": P()}

    def local(kernel, batch):
        gradient = jax.grad(lambda k: jnp.sum(op((k, bias), batch, None)[0] * batch["w"]))(kernel)
        assert not jax.typeof(gradient).manual_axis_type.varying
        return gradient

    got = jax.jit(jax.shard_map(local, mesh=mesh_of((8,), ("i",)), **specs))(kernel, batch)
    c = Case("plain", batch=16)
    assert_trees_close(got, c.want()[3], 1e-12)


def gradients(op):
    def loss(params, batch):
        return jnp.sum(op(params, batch, None)[0] * batch["w"])

    return jax.grad(loss, argnums=(0, 1))


def exchanged(fun, params, batch):
    found = collectives(jax.jit(fun).lower(params, batch).compile().as_text())
    return [(c.kind, c.bytes, c.count) for c in found]


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("kind", ["auto", "explicit", "auto_4x2", "explicit_4x2"])
def test_one_all_reduce_and_no_gather(conv, kind):
    """Batch-sharded, forward and backward. XLA alone would reduce in every slice of Auto axes."""
    if not ("auto" in kind and conv.keywords["implementation"] == "xla"):
        conv = functools.partial(conv, workspace_bytes=SLICES)
    op, params, batch = setup(conv)
    axes = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}[kind.removesuffix("_4x2")]
    names = ("i", "j") if "4x2" in kind else ("i",)
    mesh = mesh_of((4, 2) if "4x2" in kind else (8,), names, axes)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P(names)))
    assert exchanged(lambda p, b: op(p, b, None)[0], params, batch) == []
    found = exchanged(gradients(op), params, batch)
    assert found == [("all-reduce", sum(p.nbytes for p in params), 1)]


@all_rules
def test_a_batch_that_does_not_divide(conv):
    """XLA fills the last shard up; neither there nor in the gradients may that be seen."""
    op, params, batch = setup(conv)
    batch = jax.tree.map(lambda a: a[:10], batch)
    constrain = functools.partial(
        lax.with_sharding_constraint, shardings=NamedSharding(mesh_of((8,), ("i",)), P("i"))
    )

    def loss(params, batch, constrain):
        # Neither images nor what arrives from above is zero where XLA fills up.
        x = constrain(batch["x"]) + 1
        return jnp.sum(jnp.cos(op(params, batch | {"x": x}, None)[0]))

    got, want = (
        jax.jit(functools.partial(jax.grad(loss, (0, 1)), constrain=how))(params, batch)
        for how in (constrain, lambda a: a)
    )
    assert_trees_close(got, want, 1e-12)


@all_rules
def test_examples_and_images_over_one_axis(conv):
    """A vmap whose operands are sharded over one mesh axis in two ways."""
    op, params, batch = setup(conv)
    batch = jax.tree.map(lambda a: a.reshape(8, 2, *a.shape[1:]), batch)
    mesh = mesh_of((2,), ("i",))
    specs = {name: P(None, "i") if name == "offset" else P("i") for name in batch}
    sharded = {k: jax.device_put(a, NamedSharding(mesh, specs[k])) for k, a in batch.items()}
    run = jax.jit(jax.vmap(lambda b: op(params, b, None)[0]))
    assert_trees_close(run(sharded), run(batch), 1e-12)


@all_rules
def test_no_examples(conv):
    op, params, batch = setup(conv)
    empty = jax.tree.map(lambda a: np.zeros((0, *a.shape)), batch)
    y = jax.vmap(lambda b: op(params, b, None)[0])(empty)
    assert y.shape == (0, *batch["w"].shape)


@all_rules
def test_arrays_of_a_mesh_beside_others(conv):
    op, params, batch = setup(conv)
    mesh = jax.make_mesh((8,), ("i",), (AxisType.Explicit,))
    mixed = batch | {"x": jax.device_put(batch["x"], NamedSharding(mesh, P("i")))}
    with jax.set_mesh(mesh):
        got = op(params, mixed, None)[0]
    assert_trees_close(got, op(params, batch, None)[0], 1e-12)


@all_rules
def test_float64_for_a_while_over_several_devices(conv):
    """XLA partitions in threads that a `with` does not reach."""
    op, params, batch = setup(conv)
    jax.config.update("jax_enable_x64", False)
    with jax.enable_x64(True):
        assert_trees_close(CONTEXTS["jit_auto"](op, params, batch), want(), 1e-12)


@all_rules
def test_part_of_the_mesh_in_shard_map(conv):
    """One axis of the batch is mapped, another is left to jit."""
    op, params, batch = setup(conv)
    mesh = mesh_of((4, 2), ("i", "j"))
    batch = jax.device_put(batch, NamedSharding(mesh, P(("i", "j"))))
    specs = {"in_specs": (P(), P("i")), "out_specs": (P(), P("i")), "axis_names": {"i"}}
    run = jax.jit(jax.shard_map(lambda p, b: gradients(op)(p, b), mesh=mesh, **specs))
    assert_trees_close(run(params, batch), jax.jit(gradients(op))(params, batch), 1e-12)


@all_rules
def test_explicit_mesh_of_the_arguments(conv):
    """No `jax.set_mesh`: the mesh is known from the types alone."""
    op, params, batch = setup(conv)
    mesh = mesh_of((8,), ("i",), AxisType.Explicit)
    params, batch_on = (
        jax.device_put(a, NamedSharding(mesh, s)) for a, s in ((params, P()), (batch, P("i")))
    )
    y = op(params, batch_on, None)[0]
    assert jax.typeof(y).sharding.spec == P("i", None, None, None)
    got = jax.jit(gradients(op))(params, batch_on)
    assert_trees_close(got, jax.jit(gradients(op))(*setup(conv)[1:]), 1e-12)


MAPPED = {
    "images": (0, 0, None, 0, None),
    "kernel": (None, None, 0, None, 0),
    "all": (0, 0, 0, 0, 0),
    "offset": (None, 0, None, None, None),
}


@pytest.mark.covering
@all_implementations
@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap(conv, mapped):
    """Without a loop over the examples, each as if it were alone; forward and backward."""
    c = Case("all", batch=2)
    axes = MAPPED[mapped]
    factor = np.array([1.0, 0.5, -2.0])
    args = [
        a if axis is None else np.multiply.outer(factor, a)
        for a, axis in zip(c.args, axes, strict=True)
    ]

    def both(*args):
        y, backward = jax.vjp(functools.partial(conv, **c.options), *args)
        return y, *backward(jnp.asarray(c.dy))

    run = jax.jit(jax.vmap(both, axes)).lower(*args).compile()
    loops = run.as_text().count(" while(")
    assert loops == jax.jit(both).lower(*c.args).compile().as_text().count(" while(")
    got, one = run(*args), jax.jit(both)
    for i in range(3):
        alone = one(*(a if x is None else a[i] for a, x in zip(args, axes, strict=True)))
        assert_trees_close([g[i] for g in got], list(alone), 1e-12)


@all_rules
def test_vmap_of_vmap(conv):
    c = Case("plain", batch=4)
    x, offset, kernel, mask, bias = c.args
    kernels = np.stack([kernel, 2 * kernel])
    split = [a.reshape(2, 2, *a.shape[1:])[:, :, None] for a in (x, offset, mask)]

    def run(x, offset, mask, kernel):
        return jax.grad(lambda k: jnp.sum(conv(x, offset, k, mask, **c.options) ** 2))(kernel)

    over_images = jax.vmap(run, (0, 0, 0, None))
    got = jax.jit(jax.vmap(over_images, (0, 0, 0, 0)))(*split, kernels)
    for i in range(2):
        for j in range(2):
            alone = run(*(a[i, j] for a in split), kernels[i])
            assert_trees_close(got[i, j], alone, 1e-12)


@all_rules
def test_vmap_of_sharded_images_gathers_nothing(conv):
    """Per-example gradients: the examples are sharded, or the images of every example are."""
    op, params, batch = setup(conv)
    mesh = mesh_of((8,), ("i",))
    per_example = jax.vmap(gradients(op), (None, 0))
    for shape, spec in (((16, 1), P("i")), ((2, 8), P(None, "i"))):
        split = jax.tree.map(lambda a: a.reshape(*shape, *a.shape[1:]), batch)  # noqa: B023
        split = jax.device_put(split, NamedSharding(mesh, spec))
        on_mesh = jax.device_put(params, NamedSharding(mesh, P()))
        kinds = {kind for kind, _, _ in exchanged(per_example, on_mesh, split)}
        assert kinds <= {"all-reduce"}


@all_implementations
def test_scan_and_remat(conv):
    """A stack of layers, each recomputed for the backward pass."""
    rng = np.random.default_rng(0)
    x, offsets = rng.normal(size=(2, 4, 4, 3)), rng.normal(size=(3, 2, 4, 4, 18))
    kernels = rng.normal(size=(3, 3, 3, 3, 3)) / 5

    def layer(x, parameters):
        offset, kernel = parameters
        return jnp.tanh(conv(x, offset, kernel, padding=1)), None

    def scanned(x, offsets, kernels):
        return jnp.sum(lax.scan(jax.checkpoint(layer), x, (offsets, kernels))[0] ** 2)

    def unrolled(x, offsets, kernels):
        for parameters in zip(offsets, kernels, strict=True):
            x, _ = layer(x, parameters)
        return jnp.sum(x**2)

    got, want = (
        jax.jit(jax.grad(f, argnums=(0, 1, 2)))(x, offsets, kernels) for f in (scanned, unrolled)
    )
    assert_trees_close(got, want, 1e-12)
