"""Matching beside SciPy and optax; losses, denoising queries and decoding beside transformers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from effjax.memory import collectives
from effjax.memory.read.hlo import parse
from effjax.models.detection import (
    DetectorOutput,
    Predictions,
    Targets,
    decode_detections,
    detection_loss,
    make_denoising_queries,
    match,
)
from tests.contexts import mesh_of
from tests.tiers import vary

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
scipy_optimize = pytest.importorskip("scipy.optimize")

B, Q, N, C, LAYERS, GROUPS = 3, 7, 4, 5, 2, 2
CONFIG = transformers.RTDetrConfig(
    num_labels=C, num_queries=Q, num_denoising=9, focal_loss_gamma=1.5, matcher_alpha=0.3,
    matcher_gamma=1.5, weight_loss_vfl=1.25, backbone_config=transformers.RTDetrResNetConfig(),
)  # fmt: skip


def draw(seed=0, counts=(4, 2, 0), dtype=np.float64, num_queries=Q, n=N):
    """Return an output and targets with `counts` objects in the images."""
    rng = np.random.default_rng(seed)
    batch = len(counts)

    def predictions(q):
        boxes = rng.uniform(0.1, 0.9, (batch, q, 4)) * [1, 1, 0.5, 0.5]
        return Predictions(rng.normal(size=(batch, q, C)).astype(dtype), boxes.astype(dtype))

    labels = rng.integers(0, C, (batch, n), dtype=np.int32)
    boxes = predictions(n).boxes
    is_padding = np.arange(n) >= np.array(counts)[:, None]
    labels[is_padding], boxes[is_padding] = -1, np.nan
    boxes[0, 0, 2:] = 0  # a box of no size
    layers = [predictions(num_queries) for _ in range(LAYERS + 1)]
    denoising = tuple(predictions(2 * n * GROUPS) for _ in range(LAYERS))
    for p in denoising:  # transformers counts padding as background; here its loss is 0
        p.logits[np.tile(is_padding, 2 * GROUPS)] = -1e4
    return DetectorOutput(tuple(layers[:-1]), layers[-1], denoising), Targets(labels, boxes)


def torch_targets(targets):
    """Return the targets as transformers takes them."""
    return [
        dict(class_labels=torch.tensor(i[i >= 0]).long(), boxes=torch.tensor(b[i >= 0]))
        for i, b in zip(*map(np.asarray, targets), strict=True)
    ]


def torch_loss(output, targets, config=CONFIG):
    """Return the parts of transformers' loss, and the gradients of the output."""
    from transformers.loss.loss_rt_detr import RTDetrForObjectDetectionLoss

    leaves = jax.tree.map(lambda a: torch.tensor(np.asarray(a), requires_grad=True), output)
    pairs = list(zip(leaves.denoising, leaves.layers, strict=True))
    stacked = [torch.stack([torch.cat([d[i], o[i]], 1) for d, o in pairs], 1) for i in (0, 1)]
    n = targets.labels.shape[1]
    counts = (np.asarray(targets.labels) >= 0).sum(1)
    positive = [
        torch.tensor([2 * n * g + i for g in range(GROUPS) for i in range(count)]).long()
        for count in counts
    ]
    meta = dict(dn_positive_idx=positive, dn_num_group=GROUPS, dn_num_split=[2 * n * GROUPS, Q])
    loss, parts, _ = RTDetrForObjectDetectionLoss(
        stacked[0][:, -1], torch_targets(targets), "cpu", stacked[1][:, -1], config, *stacked,
        *leaves.encoder, denoising_meta_values=meta,
    )  # fmt: skip
    loss.backward()
    sums = {k: v.item() for k, v in parts.items() if "_aux_" not in k and "_dn_" not in k}
    sums["loss_auxiliary"] = sum(v.item() for k, v in parts.items() if "_aux_" in k)
    sums["loss_denoising"] = sum(v.item() for k, v in parts.items() if "_dn_" in k)
    return loss.item(), sums, jax.tree.map(lambda a: a.grad.numpy(), leaves)


loss_and_gradients = jax.jit(
    jax.value_and_grad(functools.partial(detection_loss, config=CONFIG), has_aux=True)
)


def close(a, b, tol=1e-8):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, tol, tol), a, b)


