"""Every operator matches its definition in every transformation."""

import functools

import jax
import pytest

from effjax import native
from tests.contexts import (
    CONTEXTS,
    assert_trees_close,
    exported,
    grad_of_vmap,
    gradients_with_parameters_of_each_device,
    in_scan,
    jit_explicit_arrays,
    scan_of_checkpoint,
    vmap_over_batches,
)
from tests.ops.subjects import NAMED_AXES, OPERATORS, OTHERS, VARIANTS
from tests.tiers import vary

pytestmark = pytest.mark.usefixtures("x64_everywhere")

# Gradients inside and outside of vmap and of shard_map, the latter with and without check_vma.
TRANSFORMATIONS = {
    **{name: CONTEXTS[name] for name in ("jit_auto", "jit_explicit", "pmap")},
    **{name: CONTEXTS[name] for name in ("vmap_of_grad", "grad_of_jit_of_vmap")},
    "scan_of_checkpoint": scan_of_checkpoint,
    "exported": exported,
    **{name: CONTEXTS[name] for name in ("shard_map_of_grad", "grad_of_shard_map_unchecked")},
}
# The rules of an operator run where the axis of vmap is out of scope, or without a named axis.
VMAP = {
    "grad_of_vmap": CONTEXTS["grad_of_vmap"],
    "grad_of_checkpoint_of_vmap": functools.partial(grad_of_vmap, jax.checkpoint),
    "grad_of_scan_of_vmap": functools.partial(grad_of_vmap, in_scan),
}
OTHER_TRANSFORMATIONS = {
    **{name: run for name, run in CONTEXTS.items() if name not in TRANSFORMATIONS | VMAP},
    "jit_explicit_arrays": jit_explicit_arrays,
    "vmap_over_batches": vmap_over_batches,
}
# They share the rules of partitioning and batching with deform_conv2d, which runs in all.
SAMPLERS = [
    "ms_deform_attn", "dcn_aggregate", "roi_align", "deform_roi_pool", "deform_psroi_pool",
    "multiscale_roi_align",
]  # fmt: skip


def check(subject, run):
    got = run(subject.op, subject.params, subject.batch)
    assert_trees_close(got, subject.want, 1e-12)


@pytest.mark.parametrize("context", TRANSFORMATIONS)
@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in SAMPLERS])
def test_transformation(name, context):
    check(OPERATORS[name](), TRANSFORMATIONS[context])


@pytest.mark.parametrize("context", ["jit_explicit", "vmap_of_grad", "shard_map_of_grad"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler(name, context):
    check(OPERATORS[name](), CONTEXTS[context])


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", TRANSFORMATIONS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_sampler_in_every_transformation(name, context):
    check(OPERATORS[name](), TRANSFORMATIONS[context])


@pytest.mark.parametrize("context", OTHER_TRANSFORMATIONS | VMAP)
@vary("name", NAMED_AXES)
def test_named_axis(name, context):
    check(NAMED_AXES[name](), (OTHER_TRANSFORMATIONS | VMAP)[context])


@pytest.mark.exhaustive
@pytest.mark.parametrize("context", OTHER_TRANSFORMATIONS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_transformation(name, context):
    check(OTHERS[name](), OTHER_TRANSFORMATIONS[context])


@vary("context", ["shard_map_of_grad", "jit_explicit", "pmap", "grad_of_shard_map_two_axes"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, context, monkeypatch):
    if name.endswith("default"):
        monkeypatch.setattr(native, "is_available", lambda platform: False)
    check(VARIANTS[name](), CONTEXTS[context])


@vary("how", ["shard_map", "vmap"])
@vary("name", [*NAMED_AXES, "linear_cross_entropy", "dot_product_attention", "deform_conv2d"])
def test_different_parameters_per_device(name, how):
    subject = OPERATORS[name]()

    def run(op, how):
        return gradients_with_parameters_of_each_device(
            lambda *args: op(*args)[0], subject.params, subject.batch, how
        )

    assert_trees_close(run(subject.op, how), run(subject.definition, "vmap"), 1e-12)
