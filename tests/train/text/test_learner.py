"""Training steps of a decoder, in all places of its arrays, against optax in float64."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from effjax import offload_jit, offload_train_step, to_device, to_host
from effjax.memory import collectives
from effjax.models import DecoderConfig, decoder_functions, decoder_shapes, init_decoder
from effjax.models.scan import scan_layers
from effjax.ops.quantize import dequantize, quantize
from effjax.train.errors import TrainError
from effjax.train.mesh import global_batch, make_mesh
from effjax.train.optimizers import is_linear, make_optimizer
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.learner import is_adapter
from effjax.train.text.learner import make_learner as make_learner_of
from tests.convert.decoders import CONFIGS, config_of
from tests.tiers import vary

MODEL = DecoderConfig(
    model_type="qwen3", vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, rms_norm_eps=1e-5,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(
    model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24,
    router_aux_loss_coef=0.1,
)  # fmt: skip
ROWS, LENGTH, STEPS, RATE, DECAY = 8, 12, 3, 1e-2, 0.1


def make_batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, MODEL.vocab_size, (ROWS, LENGTH + 1)).astype(np.int32)
    # The rows have different numbers of tokens with loss.
    weights = np.arange(LENGTH) < rng.integers(1, LENGTH, ROWS)[:, None]
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "weights": weights.astype(np.float32),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Float64Config(FinetuneConfig):
    """Options of a step in float64."""

    dtype: str = "float64"


def make_learner(devices=1, param_dtype: Any = "float32", wide=False, model=None, **options):
    mesh = make_mesh(options.get("mesh"), jax.devices()[:devices])
    plain = dict(warmup=0.0, schedule="constant", clip_norm=0.0, dtype="float32", steps=STEPS)
    plain |= dict(learning_rate=RATE, weight_decay=DECAY)
    dtype, config_type = param_dtype.removesuffix("-24"), FinetuneConfig
    if param_dtype == "float64":
        plain, config_type = plain | {"dtype": "float64"}, Float64Config
    else:
        plain["param_dtype"] = param_dtype
    size = dict(hidden_size=64, intermediate_size=96) if wide else {}
    decoder = dataclasses.replace(MODEL, dtype=dtype, **size, **(model or {}))
    return make_learner_of(config_type(**plain | options).resolve(), decoder, mesh)


def random_params(learner):
    """Return random parameters of a decoder, in the places of its learner."""
    arrays, shapes = init_decoder(learner.model, jax.random.key(0)), learner.model_shapes()
    return jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), arrays, shapes)


def assert_places(learner, state):
    """Assert that the arrays of a state have the shapes, dtypes and places of `shapes`."""

    def check(a, like):
        assert (a.shape, a.dtype) == (like.shape, like.dtype)
        assert a.sharding.is_equivalent_to(like.sharding, a.ndim)
        assert a.sharding.memory_kind == like.sharding.memory_kind

    jax.tree.map(check, state, learner.shapes())


def train(learner, params=None):
    """Return the losses of some steps and of an evaluation after them, and the state."""
    if params is None:
        params = random_params(learner)
    params = jax.tree.map(
        lambda a, like: jax.device_put(a, like.sharding), params, learner.model_shapes()
    )
    state = learner.initial_state(*params)
    assert_places(learner, state)
    step, batch = offload_jit(learner.train_step()), global_batch(make_batch(), ROWS, learner.mesh)
    losses = []
    for _ in range(STEPS):
        state, metrics = step(state, batch, jax.random.key(0))
        losses.append(loss_of(metrics))
    assert_places(learner, state)
    evaluate = offload_jit(learner.eval_step(), donate=False)
    total, weight = evaluate(state.model.layers, state.model.others, batch)
    return [*losses, float(total) / float(weight)], state


def loss_of(metrics):
    return float(metrics["loss"] if isinstance(metrics, dict) else metrics)


def is_projection(path, _=None):
    return "proj" in path[-1].key


def make_reference(name, clip_norm):
    """Return the optimizer in terms of optax."""

    def is_decayed(params):
        return jax.tree.map_with_path(
            lambda path, _: is_projection(path) or "lm_head" in path[-1].key, params
        )

    tx = optax.adamw(RATE, b2=0.95, weight_decay=DECAY, mask=is_decayed)
    if name == "muon":
        axes = optax.contrib.MuonDimensionNumbers(-2, -1)
        muon = optax.contrib.muon(
            RATE, weight_decay=DECAY, consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: axes, params),
        )  # fmt: skip
        labels = functools.partial(jax.tree.map_with_path, is_projection)
        tx = optax.partition({True: muon, False: tx}, labels)
    return tx if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), tx)


@functools.cache
def by_hand(clip_norm=None, name="adamw", has_experts=False):
    """Return the losses and the parameters of plain JAX and optax in float64."""
    tx = make_reference(name, clip_norm)
    learner = make_learner(model=EXPERTS if has_experts else None)
    params = jax.device_get(random_params(learner))
    with jax.enable_x64(True):
        embed, layer, head = decoder_functions(dataclasses.replace(learner.model, dtype="float64"))
        params, batch = jax.tree.map(lambda a: jnp.asarray(a, "float64"), params), make_batch()

        def loss_of(params):
            layers, others = params
            x = scan_layers(layer, layers, embed(others, batch), None)
            total, weight = head(others, x, batch)
            return total / weight

        @jax.jit
        def step(params, state):
            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        state, losses = jax.jit(tx.init)(params), []
        for _ in range(STEPS + 1):
            last = params
            params, state, loss = step(params, state)
            losses.append(float(loss))
        return losses, jax.device_get(last)


FORMS: dict[str, dict[str, Any]] = {
    "offloaded, microbatches": dict(params_in="host", fuse_update=True, num_microbatches=2),
    "sharded": dict(devices=4, mesh="data=2,fsdp=2", fuse_update=True),
    "sharded on the host": dict(devices=2, mesh="fsdp=2", params_in="host", fuse_update=True),
    "recomputed": {},
    "residuals kept": dict(policy="everything", on_nan="skip"),
    "activations": dict(activations_in="host", policy="dots", mlp_chunk_size=5),
    "params": dict(params_in="host", activations_in="device", num_microbatches=4),
}


def assert_like_optax(learner, rtol, atol, **options):
    losses, state = train(learner)
    want, params = by_hand(**options)
    if "has_experts" in options:  # an evaluation has no loss of the router
        losses, want = losses[:-1], want[:-1]
    np.testing.assert_allclose(losses, want, rtol=rtol)
    assert int(state.step) == STEPS
    got = jax.device_get((state.model.layers, state.model.others))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), got, params)


@vary("form", FORMS)
def test_steps_match_optax(form):
    assert_like_optax(make_learner(**FORMS[form]), rtol=2e-5, atol=2e-4)


EXPERT_FORMS = [
    dict(params_in="host", fuse_update=True),
    dict(devices=4, mesh="data=2,fsdp=2", policy="everything"),
    dict(policy="dots", activations_in="host"),
    dict(devices=2, mesh="fsdp=2", params_in="host", fuse_update=True),
]


@vary("form", EXPERT_FORMS)
def test_steps_with_experts_match_optax(form):
    """The loss of the router is that of all rows, on several devices too."""
    learner = make_learner(model=EXPERTS, **form)
    assert_like_optax(learner, rtol=2e-5, atol=5e-4, has_experts=True)


def test_devices_compute_their_own_tokens_with_experts():
    """They send gradients, and little more for the losses, the router and the norm."""
    learner = make_learner(devices=4, model=EXPERTS)
    batch = global_batch(make_batch(), ROWS, learner.mesh)
    step = jax.jit(learner.train_step()).lower(learner.shapes(), batch, jax.random.key(0))
    sent = sum(c.bytes * c.count for c in collectives(step.compile().as_text()))
    assert sent <= 1.1 * 4 * sum(a.size for a in jax.tree.leaves(learner.model_shapes()))


def test_microbatches_with_experts():
    """The loss is the mean over all tokens, and that of the router a mean over microbatches."""
    params, batch, results = None, make_batch(), []
    for count in (1, 4):
        learner = make_learner(model=EXPERTS, num_microbatches=count, params_in="host")
        params = random_params(learner)
        state = learner.initial_state(*params)
        results.append(offload_jit(learner.train_step())(state, batch)[1])
    whole, parts = results
    cross_entropy = [float(m["loss"] - 0.1 * m["router_loss"]) for m in results]
    np.testing.assert_allclose(*cross_entropy, rtol=1e-6)
    assert 2 <= whole["router_loss"] < parts["router_loss"] < 3
    assert 2 / 6 < whole["busiest_expert"] < parts["busiest_expert"] <= 1


def test_padding_is_left_out_of_the_loss_of_the_router():
    batch, learner = make_batch(), make_learner(model=EXPERTS)
    positions = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    positions[:, 7:] = 0
    ids = (np.arange(LENGTH) < 7) + 0 * positions
    losses = {}
    for name, more in {
        "short": {name: a[:, :7] for name, a in batch.items()},
        "padded": {**batch, "positions": positions},
        "packed": {**batch, "positions": positions, "segment_ids": ids},
        "long": batch,
    }.items():
        state = learner.initial_state(*random_params(learner))
        losses[name] = float(offload_jit(learner.train_step())(state, more)[1]["router_loss"])
    assert losses["short"] == pytest.approx(losses["padded"], rel=1e-6)
    assert losses["short"] == pytest.approx(losses["packed"], rel=1e-6)
    assert losses["short"] != pytest.approx(losses["long"], rel=1e-4)


@vary("form", [dict(params_in="host", fuse_update=True), {}])
def test_muon_orthogonalizes_the_matrix_of_each_layer(form):
    assert_like_optax(make_learner(optimizer="muon", **form), rtol=1e-4, atol=1e-3, name="muon")
    assert abs(by_hand(name="muon")[0][-1] - by_hand()[0][-1]) > 1e-2


@vary("form", [dict(params_in="host", fuse_update=True), {}])
def test_muon_orthogonalizes_the_matrices_of_each_expert(form):
    learner = make_learner(optimizer="muon", model=EXPERTS, **form)
    assert_like_optax(learner, rtol=1e-4, atol=1e-3, name="muon", has_experts=True)


@vary("form", [dict(params_in="host", fuse_update=True), {}])
def test_muon_orthogonalizes_the_matrices_of_fused_projections(form):
    """Phi computes as Llama with the same numbers, and so does its optimizer."""

    def make(family):
        return make_learner(optimizer="muon", model=dict(model_type=family), **form)

    def join(layers):
        q, k, v, gate, up = (
            layers.pop(f"{name}_proj.weight")
            for name in (*(f"self_attn.{one}" for one in "qkv"), "mlp.gate", "mlp.up")
        )
        fused = {"self_attn.qkv_proj": (q, k, v), "mlp.gate_up_proj": (gate, up)}
        return layers | {f"{name}.weight": np.concatenate(a, 1) for name, a in fused.items()}

    llama, phi = make("llama"), make("phi3")
    layers, others = jax.device_get(random_params(llama))
    want, state = train(llama, (layers, others))
    got, fused = train(phi, (join(dict(layers)), others))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    layers, fused = jax.device_get((state.model.layers, fused.model.layers))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), fused, join(layers))


@pytest.mark.parametrize("form", [dict(fuse_update=False), {}])
@vary("name", ["adamw8bit", "muon"])
def test_offloaded_master_copies_equal_those_in_memory(optimized, name, form):
    """Muon and 8-bit moments, with parameters of 24 bits, to the bit.

    The gradients are products of small integers, which no order of a sum changes. Those of a
    decoder are equal only up to rounding: XLA fuses the two programs differently.
    """

    def layer(p, x, key):
        rows, y = x
        return jnp.roll(rows, 1), y + rows @ p["mlp.gate_up_proj.weight"] + p["norm.weight"]

    def embed(others, batch, key):
        rows = batch["rows"]
        return rows, rows * others["embed.weight"]

    def head(others, x, batch, key):
        return (x[1].astype("float32") * batch["labels"]).sum() + others["norm.weight"].sum()

    def train(place):
        key = jax.random.split(jax.random.key(0), 2)
        draw = lambda key, *shape: jax.random.normal(key, shape, "bfloat16")  # noqa: E731
        layers = {
            "mlp.gate_up_proj.weight": draw(key[0], 3, 16, 16),
            "norm.weight": draw(key[1], 3, 16),
        }
        others = {"embed.weight": draw(key[0], 16), "norm.weight": draw(key[1], 16)}
        tx = make_optimizer(
            name, lambda count: RATE / (1 + count), DECAY, master_copy=True,
            fused={"mlp.gate_up_proj": (8, 8)},
        )  # fmt: skip
        init, step = offload_train_step(
            embed, layer, head, tx, params_in=place, others_in=place, **form
        )
        put = to_host if place == "host" else to_device
        state, step = init(put(layers), put(others)), offload_jit(step)
        rng = np.random.default_rng(0)
        for _ in range(5):
            rows, labels = rng.integers(-3, 4, (2, 4, 16))
            state, *_ = step(state, {"rows": jnp.asarray(rows, "bfloat16"), "labels": labels})
        return jax.device_get(state)

    jax.tree.map(np.testing.assert_array_equal, train("host"), train("device"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options", [dict(params_in="host", activations_in="device"), dict(devices=2, mesh="fsdp=2")]
)
def test_clips_by_the_norm_of_all_gradients(options):
    # Adam divides by the size of the gradients: a constant factor matters only next to epsilon.
    losses, _ = train(make_learner(clip_norm=1e-7, **options))
    want, _ = by_hand(1e-7)
    assert abs(want[-1] - by_hand()[0][-1]) > 1e-2
    np.testing.assert_allclose(losses, want, rtol=1e-4)


def test_clips_by_the_norm_of_the_previous_step():
    _, state = train(make_learner(fuse_update=True, clip_norm=1.0))
    assert 0 < float(state.model.grad_norm) < np.inf


@vary("options", [dict(params_in="host", fuse_update=True), dict(devices=2, mesh="fsdp=2")])
def test_trains_adapters_only(options):
    learner = make_learner(lora=2, lora_alpha=6.0, **options)
    state = learner.initial_state(*random_params(learner))
    before = jax.device_get((state.model.layers, state.model.others))
    losses, state = train(learner)
    assert losses[0] == pytest.approx(by_hand()[0][0], rel=1e-5)  # B is 0
    assert losses[-1] < losses[0] - 0.1
    after = jax.device_get((state.model.layers, state.model.others))
    changed = jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)
    assert changed == jax.tree.map_with_path(is_adapter, before)
    adapters = {name: a for name, a in before[0].items() if "lora" in name}
    assert len(adapters) == 2 * 7  # all linear layers
    trained = sum(a.size for a in adapters.values())
    assert learner.num_trained == trained < learner.num_params
    moments = [a for a in jax.tree.leaves(state.model.layers_state) if a.ndim > 1]
    assert sum(a.size for a in moments) == 2 * trained


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (dict(mlp_chunk_size=5), "`mlp_chunk_size` .* must be None"),
        (dict(lora=2, lora_dropout=0.1), "`lora_dropout` .* adapters of experts"),
    ],
)
def test_options_that_experts_do_not_support(options, match):
    with pytest.raises(TrainError, match=match):
        make_learner(model=EXPERTS, **options)


def draw(shapes):
    rng = np.random.default_rng(0)
    return {name: rng.normal(0, 0.3, a.shape).astype(a.dtype) for name, a in shapes.items()}


def initial_state(learner, *arrays):
    """Return the state with arrays of the layers, the others and the adapters, in their places."""
    shapes = (*learner.model_shapes(), learner.adapter_shapes())
    layers, others, adapters = jax.tree.map(
        lambda a, like: jax.device_put(a, like.sharding), arrays, shapes
    )
    return learner.initial_state(layers, others, adapters=adapters)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "options",
    [
        dict(params_in="host", fuse_update=True),
        dict(policy="everything"),
        dict(devices=2, mesh="fsdp=2"),
    ],
)
def test_dropout_of_adapters(options):
    """All forms of a step drop the same numbers, which depend on the number of the step."""
    params = jax.device_get(random_params(make_learner()))
    results = []
    for form in (options, {}):
        learner = make_learner(lora=2, lora_alpha=6.0, lora_dropout=0.5, **form)
        adapters = draw(learner.adapter_shapes())
        state = initial_state(learner, *params, adapters)
        step = offload_jit(learner.train_step(), donate=False)
        batch, losses, after = global_batch(make_batch(), ROWS, learner.mesh), [], state
        for number in (0, 0, 1):
            count = jax.device_put(np.int32(number), state.step.sharding)
            after, loss = step(state._replace(step=count), batch, jax.random.key(0))
            losses.append(float(loss))
        assert losses[0] == losses[1] and abs(losses[2] - losses[0]) > 1e-3
        results.append((losses, {name: np.asarray(after.model.layers[name]) for name in adapters}))
    (losses, layers), (want, want_layers) = results
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-4), layers, want_layers)


@pytest.mark.parametrize("model", [None, EXPERTS])
def test_adapters_add_their_product(model):
    """A model with adapters computes the same as one with W + scale B A."""
    learner = make_learner(lora=2, lora_alpha=6.0, model=model)
    layers, others = jax.device_get(random_params(learner))
    adapters, merged = draw(learner.adapter_shapes()), dict(layers)
    for module in {name.rpartition("lora_")[0] for name in adapters}:
        b, a = (adapters[f"{module}lora_{i}.weight"] for i in "BA")
        merged[f"{module}weight"] = layers[f"{module}weight"] + 3 * b @ a
    evaluate, batch = jax.jit(learner.eval_step()), make_batch()
    with jax.default_matmul_precision("highest"):
        loss, want, plain = (
            evaluate(tree, others, batch)[0] for tree in (layers | adapters, merged, layers)
        )
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    assert abs(loss - plain) > 0.1


QUANTIZED_FORMS: list[dict[str, Any]] = [
    dict(params_in="host", fuse_update=True),
    dict(policy="dots", mlp_chunk_size=5),
    dict(devices=2, mesh="fsdp=2", params_in="host", activations_in="device"),
    dict(policy="everything", num_microbatches=2),
]


@vary(
    "form, options",
    [
        ("nf4", QUANTIZED_FORMS[0]),
        ("nf4", QUANTIZED_FORMS[0] | {"model": EXPERTS}),
        *(("int8", o) for o in QUANTIZED_FORMS),
    ],
)
def test_a_quantized_base_is_that_of_its_dequantized_weights(form, options, x64):
    """The loss and the gradients of adapters, which are the first moments, up to a factor."""
    options = options | dict(param_dtype="float64", lora=2, lora_alpha=6.0)
    learner = make_learner(**options)
    layers, others = map(draw, learner.model_shapes())
    adapters, quantized = draw(learner.adapter_shapes()), {}
    for name, weight in layers.items():
        if name.endswith("_proj.weight"):
            pair = jax.jit(quantize, static_argnums=1)(weight, form)
            quantized |= {f"{name}.codes": pair.codes, f"{name}.scales": pair.scales}
            layers[name] = dequantize(pair, weight.shape[-1], "float64")
        else:
            quantized[name] = weight
    results = []
    for params, how in ((layers, None), (quantized, form)):
        learner = make_learner(quantize=how, **options)
        state = initial_state(learner, params, others, adapters)
        assert_places(learner, state)
        batch = global_batch(make_batch(), ROWS, learner.mesh)
        frozen = {name: np.array(a) for name, a in state.model.layers.items() if "lora" not in name}
        state, loss = offload_jit(learner.train_step())(state, batch, jax.random.key(0))
        assert_places(learner, state)
        for name, a in frozen.items():
            np.testing.assert_array_equal(state.model.layers[name], a)
        moments = [np.asarray(a) for a in jax.tree.leaves(state.model.layers_state) if a.ndim > 1]
        results.append((loss_of(loss), moments))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-12)
    for got, want in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-9 * np.abs(want).max())


# Their parts are rounded as the whole arrays, up to numbers beside a boundary of the rounding.
@vary("form", FORMS)
def test_8_bit_products_in_all_forms(form):
    exact, want, got = (
        train(make_learner(**options))[0]
        for options in ({}, {"matmul": "fp8"}, FORMS[form] | {"matmul": "fp8"})
    )
    np.testing.assert_allclose(got, want, rtol=2e-3)
    np.testing.assert_allclose(want, exact, rtol=0.05)
    assert np.max(np.abs(np.subtract(want, exact))) > 1e-3


@pytest.mark.exhaustive
@pytest.mark.parametrize("places", [{}, dict(params_in="host", activations_in="device")])
def test_adapters_of_8_bit_products(places):
    """Adapters learn as beside products in bfloat16, and the base does not change."""
    options = dict(lora=2, lora_alpha=6.0, param_dtype="bfloat16", dtype="bfloat16", **places)
    losses = []
    for matmul in (None, "fp8"):
        learner = make_learner(matmul=matmul, **options)
        params = random_params(learner)
        frozen = jax.device_get(params)
        values, state = train(learner, params)
        losses.append(values)
        jax.tree.map(
            np.testing.assert_array_equal,
            {name: jax.device_get(state.model.layers[name]) for name in frozen[0]},
            frozen[0],
        )
    np.testing.assert_allclose(*losses, rtol=0.02)
    assert losses[0] != losses[1] and losses[1][-1] < losses[1][0]


OFFLOADED: dict[str, Any] = dict(param_dtype="bfloat16", params_in="host", fuse_update=True)


@pytest.mark.exhaustive
def test_bfloat16_parameters():
    losses, state = train(make_learner(**OFFLOADED))
    np.testing.assert_allclose(losses, by_hand()[0], rtol=0.05)
    assert {a.dtype for a in state.model.layers.values()} == {jnp.dtype(jnp.bfloat16)}
    moments = [a for a in jax.tree.leaves(state.model.layers_state) if a.ndim > 1]
    assert {a.dtype for a in moments} == {jnp.dtype(jnp.float32)}


def test_8_bit_moments():
    learner = make_learner(optimizer="adamw8bit", wide=True, **OFFLOADED)
    losses, state = train(learner)
    assert losses[-1] < losses[0] - 0.2
    codes = [a for a in jax.tree.leaves(state.model.layers_state) if a.dtype.itemsize == 1]
    large = {"mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"}
    assert sum(a.size for a in codes) == 2 * sum(state.model.layers[n].size for n in large)


@pytest.mark.parametrize("name", CONFIGS)
def test_linear_layers_are_those_with_a_quantized_form(name):
    config = config_of(name)
    plain, quantized = (decoder_shapes(config, quantize=form)[0] for form in (None, "nf4"))
    linear = {name for name in plain if is_linear(name)}
    assert linear == plain.keys() - quantized.keys() and len(linear) in (4, 7)
    assert not any(is_linear(name.replace(".weight", ".lora_A.weight")) for name in plain)
