"""Matching, loss, denoising queries and decoding of RT-DETR, a detection transformer.

Zhao et al., "DETRs Beat YOLOs on Real-time Object Detection" (2024). The denoising queries are from
Zhang et al., "DINO" (2022), the loss of the classes from Zhang et al., "VarifocalNet" (2021).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import PartitionSpec

from ..ops._common.arguments import as_array
from ..ops._common.dtypes import at_least_float32
from ..ops._common.sharding import (
    explicit_spec,
    match_varying,
    run_per_device,
    with_auto_axes,
)
from ..ops.samplers.core import partition_over_images


class Targets(NamedTuple):
    """Objects of each image, padded to a fixed number N."""

    labels: jax.Array  # int32 [B, N], -1 is padding
    boxes: jax.Array  # [B, N, 4], (center x, center y, width, height) in shares of the image


class Predictions(NamedTuple):
    """Predictions of Q queries for C classes."""

    logits: jax.Array  # [B, Q, C]
    boxes: jax.Array  # [B, Q, 4], in [0, 1], as those of Targets


class DetectorOutput(NamedTuple):
    """Predictions that the loss of a detector is computed from."""

    layers: tuple[Predictions, ...]  # of the decoder; the last is the answer
    encoder: Predictions  # of the selected queries
    denoising: tuple[Predictions, ...] = ()  # of the decoder, for the denoising queries


class DenoisingQueries(NamedTuple):
    """D = 2 N G noisy objects: G groups of N positive queries and N negative ones."""

    labels: jax.Array  # int32 [B, D]; the number of classes is padding
    boxes: jax.Array  # [B, D, 4], before the sigmoid
    mask: jax.Array  # bool [D + Q, D + Q], True where a query (row) may attend


def match(costs: jax.Array, is_target: jax.Array) -> jax.Array:
    """Assign a different query to each target such that the sum of the costs is smallest.

    The shortest augmenting path of one target after the other (Crouse, "On implementing 2D
    rectangular assignment algorithms", 2016). Each device matches its own images (axis 0).

    Args:
        costs: [..., Q, N], floating point, with N <= Q. As few as possible of the costs that are
            NaN, infinite, or above the square root of the largest number are chosen.
        is_target: bool [..., N]. False is padding.

    Returns:
        int32 [..., N], the query of each target; -1 for padding. It has no gradient.

    Raises:
        TypeError: for arguments that are not arrays, or of the wrong kind of dtype.
        ValueError: for mismatched shapes, and for more targets than queries.
    """
    costs, is_target = as_array("costs", costs), as_array("is_target", is_target, jnp.bool_)
    if costs.ndim < 2 or is_target.shape != (*costs.shape[:-2], costs.shape[-1]):
        raise ValueError(
            f"`costs` of shape {costs.shape} must be [..., Q, N], for `is_target` [..., N] of "
            f"shape {is_target.shape}."
        )
    num_queries, num_targets = costs.shape[-2:]
    if num_targets > num_queries:
        raise ValueError(
            f"The number of targets (={num_targets}), with padding, must be at most the number of "
            f"queries (={num_queries})."
        )
    if costs.ndim == 2:
        return match(costs[None], is_target[None])[0]
    if not is_target.size:
        return jnp.zeros(is_target.shape, jnp.int32)

    def assign(costs, is_target):  # [1, B, L, Q, N], [1, B, L, N]
        rows = jnp.swapaxes(costs, -1, -2).reshape(-1, num_targets, num_queries)
        queries = _assign(rows, is_target.reshape(-1, num_targets))
        return (queries.reshape(is_target.shape),)

    rule = "d n l q t, d n l t -> d n l t"
    partitioned = partition_over_images(assign, rule, "match has no derivatives.")

    def run(arrays, _):
        costs, is_target = match_varying(arrays)
        batch = 1, costs.shape[0], -1
        costs = costs.reshape(*batch, num_queries, num_targets)
        (queries,) = partitioned(costs, is_target.reshape(*batch, num_targets))
        return queries.reshape(is_target.shape)

    costs = at_least_float32(lax.stop_gradient(costs))
    return run_per_device(run, costs)((costs, is_target), ())


def _assign(costs: jax.Array, is_target: jax.Array) -> jax.Array:
    """Return the query of each target [M, N]; costs are [M, N, Q]."""
    _, n, q = costs.shape
    rows, columns = jnp.arange(n), jnp.arange(q)

    def start(costs, is_target):
        is_valid = jnp.abs(costs) < jnp.sqrt(jnp.finfo(costs.dtype).max)
        largest = jnp.where(is_valid & is_target[:, None], jnp.abs(costs), 0).max()
        # One more of these costs exceeds what any assignment of valid costs saves.
        costs = jnp.where(is_valid, costs, 2 * (n + 1) * jnp.where(largest > 0, largest, 1))
        # Each query goes to the first target whose cheapest it is. For these targets, most of them
        # once a network is trained, this is optimal with dual variables of zero.
        best = jnp.argmin(costs, 1)
        is_best = is_target[:, None] & (best[:, None] == columns)
        owner = jnp.where(is_best, rows[:, None], n).min(0)  # [Q], the target of a query, or N
        query = jnp.where(is_target & (owner[best] == rows), best, -1)
        target, dual = jnp.where(is_target & (query < 0), rows, n).min(), costs[0] * 0
        is_done = dual != 0
        search = target, dual[0], best[0], is_done[0], dual + jnp.inf, owner, is_done
        return costs, (target, search, dual, owner, query)

    # A step expands `row`, a target at distance `offset` (less its dual variable) from `target`.
    # Once a free query is found, steps walk back from `column` and assign the queries on the path.
    # One loop of both lets each image advance on its own.
    def step(costs, is_target, state):
        target, search, dual, owner, query = state
        row, offset, column, is_walking, length, before, is_done = search
        new_length = offset + costs[row] - dual
        is_shorter = ~is_walking & ~is_done & (new_length < length)
        length = jnp.where(is_shorter, new_length, length)
        before = jnp.where(is_shorter, row, before)  # the target before each query on its path
        rest = jnp.where(is_done, jnp.inf, length)
        shortest = rest.min()
        # Among ties, a free query ends the search.
        rank = jnp.where(rest == shortest, columns + q * (owner < n), 2 * q)
        column = jnp.where(is_walking, column, rank.min() % q)
        next_row = owner[column]
        is_found = ~is_walking & (next_row == n) & (target < n)
        # The dual variable of a target is its cost less the dual variable of its query.
        offset = shortest - (costs[next_row, column] - dual[column])
        dual = dual + jnp.where(is_found & is_done, length - shortest, 0)
        is_walking, is_done = is_walking | is_found, is_done | (columns == column)

        row = before[column]
        owner = jnp.where(is_walking & (columns == column), row, owner)
        next_column = query[row]
        query = jnp.where(is_walking & (rows == row), column, query)
        is_end = is_walking & (row == target)
        next_target = jnp.where(is_target & (query < 0), rows, n).min()
        target = jnp.where(is_end, next_target, target)
        row, offset = jnp.where(is_end, target, next_row), jnp.where(is_end, 0, offset)
        length, is_done = jnp.where(is_end, jnp.inf, length), is_done & ~is_end
        search = row, offset, next_column, is_walking & ~is_end, length, before, is_done
        return target, search, dual, owner, query

    costs, state = jax.vmap(start)(costs, is_target)
    # The path of target i expands at most i + 1 targets, and changes the queries of i others.
    with set_xla_metadata(max_trip_count=n**2):
        state = lax.while_loop(
            lambda state: (state[0] < n).any(),
            functools.partial(jax.vmap(step), costs, is_target),
            state,
        )
    return state[-1].astype(jnp.int32)


def _take(x: jax.Array, rows: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, rows[..., None], -2)


def _corners(boxes: jax.Array) -> tuple[jax.Array, jax.Array]:
    return boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2


def _compare_boxes(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the IoU and the generalized IoU of boxes. A ratio of two zeros is 0."""

    def area(sides):
        return sides[..., 0] * sides[..., 1]

    def ratio(x, y):
        return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)

    (a0, a1), (b0, b1) = _corners(a), _corners(b)
    overlap = area(jnp.maximum(jnp.minimum(a1, b1) - jnp.maximum(a0, b0), 0))
    union = area(a[..., 2:]) + area(b[..., 2:]) - overlap
    hull = area(jnp.maximum(a1, b1) - jnp.minimum(a0, b0))
    iou = ratio(overlap, union)
    return iou, iou - ratio(hull - union, hull)


