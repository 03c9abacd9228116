"""Public operators in the form of tests.contexts."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import effjax
from tests import oracles
from tests.contexts import single_device
from tests.ops.batch_norm import cases as batch_norm
from tests.ops.battery import Operator
from tests.ops.dense_block import cases as dense_block
from tests.ops.samplers.deform_attention.cases import ATTENTION, DCN
from tests.ops.samplers.deform_conv.cases import OPERATOR as CONV
from tests.ops.samplers.roi.cases import OPERATOR as ROI


@dataclasses.dataclass
class Subject:
    """An operator and its arguments.

    Attributes:
        op: ``op(params, batch, axis_name) -> (y, aux)``.
        definition: The same function, differentiated by JAX.
        params: Parameters.
        batch: Arrays with a batch axis.
        tolerance: Largest difference, relative to the largest value.
    """

    op: Callable[..., tuple]
    definition: Callable[..., tuple]
    params: Any
    batch: dict[str, Any]
    tolerance: float = 1e-12

    @functools.cached_property
    def want(self) -> tuple:
        """The loss, aux and the gradients."""
        return single_device(self.definition, self.params, self.batch)


def sync_batch_norm(names=("mask", "residual"), params=batch_norm.PARAMS, **options):
    def definition(params, batch, axis_name):
        given = {name: batch[name] for name in names}
        return oracles.batch_norm(batch["x"], **params, **given, relu=True, axis_name=axis_name)

    def op(params, batch, axis_name):
        given = {name: batch[name] for name in names} | {"activation": "relu"}
        x = batch["x"]
        y, stats = effjax.sync_batch_norm(x, **params, **given, axis_name=axis_name, **options)
        return y, tuple(stats)

    return Subject(op, definition, params, batch_norm.make_batch())


def batch_norm_inference():
    def definition(params, batch, axis_name):
        y = (batch["x"] - params["mean"]) / jnp.sqrt(params["var"] + 1e-5)
        return jnp.maximum(y * params["scale"] + params["bias"] + batch["residual"], 0), ()

    def op(params, batch, axis_name):
        options = {"residual": batch["residual"], "activation": "relu"}
        return effjax.batch_norm_inference(batch["x"], **params, **options), ()

    params = batch_norm.PARAMS | {"mean": np.linspace(2, 4, 5), "var": np.linspace(1, 3, 5)}
    return Subject(op, definition, params, batch_norm.make_batch())


def bn_relu_conv(conv="pointwise"):
    return Subject(*dense_block.make_conv(conv))


def dense_block_of(**options):
    definition = dense_block.bind(oracles.dense_block, mask=options.get("mask", False))
    op = dense_block.bind(effjax.dense_block, chunk_size=3, **options)
    return Subject(op, definition, dense_block.make_params(), dense_block.make_batch())


def make_head(
    tokens=(16, 3), width=5, vocab_size=11, bias=True, mask=False, transposed=False, dtype="f8"
):  # fmt: skip
    """Return parameters and a batch of linear_cross_entropy."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(width, vocab_size))
    params = {"kernel": kernel.T if transposed else kernel}
    params |= {"bias": rng.normal(size=vocab_size)} if bias else {}
    batch = {"x": rng.normal(size=(*tokens, width)), "w": rng.normal(size=tokens)}
    params, batch = jax.tree.map(lambda a: np.asarray(a, dtype), (params, batch))
    batch["labels"] = rng.integers(0, vocab_size, tokens)
    return params, batch | ({"mask": rng.random(tokens) < 0.7} if mask else {})


def run_head(function, params, batch, axis_name=None, **options):
    given = {name: batch[name] for name in ("labels", "mask") if name in batch}
    return function(batch["x"], **params, **given, **options), ()


def linear_cross_entropy(bias=True, mask=True, transposed=False, **options):
    options["transposed"] = transposed
    definition = functools.partial(run_head, oracles.cross_entropy, **options)
    op = functools.partial(run_head, effjax.linear_cross_entropy, chunk_size=4, **options)
    arrays = make_head(bias=bias, mask=mask, transposed=transposed)
    return Subject(op, definition, *arrays)


