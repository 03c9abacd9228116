# pyright: strict, reportMissingTypeStubs=false
"""A user's program, checked by pyright in strict mode: what effjax says of its types is enough.

It is read by the type checker (.ci/run) and need not run; it uses the public names as the pages do.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import effjax
from effjax import convert, memory
from effjax.models import (
    Decoder,
    DecoderConfig,
    DenseNet,
    FeaturePyramid,
    ResNet,
    densenet121,
    resnet50,
)
from effjax.models import linen as linen_models

Params = dict[str, jax.Array]


def norms(x: jax.Array, scale: jax.Array, bias: jax.Array, kernel: jax.Array) -> jax.Array:
    y, stats = effjax.sync_batch_norm(x, scale, bias, axis_name="data", activation="relu")
    mean: jax.Array = stats.mean
    count = stats.count + 1
    fixed = effjax.batch_norm_inference(x, mean, stats.var, scale, bias, residual=y)
    z, batch = effjax.bn_relu_conv([x, fixed], scale, bias, kernel, strides=(1, 2))
    assert isinstance(batch, effjax.BatchStats)
    return z * count


def block(x: jax.Array, layers: list[effjax.DenseLayerParams], key: jax.Array) -> jax.Array:
    y, stats = effjax.dense_block(x, layers, save="features", dropout_rate=0.1, key=key)
    first, second = stats[0]
    return y + first.mean.sum() + second.var.sum()


def sampled(x: jax.Array, boxes: jax.Array, offset: jax.Array, kernel: jax.Array) -> jax.Array:
    y = effjax.deform_conv2d(x, offset, kernel, padding=1, implementation="xla")
    y += effjax.deform_conv2d(x, offset, kernel, offset, None, strides=1, padding="SAME")
    y += effjax.dcn_aggregate(x, offset, offset, kernel_size=3)
    pooled = effjax.roi_align(x, boxes, output_size=(7, 7), spatial_scale=0.25)
    pooled += effjax.multiscale_roi_align([x, y], boxes, output_size=7, spatial_scales=[0.25, 0.5])
    pooled += effjax.deform_roi_pool(x, boxes, output_size=7)
    pooled += effjax.deform_psroi_pool(x, boxes, output_size=7)
    return pooled.sum() + effjax.ms_deform_attn(x, [(4, 4)], offset, kernel)


def layer(params: Params, x: jax.Array) -> jax.Array:
    return x + jax.nn.relu(x @ params["w"])


def embed(params: Params, batch: Params, key: jax.Array) -> jax.Array:
    return batch["image"] @ params["embed"]


def head(params: Params, x: jax.Array, batch: Params, key: jax.Array) -> jax.Array:
    losses = effjax.linear_cross_entropy(x, params["head"], batch["label"], chunk_size=128)
    return losses.mean()


def offloaded(params: Params, others: Params, batch: Params, keys: jax.Array) -> jax.Array:
    def init(key: jax.Array) -> Params:
        return {"w": jax.random.normal(key, (8, 8))}

    layers = effjax.host_init(init, keys)
    y = effjax.offload_scan(layer, effjax.to_host(params), batch["image"], num_slices=4)
    y += effjax.offload_sequential([layer, layer], [params, params], batch["image"])

    tx = optax.adam(1e-3)
    training = effjax.offload_train_step(
        embed, layer, head, tx, clip_norm=1.0, clip_by="layer", num_slices=4
    )
    state = training.init(layers, others)
    assert isinstance(state, effjax.OffloadState)
    step = effjax.offload_jit(training.step)
    state, loss, *_ = step(state, batch)

    update = effjax.stream_update(tx)
    moments = update.init(params)
    params, moments = update.update(params, moments, params)
    on_device = effjax.to_device(state.layers)
    return y + loss + jax.tree.leaves(on_device)[0]


class Model(nnx.Module):
    """Modules of nnx."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm = effjax.nnx.BatchNorm(8, axis_name="data", activation="relu", rngs=rngs)
        self.deform = effjax.nnx.DeformConv(8, 8, 3, padding=1, predict_offset=True, rngs=rngs)
        self.attention = effjax.nnx.MSDeformAttn(8, num_levels=1, num_heads=2, rngs=rngs)
        self.pool = effjax.nnx.DeformRoIPoolPack(7, 8, spatial_scale=0.25, rngs=rngs)

    def __call__(self, x: jax.Array, boxes: jax.Array) -> jax.Array:
        y = self.deform(self.norm(x, mask=None, residual=x))
        return self.pool(y, boxes)


