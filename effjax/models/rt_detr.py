"""RT-DETR, a detection transformer with a convolutional encoder, for Flax NNX."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..layers.deform_attention import sample
from ..layers.images import ImageLayerConfig, Save, norm_options, promote_dtypes
from ..nnx.batch_norm import BatchNorm
from ..nnx.conv import make_conv
from ..nnx.deform_attention import MSDeformAttn
from ..ops._common.arguments import as_real_array, check_instance
from ..ops._common.dtypes import at_least_float32
from ..ops._common.sharding import explicit_spec, reshape
from .detection import DenoisingQueries, DetectorOutput, Predictions, inverse_sigmoid
from .pyramid import upsample
from .resnet import FrozenBatchNorm, ResNet, keep_conv, recompute
from .rt_detr_config import RTDetrConfig

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "identity": lambda x: x,
}
Shapes = tuple[tuple[int, int], ...]
NUM_REP_BLOCKS = 3  # of a CSP block
BACKBONE_EPSILON = 1e-5  # of norms whose epsilon config.json does not determine
ANCHOR_SIZE, ANCHOR_BORDER = 0.05, 0.01  # of the finest level, as shares of the image
glorot_uniform, zeros = nnx.initializers.glorot_uniform(), nnx.initializers.zeros


class RTDetr(nnx.Module):
    """RT-DETR (v1 and v2), a detector that needs no suppression of overlapping boxes.

    A ResNet-vd; an encoder of self-attention on the coarsest level and two pyramids of
    convolutions, from coarse to fine and back; and a decoder. Its queries begin as the pixels of
    the encoder with the best scores. Each layer attends from the queries to points of all levels
    (`effjax.ms_deform_attn`) and refines their boxes.

    With `efficient=True`, the blocks of the backbone and the encoder and the layers of the decoder
    are recomputed in the backward pass, as in `ResNet`. Results are those of `efficient=False`.
    `effjax.convert.load_detector` and `save_detector` read and write the files of transformers.

    Args:
        config: the configuration.
        frozen_norms: True makes all batch norms constants, False none. If None, those of the
            backbone are if the configuration has `freeze_backbone_batch_norms`. Exclude constants
            from the optimizer, whose weight decay would still change them.
        efficient, save: as in `ResNet`.
        axis_name: the mapped axes over which batch statistics are reduced. `jit` over sharded
            images needs none.
        momentum: of the batch norms; PyTorch's momentum 0.1 is 0.9 here.
        dtype: of the computation. If None, that of the images, promoted with `param_dtype`. Boxes,
            logits and statistics are computed in float32 at least.
        param_dtype: of the parameters.
        rngs: for the parameters (stream `params`).

    Raises:
        TypeError, ValueError: if an option has the wrong type or is out of range.

    References:
        Zhao et al. 2023 (arXiv:2304.08069); Lv et al. 2024 (arXiv:2407.17140).
    """

    config: RTDetrConfig  # these three by `init_class_heads`
    enc_score_head: nnx.Linear
    denoising_class_embed: Any  # None without denoising queries

    def __init__(
        self,
        config: RTDetrConfig,
        *,
        frozen_norms: bool | None = None,
        efficient: bool = True,
        save: Save = "conv",
        axis_name: Any = None,
        momentum: float | None = 0.9,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        check_instance("config", config, RTDetrConfig, "an RTDetrConfig")
        options: dict[str, Any] = dict(
            efficient=efficient, save=save, axis_name=axis_name, momentum=momentum, dtype=dtype,
            param_dtype=param_dtype, epsilon=BACKBONE_EPSILON, unbiased_running_var=True,
        )  # fmt: skip
        self.options = ImageLayerConfig(**options)
        make = Factory(config, self.options, bool(frozen_norms), rngs)
        if frozen_norms is None:
            frozen_norms = config.freeze_backbone_batch_norms
        backbone = config.backbone_config
        hidden, features = config.encoder_hidden_dim, config.d_model
        self.backbone = ResNet(
            stage_sizes=backbone.depths, bottleneck=backbone.layer_type == "bottleneck",
            width=backbone.embedding_size, stride_in_1x1=backbone.downsample_in_bottleneck,
            in_channels=backbone.num_channels, deep_stem=True, pool_shortcut=True,
            num_classes=None, frozen_norm=frozen_norms, **options, rngs=rngs,
        )  # fmt: skip
        channels = [backbone.hidden_sizes[i - 1] for i in backbone.out_indices]
        project = functools.partial(ConvNorm, make, epsilon=BACKBONE_EPSILON)
        self.encoder_input_proj = nnx.List([project(inputs, hidden) for inputs in channels])
        self.encoder = Encoder(make)
        self.decoder_input_proj = nnx.List([ConvNorm(make, hidden, features) for _ in channels])
        self.enc_output = make.linear(features, features)
        self.enc_output_norm = make.layer_norm(features)
        self.enc_bbox_head = MLP(make, features, features, features, 4)
        self.decoder = Decoder(make)
        init_class_heads(self, config, rngs)

    def __call__(
        self, images: ArrayLike, denoising: DenoisingQueries | None = None
    ) -> DetectorOutput:
        """Return the predictions of the queries.

        Args:
            images: `[N, H, W, C]` with values in [0, 1]; H and W are multiples of 32.
            denoising: noisy objects to restore, for the loss in training.

        Returns:
            Boxes and logits of each layer of the decoder, of the encoder and of the denoising
            queries, in float32 (float64 if computed in float64).

        Raises:
            TypeError, ValueError: if the dtype or shape of `images` is wrong, they have fewer
                pixels than queries, or the model has no embeddings of denoising queries.
        """
        memory, shapes = self._encode(images)
        queries, boxes, encoder = self._select(memory, shapes)
        mask = None
        if denoising is not None:
            queries = jnp.concatenate([self._embed(denoising), queries], 1)
            boxes = jnp.concatenate([denoising.boxes.astype(boxes.dtype), boxes], 1)
            mask = denoising.mask
        layers = tuple(found for found, _ in self.decoder(queries, boxes, memory, shapes, mask))
        if denoising is None:
            return DetectorOutput(layers, encoder)
        count = denoising.labels.shape[1]
        restored, layers = (
            tuple(Predictions(p.logits[:, part], p.boxes[:, part]) for p in layers)
            for part in (slice(None, count), slice(count, None))
        )
        return DetectorOutput(layers, encoder, restored)

    def sampled_points(self, images: ArrayLike) -> tuple[jax.Array, jax.Array]:
        """Return where the last layer of the decoder samples the levels, for pictures.

        Args:
            images: as in a call.

        Returns:
            Points `[N, Q, heads, levels, points, 2]`, (x, y) in shares of the image, and their
            weights `[N, Q, heads, levels, points]`, which sum to 1 for each query and head.
        """
        memory, shapes = self._encode(images)
        queries, boxes, _ = self._select(memory, shapes)
        *_, (_, inputs) = self.decoder(queries, boxes, memory, shapes, None)
        return self.decoder.layers[-1].sample(*inputs, shapes)

    # Private, because `nnx.tabulate` runs all public methods.

    def _encode(self, images: ArrayLike) -> tuple[jax.Array, Shapes]:
        """Return the pixels of all levels [N, S, d_model], and the (H, W) of the levels."""
        images, backbone = as_real_array("images", images), self.config.backbone_config
        shape, stride = images.shape, self.config.stride
        is_valid = len(shape) == 4 and shape[3] == backbone.num_channels and 0 not in shape
        if not is_valid or any(side % stride for side in shape[1:3]):
            raise ValueError(
                f"`images` of shape {shape} must be [N, H, W, {backbone.num_channels}], with "
                f"height and width that are multiples of {stride}. Resize or pad them."
            )
        dtype = self.options.dtype or promote_dtypes(images.dtype, self.options.param_dtype)
        features = self.backbone.features(images.astype(dtype))
        levels = [features[i - 1] for i in backbone.out_indices]
        levels = [proj(x) for proj, x in zip(self.encoder_input_proj, levels, strict=True)]
        levels = self.encoder(levels)
        levels = [proj(x) for proj, x in zip(self.decoder_input_proj, levels, strict=True)]
        shapes = tuple((x.shape[1], x.shape[2]) for x in levels)
        return jnp.concatenate([_flatten(x) for x in levels], 1), shapes

    def _select(
        self, memory: jax.Array, shapes: Shapes
    ) -> tuple[jax.Array, jax.Array, Predictions]:
        """Return queries, their boxes before the sigmoid, and their predictions."""
        count = self.config.num_queries
        if count > memory.shape[1]:
            raise ValueError(
                f"`num_queries` (={count}) must be at most the number of pixels of all levels "
                f"(={memory.shape[1]}). Use larger images."
            )
        anchors, is_valid = make_anchors(shapes)
        memory = jnp.where(is_valid[:, None], memory, 0)
        features = self.enc_output_norm(self.enc_output(memory))
        logits = at_least_float32(self.enc_score_head(features))
        _, index = lax.top_k(lax.stop_gradient(logits).max(-1), count)
        # Boxes depend on a pixel's own features only, so the head runs for the selected ones.
        queries, logits = _gather(features, index), _gather(logits, index)
        # The largest finite number, which the sigmoid makes 1, marks invalid anchors.
        anchors = np.where(is_valid[:, None], anchors, float(jnp.finfo(logits.dtype).max))
        anchors = jnp.zeros_like(memory[..., :1], logits.dtype) + jnp.asarray(anchors, logits.dtype)
        boxes = at_least_float32(self.enc_bbox_head(queries)) + _gather(anchors, index)
        predictions = Predictions(logits, jax.nn.sigmoid(boxes))
        return lax.stop_gradient(queries), lax.stop_gradient(boxes), predictions

    def _embed(self, denoising: DenoisingQueries) -> jax.Array:
        if self.denoising_class_embed is None:
            raise ValueError("`denoising` needs a configuration whose `num_denoising` is positive.")
        table = self.denoising_class_embed.embedding[...]
        table = jnp.concatenate([table[:-1], lax.stop_gradient(table[-1:])])  # padding is constant
        # A product, because a lookup does not determine the sharding on an Explicit mesh.
        dtype = self.options.dtype or table.dtype
        rows = jax.nn.one_hot(denoising.labels, len(table), dtype=dtype)
        return jnp.matmul(rows, table.astype(dtype), precision="highest")


def init_class_heads(model: RTDetr, config: RTDetrConfig, rngs: nnx.Rngs) -> None:
    """Initialize the layers whose shapes depend on the number of classes in `config`."""
    classes, features = config.num_labels, config.d_model
    make = Factory(config, model.options, False, rngs)
    prior = config.initializer_bias_prior_prob or 1 / (classes + 1)
    bias_init = nnx.initializers.constant(-math.log((1 - prior) / prior))
    head = functools.partial(make.linear, features, classes, bias_init=bias_init)
    model.config = config
    model.enc_score_head = head()
    model.decoder.class_embed = nnx.List([head() for _ in model.decoder.layers])
    model.denoising_class_embed = nnx.data(None)
    if config.num_denoising:
        model.denoising_class_embed = nnx.Embed(
            classes + 1, features, embedding_init=glorot_uniform, **make.options, rngs=rngs
        )


class Factory:
    """Constructors of the layers of an RT-DETR."""

    def __init__(
        self, config: RTDetrConfig, options: ImageLayerConfig, is_frozen: bool, rngs: nnx.Rngs
    ):
        self.config, self.layer_config, self.rngs = config, options, rngs
        dtypes: dict[str, Any] = dict(dtype=options.dtype, param_dtype=options.param_dtype)
        self.options = dtypes
        self.linear = functools.partial(nnx.Linear, kernel_init=glorot_uniform, **dtypes, rngs=rngs)
        self.layer_norm = functools.partial(
            nnx.LayerNorm, epsilon=config.layer_norm_eps, use_fast_variance=False, **dtypes,
            rngs=rngs,
        )  # fmt: skip
        self.conv = functools.partial(make_conv, param_dtype=options.param_dtype, rngs=rngs)
        self.batch_norm = functools.partial(
            FrozenBatchNorm if is_frozen else BatchNorm,
            **norm_options(options, activation=None), rngs=rngs,
        )  # fmt: skip


class ConvNorm(nnx.Module):
    """Convolution, batch norm and activation."""

    def __init__(
        self, make: Factory, inputs: int, outputs: int, size: int = 1, strides: int = 1,
        activation: str = "identity", epsilon: float | None = None,
    ):  # fmt: skip
        self.conv = make.conv(inputs, outputs, size, strides)
        self.norm = make.batch_norm(outputs, epsilon=epsilon or make.config.batch_norm_eps)
        self.activation = activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return features of the size that the convolution has."""
        return ACTIVATIONS[self.activation](self.norm(keep_conv(self.conv(x))))