def fp8_linear(transposed=False):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.normal(size=shape).astype("f4")

    def bind(multiply):
        return lambda params, batch, axis_name: (
            multiply(batch["x"], params["kernel"], transposed=transposed),
            (),
        )

    params = {"kernel": draw(7, 5) if transposed else draw(5, 7)}
    batch = {"x": draw(16, 3, 5), "w": draw(16, 3, 7)}
    return Subject(bind(effjax.fp8_linear), bind(oracles.fp8_linear), params, batch, 2e-4)


def dot_product_attention(segments=True, **options):
    """Attention of which keys and values are projections of the queries."""
    rng = np.random.default_rng(0)
    params = {name: rng.normal(size=(4, 6, 2, 6)) / 6**0.5 for name in "kv"}
    batch = {name: rng.normal(size=(16, 7, 4, 6)) for name in "xw"}
    if segments:
        batch["segments"] = np.sort(rng.integers(0, 3, (16, 7)), -1).astype(np.int32)

    def bind(attend, **options):
        def op(params, batch, axis_name):
            k, v = (jnp.einsum("nthd,hdke->ntke", batch["x"], params[name]) for name in "kv")
            return attend(batch["x"], k, v, segment_ids=batch.get("segments"), **options), ()

        return op

    op = bind(effjax.dot_product_attention, chunk_size=3, **options)
    return Subject(op, bind(oracles.attention, **options), params, batch)


def make_experts(num_tokens=16, k=3, num_experts=5, width=4, hidden=6, transposed=False):
    """Return matrices of experts of which the last has no token, and tokens that choose some."""
    rng = np.random.default_rng(0)
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    params = {name: rng.normal(size=(num_experts, *shape)) for name, shape in shapes.items()}
    if transposed:
        params = {name: np.swapaxes(a, 1, 2) for name, a in params.items()}
    batch = {name: rng.normal(size=(num_tokens, width)) for name in "xw"}
    # Some tokens name an expert two times.
    batch["experts"] = rng.integers(0, max(num_experts - 1, 1), (num_tokens, k))
    batch["weights"] = rng.random((num_tokens, k))
    return params, batch


def run_experts(function, params, batch, axis_name=None, **options):
    """Choose weights that depend on x, as a router's do."""
    weights = batch["weights"] * (2 + jnp.sin(batch["x"][:, :1]))
    return function(batch["x"], batch["experts"], weights, **params, **options), ()


def expert_mlp(transposed=False, mesh=None, **options):
    options["transposed"] = transposed
    definition = functools.partial(run_experts, oracles.expert_mlp, **options)
    op = functools.partial(run_experts, effjax.expert_mlp, **options, mesh=mesh)
    return Subject(op, definition, *make_experts(transposed=transposed))


def multiscale_roi_align():
    rng = np.random.default_rng(0)
    corner, sides = rng.uniform(0, 4, size=(16, 4, 2)), np.array([[8.0], [19.9], [20], [30]])
    batch = {"x": rng.normal(size=(16, 8, 10, 3)), "w": rng.normal(size=(16, 4, 2, 2, 3))}
    batch["boxes"] = np.concatenate([corner, corner + sides], -1)
    scales = 1 / 2, 1 / 4
    options = {"output_size": 2, "sampling_ratio": 2, "aligned": True}

    def levels(params, x):
        return [x, params["gain"] * x[:, ::2, ::2]]

    def definition(params, batch, axis_name):
        low, high = (
            effjax.roi_align(x, batch["boxes"], spatial_scale=s, implementation="xla", **options)
            for x, s in zip(levels(params, batch["x"]), scales, strict=True)
        )
        return jnp.where(sides[:, :, None, None] < 20, low, high), ()

    def op(params, batch, axis_name):
        features, named = levels(params, batch["x"]), {"spatial_scales": scales}
        named |= {"canonical_scale": 20.0, "canonical_level": 2} | options
        return effjax.multiscale_roi_align(features, batch["boxes"], **named), ()

    return Subject(op, definition, {"gain": np.linspace(1, 2, 3)}, batch)


