"""Training steps of a language model: in memory, recomputed, and offloaded in several forms."""

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
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from effjax import (
    OffloadState,
    offload_jit,
    offload_scan,
    offload_train_step,
    to_device,
    to_host,
)
from effjax.memory import MemoryPlan
from effjax.models.scan import scan_layers

from .transformer import TransformerLM, split_loss

Place = Literal["device", "host"]
ADAM = optax.adam(1e-3)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A model and its batch."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    context: int = 256
    batch_size: int = 8
    dtype: str = "float32"
    vocab_size: int = 256
    mlp_width: int | None = None
    param_dtype: str = "float32"

    @property
    def abstract_model(self) -> TransformerLM:
        return nnx.eval_shape(lambda: self.make_model(self.layers))

    def make_model(self, layers: int) -> TransformerLM:
        return TransformerLM(
            vocab_size=self.vocab_size,
            num_layers=layers,
            width=self.width,
            num_heads=self.heads,
            mlp_width=self.mlp_width,
            dtype=jnp.dtype(self.dtype),
            param_dtype=jnp.dtype(self.param_dtype),
            rngs=nnx.Rngs(1),
        )

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(a.shape) for a in jax.tree.leaves(split_params(self.abstract_model)))

    @property
    def tokens(self) -> jax.ShapeDtypeStruct:
        # The last token of a row is predicted only.
        return jax.ShapeDtypeStruct((self.batch_size, self.context + 1), jnp.int32)


class Form(NamedTuple):
    """Methods that apply and update the layers.

    layers:      where their parameters are.
    apply:       applies the layers: ``apply(layer, params, x, None) -> x``. None if only the whole
                 step exists.
    moments:     where the state of one optimizer for all parameters is. None if
                 `offload_train_step` updates each layer with its own state.
    fuse_update: argument of `offload_train_step`.
    options:     further arguments of `offload_train_step`.
    """

    layers: Place
    apply: Callable | None
    moments: Place | None = None
    fuse_update: bool = False
    options: Mapping[str, Any] = {}


def checkpointed(policy: Callable) -> Callable:
    """Return a function that applies the layers in a scan under a checkpoint policy."""

    def apply(layer: Callable, layers: Any, x: Any, key: None = None) -> Any:
        def named(params, x, key):
            return layer(params, checkpoint_name(x, "input"))

        return scan_layers(jax.checkpoint(named, policy=policy, prevent_cse=False), layers, x, key)

    return apply


def apply_from_host(layer: Callable, layers: Any, x: Any, key: None = None) -> Any:
    """Fetch the parameters of one layer after the other, recomputing the layers."""
    return scan_layers(
        lambda params, x, key: layer(to_device(params), x), layers, x, key, remat=True
    )


def apply_offloaded(params_in: Place) -> Callable:
    return lambda layer, layers, x, key: offload_scan(layer, layers, x, params_in=params_in)


POLICIES = jax.checkpoint_policies
OFFLOAD_INPUTS = POLICIES.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["input"],
    offload_src="device",
    offload_dst="pinned_host",
)
OFFLOAD_PRODUCTS = POLICIES.offload_dot_with_no_batch_dims("device", "pinned_host")

IN_MEMORY = "in memory"
REMAT = "in memory, remat"
FUSED_IN_MEMORY = "in memory, fused update"
OFFLOADED = "all offloaded"
FUSED = "all offloaded, fused update"
STATE_MOVED = "optimizer's state moved whole"

_remat = Form("device", functools.partial(scan_layers, remat=True), "device")
_fused_in_memory = Form("device", None, fuse_update=True)
_fused = Form("host", apply_offloaded("host"), fuse_update=True)