def _matching_costs(predictions: Predictions, targets: Targets, config: Any) -> jax.Array:
    """Return the costs [B, L, Q, N] of L layers."""
    alpha, gamma = config.matcher_alpha, config.matcher_gamma
    p = jax.nn.sigmoid(predictions.logits)
    p = jnp.take_along_axis(p, targets.labels[:, None, None], -1)
    negative = (1 - alpha) * p**gamma * jnp.log(1 - p + 1e-8)
    class_cost = negative - alpha * (1 - p) ** gamma * jnp.log(p + 1e-8)
    boxes, wanted = predictions.boxes[..., None, :], targets.boxes[:, None, None]
    bbox_cost = config.matcher_bbox_cost * jnp.abs(boxes - wanted).sum(-1)
    giou_cost = config.matcher_giou_cost * _compare_boxes(boxes, wanted)[1]
    return config.matcher_class_cost * class_cost + bbox_cost - giou_cost


def _layer_losses(predictions: Predictions, targets: Targets, query, is_query, config) -> jax.Array:
    """Return the sums [3, L] of the losses of classes, L1 and generalized IoU, of L layers.

    `query` is that of each target, [B, L, N], negative for padding, and `is_query` is [B, 1, Q].
    """
    boxes, wanted = _take(predictions.boxes, query), targets.boxes[:, None]
    iou, giou = _compare_boxes(boxes, wanted)
    iou = lax.stop_gradient(iou)

    def background(logits):
        p = lax.stop_gradient(jax.nn.sigmoid(logits))
        return config.focal_loss_alpha * p**config.focal_loss_gamma * jax.nn.softplus(logits)

    # Every logit as background, and the change for those of the targets: no one-hot labels.
    labels = jnp.maximum(targets.labels, 0)[:, None, :, None]
    logits = jnp.take_along_axis(_take(predictions.logits, query), labels, -1)[..., 0]
    entropy = -iou * jax.nn.log_sigmoid(logits) - (1 - iou) * jax.nn.log_sigmoid(-logits)
    change = iou * entropy - background(logits)
    everywhere = jnp.where(is_query, background(predictions.logits).sum(-1), 0).sum((0, 2))
    losses = jnp.stack([change, jnp.abs(boxes - wanted).sum(-1), 1 - giou])
    vfl, bbox, giou = jnp.where(query >= 0, losses, 0).sum((1, 3))
    weights = config.weight_loss_vfl, config.weight_loss_bbox, config.weight_loss_giou
    return jnp.stack([w * x for w, x in zip(weights, (everywhere + vfl, bbox, giou), strict=True)])


