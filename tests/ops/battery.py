"""Description of a sampling operator and its test cases; used by every test of these operators."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import native
from tests.tiers import vary

NO_NATIVE = not native.is_available("cpu")
# "default" is implementation=None without native kernels: XLA behind the operator's own
# differentiation and partitioning rules.
IMPLEMENTATIONS = ["default", "xla"] if NO_NATIVE else ["native", "xla", "default"]
# Tests of these rules need one implementation that has them.
OWN_RULES = IMPLEMENTATIONS[0]

only_own_rules = pytest.mark.parametrize("implementation", [OWN_RULES], indirect=True)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
# "default" has the rules of "native" and the arithmetic of "xla".
own_rules_or_xla = vary("implementation", [OWN_RULES, "xla"], indirect=True)


def on_random_shapes(test: Callable) -> Callable:
    """Run a test of (implementation, data) in float64 on data of hypothesis, with --exhaustive."""
    settings = hypothesis.settings(
        max_examples=4,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )
    test = own_rules_or_xla(settings(hypothesis.given(data=st.data())(test)))
    return pytest.mark.exhaustive(pytest.mark.usefixtures("x64")(test))


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
        y, gradients = self.oracle(*self.args, self.dy)
        return [y, *gradients]

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
        mapped: Axes of vmap of the arguments of `context_case`.
        derivatives: Returns a case between the kinks of the interpolation, for differences.
        options: Options that split the work into slices.
    """

    make: Callable[..., Case]
    cases: tuple[str, ...]
    plain_case: str
    context_case: str
    xla_context_case: str
    context_options: Mapping[str, Any]
    sizes: tuple[tuple[str, Mapping[str, Any]], ...]
    mapped: Mapping[str, tuple[int | None, ...]]
    derivatives: Callable[..., Case]
    options: Mapping[str, Any]

    def make_context(self, implementation: str | None = None, **options: Any) -> Case:
        """Return a small case for tests under transformations and over devices."""
        name = self.xla_context_case if implementation == "xla" else self.context_case
        return self.make(name, **{**self.context_options, **options})