# Each group is in the order of the device memory it needs, most first. The first peer is the
# reference of all forms.
PEERS: dict[str, Form] = {
    IN_MEMORY: Form("device", scan_layers, "device"),
    REMAT: _remat,
    "in memory, remat, inputs offloaded": _remat._replace(apply=checkpointed(OFFLOAD_INPUTS)),
    "in memory, remat, products offloaded": _remat._replace(apply=checkpointed(OFFLOAD_PRODUCTS)),
    STATE_MOVED: _remat._replace(moments="host"),
    f"parameters and {STATE_MOVED}": Form("host", apply_from_host, "host"),
}
OURS: dict[str, Form] = {
    FUSED_IN_MEMORY: _fused_in_memory,
    f"{FUSED_IN_MEMORY}, inputs offloaded": _fused_in_memory._replace(
        options={"activations_in": "host"}
    ),
    "activations offloaded": Form("device", apply_offloaded("device"), "device"),
    OFFLOADED: Form("host", apply_offloaded("host")),
    f"{FUSED}, products kept": _fused._replace(
        options={"policy": POLICIES.dots_with_no_batch_dims_saveable}
    ),
    FUSED: _fused,
}
FORMS = PEERS | OURS


def step_of(setting: Setting, form: Form) -> tuple[Callable, Callable]:
    """Return `(init, step)` as `effjax.offload_train_step`, with Adam."""
    functions = split_loss(setting.abstract_model)
    if form.moments is None:
        options: dict[str, Any] = dict(params_in=form.layers, fuse_update=form.fuse_update)
        return offload_train_step(*functions, ADAM, **options | dict(form.options))
    apply = form.apply
    assert apply is not None

    def loss_of(layers, others, tokens):
        x = apply(functions.layer, layers, functions.embed(others, tokens), None)
        return functions.head(others, x, tokens)

    gradients = jax.value_and_grad(loss_of, argnums=(0, 1))

    def init(*params):
        moments = ADAM.init(to_device(params))
        put = to_host if form.moments == "host" else to_device
        return params, jax.tree.map(lambda a: put(a) if a.ndim > 1 else a, moments)

    def step(state, tokens):
        loss, grads = gradients(*state[0], tokens)
        # Everything on the host comes to the device for the update, and goes back after it.
        params, moments, grads = to_device((*state, grads))
        updates, moments = ADAM.update(grads, moments, params)
        new_state = optax.apply_updates(params, updates), moments
        return jax.tree.map(_put_like, new_state, state), loss

    return init, step


def _put_like(new: jax.Array, old: jax.Array) -> jax.Array:
    return to_host(new) if jax.typeof(old).memory_space == jax.memory.Space.Host else new


def split_params(model: TransformerLM) -> tuple[Any, Any]:
    """Return the parameters as `(layers, others)`."""
    params: Any = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return params.pop("blocks"), params


def abstract_step(setting: Setting, form: Form) -> tuple:
    """Return `(fn, *args)` of the whole step for the planner."""
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])

    def place(tree: Any, where: Place | None) -> Any:
        kind = "pinned_host" if where == "host" else None
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree
        )

    def place_state(tree: Any, where: Place | None) -> Any:
        # Scalars, such as the count of steps, stay on the device.
        return jax.tree.map(lambda a: place(a, where if a.ndim > 1 else "device"), tree)

    layers, others = split_params(setting.abstract_model)
    params = place(layers, form.layers), place(others, "device")
    tokens = place(setting.tokens, "device")
    step, init = offload_jit(step_of(setting, form)[1]), ADAM.init
    if form.moments is not None:
        moments = jax.eval_shape(init, (layers, others))
        return step, (params, place_state(moments, form.moments)), tokens
    layer_moments = jax.eval_shape(jax.vmap(init), layers)
    moments = jax.eval_shape(init, others)
    state = OffloadState(*params, place_state(layer_moments, form.layers), place(moments, "device"))
    return step, state, tokens


def planned_bytes(plan: MemoryPlan) -> dict[str, int]:
    """Return the columns of a planned step."""
    return {
        "planned_device_bytes": plan.peak_device_bytes,
        "planned_device_temp_bytes": plan.device.temporaries,
        "planned_host_bytes": plan.host.total,
    }
