"""Training steps of a language model in memory and offloaded, for `effjax.bench.offload`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from .. import host_init, offload_scan, offload_train_step, to_device, to_host
from ..models import TransformerLM, scan_layers
from ..ops.offload.train_step import TrainStep
from ..train.lm.steps import lm_parts

IN_MEMORY = "in memory"
REMAT = "in memory, remat"
FUSED_IN_MEMORY = "in memory, fused update"
FUSED = "all offloaded, fused update"
INPUTS_MOVED = "in memory, remat, inputs offloaded"
PRODUCTS_MOVED = "in memory, remat, products offloaded"
MOVED = "optimizer's state moved whole"
POLICIES = jax.checkpoint_policies
PRODUCTS = POLICIES.dots_with_no_batch_dims_saveable


@dataclasses.dataclass(frozen=True)
class Setting:
    """The model and its batch."""

    layers: int = 8
    width: int = 384
    heads: int = 6
    context: int = 256
    batch_size: int = 8
    microbatches: int = 1
    dtype: str = "float32"
    dropout: float = 0.1
    optimizer: Literal["adam", "sgd"] = "adam"
    vocab_size: int = 256
    mlp_width: int | None = None
    param_dtype: str = "float32"

    @property
    def tx(self) -> optax.GradientTransformation:
        return {"adam": optax.adam, "sgd": optax.sgd}[self.optimizer](1e-3)

    @property
    def model(self) -> TransformerLM:
        """Its shapes."""
        return nnx.eval_shape(lambda: self.make_model(self.layers))

    def make_model(self, layers: int) -> TransformerLM:
        return TransformerLM(
            vocab_size=self.vocab_size, num_layers=layers, width=self.width, num_heads=self.heads,
            mlp_width=self.mlp_width, dropout_rate=self.dropout, dtype=jnp.dtype(self.dtype),
            param_dtype=jnp.dtype(self.param_dtype), rngs=nnx.Rngs(1),
        )  # fmt: skip

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(a.shape) for a in jax.tree.leaves(split(self.model)))

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        """The last one of a row is predicted only."""
        return jax.ShapeDtypeStruct((self.batch_size, self.context + 1), jnp.int32)

    def batch(self) -> jax.Array:
        """Tokens, the same every time."""
        return jax.random.randint(jax.random.key(1), self.tokens.shape, 0, self.vocab_size)


class Form(NamedTuple):
    """How the layers are applied and updated."""

    layers: str  # where their parameters are
    apply: Any  # as of `TransformerLM`; None: there is the whole step only
    microbatches: int = 1
    remat: bool = False
    fuse_update: bool = False
    moments: str | None = None  # where the state of one optimizer for all is; None: a state a layer
    options: Mapping[str, Any] = {}  # of `offload_train_step`, more than these

    @property
    def is_plain(self) -> bool:
        """Whether optax updates all parameters at once, on the device."""
        return self.moments is not None


def forms_of(microbatches: int) -> dict[str, Form]:
    """All of them, in the order of what they need on the device, most first."""

    def offloaded(params_in: Any) -> Callable:
        return lambda layer, layers, x, key: offload_scan(
            layer, layers, x, key=key, params_in=params_in, num_microbatches=microbatches
        )

    in_memory: Any = functools.partial(Form, "device", moments="device")
    remat = functools.partial(scan_layers, remat=True)
    forms = {IN_MEMORY: in_memory(scan_layers), REMAT: in_memory(remat, remat=True)}
    if microbatches > 1:
        for name, form in list(forms.items()):
            apply = functools.partial(scan_microbatches, number=microbatches, remat=form.remat)
            forms[f"{name}, microbatches"] = in_memory(apply, microbatches, form.remat)
    host = functools.partial(Form, "host", offloaded("host"), microbatches)
    return forms | {
        FUSED_IN_MEMORY: Form("device", None, microbatches, fuse_update=True),
        "activations offloaded": in_memory(offloaded("device"), microbatches),
        "all offloaded": host(),
        FUSED: host(fuse_update=True),
    }


def peers() -> dict[str, Form]:
    """What JAX and its users have; the first is what all others are compared with."""
    known = forms_of(1)
    remat = known[REMAT]
    inputs = POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["input"],
        offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip
    products = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")
    return {
        IN_MEMORY: known[IN_MEMORY],
        REMAT: remat,
        INPUTS_MOVED: remat._replace(apply=_recomputed(inputs)),
        PRODUCTS_MOVED: remat._replace(apply=_recomputed(products)),
        MOVED: remat._replace(moments="host"),
        f"parameters and {MOVED}": remat._replace(
            layers="host", moments="host", apply=_from_host
        ),
    }  # fmt: skip


def _recomputed(policy: Callable) -> Callable:
    def apply(layer: Callable, layers: Any, x: Any, key: Any) -> Any:
        def named(params, x, key):
            return layer(params, checkpoint_name(x, "input"), key)

        one = jax.checkpoint(named, policy=policy, prevent_cse=False)
        return scan_layers(one, layers, x, key)

    return apply


def _from_host(layer: Callable, layers: Any, x: Any, key: Any) -> Any:
    return scan_layers(
        lambda params, x, key: layer(to_device(params), x, key), layers, x, key, remat=True
    )


def scan_microbatches(
    layer: Callable, layers: Any, x: Any, key: Any, *, number: int, remat: bool
) -> Any:
    """`scan_layers` with the keys of `offload_scan` for several microbatches."""
    one = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def body(x, at):
        w, i = at

        def microbatch(_, at):
            part, m = at
            return None, one(w, part, jax.random.fold_in(jax.random.fold_in(key, i), m))

        parts = x.reshape(number, -1, *x.shape[1:])
        _, parts = jax.lax.scan(microbatch, None, (parts, jnp.arange(number)))
        return parts.reshape(x.shape), None

    return jax.lax.scan(body, x, (layers, jnp.arange(jax.tree.leaves(layers)[0].shape[0])))[0]


def gradients_of(setting: Setting, form: Form) -> Callable:
    """``(layers, others, tokens, key) -> (loss, gradients of both)``"""
    parts = lm_parts(setting.model)

    def loss(layers, others, tokens, key):
        x = form.apply(parts.layer, layers, parts.embed(others, tokens, key), key)
        return parts.head(others, x, tokens, key)

    return jax.value_and_grad(loss, argnums=(0, 1))


def step_of(setting: Setting, form: Form) -> TrainStep:
    """Gradients and the optimizer's update; its init takes the layers where they are."""
    if not form.is_plain:
        options: dict[str, Any] = dict(num_microbatches=form.microbatches, params_in=form.layers)
        return offload_train_step(
            *lm_parts(setting.model), setting.tx, fuse_update=form.fuse_update,
            **options | dict(form.options),
        )  # fmt: skip
    gradients = gradients_of(setting, form)

    def init(*params):
        moments = setting.tx.init(to_device(params))
        put = to_host if form.moments == "host" else to_device
        return params, jax.tree.map(lambda a: put(a) if a.ndim > 1 else a, moments)

    def step(state, tokens, key):
        loss, grads = gradients(*state[0], tokens, key)
        # All that is on the host comes for the update, and goes back after it.
        params, moments, grads = to_device((*state, grads))
        updates, moments = setting.tx.update(grads, moments, params)
        new = optax.apply_updates(params, updates), moments
        return jax.tree.map(_where_it_was, new, state), loss

    return TrainStep(init, step)


def _where_it_was(new: jax.Array, old: jax.Array) -> jax.Array:
    return to_host(new) if jax.typeof(old).memory_space == jax.memory.Space.Host else new


def make_params(setting: Setting, where: str) -> tuple[Any, Any]:
    """(layers, others), the same every time."""
    model, key = setting.model, jax.random.key(0)

    @jax.jit
    def others():
        # The parameters of its layers are not used, and so not made.
        return split(setting.make_model(1))[1]

    layers = host_init(model.init_layer, model.layer_keys(key))
    return (to_device(layers) if where == "device" else layers), others()


def split(model: TransformerLM) -> tuple[Any, Any]:
    """(layers, others)"""
    params: Any = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return params.pop("blocks"), params
