import json

import jax.numpy as jnp
import pytest

from effjax.memory import residual_bytes
from tests.memory.conftest import f32


@pytest.mark.parametrize(
    ("function", "num_args", "kept", "of_arguments"),
    [
        (lambda x, w: jnp.sin(x) * w, 2, 3, 1),  # cos(x), and the operands sin(x) and w
        (lambda x: jnp.sin(x) * jnp.sin(x), 1, 4, 0),
        (lambda x, a, b: x * a + x * b, 3, 3, 3),  # x counts one time
    ],
)
def test_counts_arrays_and_arguments(function, num_args, kept, of_arguments):
    report = residual_bytes(function, *[f32(4, 8)] * num_args)
    assert report.arrays == (((4, 8), "float32", kept, kept * 128),)
    assert (report.bytes, report.argument_bytes) == (kept * 128, of_arguments * 128)


def test_has_aux_and_pytrees():
    def fn(params, x):
        y = x @ params["w"]
        return jnp.sum(y**2), {"y": y}

    params = {"w": f32(3, 5)}
    with_aux = residual_bytes(fn, params, f32(2, 3), has_aux=True)
    without = residual_bytes(lambda p, x: fn(p, x)[0], params, f32(2, 3))
    assert with_aux == without
    assert with_aux.argument_bytes == (15 + 6) * 4


def test_report(plot, rich_text):
    def fn(x, *weights):
        for w in weights:
            x = jnp.sin(x @ w)
        return jnp.sum(x)

    report = residual_bytes(fn, f32(1, 16), f32(16, 64), f32(64, 32))
    first, _, header, *rows = str(report).splitlines()
    assert first.startswith(f"{report.bytes / 1e3:.1f} kB kept for the backward pass, of them ")
    assert header.split() == ["bytes", "count", "shape"] and len(rows) == len(report.arrays)
    assert rows[0].split() == ["8.2", "kB", "1×", "float32[64,32]"]  # the largest first
    assert sum(row[-1] for row in report.arrays) == report.bytes

    record = json.loads(json.dumps(report.to_dict()))
    assert record["bytes"] == report.bytes and record["arrays"][0] == [[64, 32], "float32", 1, 8192]
    assert len(plot(report, most=2).get_yticklabels()) == 2
    assert "kept for the backward pass" in rich_text(report)