def detection_loss(
    output: DetectorOutput, targets: Targets, *, config: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Compute the training loss of RT-DETR, in float32 or wider.

    For each layer of the decoder and for the encoder it is the sum of the varifocal loss of all
    classes, and of the L1 distance and one minus the generalized IoU of the boxes that `match`
    assigns to the targets. It is divided by the number of targets in the batch, at least 1.
    Denoising queries are assigned to their own objects. Padding has no influence (in transformers,
    its denoising queries count as background).

    Args:
        output: predictions; with `denoising`, for queries of `make_denoising_queries(targets)`.
        targets: labels of C or more make the loss NaN. A box may have no size.
        config: an `RTDetrConfig`. Without `auxiliary_loss`, only the last layer counts.

    Returns:
        The loss, and its parts, of which it is the sum: "loss_vfl", "loss_bbox" and "loss_giou" of
        the last layer, "loss_auxiliary" and "loss_denoising".

    Raises:
        ValueError: for mismatched shapes, and for more targets than queries.
    """
    (batch, n), sizes = targets.labels.shape, [p.logits.shape[:2] for p in output.denoising]
    if output.layers[-1].logits.shape[0] != batch or targets.boxes.shape != (batch, n, 4):
        raise ValueError(
            f"`targets` of shapes {targets.labels.shape} and {targets.boxes.shape} must be [B, N] "
            f"and [B, N, 4], with the B of `output` (={output.layers[-1].logits.shape[0]})."
        )
    if any(size % (2 * n) for _, size in sizes):
        raise ValueError(
            f"The number of queries of `output.denoising` (={sizes[0][1]}) must be a multiple of "
            f"2 * {n}, twice the number of `targets`."
        )

    def stack(layers):  # [B, L, Q, ...]
        return Predictions(*(at_least_float32(jnp.stack(x, 1)) for x in zip(*layers, strict=True)))

    def run(output: DetectorOutput, targets: Targets):
        is_target = targets.labels >= 0
        # The derivative at a padding of NaN would not be 0.
        boxes = jnp.where(is_target[..., None], at_least_float32(targets.boxes), 0)
        targets = Targets(targets.labels, boxes)
        num_boxes = jnp.maximum(is_target.sum(), 1)
        others = (*output.layers[:-1], output.encoder) if config.auxiliary_loss else ()
        predictions = stack((output.layers[-1], *others))
        costs = _matching_costs(lax.stop_gradient(predictions), targets, config)
        is_target = jnp.broadcast_to(is_target[:, None], (*costs.shape[:2], costs.shape[-1]))
        query = match(costs, is_target)
        losses = _layer_losses(predictions, targets, query, True, config) / num_boxes
        parts = dict(zip(("loss_vfl", "loss_bbox", "loss_giou"), losses[:, 0], strict=True))
        parts |= {"loss_auxiliary": losses[:, 1:].sum(), "loss_denoising": losses[0, 0] * 0}
        if output.denoising and config.auxiliary_loss:
            predictions = stack(output.denoising)
            groups = predictions.logits.shape[2] // (2 * n)
            copies = Targets(*(jnp.concatenate([a] * groups, 1) for a in targets))
            query = (2 * n * jnp.arange(groups)[:, None] + jnp.arange(n)).reshape(-1)
            query = jnp.where(copies.labels >= 0, query, -1)[:, None]
            query = jnp.broadcast_to(query, (batch, len(output.denoising), n * groups))
            is_query = jnp.concatenate([is_target[:, :1]] * 2 * groups, 2)
            losses = _layer_losses(predictions, copies, query, is_query, config)
            parts["loss_denoising"] = losses.sum() / (num_boxes * groups)
        return sum(parts.values()), parts

    return with_auto_axes(run, targets.labels, PartitionSpec())(output, targets)


def make_denoising_queries(
    key: jax.Array, targets: Targets, *, config: Any
) -> DenoisingQueries | None:
    """Make noisy copies of the objects, in ``G = max(num_denoising // N, 1)`` groups.

    Half of `label_noise_ratio` of the labels are random. The corners of a positive query move by up
    to `box_noise_scale` times half of the box's sides, those of a negative one by 1 to 2 times as
    much. Queries attend to their own group and to the `num_queries` others, which attend to
    themselves.

    Args:
        key: of the noise.
        targets: the objects.
        config: an `RTDetrConfig`.

    Returns:
        The queries, for a call of `RTDetr`; None if `num_denoising` is 0.

    Raises:
        ValueError: for targets without room for an object.
    """
    if not config.num_denoising:
        return None
    n, num_classes = targets.labels.shape[1], config.num_labels
    if not n:
        raise ValueError("`targets` of shape [B, 0] must have at least one object, or padding.")
    groups = max(config.num_denoising // n, 1)
    number = jnp.arange(2 * n * groups)

    def run(targets: Targets, key):
        labels, boxes = (jnp.concatenate([a] * 2 * groups, 1) for a in targets)
        boxes, is_object, keys = at_least_float32(boxes), labels >= 0, jax.random.split(key, 4)
        is_random = jax.random.uniform(keys[0], labels.shape) < config.label_noise_ratio / 2
        random = jax.random.randint(keys[1], labels.shape, 0, num_classes, labels.dtype)
        labels = jnp.where(is_random, random, labels)
        shift = jax.random.uniform(keys[2], boxes.shape, boxes.dtype)
        shift += (number // n % 2)[:, None].astype(boxes.dtype)
        shift *= jax.random.rademacher(keys[3], boxes.shape, boxes.dtype) * config.box_noise_scale
        half = jnp.concatenate([boxes[..., 2:]] * 2, -1) / 2
        corners = jnp.concatenate(_corners(boxes), -1) + shift * half
        start, end = jnp.split(jnp.clip(corners, 0, 1), 2, -1)
        boxes = jnp.concatenate([(start + end) / 2, end - start], -1)
        # The corners of a negative query may have changed places.
        boxes = jnp.where(is_object[..., None], jnp.maximum(boxes, 0), 0)
        return jnp.where(is_object, labels, num_classes), inverse_sigmoid(boxes)

    spec = PartitionSpec(explicit_spec(targets.labels)[0])
    labels, boxes = with_auto_axes(run, targets.labels, (spec, spec))(targets, key)
    group = jnp.pad(number // (2 * n) + 1, (0, config.num_queries))  # 0: the other queries
    return DenoisingQueries(labels, boxes, (group == 0) | (group[:, None] == group))


def inverse_sigmoid(x: jax.Array) -> jax.Array:
    """Return the logarithm of x / (1 - x), each at least 1e-5."""
    return jnp.log(jnp.maximum(x, 1e-5) / jnp.maximum(1 - x, 1e-5))


def decode_detections(
    predictions: Predictions, sizes: jax.Array, num: int = 300
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the best pairs of a query and a class of each image, the best first.

    Args:
        predictions: of the last layer.
        sizes: [B, 2], height and width of each image in pixels.
        num: the number of pairs, at most Q C.

    Returns:
        Scores [B, num] in [0, 1], labels, and boxes [B, num, 4], (x0, y0, x1, y1) in pixels.
    """
    logits, boxes = map(at_least_float32, predictions)
    batch, _, num_classes = logits.shape

    def run(logits, boxes, sizes):
        scores, best = lax.top_k(jax.nn.sigmoid(logits).reshape(batch, -1), num)
        corners = jnp.concatenate(_corners(_take(boxes, best // num_classes)), -1)
        scale = jnp.concatenate([sizes[:, ::-1]] * 2, 1)[:, None]
        return scores, best % num_classes, corners * scale.astype(corners.dtype)

    spec = PartitionSpec(explicit_spec(logits)[0])
    return with_auto_axes(run, logits, (spec,) * 3)(logits, boxes, sizes)