@vary("counts", [(4, 2, 0), (4, 4, 4), (0, 0, 0)])
def test_loss_is_that_of_transformers(counts, x64):
    output, targets = draw(counts=counts)
    (loss, parts), gradients = loss_and_gradients(output, targets)
    close((loss, parts, gradients), torch_loss(output, targets))
    run = functools.partial(detection_loss, config=CONFIG)
    assert loss_and_gradients._cache_size() == 1
    assert len(run(output._replace(denoising=()), targets)[1]) == 5


def test_padding_has_no_influence():
    output, targets = draw(dtype=np.float32)
    output = output._replace(denoising=())
    labels = np.pad(targets.labels, ((0, 0), (0, 3)), constant_values=-1)
    boxes = np.pad(targets.boxes, ((0, 0), (0, 3), (0, 0)), constant_values=np.inf)
    padded = loss_and_gradients(output, Targets(labels, boxes))
    close(loss_and_gradients(output, targets), padded, 1e-6)


def test_half_types_and_boxes_of_no_size():
    output, targets = jax.tree.map(jnp.asarray, draw(dtype=np.float32))
    half, _ = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (output, 0.0 * targets.boxes))
    flat = half._replace(layers=[p._replace(boxes=p.boxes * 0) for p in half.layers])
    targets = targets._replace(boxes=targets.boxes * 0)
    want, gradients = loss_and_gradients(jax.tree.map(lambda a: a.astype("float32"), flat), targets)
    got, half_gradients = loss_and_gradients(flat, targets)
    close(got, want, 1e-6)
    assert got[0].dtype == jnp.float32 and half_gradients.encoder.logits.dtype == jnp.bfloat16
    assert all(jnp.isfinite(a).all() for a in jax.tree.leaves((got, half_gradients)))
    close(half_gradients, gradients, 1e-2)


def total(costs, query):
    is_target = query >= 0
    assert len(set(query[is_target])) == is_target.sum()
    return costs[query[is_target], np.flatnonzero(is_target)].sum()


@vary("kind", ["normal", "ties", "equal", "contested", "square"])
def test_matching_has_the_smallest_cost(kind, x64):
    rng = np.random.default_rng(0)
    costs = rng.normal(size=(5, 2, 8 if kind == "square" else 20, 8))
    if kind == "ties":
        costs = np.round(costs)
    if kind == "equal":
        costs = np.ones_like(costs)
    if kind == "contested":
        costs = rng.normal(size=(5, 2, 20, 1)) + costs * 0.1
    is_target = rng.uniform(size=(5, 2, 8)) < np.linspace(0, 1.3, 5)[:, None, None]
    got = jax.jit(match)(costs, is_target)
    np.testing.assert_array_equal(got, jax.jit(jax.vmap(match))(costs, is_target))
    np.testing.assert_array_equal(got[1, 1], match(costs[1, 1], is_target[1, 1]))
    images = (a.reshape(10, *a.shape[2:]) for a in (costs, is_target, got))
    for c, t, query in zip(*images, strict=True):
        np.testing.assert_array_equal(query >= 0, t)
        rows, columns = scipy_optimize.linear_sum_assignment(c[:, t])
        close(total(c, np.asarray(query)), c[:, t][rows, columns].sum(), 1e-12)
        if t.all() and kind == "normal":
            pairs = optax.assignment.hungarian_algorithm(jnp.asarray(c))
            close(total(c, np.asarray(query)), c[pairs].sum(), 1e-12)


def test_matching_avoids_invalid_costs():
    rng = np.random.default_rng(0)
    costs = rng.normal(size=(20, 6, 4)).astype(np.float32)
    is_invalid = rng.uniform(size=costs.shape) < 0.7
    is_invalid[0] = True
    costs[is_invalid] = rng.choice([np.nan, np.inf, -np.inf, 1e30], is_invalid.sum())
    for c, query in zip(costs, np.asarray(match(costs, np.ones((20, 4), bool))), strict=True):
        cost = np.where(np.abs(c) < 1e10, c, 1e3).astype(np.float64)
        close(total(cost, query), cost[scipy_optimize.linear_sum_assignment(cost)].sum(), 1e-6)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="targets .=8., with padding, must be at most the number"):
        detection_loss(*draw(n=8), config=CONFIG)
    with pytest.raises(ValueError, match=r"`targets` of shape .B, 0."):
        empty = jax.tree.map(lambda a: a[:, :0], draw()[1])
        make_denoising_queries(jax.random.key(0), empty, config=CONFIG)
    with pytest.raises(ValueError, match="`costs` of shape"):
        match(np.zeros((2, 5, 4)), np.ones((2, 5), bool))
    output, targets = draw()
    with pytest.raises(ValueError, match="`targets` of shapes .2, 4."):
        detection_loss(output, jax.tree.map(lambda a: a[:2], targets), config=CONFIG)
    with pytest.raises(ValueError, match=r"`output.denoising` .=16."):
        detection_loss(output, jax.tree.map(lambda a: a[:, :3], targets), config=CONFIG)


