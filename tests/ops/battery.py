"""Description of a sampling operator and its test cases; used by every test of these operators."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from effjax import native
from tests.tiers import vary

NO_NATIVE = not native.is_available("cpu")
# "default" is implementation=None without native kernels: XLA behind the operator's own
# differentiation and partitioning rules.
IMPLEMENTATIONS = ["default", "xla"] if NO_NATIVE else ["native", "xla", "default"]
# "default" has the rules of "native" and the arithmetic of "xla".
own_rules_or_xla = vary("implementation", [IMPLEMENTATIONS[0], "xla"], indirect=True)


@dataclasses.dataclass
class Case:
    """Arguments of one case.

    Attributes:
        bind: ``bind(implementation, **options)`` returns the operator as a function of `args`.
        oracle: ``oracle(*args, dy)`` returns y and the gradients of the differentiable arguments.
        args: All array arguments; None is an absent one.
        dy: Cotangent of the result.
        differentiable: Number of leading arguments that have a gradient.
        shared: Indices of the arguments without a batch axis.
    """

    bind: Callable[..., Callable]
    oracle: Callable[..., tuple[np.ndarray, tuple]]
    args: list
    dy: np.ndarray
    differentiable: int
    shared: tuple[int, ...] = ()

    def want(self) -> list:
        args = (a if a is None else np.asarray(a, np.float64) for a in self.args)
        y, gradients = self.oracle(*args, self.dy)
        return [y, *gradients]

    def cast(self, *dtypes: Any) -> None:
        """Round the arguments and dy to dtypes; the last one is that of all other arguments."""
        for i, a in enumerate(self.args):
            if a is not None:
                with np.errstate(over="ignore"):
                    self.args[i] = jnp.asarray(a, dtypes[min(i, len(dtypes) - 1)])
        self.dy = np.asarray(jnp.asarray(self.dy, dtypes[0]), np.float64)

    def got(self, implementation: str | None, **options: Any) -> list:
        return self.compile(implementation, **options)(self.args, self.dy)

    def compile(self, implementation: str | None, **options: Any) -> Callable[..., list]:
        """Return the compiled ``run(args, dy)``: the result and the gradients."""
        f, n = self.bind(implementation, **options), self.differentiable

        def run(args, dy):
            y, backward = jax.vjp(lambda *a: f(*a, *args[n:]), *args[:n])
            return [y, *(g for g in backward(jnp.asarray(dy, y.dtype)) if g is not None)]

        return jax.jit(run)


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    """Description of an operator.

    Attributes:
        make: ``make(name, batch=..., dtype=...)`` returns a case.
        cases: Names of the cases.
        plain_case: Case with most options.
        context_case: Case of the tests under transformations and over devices.
        xla_context_case: The same for implementation="xla".
        context_options: Keyword arguments of `make` for these cases.
        sizes: Arguments of `make`: odd, large and empty sizes.
        mapped: Axes of vmap of some of the arguments of `context_case`.
        derivatives: Returns a case between the kinks of the interpolation, for differences.
        options: Options that split the work into chunks.
    """

    make: Callable[..., Case]
    cases: tuple[str, ...]
    plain_case: str
    context_case: str
    xla_context_case: str
    context_options: Mapping[str, Any]
    sizes: tuple[tuple[str, Mapping[str, Any]], ...]
    mapped: tuple[tuple[int | None, ...], ...]
    derivatives: Callable[..., Case]
    options: Mapping[str, Any]

    def make_context(self, implementation: str | None = None, **options: Any) -> Case:
        """Return a small case for tests under transformations and over devices."""
        name = self.xla_context_case if implementation == "xla" else self.context_case
        return self.make(name, **{**self.context_options, **options})
