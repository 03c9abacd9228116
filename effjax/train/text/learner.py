"""A decoder, its optimizer and its training step, with arrays in device or host memory."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ...models import DecoderConfig, decoder_functions, decoder_logits, decoder_shapes
from ...models.decoder import (
    CODES,
    SCALES,
    DecoderFunctions,
    Params,
    router_loss,
)
from ...models.decoder_config import check_dropout
from ...ops.offload import OffloadState, offload_scan, offload_train_step, to_device
from ..errors import TrainError
from ..mesh import AnyMesh, gather_params, param_sharding, put, replicated, with_shardings
from ..optimizers import is_adamw, is_linear, make_optimizer, make_schedule
from .config import FinetuneConfig
from .preferences import as_rows, preference_loss, sum_log_probs

LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"  # suffixes of the names of adapters
POLICIES: dict[str, Any] = {
    "recompute": None,
    "dots": jax.checkpoint_policies.dots_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
}

# (logits, batch) -> (loss_sum, weight)
Loss = Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]]


class DecoderState(NamedTuple):
    """State of a training run."""

    step: Any  # int32 []
    model: OffloadState


def is_adapter(path: Any, leaf: Any = None) -> bool:
    """Return True if the path of a parameter is that of an adapter."""
    return path[-1].key.endswith((LORA_A, LORA_B))


def make_learner(
    config: FinetuneConfig, model: DecoderConfig, mesh: AnyMesh, loss: "Loss | None" = None
) -> "DecoderLearner":
    """Create the learner of a configuration. Nothing is computed.

    Args:
        config: The options, resolved.
        model: The model, with the dtype of the parameters.
        mesh: The devices.
        loss: The loss in place of the cross entropy.

    Raises:
        TrainError: config.json has dropout, which is not supported in training, or the model does
            not support an option.
    """
    try:
        check_dropout(model)
        decoder_functions(model, mlp_chunk_size=config.mlp_chunk_size)
    except ValueError as error:
        raise TrainError(str(error)) from error
    optimizer = make_optimizer(
        config.optimizer, learning_rate_schedule(config), config.weight_decay,
        master_copy=config.param_dtype == "bfloat16-24", seed=config.seed, b1=config.beta1,
        b2=config.beta2, epsilon=config.epsilon, fused=model.fused_projections,
    )  # fmt: skip
    return DecoderLearner(config, model, mesh, optimizer, _find_adapted(config, model), loss)


def _find_adapted(config: FinetuneConfig, model: DecoderConfig) -> tuple[str, ...]:
    if config.lora is None:
        return ()
    layers, _ = decoder_shapes(model)
    modules = [name.removesuffix(".weight") for name in layers if is_linear(name)]
    found = tuple(modules) if config.lora_targets is None else _select(config.lora_targets, modules)
    if config.lora_dropout and any(".experts." in module for module in found):
        raise TrainError(
            f"`lora_dropout` (={config.lora_dropout}) is not supported for adapters of experts. "
            "Leave it out, or adapt only attention by `lora_targets` (=q_proj,k_proj,v_proj,o_proj)"
        )
    return found


def _select(lora_targets: str, modules: Sequence[str]) -> tuple[str, ...]:
    targets = [name.strip() for name in lora_targets.split(",")]
    for target in targets:
        if not any(target in (module, module.rpartition(".")[2]) for module in modules):
            known = ", ".join(module.rpartition(".")[2] for module in modules)
            raise TrainError(f"`lora_targets` (={target!r:.120}) must be some of {known}")
    return tuple(m for m in modules if m in targets or m.rpartition(".")[2] in targets)


def learning_rate_schedule(config: FinetuneConfig) -> optax.Schedule:
    """Return the learning rate of a run whose number of steps is known."""
    assert config.learning_rate is not None and config.steps is not None
    return make_schedule(
        config.schedule, config.learning_rate, config.steps, config.warmup,
        config.first_rate, config.lowest_rate,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class DecoderLearner:
    """A decoder and its optimizer, with the places of its arrays; from `make_learner`.

    Attributes:
        config: The options, resolved.
        model: The decoder, with the dtype of its parameters.
        mesh: The devices. Parameters are sharded over its axis `fsdp`, if it has one.
        optimizer: The optimizer.
        adapted: The linear layers with adapters, as in `self_attn.q_proj`. If there are some, only
            adapters are trained.
        loss: The loss in place of the cross entropy.
    """

    config: FinetuneConfig
    model: DecoderConfig
    mesh: AnyMesh
    optimizer: optax.GradientTransformation
    adapted: tuple[str, ...] = ()
    loss: Loss | None = None

    @property
    def num_params(self) -> int:
        """The number of parameters, without adapters."""
        return sum(math.prod(a.shape) for tree in decoder_shapes(self.model) for a in tree.values())

    @property
    def num_trained(self) -> int:
        """The number of trained parameters."""
        if not self.adapted:
            return self.num_params
        return sum(math.prod(a.shape) for a in self._adapter_shapes().values())

    def model_shapes(self) -> tuple[Params, Params]:
        """Return the shapes of the model's parameters, ``(layers, others)``, with their places.

        They are arguments of `effjax.convert.load_checkpoint`.
        """
        layers, others = decoder_shapes(self.model, quantize=self.config.quantize)
        return self._place(layers, stacked=True), self._place(others)

    def shapes(self) -> DecoderState:
        """Return the shapes, dtypes, shardings and memory of the state."""
        layers, others = self.model_shapes()
        layers |= self.adapter_shapes()
        # Host arrays exist only with concrete devices, and shapes do not depend on the place.
        on_device = dataclasses.replace(self.config, params_in="device")
        init, _ = dataclasses.replace(self, config=on_device)._offload_functions()
        without_places = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (layers, others)
        )
        model: OffloadState = jax.eval_shape(init, *without_places)
        shapes = DecoderState(
            jax.ShapeDtypeStruct((), jnp.int32), model._replace(layers=layers, others=others)
        )
        return with_shardings(shapes, self._shardings(shapes))

    def adapter_shapes(self) -> Params:
        """Return the shapes of the adapters, with their places; empty if there are none."""
        return self._place(self._adapter_shapes(), stacked=True)

    def initial_state(
        self, layers: Params, others: Params, adapters: Params | None = None
    ) -> DecoderState:
        """Return the state before the first step.

        Args:
            layers: The parameters of the layers, in the places of `model_shapes`.
            others: The parameters outside the layers.
            adapters: The adapters, in the places of `adapter_shapes`. By default they are new.
        """
        layers = layers | (self._init_adapters() if adapters is None else adapters)
        init, _ = self._offload_functions()
        state = DecoderState(jnp.int32(0), init(layers, others))
        return put(state, self._shardings(state))

    def train_step(self) -> Callable:
        """Return the training step, ``(state, batch, key) -> (state, loss)``, not compiled.

        The batch is that of `decoder_functions`. The loss is the weighted mean over its tokens, and
        NaN if a gradient is not finite. `key` is that of the run, which the dropout of adapters
        needs.

        Of preferences, the batch is that of `PackedPairs`, and in place of the loss is a dict of
        the means over its pairs: the "loss" and the metrics of `preferences`. Of a model with
        experts it is a dict, too, with the metrics of `router_loss`.
        """
        _, train_step = self._offload_functions()

        def step(state: DecoderState, batch: Any, key: Any = None) -> tuple[DecoderState, Any]:
            # The recomputation of a layer, and a run that resumes, drop the same numbers.
            step_key = jax.random.fold_in(key, state.step) if self.config.lora_dropout else None
            result = train_step(state.model, batch, step_key)
            # The loop reads only the loss. A gradient that is not finite shows in it as NaN.
            metrics: Any = jnp.where(result.finite, result.loss, jnp.nan)
            if result.head_aux is not None:
                sums = {name: jnp.sum(a) for name, a in result.head_aux.items()}
                count = sums.pop("weight") if "weight" in sums else jnp.sum(batch["pairs"])
                means = {name: a / count for name, a in sums.items()}
                metrics = {"loss": metrics, **means}
            return DecoderState(state.step + 1, result.state), metrics

        return step

    def eval_step(self) -> Callable:
        """Return ``(layers, others, batch) -> (loss_sum, weight)``, not compiled.

        Of preferences, the result is ``((loss_sum, weight), sums)`` with the sums of the metrics.
        """
        return self._forward(self._functions().head)

    def log_probs_step(self) -> Callable:
        """Return ``(layers, others, batch) -> log_probs`` of preferences, not compiled.

        They are those of `sum_log_probs`, on each device.
        """

        def head(others: Params, x: Params, batch: Any) -> jax.Array:
            others = gather_params(others, self.mesh)
            log_probs = sum_log_probs(self.model, others, x["hidden"], batch)
            # Each process stores the values of all pairs.
            return jax.lax.with_sharding_constraint(log_probs, replicated(self.mesh))

        return self._forward(head)

    def _forward(self, head: Callable) -> Callable:
        """Return ``(layers, others, batch) -> result`` of a head."""
        embed, layer, _ = self._functions()

        def step(layers: Params, others: Params, batch: Any) -> Any:
            others = to_device(others)
            # trainable=False keeps no residuals, so that nothing is written to host memory.
            x = embed(others, batch)
            x = offload_scan(layer, layers, x, trainable=False, params_in=self.config.params_in)
            return head(others, x, batch)

        return step

    def _functions(self, balances: bool = False) -> DecoderFunctions:
        """Return the functions of the decoder, which gather sharded parameters.

        With `balances`, the router's loss is added to that of a model with experts.
        """
        config, model = self.config, self.model
        if model.num_experts is not None:
            model = dataclasses.replace(model, router_aux_loss_coef=0.0)
        embed, layer, head = decoder_functions(
            model, dtype=config.dtype,
            mlp_chunk_size=config.mlp_chunk_size, lora_scale=config.lora_scale,
            lora_dropout=config.lora_dropout or 0.0, matmul=config.matmul, mesh=self.mesh,
        )  # fmt: skip
        if config.has_pairs:
            embed_rows, head = embed, self._preference_head

            def embed(others: Params, batch: Any, key: Any = None) -> Params:
                return embed_rows(others, as_rows(batch), key)

        elif self.loss is not None:
            head = self._own_head
        if balances:
            embed, head = self._with_mask(embed), self._with_router_loss(head)

        # Within the scan over the layers, so that a device has one whole layer at a time. The
        # backward pass gathers it again.
        def gather(function: Callable) -> Callable:
            return lambda params, *rest: function(gather_params(params, self.mesh), *rest)

        return DecoderFunctions(gather(embed), gather(layer), gather(head))

    def _with_mask(self, embed: Callable) -> Callable:
        """Leave padding out of the router's loss."""

        def run(others: Params, batch: Any, key: Any = None) -> Params:
            rows, x = as_rows(batch) if self.config.has_pairs else batch, embed(others, batch, key)
            if "segment_ids" in rows:
                x["mask"] = rows["segment_ids"] != 0
            elif "positions" in rows:  # those of padding are 0
                x["mask"] = (rows["positions"] > 0).at[:, 0].set(True)
            return x

        return run

    def _with_router_loss(self, head: Callable) -> Callable:
        def run(others: Params, x: Params, batch: Any, key: Any = None) -> Any:
            result = head(others, x, batch, key)
            (loss, weight), sums = result if self.config.has_pairs else (result, {})
            value, busiest = router_loss(self.model, x)
            loss += self.model.router_aux_loss_coef * weight * value
            metrics = {"router_loss": value, "busiest_expert": busiest}
            metrics = {name: weight * a for name, a in metrics.items()} | {"weight": weight}
            return (loss, weight), sums | jax.lax.stop_gradient(metrics)

        return run

    def _preference_head(self, others: Params, x: Params, batch: Any, key: Any = None) -> Any:
        assert self.config.dpo_beta is not None
        log_probs = sum_log_probs(self.model, others, x["hidden"], batch)
        return preference_loss(self.config.dpo_beta, log_probs, batch)

    def _own_head(self, others: Params, x: Params, batch: Any, key: Any = None) -> Any:
        assert self.loss is not None
        return self.loss(decoder_logits(self.model, others, x["hidden"]), batch)

    def _offload_functions(self) -> tuple[Callable, Callable]:
        """Return `(init, step)` of `offload_train_step`."""
        config = self.config
        # A layer is updated before the gradients of those below it exist, and so is their norm.
        clip_by = "previous" if config.fuse_update and config.clip_norm else "global"
        has_experts = self.model.num_experts is not None
        return offload_train_step(
            *self._functions(balances=has_experts), self.optimizer,
            # A microbatch, or the rows of a device, may have more tokens with loss than another
            # one.
            weighted_loss=True, head_has_aux=config.has_pairs or has_experts,
            fuse_update=config.fuse_update, clip_norm=config.clip_norm or None, clip_by=clip_by,
            skip_nonfinite=config.on_nan == "skip",
            num_microbatches=config.num_microbatches, policy=POLICIES[config.policy],
            trainable=is_adapter if self.adapted else True, trainable_others=not self.adapted,
            params_in=config.params_in, others_in=config.params_in,
            activations_in=config.activations_in,
            update_rows=is_adamw if config.params_in == "host" and not self.adapted else None,
        )  # fmt: skip

    def _adapter_shapes(self) -> Params:
        layers, _ = decoder_shapes(self.model)
        rank, shapes = self.config.lora, {}
        for module in self.adapted:
            # float32, as in PEFT: adapters are small, and a bfloat16 number would round away
            # updates below 1/512 of it.
            *counts, outputs, inputs = layers[f"{module}.weight"].shape
            for end, shape in ((LORA_A, (rank, inputs)), (LORA_B, (outputs, rank))):
                shapes[f"{module}.{end}"] = jax.ShapeDtypeStruct((*counts, *shape), jnp.float32)
        return shapes

    def _init_adapters(self) -> Params:
        """Return adapters that do not change the model, because B is 0."""
        # PEFT draws A by He's rule for a leaky ReLU of slope a = √5, which is uniform in
        # ±√(6 / ((1 + a²) in)) = ±1/√in.
        shapes = self.adapter_shapes()

        def init(key: jax.Array) -> Params:
            def draw(i: int, name: str, a: jax.ShapeDtypeStruct) -> jax.Array:
                if name.endswith(LORA_B):
                    return jnp.zeros(a.shape, a.dtype)
                bound = a.shape[-1] ** -0.5
                key_i = jax.random.fold_in(key, i)
                return jax.random.uniform(key_i, a.shape, a.dtype, -bound, bound)

            return {name: draw(i, name, a) for i, (name, a) in enumerate(shapes.items())}

        places = {name: a.sharding.with_memory_kind("device") for name, a in shapes.items()}
        arrays = jax.jit(init, out_shardings=places)(jax.random.key(self.config.seed))
        return put(arrays, {name: a.sharding for name, a in shapes.items()})

    def _place(self, shapes: Params, stacked: bool = False) -> Params:
        kind = "pinned_host" if self.config.params_in == "host" else "device"

        def sharding(name: str, a: Any) -> Any:
            # The codes of a block are where its scale is.
            shape = shapes.get(name.removesuffix(CODES) + SCALES, a).shape
            return param_sharding(shape, self.mesh, stacked).with_memory_kind(kind)

        shardings = {name: sharding(name, a) for name, a in shapes.items()}
        return with_shardings(shapes, shardings)

    def _shardings(self, state: DecoderState) -> DecoderState:
        """Return the sharding and the memory of each array of the state, or of its shapes."""
        return DecoderState(replicated(self.mesh), state.model.shardings())