class MLP(nnx.Module):
    """Linear layers with ReLU between them; heads of boxes begin at zero."""

    def __init__(self, make: Factory, *sizes: int):
        layers = [make.linear(*pair) for pair in itertools.pairwise(sizes[:-1])]
        kernel_init = zeros if sizes[-1] == 4 else glorot_uniform
        self.layers = nnx.List([*layers, make.linear(*sizes[-2:], kernel_init=kernel_init)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the output of the last layer."""
        for layer in self.layers[:-1]:
            x = jax.nn.relu(layer(x))
        return self.layers[-1](x)


class SelfAttention(nnx.Module):
    """Attention whose queries and keys contain positions."""

    def __init__(self, make: Factory, features: int, num_heads: int):
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            make.linear(features, features) for _ in range(4)
        )

    def __call__(
        self, x: jax.Array, positions: jax.Array, mask: jax.Array | None = None
    ) -> jax.Array:
        """Attend among the rows of x [N, Q, C]; `mask` [Q, Q] is True where a row may."""
        h = x + positions
        query, key, value = (
            _reshape(y, *y.shape[:2], self.num_heads, y.shape[2] // self.num_heads)
            for y in (self.q_proj(h), self.k_proj(h), self.v_proj(x))
        )
        # jax.nn.dot_product_attention computes the softmax of float64 in float32.
        scores = at_least_float32(jnp.einsum("nqhc,nkhc->nhqk", query, key))
        scores = scores * query.shape[-1] ** -0.5
        if mask is not None:
            scores = jnp.where(mask, scores, -jnp.inf)
        weights = jax.nn.softmax(scores).astype(x.dtype)
        return self.out_proj(_reshape(jnp.einsum("nhqk,nkhc->nqhc", weights, value), *x.shape))


class Layer(nnx.Module):
    """Self-attention and MLP of a transformer layer."""

    def __init__(self, make: Factory, features: int, inner: int, heads: int, activation: str):
        self.activation = activation
        self.self_attn = SelfAttention(make, features, heads)
        self.self_attn_layer_norm = make.layer_norm(features)
        self.fc1, self.fc2 = make.linear(features, inner), make.linear(inner, features)
        self.final_layer_norm = make.layer_norm(features)

    def _mlp(self, x: jax.Array) -> jax.Array:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


class EncoderLayer(Layer):
    """Transformer layer on the pixels of a level."""

    def __init__(self, make: Factory):
        config = make.config
        super().__init__(
            make, config.encoder_hidden_dim, config.encoder_ffn_dim,
            config.encoder_attention_heads, config.encoder_activation_function,
        )  # fmt: skip
        self.normalize_before = config.normalize_before

    def __call__(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Return the pixels [N, H * W, C] after attention and MLP."""
        norm1, norm2 = self.self_attn_layer_norm, self.final_layer_norm
        if self.normalize_before:
            x = norm2(x + self.self_attn(norm1(x), positions))
            return x + self._mlp(x)
        x = norm1(x + self.self_attn(x, positions))
        return norm2(x + self._mlp(x))


class RepBlock(nnx.Module):
    """Sum of a 3x3 and a 1x1 convolution with their norms, and activation."""

    def __init__(self, make: Factory, features: int):
        self.conv1, self.conv2 = (ConvNorm(make, features, features, size) for size in (3, 1))
        self.activation = make.config.activation_function

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return features of the same shape."""
        return ACTIVATIONS[self.activation](self.conv1(x) + self.conv2(x))


class CSPBlock(nnx.Module):
    """Cross-stage partial block, which fuses two levels of the pyramids."""

    def __init__(self, make: Factory):
        features, inner = make.config.encoder_hidden_dim, make.config.hidden_features
        conv = functools.partial(ConvNorm, make, activation=make.config.activation_function)
        self.conv1, self.conv2 = (conv(2 * features, inner) for _ in range(2))
        self.bottlenecks = nnx.List([RepBlock(make, inner) for _ in range(NUM_REP_BLOCKS)])
        self.conv3: Any = conv(inner, features) if inner != features else nnx.data(None)

    def __call__(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Return features of the shape of each level."""
        x = jnp.concatenate([a, b], -1)
        h = self.conv1(x)
        for block in self.bottlenecks:
            h = block(h)
        h = h + self.conv2(x)
        return h if self.conv3 is None else self.conv3(h)


class Encoder(nnx.Module):
    """Self-attention within levels, and pyramids from coarse to fine and from fine to coarse."""

    def __init__(self, make: Factory):
        self.config, self.options = make.config, make.layer_config
        hidden, steps = self.config.encoder_hidden_dim, range(self.config.num_feature_levels - 1)
        conv = functools.partial(
            ConvNorm, make, hidden, hidden, activation=self.config.activation_function
        )
        self.encoder = nnx.List(
            [
                nnx.List([EncoderLayer(make) for _ in range(self.config.encoder_layers)])
                for _ in self.config.encode_proj_layers
            ]
        )
        self.lateral_convs = nnx.List([conv() for _ in steps])
        self.fpn_blocks = nnx.List([CSPBlock(make) for _ in steps])
        self.downsample_convs = nnx.List([conv(size=3, strides=2) for _ in steps])
        self.pan_blocks = nnx.List([CSPBlock(make) for _ in steps])

    def __call__(self, levels: list[jax.Array]) -> list[jax.Array]:
        """Return the levels, finest first, with the same shapes."""
        levels = [*levels]
        attend = recompute(self.options, EncoderLayer.__call__)
        fuse = recompute(self.options, CSPBlock.__call__)
        for i, layers in zip(self.config.encode_proj_layers, self.encoder, strict=True):
            x, shape = _flatten(levels[i]), levels[i].shape
            positions = jnp.asarray(make_positions(self.config, shape[1], shape[2]), x.dtype)
            for layer in layers:
                x = attend(layer, x, positions)
            levels[i] = _reshape(x, *shape)
        top, laterals = levels.pop(), []
        for conv, block in zip(self.lateral_convs, self.fpn_blocks, strict=True):
            laterals.append(conv(top))
            fine = levels.pop()
            top = fuse(block, upsample(laterals[-1], fine.shape[1:3]), fine)
        outputs = [top]
        for conv, block in zip(self.downsample_convs, self.pan_blocks, strict=True):
            outputs.append(fuse(block, conv(outputs[-1]), laterals.pop()))
        return outputs


class DecoderLayer(Layer):
    """Transformer layer of queries, which attend to each other and to points of all levels."""

    def __init__(self, make: Factory):
        config = make.config
        heads, features = config.decoder_attention_heads, config.d_model
        activation = config.decoder_activation_function
        super().__init__(make, features, config.decoder_ffn_dim, heads, activation)
        self.encoder_attn = MSDeformAttn(
            features, config.num_feature_levels, heads, config.decoder_n_points, **make.options,
            rngs=make.rngs,
        )  # fmt: skip
        self.encoder_attn_layer_norm = make.layer_norm(features)
        # MSDeformAttn's unit of offsets is half the size of the box.
        self.box_scale = 2 * config.decoder_offset_scale

    def __call__(
        self, x: jax.Array, positions: jax.Array, boxes: jax.Array, memory: jax.Array,
        mask: jax.Array | None, shapes: Shapes,
    ) -> jax.Array:  # fmt: skip
        """Return the queries [N, Q, C] after attention and MLP."""
        x, boxes = self._attend(x, positions, boxes, mask, shapes)
        x = x + self.encoder_attn(x + positions, boxes, memory, shapes)
        x = self.encoder_attn_layer_norm(x)
        return self.final_layer_norm(x + self._mlp(x))

    def sample(
        self, x: jax.Array, positions: jax.Array, boxes: jax.Array, shapes: Shapes
    ) -> tuple[jax.Array, jax.Array]:
        """Return the locations and the weights of the sampled points."""
        x, boxes = self._attend(x, positions, boxes, None, shapes)
        query, attn = x + positions, self.encoder_attn
        offsets, logits = attn.sampling_offsets(query), attn.attention_weights(query)
        return sample(offsets, logits, boxes, shapes, attn.num_heads)

    def _attend(
        self, x: jax.Array, positions: jax.Array, boxes: jax.Array, mask: Any, shapes: Shapes
    ) -> tuple[jax.Array, jax.Array]:
        """Return queries after self-attention, and their boxes for `encoder_attn`."""
        x = self.self_attn_layer_norm(x + self.self_attn(x, positions, mask))
        boxes = boxes * jnp.asarray([1, 1, self.box_scale, self.box_scale], boxes.dtype)
        return x, jnp.repeat(boxes[:, :, None], len(shapes), 2)


class Decoder(nnx.Module):
    """Layers that refine the boxes of queries, each with its own heads."""

    class_embed: nnx.List  # by `init_class_heads`

    def __init__(self, make: Factory):
        self.options = make.layer_config
        features, layers = make.config.d_model, range(make.config.decoder_layers)
        self.layers = nnx.List([DecoderLayer(make) for _ in layers])
        self.query_pos_head = MLP(make, 4, 2 * features, features)
        self.bbox_embed = nnx.List([MLP(make, features, features, features, 4) for _ in layers])

    def __call__(
        self, x: jax.Array, boxes: jax.Array, memory: jax.Array, shapes: Shapes,
        mask: jax.Array | None,
    ) -> Iterator[tuple[Predictions, tuple[jax.Array, jax.Array, jax.Array]]]:  # fmt: skip
        """Yield the predictions of each layer, and its queries, positions and boxes.

        Args:
            x: queries, [N, Q, C].
            boxes: their boxes before the sigmoid, [N, Q, 4].
            memory: the pixels of all levels, [N, S, C].
            shapes: (H, W) of the levels.
            mask: [Q, Q], True where a query (row) may attend; None for all.
        """
        run = recompute(self.options, functools.partial(DecoderLayer.__call__, shapes=shapes))
        boxes = jax.nn.sigmoid(boxes)
        heads = zip(self.layers, self.class_embed, self.bbox_embed, strict=True)
        for layer, class_head, box_head in heads:
            positions = self.query_pos_head(boxes.astype(x.dtype))
            inputs = x, positions, boxes
            x = run(layer, *inputs, memory, mask)
            refined = jax.nn.sigmoid(at_least_float32(box_head(x)) + inverse_sigmoid(boxes))
            yield Predictions(at_least_float32(class_head(x)), refined), inputs
            boxes = lax.stop_gradient(refined)


def make_anchors(shapes: Shapes) -> tuple[np.ndarray, np.ndarray]:
    """Return the anchor of each pixel before the sigmoid, [S, 4], and whether it is valid, [S].

    An anchor is at the center of its pixel. It is invalid close to the border of the image.
    """
    anchors = []
    for level, (height, width) in enumerate(shapes):
        y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
        center = np.stack([(x + 0.5) / width, (y + 0.5) / height], -1)
        size = np.full_like(center, ANCHOR_SIZE * 2**level)
        anchors.append(np.concatenate([center, size], -1).reshape(-1, 4))
    boxes = np.concatenate(anchors)
    is_valid = ((boxes > ANCHOR_BORDER) & (boxes < 1 - ANCHOR_BORDER)).all(-1)
    boxes = np.where(is_valid[:, None], boxes, 0.5)
    return np.log(boxes / (1 - boxes)), is_valid


def make_positions(config: RTDetrConfig, height: int, width: int) -> np.ndarray:
    """Return sines and cosines of the rows and columns of pixels, [H * W, C]."""
    quarter = config.encoder_hidden_dim // 4
    rates = 1 / config.positional_encoding_temperature ** (np.arange(quarter) / quarter)
    y, x = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    y, x = (a.reshape(-1, 1) * rates for a in (y, x))
    return np.concatenate([np.sin(y), np.cos(y), np.sin(x), np.cos(x)], 1)


def _flatten(level: jax.Array) -> jax.Array:
    n, height, width, channels = level.shape
    return _reshape(level, n, height * width, channels)


def _reshape(x: jax.Array, *shape: int) -> jax.Array:
    """Reshape x [N, ...], whose images may be on different devices."""
    return reshape(x, shape, (explicit_spec(x)[0], *[None] * (len(shape) - 1)))


def _gather(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return the rows of x [N, S, C] at index [N, Q]."""
    return jnp.take_along_axis(x, index[..., None], 1)
