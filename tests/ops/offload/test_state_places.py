"""The memory and the sharding of optimizer states."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from effjax import offload_train_step, stream_update
from effjax.ops.offload.host_init import place_state
from effjax.optimizers import adamw_8bit
from tests.ops.offload.steps import embed, head


def params(mesh, spec, shape=(256, 128), stacked=False):
    spec, shape = ((None, *spec), (3, *shape)) if stacked else (spec, shape)
    sharding = NamedSharding(mesh, P(*spec), memory_kind="pinned_host")
    return {"w": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)}


def places(tx, w, stacked=False):
    """Return the sharding of each array of the state by its path, without the parameter's."""
    init = jax.vmap(tx.init) if stacked else tx.init
    shapes = {k: jax.ShapeDtypeStruct(a.shape, a.dtype) for k, a in w.items()}
    got = place_state(jax.eval_shape(init, shapes), w, stacked)
    return {
        jax.tree_util.keystr(path).split(".")[-1]: sharding
        for path, sharding in jax.tree_util.tree_leaves_with_path(got)
    }


@pytest.mark.parametrize("stacked", [False, True])
def test_factored_moments_keep_the_sharding_of_their_axis(mesh8, stacked):
    tx = optax.scale_by_factored_rms()
    lead = (None,) if stacked else ()
    # The larger axis is that of 256 rows: v_row has no rows.
    for shape, spec, row, col in (
        ((256, 128), ("data", None), (None,), ("data",)),
        ((128, 128), ("data", None), ("data",), (None,)),
        ((2, 128, 256), (None, None, "data"), (None, None), (None, "data")),
    ):
        got = places(tx, params(mesh8, spec, shape, stacked), stacked)
        assert got["v_row['w']"].spec == P(*lead, *row)
        assert got["v_col['w']"].spec == P(*lead, *col)
        assert got["v['w']"].spec == got["count"].spec == P()
        assert got["v_row['w']"].memory_kind == "pinned_host"
        assert got["count"].memory_kind == "device"


def test_moments_have_the_sharding_of_the_parameter_with_the_longest_path(mesh8):
    by_row, whole = (NamedSharding(mesh8, spec) for spec in (P(None, "data"), P()))
    outer, inner = (jax.device_put(jnp.ones((2, 8, 8)), place) for place in (whole, by_row))
    moments = stream_update(optax.adam(0.1)).init({"k": outer, "mlp": {"k": inner}})[0].mu
    assert moments["k"].sharding.is_equivalent_to(whole, 3)
    assert moments["mlp"]["k"].sharding.is_equivalent_to(by_row, 3)


def test_scales_of_8_bit_moments_are_sharded_like_their_blocks(mesh8):
    tx = adamw_8bit(1e-2, block_size=16)
    for spec, scale in (((None, "data"), P(None, "data")), (("data", None), P("data", None))):
        got = places(tx, params(mesh8, spec))
        assert got["mu['w']"].spec == P(*spec) and got["mu_scale['w']"].spec == scale
    # Eight devices cannot share four blocks of 32 numbers.
    got = places(adamw_8bit(1e-2, block_size=32), params(mesh8, (None, "data")))
    assert got["nu_scale['w']"].spec == P(None, None)


def test_rejects_state_of_another_shape_than_its_sharded_parameter(mesh8):
    init = lambda p: {"norms": jax.tree.map(lambda a: jnp.zeros(a.shape[:1]), p)}  # noqa: E731
    tx = optax.GradientTransformation(init, lambda g, s, p: (g, s))
    with pytest.raises(ValueError, match=r"state\['norms'\]\['w'\] of shape \(256,\)"):
        places(tx, params(mesh8, ("data", None)))
    assert places(tx, params(mesh8, ()))
    kernel = jax.device_put(
        jnp.ones((2, 8, 8)), NamedSharding(mesh8, P(None, "data"), memory_kind="pinned_host")
    )
    with pytest.raises(ValueError, match=r"state\['norms'\]\['w'\] of shape \(2, 8\)"):
        stream_update(tx).init({"w": kernel})


def test_rejects_state_of_no_parameter_beside_sharded_ones(mesh8):
    tx = optax.GradientTransformation(lambda p: jnp.zeros(5), lambda g, s, p: (g, s))
    with pytest.raises(ValueError, match="no parameter"):
        place_state(tx.init({}), params(mesh8, ("data",)))


@pytest.mark.parametrize("form", ["stack", "list"])
def test_shardings_of_shapes_are_those_of_init(mesh8, form):
    """The places of an abstract state are those that init creates."""
    split = NamedSharding(mesh8, P(None, "data"), memory_kind="pinned_host")
    w = {"a": jax.device_put(jnp.ones((2, 8, 8)), split)}
    layers = w if form == "stack" else [w, {}]
    others = jax.device_put({"e": jnp.ones((8, 8))}, NamedSharding(mesh8, P("data")))
    init, _ = offload_train_step(
        embed, (lambda w, x, key: x) if form == "stack" else [lambda w, x, key: x] * 2, head,
        optax.chain(optax.adam(1e-2), optax.add_noise(0.1, 0.5, 0)),
    )  # fmt: skip
    state = init(layers, others)

    def check(a, sharding):
        assert a.sharding.is_equivalent_to(sharding, a.ndim)
        assert a.sharding.memory_kind == sharding.memory_kind

    jax.tree.map(check, state, state.shardings())
