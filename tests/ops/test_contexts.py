"""Every operator matches its definition in every transformation."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import native
from tests.contexts import (
    CONTEXTS,
    DEVICES,
    assert_trees_close,
    exported,
    grad_of_vmap,
    gradients_with_parameters_of_each_device,
    in_scan,
    jit_explicit_arrays,
    mesh_of,
    scan_of_checkpoint,
    single_device,
    value_and_grads,
    vmap_over_batches,
)
from tests.ops.subjects import NAMED_AXES, OPERATORS, OTHERS, VARIANTS
from tests.programs import collective_sizes
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64_everywhere")

# The rules of an operator run where the axis of vmap is out of scope, or without a named axis.
AROUND_VMAP = {
    "grad_of_checkpoint_of_vmap": functools.partial(grad_of_vmap, jax.checkpoint),
    "grad_of_scan_of_vmap": functools.partial(grad_of_vmap, in_scan),
}
ALL = CONTEXTS | AROUND_VMAP
ALL |= {
    "scan_of_checkpoint": scan_of_checkpoint,
    "exported": exported,
    "jit_explicit_arrays": jit_explicit_arrays,
    "vmap_over_batches": vmap_over_batches,
}
# Gradients inside and outside of vmap and of shard_map, the latter with and without check_vma.
PLAIN = [
    "jit_auto", "jit_explicit", "pmap", "vmap_of_grad", "grad_of_jit_of_vmap", "scan_of_checkpoint",
    "exported", "shard_map_of_grad", "grad_of_shard_map_unchecked",
]  # fmt: skip
# They share the rules of partitioning and batching with deform_conv2d.
SAMPLERS = [
    "ms_deform_attn", "dcn_aggregate", "roi_align", "deform_roi_pool", "deform_psroi_pool",
    "multiscale_roi_align",
]  # fmt: skip


def is_plain(name, context):
    if name in SAMPLERS:
        return context in ("jit_explicit", "vmap_of_grad", "shard_map_of_grad")
    return context in PLAIN or name == "sync_batch_norm"


def check(subject, run):
    got = run(subject.op, subject.params, subject.batch)
    assert_trees_close(got, subject.want, subject.tolerance)


PAIRS = [
    (name, context)
    for name in OPERATORS
    for context in ALL
    if name in NAMED_AXES or context not in ("grad_of_vmap", *AROUND_VMAP)
]


@pytest.mark.parametrize(("name", "context"), [pair for pair in PAIRS if is_plain(*pair)])
def test_transformation(name, context):
    check(OPERATORS[name](), ALL[context])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "context"), [pair for pair in PAIRS if not is_plain(*pair)])
def test_other_transformation(name, context):
    check(OPERATORS[name](), ALL[context])


@vary("context", ["shard_map_of_grad", "jit_explicit", "pmap", "grad_of_shard_map_two_axes"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, context, monkeypatch):
    if name.endswith("default"):
        monkeypatch.setattr(native, "is_available", lambda platform: False)
    check(VARIANTS[name](), CONTEXTS[context])


@vary("how", ["shard_map", "vmap"])
@vary(
    "name",
    [*NAMED_AXES, "linear_cross_entropy", "dot_product_attention", "expert_mlp", "deform_conv2d"],
)
def test_different_parameters_per_device(name, how):
    subject = OPERATORS[name]()

    def run(op, how):
        return gradients_with_parameters_of_each_device(
            lambda *args: op(*args)[0], subject.params, subject.batch, how
        )

    assert_trees_close(run(subject.op, how), run(subject.definition, "vmap"), 1e-12)


def sum_of_squared_gradients(op, params, batch):
    def squares(params, x):
        _, _, *gradients = value_and_grads(op, params, batch | {"x": x}, None)
        return sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients))

    return jax.jit(jax.value_and_grad(squares, (0, 1)))(params, batch["x"])


@pytest.mark.parametrize(
    "name", ["sync_batch_norm", "linear_cross_entropy", "dot_product_attention"]
)
def test_second_order(name):
    subject = OPERATORS[name]()
    got, want = (
        sum_of_squared_gradients(op, subject.params, subject.batch)
        for op in (subject.op, subject.definition)
    )
    assert_trees_close(got, want, 1e-11)


@pytest.mark.parametrize(
    "name", ["linear_cross_entropy", "dot_product_attention", "expert_mlp", "fp8_linear"]
)
def test_reverse_mode_only(name):
    """Or forward mode over reverse mode, where second derivatives exist."""
    subject = OPERATORS[name]()
    x = jnp.asarray(subject.batch["x"])
    run = lambda x: jnp.sum(subject.op(subject.params, subject.batch | {"x": x}, None)[0])  # noqa: E731
    with pytest.raises(NotImplementedError, match=f"{name} .* forward-mode"):
        jax.jvp(run, (x,), (x,))
    if name == "fp8_linear":
        with pytest.raises(NotImplementedError, match="fp8_linear .* first derivatives"):
            jax.grad(lambda x: jax.grad(run)(x).sum())(x)
    else:
        jax.eval_shape(lambda x: jax.jvp(jax.grad(run), (x,), (x,)), x)


def check_collectives(subject, kind):
    """Check that gradients of parameters are reduced once, and that nothing else is sent."""
    mesh = mesh_of((DEVICES,), ("i",), kind)
    params = jax.device_put(subject.params, NamedSharding(mesh, P()))
    batch = jax.device_put(subject.batch, NamedSharding(mesh, P("i")))
    if kind == AxisType.Explicit:
        y = jax.eval_shape(lambda *args: subject.op(*args, None)[0], params, batch)
        assert y.sharding.spec[0] == "i"
    run = jax.jit(lambda *args: single_device(subject.op, *args))
    sent = collective_sizes(run.lower(params, batch).compile(), "f8")
    loss = 1
    assert sum(n for _, n in sent) <= loss + sum(p.size for p in jax.tree.leaves(params))
    assert {kind for kind, _ in sent} == {"all-reduce"}


@vary("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "name",
    [
        "batch_norm_inference", "linear_cross_entropy", "dot_product_attention", "deform_conv2d",
        "ms_deform_attn", "deform_roi_pool", "expert_mlp",
    ],
)  # fmt: skip
def test_devices_keep_their_sequences_or_images(name, kind):
    # With Auto axes, arrays do not show that their tokens are divided.
    options = {"mesh": mesh_of((DEVICES,), ("i",), kind)} if name == "expert_mlp" else {}
    check_collectives(OTHERS[name](**options), kind)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in VARIANTS if name.endswith("xla")])
def test_devices_keep_their_images_with_xla(name):
    # Under Auto axes, XLA reduces in every slice of a convolution.
    check_collectives(VARIANTS[name](), AxisType.Explicit)