class SampledSubject(Subject):
    """A sampling operator, whose results are those of its oracle.

    Parameters are the arguments without a batch axis and a factor of the result. The definition is
    the implementation "xla".
    """

    def __init__(self, operator: Operator, implementation=None, case=None, sliced=True):
        if case is None:
            self.case = operator.make_context(implementation, batch=16)
        else:
            self.case = operator.make(case, **{**operator.context_options, "batch": 16})
        c = self.case
        shared = {i: c.args[i] for i in c.shared}
        args = {i: a for i, a in enumerate(c.args) if i and i not in shared}
        params = {"args": shared, "gain": 0.5 + np.arange(c.dy.shape[-1]) / 6}
        batch = {"args": args, "x": c.args[0], "w": c.dy}
        options = operator.options if sliced else {}
        super().__init__(self._bind(implementation, **options), self._bind("xla"), params, batch)

    def _bind(self, implementation, **options):
        f = self.case.bind(implementation, **options)

        def op(params, batch, axis_name):
            args = {0: batch["x"]} | batch["args"] | params["args"]
            return params["gain"] * f(*(args[i] for i in range(len(args)))), ()

        return op

    @functools.cached_property
    def want(self):
        c, gain = self.case, self.params["gain"]
        sampled = c.oracle(*c.args, c.dy)[0]
        y = gain * sampled
        loss = np.mean(np.sin(y) * c.dy + 0.3 * y * y)
        dy = (np.cos(y) * c.dy + 0.6 * y) / y.size
        _, gradients = c.oracle(*c.args, gain * dy)
        dgain = (dy * sampled).reshape(-1, gain.size).sum(0)
        return loss, (), {"args": {i: gradients[i] for i in c.shared}, "gain": dgain}, gradients[0]


def bind(make, *args, **options):
    return functools.cache(functools.partial(make, *args, **options))


# Operators with named axes of devices come first.
NAMED_AXES = {
    "sync_batch_norm": bind(sync_batch_norm),
    "bn_relu_conv": bind(bn_relu_conv),
    "dense_block": bind(dense_block_of),
}
OTHERS = {
    "batch_norm_inference": bind(batch_norm_inference),
    "linear_cross_entropy": bind(
        linear_cross_entropy, z_loss=0.1, label_smoothing=0.2, softcap=1.5
    ),
    "dot_product_attention": bind(dot_product_attention, window=3, scale=0.7, softcap=0.5),
    "expert_mlp": bind(expert_mlp),
    "fp8_linear": bind(fp8_linear),
    "deform_conv2d": bind(SampledSubject, CONV),
    "ms_deform_attn": bind(SampledSubject, ATTENTION),
    "dcn_aggregate": bind(SampledSubject, DCN),
    "roi_align": bind(SampledSubject, ROI, case="ratio"),
    "deform_roi_pool": bind(SampledSubject, ROI),
    "deform_psroi_pool": bind(SampledSubject, ROI, case="by_position"),
    "multiscale_roi_align": bind(multiscale_roi_align),
}
OPERATORS = NAMED_AXES | OTHERS
# Other options and implementations. "default" is the one of an installation without native code.
VARIANTS = {
    "sync_batch_norm, plain": bind(sync_batch_norm, ()),
    "sync_batch_norm, bare": bind(sync_batch_norm, (), {}, stats="two_psum"),
    "sync_batch_norm, two_psum": bind(sync_batch_norm, stats="two_psum"),
    "bn_relu_conv, strided": bind(bn_relu_conv, "strided"),
    "dense_block, features": bind(dense_block_of, save="features"),
    "dense_block, mask": bind(dense_block_of, mask=True, stats="two_psum"),
    "linear_cross_entropy, bare": bind(linear_cross_entropy, bias=False, mask=False),
    "linear_cross_entropy, transposed": bind(linear_cross_entropy, mask=False, transposed=True),
    "fp8_linear, transposed": bind(fp8_linear, transposed=True),
    "dot_product_attention, causal": bind(dot_product_attention, segments=False),
    "dot_product_attention, full": bind(dot_product_attention, causal=False),
    "expert_mlp, transposed": bind(expert_mlp, activation="gelu_pytorch_tanh", transposed=True),
    "deform_conv2d, default": bind(SampledSubject, CONV),
    "deform_conv2d, xla": bind(SampledSubject, CONV, "xla"),
    "ms_deform_attn, default": bind(SampledSubject, ATTENTION),
    "ms_deform_attn, xla": bind(SampledSubject, ATTENTION, "xla"),
    "deform_roi_pool, default": bind(SampledSubject, ROI),
    # JAX differentiates pooling only with a fixed number of samples.
    "deform_roi_pool, xla": bind(SampledSubject, ROI, "xla"),
}