def networks(images: jax.Array) -> jax.Array:
    rngs = nnx.Rngs(0)
    dense = DenseNet(block_config=(2, 2), growth_rate=8, save="features", rngs=rngs)
    resnet = ResNet(stage_sizes=(1, 1, 1, 1), stage_with_dcn=(False, True, True, True), rngs=rngs)
    pyramid = FeaturePyramid(resnet.feature_channels, 64, rngs=rngs)
    levels = pyramid(resnet.features(images))
    decoder = Decoder(DecoderConfig.from_json("checkpoint"), mlp_chunk_size=64, rngs=rngs)
    logits = decoder(images.astype(jnp.int32))
    named = densenet121(rngs=rngs)(images) + resnet50(rngs=rngs)(images)
    converted = effjax.nnx.convert_batch_norm(Model(rngs), axis_name="data")
    back: Model = effjax.nnx.revert_batch_norm(converted)
    stack = effjax.nnx.OffloadModel([nnx.Linear(8, 8, rngs=rngs)], num_slices=1)
    return dense(images) + levels[0] + logits + named + back(images, images) + stack(images)


def linen_modules(x: jax.Array, boxes: jax.Array) -> jax.Array:
    norm = effjax.linen.BatchNorm(use_running_average=False, axis_name="data")
    conv = effjax.linen.DeformConv(8, (3, 3), predict_offset=True)
    pool = effjax.linen.DeformRoIPool(7, spatial_scale=0.25)
    attention = effjax.linen.MSDeformAttn(8, num_levels=1, num_heads=2)
    stack = effjax.linen.OffloadModel([conv, conv], num_slices=2)
    network = linen_models.DenseNet(block_config=(2, 2), growth_rate=8)
    synced = effjax.linen.convert_batch_norm(network, axis_name="data")
    y: jax.Array = pool(conv(norm(x, mask=None)), boxes)
    return y + attention(x, boxes, x, [(4, 4)]) + synced(x) + stack(x)


def planned(params: Params, x: jax.Array) -> str:
    def loss(params: Params, x: jax.Array) -> jax.Array:
        return layer(params, x).sum()

    found = memory.plan(loss, params, x, target="h200", donate_argnums=(0,))
    assert found.fits, found.peak_device_bytes
    largest = found.peak_buffers[0].bytes / 1e9
    programs = {"plain": loss, "again": loss}
    comparison = memory.compare(programs, params, x, target="a100-40")
    peak = comparison["plain"].peak_device_bytes

    def step_for_batch(n: int) -> tuple[Any, ...]:
        return loss, params, jax.ShapeDtypeStruct((n, 8), jnp.float32)

    best = memory.max_batch_size(step_for_batch, target="l4", multiple_of=8)
    both = memory.compare({"loss": (loss, params, x)})
    kept = memory.residual_bytes(loss, params, x).bytes
    lines = [f"{name}: {plan.peak_host_bytes}" for name, plan in both.items()]
    return f"{largest} {peak} {best.batch_size} {best.plan} {kept} {lines}"


def converted(path: Path) -> None:
    weights = convert.load_weights(path)
    model = convert.from_torch(weights, densenet121(rngs=nnx.Rngs(0)), convert.DENSENET)
    back = convert.to_torch(model, convert.DENSENET)
    convert.save_weights(path.with_suffix(".safetensors"), back)


def fine_tuned(folder: Path, base: Path, shapes: dict[str, jax.ShapeDtypeStruct]) -> None:
    done: list[float] = []
    layers, others = convert.load_checkpoint(
        base, shapes, {}, progress=lambda n, total: done.append(n / total)
    )
    convert.save_checkpoint(folder / "model", layers, others, {"model_type": "llama"})
    adapter, scale = convert.load_adapter(base, shapes)
    convert.save_adapter(folder / "adapter", adapter, 2 * scale, base_model=str(base))


def compatible(x: jax.Array, offset: jax.Array, weight: jax.Array) -> jax.Array:
    y = effjax.compat.deform_conv(x, offset, weight, 1, 1, 1, 1, 1)
    return y + effjax.compat.deform_conv2d(x, offset, weight, padding=(1, 1))
