"""offload_scan compared with the same stack in device memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from effjax import offload_scan, to_device, to_host
from effjax.ops._common.platform import trace_for_platform
from tests.ops.offload import reference, stacks
from tests.ops.offload.stacks import (
    BATCH,
    KEY,
    LAYERS,
    POLICIES,
    WIDTH,
    assert_close,
    assert_equal_bits,
    check_gradients,
    in_memory,
    inputs,
    kinds,
    layer,
    loss,
    offloaded,
    params,
    value_and_grads,
)
from tests.tiers import vary


@pytest.mark.usefixtures("optimized")
@vary(
    "options",
    [
        {"num_slices": 2, "resident_slices": 1, "num_microbatches": 4, "policy": "everything"},
        {},
        {"prefetch": 0, "num_microbatches": 4},
        {"prefetch": 3, "num_slices": 2, "resident_slices": 2, "policy": "dots"},
        {
            "activations_in": "device",
            "grads_in": "device",
            "num_microbatches": 4,
            "policy": "everything",
        },
        {"params_in": "device", "grads_in": "host", "policy": "everything"},
    ],
    ids=str,
)
def test_loss_and_gradients_match_in_memory_bitwise(options):
    check_gradients(key=KEY, **options)


@pytest.mark.usefixtures("optimized")
@vary(
    ("platform", "num_layers", "options"),
    [
        ("tpu", 3, {"prefetch": 2}),
        ("tpu", 2, {"key": KEY}),
        ("tpu", 6, {"num_slices": 3}),
        ("cuda", 3, {"resident_slices": 1, "key": KEY}),
        ("cuda", 5, {"prefetch": 3, "policy": "everything"}),
    ],
)
def test_any_number_of_layers_matches_in_memory(platform, num_layers, options):
    # XLA for CPUs ignored barriers before JAX 0.12, and fuses the two turns of an iteration.
    is_exact = platform == "cuda" or jax.__version_info__ >= (0, 12)
    with trace_for_platform(platform):
        check_gradients(w=params(num_layers), tolerance=0 if is_exact else 1e-5, **options)


def freeze(*names):
    """Return the layer without gradients of some parameters."""
    return lambda w, x, key: layer(w | {n: lax.stop_gradient(w[n]) for n in names}, x, key)


def astype(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype), tree)


def cast(w, x, key):
    return layer(astype(w, "bfloat16"), x, key)


def in_bfloat16(w, x, key):
    assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(w))
    return layer(w, x, key)


# XLA may round a recomputed gelu differently from a saved one, so the reference recomputes.
recomputed_gelu = jax.checkpoint(stacks.gelu, prevent_cse=False)
offloading = jax.checkpoint(stacks.named, policy=stacks.OFFLOADED, prevent_cse=False)
TWO = dict(num_slices=2, num_microbatches=2)
GRADIENTS: dict[str, dict[str, Any]] = {
    "gelu": dict(layer=stacks.gelu, plain=recomputed_gelu, num_microbatches=2),
    "single layer, uint32 key": dict(w=params(1), key=jax.random.PRNGKey(3)),
    "computed in bfloat16": dict(
        layer=in_bfloat16, compute_dtype=jnp.bfloat16, plain=cast, policy="everything",
        x=inputs().astype("bfloat16"),
    ),
    "bfloat16": dict(
        w=astype(params(), "bfloat16"), x=inputs().astype("bfloat16"), policy="everything",
        tolerance=0.05,
    ),
    "composed": dict(
        layer=stacks.composed, form="list", policy="everything", key=KEY, tolerance=2e-5
    ),
    "frozen by a tree": dict(
        trainable={"a": True, "b": False, "c": np.True_}, plain=freeze("b"), tolerance=1e-5
    ),
    "frozen by path": dict(
        trainable=lambda path, leaf: path[0].key != "b", params_in="device", plain=freeze("b"),
        tolerance=1e-5,
    ),
    "frozen": dict(trainable=False, plain=freeze("a", "b", "c"), tolerance=1e-5),
}  # fmt: skip
# These could fail separately, but combine what those above and the tests of residuals show.
MORE_GRADIENTS: dict[str, dict[str, Any]] = {
    "composed, recomputed": dict(layer=stacks.composed, key=KEY, tolerance=2e-5, **TWO),
    "casting": dict(
        layer=stacks.casting, form="list", num_slices=2, policy="nothing", tolerance=2e-2
    ),
    "named": dict(layer=stacks.named, form="list", policy="dots", tolerance=2e-5, **TWO),
    "offloading": dict(
        layer=offloading, form="list", policy="everything", plain=stacks.named, tolerance=2e-5,
        **TWO,
    ),
    "empty batch": dict(
        w=astype(params(), "float16"), x=inputs()[:0].astype("float16"), policy="everything"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_match_in_memory(name):
    check_gradients(**GRADIENTS[name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MORE_GRADIENTS)
def test_more_gradients_match_in_memory(name):
    check_gradients(**MORE_GRADIENTS[name])


def test_without_key_outside_jit():
    run = functools.partial(offload_scan, layer)
    got = jax.value_and_grad(lambda w: loss(run(w, inputs())))(to_host(params()))
    expected = value_and_grads(lambda w: in_memory(layer, w, inputs(), None), params())
    assert_close(got, (expected[0], expected[1][0]), rtol=1e-5, atol=1e-6)
    assert kinds(got[1]) == {"pinned_host"}


def quantized_params():
    """Return low-rank matrices and frozen int8 kernels with their scales."""
    w = params()
    scale = jnp.abs(w["a"]).max((1, 2), keepdims=True) / 127
    keys = jax.random.split(jax.random.key(4))
    return {
        "kernel": jnp.round(w["a"] / scale).astype(jnp.int8),
        "scale": scale,
        "low": {
            "down": 0.1 * jax.random.normal(keys[0], (LAYERS, WIDTH, 2)),
            "up": 0.1 * jax.random.normal(keys[1], (LAYERS, 2, 2 * WIDTH)),
        },
        "out": w["b"].astype(jnp.bfloat16),
    }


@vary("options", [{"num_slices": 2, "num_microbatches": 2}, {"resident_slices": 1}], ids=str)
def test_gradients_of_low_rank_parameters_match_in_memory(options):
    """The other parameters are frozen, one of them of integers."""
    w, m = quantized_params(), options.get("num_microbatches", 1)
    run = offloaded(stacks.low_rank_layer, trainable=stacks.is_low_rank, **options)
    host_w = to_host(w)
    got = value_and_grads(lambda low, x: run({**host_w, "low": low}, x), host_w["low"], inputs())
    plain = lambda w, x: in_memory(stacks.low_rank_layer, w, x, None, m)  # noqa: E731
    want = value_and_grads(lambda low, x: plain({**w, "low": low}, x), w["low"], inputs())
    assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert kinds(got[1][0]) == {"pinned_host"}


def in_a_scan(f):
    # The transpose of a scan cannot add gradients in host memory.
    def run(w, x):
        return lax.scan(lambda x, _: (f(to_host(w), x), None), x, length=3)[0]

    return run


def twice(f):
    return lambda w, x: f(w, f(w, x))


@pytest.mark.parametrize(
    ("transform", "policy"), [(twice, "recomputed"), (in_a_scan, "everything")]
)
def test_inside_transformation(transform, policy):
    run = functools.partial(offload_scan, layer, num_slices=2, policy=POLICIES[policy])
    got = value_and_grads(
        transform(run), params() if transform is in_a_scan else to_host(params()), inputs()
    )
    plain = lambda w, x: in_memory(layer, to_device(w), x, None)  # noqa: E731
    assert_close(got, value_and_grads(transform(plain), params(), inputs()), rtol=2e-5, atol=1e-6)


def test_vmap_of_the_forward_pass():
    x = jnp.stack([inputs(), 2 * inputs()])
    got = jax.jit(jax.vmap(lambda x: offload_scan(layer, to_host(params()), x)))(x)
    want = jax.jit(jax.vmap(lambda x: in_memory(layer, params(), x, None)))(x)
    assert_close(got, want, rtol=2e-5, atol=1e-6)


def test_gradient_of_closed_over_array():
    def run(apply, w, x, scale):
        return apply(lambda w, x, key: layer(w, x * scale, key))(w, x)

    ours = functools.partial(offloaded, num_microbatches=2, policy=POLICIES["everything"])
    plain = lambda f: lambda w, x: in_memory(f, w, x, None, 2)  # noqa: E731
    args = inputs(), jnp.linspace(0.5, 1.5, WIDTH)
    got = value_and_grads(functools.partial(run, ours), to_host(params()), *args)
    want = value_and_grads(functools.partial(run, plain), params(), *args)
    assert_equal_bits(got, want)


@vary(("form", "policy"), [("stack", "recomputed"), ("list", "everything")])
def test_closed_over_integers_and_keys(form, policy):
    """They get no gradients under jax.checkpoint and inside lax.scan."""
    ids, key = jnp.arange(BATCH) % 3, jax.random.key(5)

    def run(apply, w, x, ids, key, scale):
        def own(w, x, _):
            return layer(w, x * scale + ids[:, None], key)

        return loss(apply(own)(w, x))

    def plain(own):
        return lambda w, x: in_memory(own, w, x, None)

    args = inputs(), ids, key, jnp.float32(1.5)
    apply = functools.partial(offloaded, form=form, policy=POLICIES[policy])
    ours, theirs = functools.partial(run, apply), functools.partial(run, plain)
    host_w, w = to_host(params()), params()
    want = jax.jit(jax.grad(theirs, (0, 1, 4)))(w, *args)
    got = jax.jit(jax.grad(jax.checkpoint(ours), (0, 1, 4)))(host_w, *args)
    assert_close(got, want, rtol=2e-5, atol=1e-6)

    def in_loop(apply, w, x):
        def step(x, i):
            return x + 0.1 * jax.grad(apply, 1)(w, x, ids + i, *args[2:]), None

        return lax.scan(step, x, jnp.arange(3))[0]

    want = jax.jit(functools.partial(in_loop, theirs))(w, args[0])
    got = jax.jit(functools.partial(in_loop, ours))(host_w, args[0])
    assert_close(got, want, rtol=2e-5, atol=1e-5)


def test_rejects_closed_over_host_array():
    other = to_host(jnp.ones(WIDTH))
    with pytest.raises(ValueError, match="closes over an array in host memory"):
        offload_scan(
            lambda w, x, key: layer(w, x * to_device(other), key), to_host(params()), inputs()
        )


@vary(("num_microbatches", "policy"), [(2, "everything"), (1, "recomputed")])
def test_inputs_with_integers_and_keys(num_microbatches, policy):
    """Integers and PRNG keys are residuals without gradients."""

    def tree_layer(w, x, key):
        turned = jnp.take_along_axis(x["h"], x["order"], 1)
        noise = jax.vmap(lambda k: jax.random.normal(k, (WIDTH,)))(x["keys"])
        return {
            **x, "h": layer(w, turned, key) + 0.1 * noise, "order": (x["order"] + 1) % WIDTH,
        }  # fmt: skip

    order = jax.random.randint(KEY, (BATCH, WIDTH), 0, WIDTH)

    def run(apply, w, h):
        pair = h[:, 0], jnp.zeros((BATCH, 0))
        x = {"h": h, "order": order, "pair": pair, "keys": jax.random.split(KEY, BATCH)}
        y = apply(tree_layer, w, x)
        assert jax.tree.structure(y) == jax.tree.structure(x)
        return y["h"] + y["order"] + y["pair"][0][:, None]

    options = {"num_microbatches": num_microbatches, "policy": POLICIES[policy]}
    ours = functools.partial(offload_scan, resident_slices=1, **options)
    plain = lambda f, w, x: in_memory(f, w, x, None, num_microbatches)  # noqa: E731
    got = value_and_grads(functools.partial(run, ours), to_host(params()), inputs())
    want = value_and_grads(functools.partial(run, plain), params(), inputs())
    assert_close(got, want, rtol=2e-5, atol=1e-6)


@vary(("form", "options"), [("stack", {"resident_slices": 1}), ("list", {})])
def test_aux(form, options):
    """Auxiliary outputs of each layer are stacked by microbatch and have gradients."""
    num_microbatches = 2
    options = {"num_microbatches": num_microbatches, "num_slices": 2, **options}

    def aux_layer(w, x, key):
        return layer(w, x, key), {"mean": x.mean(0), "count": jnp.int32(x.shape[0])}

    def apply(w, x):
        y, aux = offloaded(aux_layer, form, has_aux=True, **options)(w, x)
        if form == "list":
            aux = reference.stack(aux)
        assert aux["mean"].shape == (LAYERS, num_microbatches, WIDTH)
        assert aux["count"].shape == (LAYERS, num_microbatches)
        scale = 1.0 + jnp.arange(LAYERS * num_microbatches).reshape(LAYERS, num_microbatches, 1)
        return y.sum(0) + jnp.sum(aux["mean"] ** 2 * scale, (0, 1))

    def plain(w, x):
        total = 0.0
        for i in range(LAYERS):
            parts = jnp.split(x, num_microbatches)
            for m, part in enumerate(parts):
                total += part.mean(0) ** 2 * (1.0 + i * num_microbatches + m)
            one = jax.tree.map(lambda a, i=i: a[i], w)
            x = jnp.concatenate([layer(one, part, None) for part in parts])
        return x.sum(0) + total

    got = value_and_grads(apply, to_host(params()), inputs())
    expected = value_and_grads(plain, params(), inputs())
    assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("form", ["stack", "list"])
def test_rejects_gradient_of_integer_parameters(form):
    quantized = to_host(jax.tree.map(lambda a: jnp.round(a * 50).astype(jnp.int8), params()))

    def int_layer(w, x, key):
        return layer(jax.tree.map(lambda a: a / 50.0, w), x, key)

    run = functools.partial(offloaded(int_layer, form), quantized)
    assert jax.jit(run)(inputs()).shape == (BATCH, WIDTH)
    with pytest.raises(TypeError, match=r"`(stacked_)?params`.*\['a'\] must be floating-point"):
        jax.grad(lambda x: loss(run(x)))(inputs())


def test_rejects_list_of_layers_without_listing_all_shapes():
    layers = to_host([jax.tree.map(lambda a: a[0], params())] * 30)
    with pytest.raises(ValueError, match="Stack a list of layers") as raised:
        offload_scan(layer, layers, inputs())
    assert len(str(raised.value)) < 300


def test_compute_dtype_does_not_cast_complex_parameters():
    w = to_host({"a": jnp.full((2, 3), 1 + 2j), "b": jnp.ones((2, 3))})

    def one(w, x, key):
        assert w["b"].dtype == jnp.bfloat16
        return x * w["a"]

    y = offload_scan(one, w, jnp.ones(3, complex), compute_dtype=jnp.bfloat16)
    np.testing.assert_allclose(y, jnp.full(3, (1 + 2j) ** 2), rtol=1e-6)


def test_rejects_vmap_of_gradient_jvp_and_pmap():
    w, x = to_host(params()), jnp.stack([inputs()] * 2)
    gradient = jax.grad(lambda w, x: loss(offload_scan(layer, w, x)))
    with pytest.raises(NotImplementedError, match="mapped axis"):
        jax.vmap(gradient, (None, 0))(w, x)
    with pytest.raises(NotImplementedError):
        jax.vmap(jax.grad(lambda x: loss(offload_scan(layer, w, x))))(x)
    with pytest.raises(NotImplementedError, match="offload_scan .* forward-mode"):
        jax.jvp(lambda x: offload_scan(layer, w, x), (x[0],), (x[0],))
    with pytest.raises(ValueError, match="jax.pmap"):
        jax.pmap(lambda w, x: offload_scan(layer, w, x), in_axes=(None, 0))(params(), x)


def test_to_host_and_to_device_are_differentiable():
    tree = {"w": inputs(), "n": jnp.arange(3)}
    for run in (lambda f: f, jax.jit):
        host = run(to_host)(tree)
        assert kinds(host) == {"pinned_host"} and kinds(run(to_device)(host)) == {"device"}
        assert kinds(run(to_host)(host)) == {"pinned_host"}

        def there(w):
            return jnp.sum(jnp.sin(to_device(to_host(w * 2))))

        got = run(jax.grad(there))(tree["w"])
        np.testing.assert_allclose(got, 2 * jnp.cos(2 * tree["w"]), rtol=1e-6)
        assert kinds(got) == {"device"}
        assert kinds(run(jax.grad(lambda w: jnp.sum(to_device(w) ** 2)))(host["w"])) == {
            "pinned_host"
        }
