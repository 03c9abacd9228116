import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from effjax.models import DeformResNet
from effjax.nnx import DeformConv

X = jax.random.normal(jax.random.key(0), (2, 9, 8, 3))
SMALL = dict(stage_sizes=(1, 1, 2), widths=(4, 6, 8), num_classes=5)


def new(**options):
    return DeformResNet(**SMALL | options, rngs=nnx.Rngs(0))


def deformable_layers(model):
    return [m for _, m in nnx.iter_modules(model) if isinstance(m, DeformConv)]


def test_deformable_layers_are_in_the_stages_asked_for():
    make = lambda **options: nnx.eval_shape(lambda: new(**options))  # noqa: E731
    assert nnx.eval_shape(lambda m: m(X), make()).shape == (2, 5)
    # Of the strided blocks the second convolution only, of the last block both.
    assert len(deformable_layers(make())) == 1 + 1 + 2
    assert len(deformable_layers(make(deformable=(0,)))) == 2
    assert deformable_layers(make(deformable=())) == []
    assert all(m.modulated for m in deformable_layers(make()))
    assert not any(m.modulated for m in deformable_layers(make(modulated=False)))


def test_starts_as_the_plain_network():
    """Of DCN v1 with zero offsets: the same convolutions."""
    deformed, plain = new(modulated=False), new(deformable=())
    values = nnx.to_pure_dict(nnx.state(deformed, nnx.Param))

    def without_offsets(tree):
        return {k: without_offsets(v) for k, v in tree.items() if k != "offset_conv"} if isinstance(
            tree, dict
        ) else tree  # fmt: skip

    nnx.update(plain, without_offsets(values))
    np.testing.assert_allclose(deformed(X), plain(X), rtol=1e-4, atol=1e-4)


def test_every_parameter_learns():
    model = new()
    grads = nnx.grad(lambda m: jnp.sum(jnp.sin(m(X))))(model)
    assert all(float(jnp.abs(g).max()) > 0 for g in jax.tree.leaves(grads))


def test_shapes_are_asserted_where_they_are_made():
    model = nnx.eval_shape(new)
    model.blocks[0].shortcut = nnx.eval_shape(lambda: nnx.Conv(4, 4, (1, 1), 2, rngs=nnx.Rngs(0)))
    with pytest.raises(AssertionError, match="assert_equal_shape"):
        nnx.eval_shape(lambda m: m(X), model)


def test_tables():
    console = {"width": 300, "force_terminal": False}
    table = nnx.tabulate(new(), X, console_kwargs=console)
    assert "offset_conv" in table and "float32[2,5]" in table


def test_half_precision_logits_are_float32():
    assert new(dtype=jnp.bfloat16)(X).dtype == jnp.float32


@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"`deformable` \(=\(3,\)\)", {"deformable": (3,)}),
        (r"`stage_sizes` \(=\(1,\)\)", {"stage_sizes": (1,)}),
        (r"positive number", {"widths": (4, 0, 8)}),
    ],
)
def test_bad_options(match, options):
    with pytest.raises(ValueError, match=match):
        new(**options)


def test_bad_images():
    with pytest.raises(ValueError, match=r"must be of shape \[batch, height, width, 3\]"):
        new()(X[..., :2])