@vary("kind", [AxisType.Auto, AxisType.Explicit])
def test_devices_match_their_own_images(kind, optimized):
    output, targets = draw(counts=(4, 2, 0, 1, 3, 4, 0, 2), dtype=np.float32)
    key, sizes = jax.random.key(0), np.full((8, 2), 100)

    @jax.jit
    def run(output, targets, sizes):
        queries = make_denoising_queries(key, targets, config=CONFIG)
        return queries, decode_detections(output.layers[-1], sizes, 6)

    sharding = NamedSharding(mesh_of((4, 2), ("data", "model"), kind), P("data"))
    arguments = jax.device_put((output, targets, sizes), sharding)
    close(run(*arguments), run(output, targets, sizes), 1e-5)
    compiled = loss_and_gradients.lower(*arguments[:2]).compile()
    close(compiled(*arguments[:2]), loss_and_gradients(output, targets), 1e-5)
    program = compiled.as_text()
    # The sums of the losses, of the targets, and nothing else.
    assert all(c.kind == "all-reduce" and c.bytes <= 100 for c in collectives(program))
    module = parse(program)
    trips = [module.trip_count(i) for i, _ in module.iter_executed() if i.opcode == "while"]
    assert N**2 in trips and None not in trips


@vary("ratio, scale", [(0.5, 1.0), (1.0, 0.4)])
def test_denoising_queries_are_those_of_transformers(ratio, scale, monkeypatch):
    from transformers.models.rt_detr import modeling_rt_detr

    _, targets = draw(dtype=np.float32)
    options, key = dict(label_noise_ratio=ratio, box_noise_scale=scale), jax.random.key(3)
    config = transformers.RTDetrConfig(**CONFIG.to_dict() | options)
    got = make_denoising_queries(key, targets, config=config)
    keys, labels, boxes = jax.random.split(key, 4), got.labels.shape, got.boxes.shape
    uniform = [jax.random.uniform(keys[0], labels), jax.random.uniform(keys[2], boxes)]
    signs = (jax.random.rademacher(keys[3], boxes) + 1) / 2
    integers = [jax.random.randint(keys[1], labels, 0, C), signs]
    for name, draws in (("rand_like", iter(uniform)), ("randint_like", iter(integers))):
        monkeypatch.setattr(
            torch, name, lambda *_, draws=draws, **__: torch.tensor(np.asarray(next(draws)))
        )
    labels, boxes, mask, _ = modeling_rt_detr.get_contrastive_denoising_training_group(
        torch_targets(targets), C, Q, lambda x: x, 9, **options
    )
    is_object = np.asarray(got.labels) < C
    close(got.labels, labels.numpy())
    close(jax.nn.sigmoid(got.boxes)[is_object], boxes.sigmoid().numpy()[is_object], 1e-6)
    np.testing.assert_array_equal(got.mask, mask.numpy() == 0)
    assert (got.labels != np.tile(targets.labels, 4)).any() and is_object.sum() == 6 * 4


def test_detections_are_those_of_transformers():
    prediction, sizes = draw(dtype=np.float32)[0].layers[-1], np.array([[30, 40], [50, 60], [7, 8]])
    scores, labels, boxes = decode_detections(prediction, sizes, Q)
    output = transformers.models.rt_detr.modeling_rt_detr.RTDetrObjectDetectionOutput(
        logits=torch.tensor(prediction.logits), pred_boxes=torch.tensor(prediction.boxes)
    )
    processor = transformers.RTDetrImageProcessor()
    want = processor.post_process_object_detection(output, 0.0, torch.tensor(sizes))
    want = [[w[k].numpy() for w in want] for k in ("scores", "labels", "boxes")]
    close([scores, labels, boxes], [np.stack(w) for w in want], 1e-5)
