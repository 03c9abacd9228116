"""Options of the operators; forward and backward pass of one slice, one microbatch at a time."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Literal,
    jaxpr_as_fun,
)
from jax.sharding import NamedSharding, PartitionSpec

from .._common.arguments import as_dtype, as_integer, check_choice, describe
from .._common.sharding import (
    cast_to_varying,
    explicit_axes,
    explicit_spec,
    sum_cotangent,
    varying_axes,
)
from .backends import write
from .placement import SPACES, MemoryName, Space, space_of
from .trees import (
    Partition,
    Tree,
    check_same_shapes,
    count_row_shards,
    float_leaves,
    fold_key,
    is_key,
    merge_microbatches,
    replace_float_leaves,
    split_microbatches,
    strip_weak_type,
)


@dataclasses.dataclass(frozen=True)
class OffloadOptions:
    """Options of `offload_scan`, documented there; the other operators take some of them."""

    num_slices: int | None = None
    num_microbatches: int = 1
    params_in: MemoryName = "host"
    activations_in: MemoryName = "host"
    grads_in: MemoryName | None = None
    prefetch: int = 1
    resident_slices: int = 0
    compute_dtype: Any = None
    has_aux: bool = False
    policy: Callable[..., Any] | None = None
    # Whether layers are called as layer(params, x, key, i, m) with the numbers of the layer and of
    # the microbatch, int32 []. The Flax modules select the variables and the keys of a layer by
    # them.
    pass_index: bool = False

    def __post_init__(self) -> None:
        minimum = {"num_slices": 1, "num_microbatches": 1, "prefetch": 0, "resident_slices": 0}
        if self.num_slices is None:
            del minimum["num_slices"]
        for name, least in minimum.items():
            object.__setattr__(self, name, as_integer(name, getattr(self, name), least))
        check_choice("params_in", self.params_in, *SPACES)
        check_choice("activations_in", self.activations_in, *SPACES)
        check_choice("grads_in", self.grads_in, *SPACES, None)
        if self.compute_dtype is not None:
            as_dtype("compute_dtype", self.compute_dtype)

    @property
    def activations_space(self) -> Space:
        """The memory of the residuals of the slices."""
        return SPACES[self.activations_in]

    @property
    def grads_space(self) -> Space:
        """The memory in which gradients are collected."""
        return SPACES[self.grads_in or self.params_in]

    def count_slices(self, num_layers: int, equal: bool) -> int:
        """Return the number of slices; with `equal` they must have the same number of layers."""
        count = num_layers if self.num_slices is None else self.num_slices
        if count > num_layers or (equal and num_layers % count):
            requirement = "divide" if equal else "be at most"
            raise ValueError(
                f"`num_slices` (={count}) must {requirement} the number of layers (={num_layers})."
            )
        if self.resident_slices > count:
            raise ValueError(
                f"`resident_slices` (={self.resident_slices}) must be at most the number of slices "
                f"(={count})."
            )
        return count


class Slice(NamedTuple):
    """A slice as functions of its parameters; both take w as a Partition.

    ``apply(w, closure, x, key, microbatch) -> (x, aux)``. Without `apply_with_residuals` the
    backward pass recomputes the slice from its input, else it uses the residuals of
    ``apply_with_residuals(w, closure, (key, microbatch), x) -> ((x, aux), Residuals)``.
    `row_shards` is that of `split_microbatches`.
    """

    apply: Callable
    num_microbatches: int
    apply_with_residuals: Callable | None = None
    row_shards: int = 1


class Residuals(NamedTuple):
    """Arrays kept for the backward pass, and the function that computes gradients from them.

    ``vjp(arrays, w, closure, rest, cotangents) -> [dw, dclosure, dx]``
    """

    arrays: list
    vjp: Callable  # a pytree without leaves


def forward(
    slice_fn: Slice, w: Partition, closure: Tree, x: Tree, key, save_residuals: bool = False
):
    """Run all microbatches; return y, aux [num_microbatches, ...] and residuals for `backward`."""
    axes, split = varying_axes(x), (slice_fn.num_microbatches, slice_fn.row_shards)
    w = jax.tree.map(lambda a: cast_to_varying(a, axes), w)

    def run(x, m):
        if save_residuals and slice_fn.apply_with_residuals is not None:
            return slice_fn.apply_with_residuals(w, closure, (key, m), x)
        return slice_fn.apply(w, closure, x, key, m), ()

    if slice_fn.num_microbatches == 1:
        (y, aux), residuals = run(x, 0)
        aux = jax.tree.map(lambda a: a[None], aux)
    else:
        xs = split_microbatches(x, *split), jnp.arange(slice_fn.num_microbatches)
        _, ((y, aux), residuals) = _scan_with_late_buffers(lambda _, xm: ((), run(*xm)), (), xs)
        y = merge_microbatches(y, slice_fn.row_shards)
    return y, aux, x if slice_fn.apply_with_residuals is None else residuals


def backward(
    slice_fn: Slice, w: Partition, closure: Tree, residuals: Tree, key, dy: list, daux: list
):
    """Compute the gradients (dw, dclosure, dx) of `forward` from its residuals.

    dy, daux, dclosure and dx are the gradients of floating-point leaves. Microbatches are added
    from the last to the first, in the order in which JAX differentiates a scan.
    """
    # With w varying over the batch's mesh axes, there is one sum over devices for all microbatches,
    # before the gradient leaves the device.
    axes = varying_axes((residuals, dy))
    varying_w = jax.tree.map(lambda a: cast_to_varying(a, axes), w)

    def gradients(residuals, m, dy, daux):
        if slice_fn.apply_with_residuals is not None:
            return residuals.vjp(residuals.arrays, varying_w, closure, (key, m), [*dy, *daux])

        def run(trained, closure_floats, x_floats):
            args = (
                varying_w._replace(trained=trained),
                replace_float_leaves(closure, closure_floats),
                replace_float_leaves(residuals, x_floats),
            )
            return float_leaves(slice_fn.apply(*args, key, m))

        _, vjp = jax.vjp(run, varying_w.trained, float_leaves(closure), float_leaves(residuals))
        return vjp([*dy, *daux])

    if slice_fn.num_microbatches == 1:
        dw, dclosure, dx = gradients(residuals, 0, dy, [a[0] for a in daux])
    else:

        def add_microbatch(sums, microbatch):
            *grads, dx = gradients(*microbatch)
            return jax.tree.map(jnp.add, sums, tuple(grads)), dx

        sums = varying_w.trained, float_leaves(closure)
        zeros = jax.tree.map(lambda a: cast_to_varying(jnp.zeros_like(a), axes), sums)
        # The sums are not allocated before dy exists.
        zeros, dy = lax.optimization_barrier((zeros, dy))
        split = slice_fn.num_microbatches, slice_fn.row_shards
        if slice_fn.apply_with_residuals is None:
            residuals = split_microbatches(residuals, *split)
        dy = split_microbatches(dy, *split)
        xs = residuals, jnp.arange(slice_fn.num_microbatches), dy, daux
        (dw, dclosure), dx = _scan_with_late_buffers(add_microbatch, zeros, xs, reverse=True)
        dx = merge_microbatches(dx, slice_fn.row_shards)
    return jax.tree.map(sum_cotangent, dw, w.trained), dclosure, dx


def _scan_with_late_buffers(
    body: Callable, carry: Tree, xs: Tree, reverse: bool = False
) -> tuple[Tree, Tree]:
    """Run ``lax.scan`` with result buffers that are not allocated before xs exist.

    The buffers of lax.scan depend on nothing. Where slices are unrolled, XLA would allocate those
    of all slices at the start. PRNG keys remain outputs of lax.scan, because zero cannot be cast to
    their dtype; they are small.
    """
    first, count = jax.tree.map(lambda a: a[0], xs), jax.tree.leaves(xs)[0].shape[0]
    zero, xs = lax.optimization_barrier((jnp.int32(0), xs))
    axes = varying_axes(xs)

    def allocate(a):
        sharding = None
        if explicit_axes(a):
            spec = PartitionSpec(None, *explicit_spec(a))
            sharding = NamedSharding(jax.typeof(a).sharding.mesh, spec)
        shape = count, *a.shape
        return cast_to_varying(
            lax.broadcast(zero.astype(a.dtype), shape, out_sharding=sharding), axes
        )

    def step(state, ix):
        carry, buffers = state
        i, x = ix
        carry, result = body(carry, x)
        leaves = jax.tree.leaves(result)
        arrays = [a for a in leaves if not is_key(a)]
        return (carry, write(buffers, arrays, i)), [a for a in leaves if is_key(a)]

    result = jax.eval_shape(body, carry, first)[1]
    buffers = [allocate(a) for a in jax.tree.leaves(result) if not is_key(a)]
    (carry, buffers), keys = lax.scan(
        step, (carry, buffers), (jnp.arange(count), xs), reverse=reverse
    )
    arrays, keys = iter(buffers), iter(keys)
    return carry, jax.tree.map(lambda a: next(keys if is_key(a) else arrays), result)


# Residuals chosen by a policy of jax.checkpoint.


def apply_with_policy(
    fun: Callable, policy: Callable, w: Partition, closure: Tree, rest: tuple, x: Tree
) -> tuple[Tree, Residuals]:
    """Return ``fun(w, closure, x, *rest)`` and the residuals that the policy keeps.

    The backward pass has w, `closure` and `rest`. They are not kept, nor values that depend on w
    and `closure` only, such as casts.
    """

    def saves(*args, **params):
        decision = policy(*args, **params)
        # Offloading policies return an object with a destination, which is `activations_in` here.
        return True if hasattr(decision, "dst") else decision

    def linearize(w, closure, rest, x):
        def run(trained, closure_floats, x_floats):
            args = (
                w._replace(trained=trained),
                replace_float_leaves(closure, closure_floats),
                replace_float_leaves(x, x_floats),
            )
            result = jax.checkpoint(fun, policy=saves, prevent_cse=False)(*args, *rest)
            return float_leaves(result), result

        primals = w.trained, float_leaves(closure), float_leaves(x)
        _, vjp, result = jax.vjp(run, *primals, has_aux=True)
        return result, vjp

    # The leaves of the vjp function are all residuals. Split the program that computes them: into
    # the forward pass, which returns the residuals to be kept, and the equations that the backward
    # pass repeats because they depend on w and `closure` only.
    args = w, closure, rest, x
    closed, (result, vjp) = jax.make_jaxpr(linearize, return_shape=True)(*args)
    jaxpr, num_results = closed.jaxpr, len(jax.tree.leaves(result))
    outputs, residuals = jaxpr.outvars[:num_results], jaxpr.outvars[num_results:]
    available = jaxpr.invars[: len(jax.tree.leaves(args[:3]))]
    late, early_eqns = set(jaxpr.invars[len(jax.tree.leaves(args[:2])) :]), []
    for eqn in jaxpr.eqns:
        if eqn.effects or late.intersection(_variables(eqn.invars)):
            late.update(eqn.outvars)
        else:
            early_eqns.append(eqn)
    kept = [v for v in dict.fromkeys(_variables(residuals)) if v in late and v not in available]
    recomputed = [v for v in residuals if isinstance(v, Literal) or v not in kept]
    forward_jaxpr = jaxpr.replace(outvars=[*outputs, *kept])
    early_jaxpr = jaxpr.replace(invars=available, outvars=recomputed, eqns=early_eqns)

    def pull_back(arrays, w, closure, rest, cotangents):
        early = _run_jaxpr(early_jaxpr, closed.consts, (w, closure, rest))
        values = dict(zip(map(id, [*kept, *recomputed]), [*arrays, *early], strict=True))
        leaves = [values[id(v)] for v in residuals]
        return jax.tree.unflatten(jax.tree.structure(vjp), leaves)(cotangents)

    values = _run_jaxpr(forward_jaxpr, closed.consts, args)
    result = jax.tree.unflatten(jax.tree.structure(result), values[:num_results])
    return result, Residuals(values[num_results:], jax.tree_util.Partial(pull_back))


def scan_with_policy(
    layer: Callable, policy: Callable, w: Partition, closure: Tree, rest: tuple, x: Tree
) -> tuple[Tree, Residuals]:
    """Apply all layers of a slice as `apply_with_policy` does one.

    w, aux and residuals are [slice_size, ...].

    ``layer(w, closure, x, *rest, i) -> (x, aux)``
    """
    count, num_floats = jax.tree.leaves(w)[0].shape[0], len(float_leaves(x))

    def forward_layer(x, wi):
        w, i = wi
        (x, aux), residuals = apply_with_policy(layer, policy, w, closure, (*rest, i), x)
        return x, (aux, residuals)

    x, (aux, (arrays, vjp)) = lax.scan(forward_layer, x, (w, jnp.arange(count)))

    def pull_back(arrays, w, closure, rest, cotangents):
        def backward_layer(state, xs):
            dx, dclosure = state
            arrays, w, i, daux = xs
            dw, dclosure_here, dx = vjp(arrays, w, closure, (*rest, i), [*dx, *daux])
            return (dx, jax.tree.map(jnp.add, dclosure, dclosure_here)), dw

        dx, daux = cotangents[:num_floats], cotangents[num_floats:]
        state = dx, [jnp.zeros_like(a) for a in float_leaves(closure)]
        xs = arrays, w, jnp.arange(count), daux
        (dx, dclosure), dw = lax.scan(backward_layer, state, xs, reverse=True)
        return dw, dclosure, dx

    return (x, aux), Residuals(arrays, jax.tree_util.Partial(pull_back))


def _run_jaxpr(jaxpr, consts, args):
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, consts))(*jax.tree.leaves(args))


def _variables(atoms: list) -> list:
    return [v for v in atoms if not isinstance(v, Literal)]


# The user's layers.


def check_layer(layer: Callable, options: OffloadOptions, keeps_shapes: bool = True) -> Callable:
    """Return ``layer(params, x, rest) -> (x, aux)`` with checks of its arguments and results.

    `rest` are the other arguments of the layer, from `layer_arguments`.
    """
    names = ["params", "x", "key", *(["layer", "microbatch"] if options.pass_index else [])]
    try:
        inspect.signature(layer).bind(*names)
    except TypeError:
        raise TypeError(
            f"`layer` must take the arguments layer({', '.join(names)}), not "
            f"{inspect.signature(layer)}. A layer without randomness ignores `key`."
        ) from None
    except ValueError:  # a builtin without a signature
        pass

    def checked(params, x, rest):
        result = layer(params, x, *rest)
        if not options.has_aux:
            result = result, ()
        elif not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                f"`layer` must return (x, aux) with has_aux=True, not {describe(result)}."
            )
        y, aux = jax.tree.map(strip_weak_type, result)
        if keeps_shapes:
            check_same_shapes("layer(params, x, key)", y, "x", x, same_types=True)
        return y, aux

    return checked


def layer_arguments(options: OffloadOptions, key: Any, i: Any, m: Any) -> tuple:
    """Return the arguments of layer i and microbatch m after its parameters and its input."""
    key = fold_key(key, i, m)
    return (key, jnp.int32(i), jnp.int32(m)) if options.pass_index else (key,)


def hoist_closure(layer: Callable, w: Tree, x: Tree, rest: Any) -> tuple[Callable, list]:
    """Make the arrays that a layer closes over an argument, so that they get gradients.

    Args:
        layer: ``layer(params, x, rest)``.
        w: arrays with the types of the parameters.
        x: arrays with the types of a microbatch.
        rest: arrays with the types of the other arguments, such as keys.

    Returns:
        ``hoisted(params, closure, x, rest)``, and `closure`, the traced arrays of the closure. Both
        `rest` and the closure vary over the mesh axes of x.
    """
    axes = varying_axes(x)
    cast = functools.partial(jax.tree.map, lambda a: cast_to_varying(a, axes))
    rest = jax.eval_shape(cast, rest)
    closed, result = jax.make_jaxpr(layer, return_shape=True)(w, x, rest)
    is_hoisted = [isinstance(c, Tracer) for c in closed.consts]
    closure = [c for c, hoist in zip(closed.consts, is_hoisted, strict=True) if hoist]
    if any(space_of(c) == Space.Host for c in closed.consts):
        raise ValueError(
            "`layer` closes over an array in host memory. Pass it in the parameters, or close over "
            "effjax.to_device of it."
        )

    def hoisted(params, closure, x, rest):
        arrays = iter(closure)
        pairs = zip(closed.consts, is_hoisted, strict=True)
        consts = [next(arrays) if hoist else c for c, hoist in pairs]
        values = _run_jaxpr(closed.jaxpr, consts, (params, x, cast(rest)))
        return jax.tree.unflatten(jax.tree.structure(result), values)

    return hoisted, cast(closure)


def first_microbatch(x: Tree, num_microbatches: int) -> Tree:
    """Return the first microbatch of x."""
    if num_microbatches == 1:
        return x
    parts = split_microbatches(x, num_microbatches, count_row_shards(x))
    return jax.tree.map(lambda a: a[0], parts)


def check_microbatches(x: Tree, num_microbatches: int, name: str = "x") -> None:
    """Raise ValueError unless all arrays of x can be split into microbatches."""
    if num_microbatches == 1:
        return
    shapes = [
        (f"{name}{jax.tree_util.keystr(path)}", jnp.shape(a))
        for path, a in jax.tree_util.tree_leaves_with_path(x)
    ]
    wrong = [
        f"{leaf} has the shape {shape}"
        for leaf, shape in shapes
        if shape[:1] != shapes[0][1][:1] or not shape or shape[0] % num_microbatches
    ]
    if wrong or not shapes:
        first = f", and {shapes[0][0]} the shape {shapes[0][1]}" if len(shapes) > len(wrong) else ""
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must divide the batch, the first axis of "
            f"all arrays of {name}, but {wrong[0] if wrong else 'there are none'}{first}."
        )
    row_shards, rows = count_row_shards(x), shapes[0][1][0]
    if rows % (num_microbatches * row_shards):
        raise ValueError(
            f"`num_microbatches` (={num_microbatches}) must divide the rows of each device, but "
            f"{rows} rows are split over {row_shards} devices of a mesh with Explicit axes."
        )
