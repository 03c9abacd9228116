"""offload_scan compared with the same stack in device memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from effjax import offload_scan, offload_sequential, to_device, to_host
from tests.ops.offload.stacks import (
    BATCH,
    KEY,
    LAYERS,
    POLICIES,
    WIDTH,
    assert_close,
    assert_equal_bits,
    in_memory,
    inputs,
    kinds,
    layer,
    loss,
    params,
    value_and_grads,
)
from tests.tiers import vary


def unstack(w):
    """Return the layers of a stack, each in host memory."""
    return [jax.tree.map(lambda a, i=i: to_host(to_device(a)[i]), w) for i in range(LAYERS)]


@pytest.mark.usefixtures("optimized")
@vary(
    ("options", "num_microbatches", "policy"),
    [
        ({"num_slices": 2, "resident_slices": 1}, 4, "everything"),
        ({}, 1, "recomputed"),
        ({"prefetch": 0}, 4, "recomputed"),
        ({"prefetch": 3, "num_slices": 2, "resident_slices": 2}, 1, "dots"),
        ({"activations": "device", "grads": "device"}, 4, "everything"),
        ({"params_in": "device", "grads": "host"}, 1, "everything"),
    ],
    ids=str,
)
def test_loss_and_gradients_match_in_memory_bitwise(options, num_microbatches, policy):
    """Gradients are returned in the memory of the parameters."""
    where = options.get("params_in", "host")
    w = params() if where == "device" else to_host(params())
    run = functools.partial(
        offload_scan, layer, key=KEY, num_microbatches=num_microbatches,
        policy=POLICIES[policy], **options,
    )  # fmt: skip
    got = value_and_grads(run, w, inputs())
    plain = lambda w, x: in_memory(layer, w, x, KEY, num_microbatches)  # noqa: E731
    assert_equal_bits(got, value_and_grads(plain, params(), inputs()))
    assert kinds(got[1][0]) == ({"device"} if where == "device" else {"pinned_host"})
    assert kinds(got[1][1]) == {"device"}


@pytest.mark.usefixtures("optimized")
def test_recomputation_matches_checkpointed_scan_bitwise():
    """XLA may round a recomputed gelu differently from a saved one, so the reference recomputes."""

    def gelu(w, x, key):
        return x + jax.nn.gelu(x @ w["a"] + w["c"]) @ w["b"]

    again = jax.checkpoint(gelu, prevent_cse=False)
    expected = value_and_grads(lambda w, x: in_memory(again, w, x, None, 2), params(), inputs())
    run = functools.partial(offload_scan, gelu, num_microbatches=2)
    assert_equal_bits(value_and_grads(run, to_host(params()), inputs()), expected)


def test_without_key_outside_jit():
    run = functools.partial(offload_scan, layer)
    got = jax.value_and_grad(lambda w: loss(run(w, inputs())))(to_host(params()))
    expected = value_and_grads(lambda w: in_memory(layer, w, inputs(), None), params())
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    assert_close(got[1], expected[1][0], rtol=1e-5, atol=1e-6)
    assert kinds(got[1]) == {"pinned_host"}


def test_single_layer_with_uint32_key():
    """XLA unrolls a loop of one iteration."""
    one = jax.tree.map(lambda a: a[:1], params())
    key = jax.random.PRNGKey(3)
    got = value_and_grads(lambda w: offload_scan(layer, w, inputs(), key=key), to_host(one))
    assert_equal_bits(got, value_and_grads(lambda w: in_memory(layer, w, inputs(), key), one))
    assert kinds(got[1]) == {"pinned_host"}


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
    scale = jnp.linspace(0.5, 1.5, WIDTH)

    def run(apply, w, x, scale):
        return apply(lambda w, x, key: layer(w, x * scale, key), w, x)

    offloaded = functools.partial(
        run,
        functools.partial(offload_scan, num_microbatches=2, policy=POLICIES["everything"]),
    )
    plain = functools.partial(run, lambda f, w, x: in_memory(f, w, x, None, 2))
    got = value_and_grads(offloaded, to_host(params()), inputs(), scale)
    assert_equal_bits(got, value_and_grads(plain, params(), inputs(), scale))


@vary(("sequential", "policy"), [(False, "recomputed"), (True, "everything")])
def test_closed_over_integers_and_keys(sequential, policy):
    """They get no gradients under jax.checkpoint and inside lax.scan."""
    policy = POLICIES[policy]
    ids, key = jnp.arange(BATCH) % 3, jax.random.key(5)

    def run(apply, w, x, ids, key, scale):
        def own(w, x, _):
            return layer(w, x * scale + ids[:, None], key)

        return loss(apply(own, w, x))

    def offloaded(own, w, x):
        if not sequential:
            return offload_scan(own, w, x, policy=policy)
        return offload_sequential([own, own], [jax.tree.map(to_host, w)] * 2, x, policy=policy)

    def plain(own, w, x):
        if sequential:
            return own(w, own(w, x, None), None)
        return in_memory(own, w, x, None)

    w = jax.tree.map(lambda a: a[0], params()) if sequential else params()
    args = inputs(), ids, key, jnp.float32(1.5)
    ours, theirs = (functools.partial(run, apply) for apply in (offloaded, plain))
    host_w = w if sequential else to_host(w)
    expected = jax.jit(jax.grad(theirs, (0, 1, 4)))(w, *args)
    got = jax.jit(jax.grad(jax.checkpoint(ours), (0, 1, 4)))(host_w, *args)
    assert_close(got, expected, rtol=2e-5, atol=1e-6)

    def in_loop(apply, w, x):
        def step(x, i):
            return x + 0.1 * jax.grad(apply, 1)(w, x, ids + i, *args[2:]), None

        return lax.scan(step, x, jnp.arange(3))[0]

    got, expected = (
        jax.jit(functools.partial(in_loop, apply))(w, args[0])
        for apply, w in ((ours, host_w), (theirs, w))
    )
    assert_close(got, expected, rtol=2e-5, atol=1e-5)


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

    offloaded = functools.partial(
        run,
        functools.partial(
            offload_scan, num_microbatches=num_microbatches, resident_slices=1,
            policy=POLICIES[policy],
        ),
    )  # fmt: skip
    plain = functools.partial(run, lambda f, w, x: in_memory(f, w, x, None, num_microbatches))
    got = value_and_grads(offloaded, to_host(params()), inputs())
    expected = value_and_grads(plain, params(), inputs())
    assert_close(got, expected, rtol=2e-5, atol=1e-6)


@vary(
    ("sequential", "options", "num_microbatches", "policy"),
    [
        (False, {"resident_slices": 1}, 2, "recomputed"),
        (True, {}, 2, "everything"),
    ],
    ids=str,
)
def test_aux(sequential, options, num_microbatches, policy):
    """Auxiliary outputs of each layer are stacked by microbatch and have gradients."""
    options = {
        "num_microbatches": num_microbatches, "num_slices": 2, "policy": POLICIES[policy], **options
    }  # fmt: skip

    def aux_layer(w, x, key):
        return layer(w, x, key), {"mean": x.mean(0), "count": jnp.int32(x.shape[0])}

    def apply(w, x):
        if sequential:
            layers, params = [aux_layer] * LAYERS, unstack(w)
            y, aux = offload_sequential(layers, params, x, has_aux=True, **options)
            aux = jax.tree.map(lambda *a: jnp.stack(a), *aux)
        else:
            y, aux = offload_scan(aux_layer, w, x, has_aux=True, **options)
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


def test_compute_dtype():
    def checked(w, x, key):
        assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(w))
        return layer(w, x, key)

    x = inputs().astype(jnp.bfloat16)
    apply = functools.partial(
        offload_scan, checked, compute_dtype=jnp.bfloat16, policy=POLICIES["everything"]
    )
    got = value_and_grads(apply, to_host(params()), x)

    def cast(w, x, key):
        return layer(jax.tree.map(lambda a: a.astype(jnp.bfloat16), w), x, key)

    expected = value_and_grads(lambda w, x: in_memory(cast, w, x, None), params(), x)
    assert_equal_bits(got, expected)
    assert got[1][0]["a"].dtype == jnp.float32 and got[1][1].dtype == jnp.bfloat16


def test_rejects_gradient_of_integer_parameters():
    quantized = to_host(jax.tree.map(lambda a: jnp.round(a * 50).astype(jnp.int8), params()))

    def int_layer(w, x, key):
        return layer(jax.tree.map(lambda a: a / 50.0, w), x, key)

    run = functools.partial(offload_scan, int_layer, quantized)
    assert jax.jit(run)(inputs()).shape == (BATCH, WIDTH)
    with pytest.raises(TypeError, match=r"`stacked_params`\['a'\] must be floating-point .* int8"):
        jax.grad(lambda x: loss(run(x)))(inputs())


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        (r"`num_slices` \(=3\) must divide", lambda w: {"num_slices": 3}),
        (r"`num_microbatches` \(=3\) must divide", lambda w: {"num_microbatches": 3}),
        (r"`resident_slices` \(=5\) must be at most", lambda w: {"resident_slices": 5}),
        (r"must be in host memory, .*: stacked_params\['c'\]",
         lambda w: {"stacked_params": w | {"c": to_device(w["c"])}}),
        ("same number of layers L",
         lambda w: {"stacked_params": w | {"c": to_host(to_device(w["c"])[:3])}}),
        ("must have the structure of x", lambda w: {"layer": lambda w, x, key: (x, x)}),
        ("must have the type", lambda w: {"layer": lambda w, x, key: x @ w["a"]}),
        (r"must return \(x, aux\)", lambda w: {"has_aux": True}),
    ],
)  # fmt: skip
def test_rejects_invalid_input(match, arguments):
    w = to_host(params())
    call = {"layer": layer, "stacked_params": w, "x": inputs(), **arguments(w)}
    with pytest.raises((TypeError, ValueError), match=match):
        offload_scan(call.pop("layer"), call.pop("stacked_params"), call.pop("x"), **call)


def test_rejects_list_of_layers_without_listing_all_shapes():
    layers = to_host([jax.tree.map(lambda a: a[0], params())] * 30)
    with pytest.raises(ValueError, match=r"Stack a list of layers: jax.tree.map\(") as raised:
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
    with pytest.raises(NotImplementedError, match="Make the mapped axis part of the batch"):
        jax.vmap(gradient, (None, 0))(w, x)
    with pytest.raises(NotImplementedError, match="Make the mapped axis part of the batch"):
        jax.vmap(jax.grad(lambda x: loss(offload_scan(layer, w, x))))(x)
    with pytest.raises(NotImplementedError, match="offload_scan .* forward-mode"):
        jax.jvp(lambda x: offload_scan(layer, w, x), (x[0],), (x[0],))
    with pytest.raises(ValueError, match="jax.pmap does not take .*: use jax.shard_map"):
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
