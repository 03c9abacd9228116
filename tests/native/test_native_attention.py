"""Argument checks of the handlers of deformable attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import native

SHAPES = dict(value=(1, 7, 2, 3), locations=(1, 4, 2, 2, 5, 2), weights=(1, 4, 2, 2, 5))
RESULT = (1, 4, 2, 3)


def call(y=RESULT, dtypes=(), sizes=(2, 3, 1, 1), attributes=(), **shapes):
    dtype = dict.fromkeys(SHAPES, np.float32) | dict(dtypes)
    arrays = [jnp.zeros(shape, dtype[name]) for name, shape in (SHAPES | shapes).items()]
    fn = jax.ffi.ffi_call("effjax_ms_deform_attn", jax.ShapeDtypeStruct(y, dtype["value"]))
    values = dict(sizes=np.asarray(sizes, np.int64), normalized=np.int64(1)) | dict(attributes)
    return jax.jit(lambda *a: fn(*a, **values))(*arrays)


@pytest.mark.skipif(not native.is_available("cpu"), reason="built without native kernels")
@pytest.mark.parametrize(
    ("match", "options"),
    [
        (r"value must be \[N, S, M, D\], not \[1, 7, 6\]", {"value": (1, 7, 6)}),
        (r"locations \[N, Q, M, L, P, 2\], not", {"locations": (1, 4, 2, 10, 2)}),
        ("pixels of value", {"sizes": (2, 3)}),
        ("sizes of levels must be positive", {"sizes": (2**33, 2**33, 7, 1)}),
        ("with 1 levels", {"sizes": (7, 1)}),
        ("do not fit value", {"weights": (1, 4, 2, 2, 4)}),
        (r"the result of shape \[1, 4, 2, 4\]", {"y": (1, 4, 2, 4)}),
        ("locations and weights must be float32", {"dtypes": {"weights": jnp.bfloat16}}),
        ("must be float32, float64, bfloat16 or float16", {"dtypes": {"value": np.int32}}),
        ("expected 2 but got 3", {"attributes": {"of_another_version": np.int64(1)}}),
    ],
)
def test_handler_rejects_bad_buffers(match, options):
    np.testing.assert_array_equal(call(), np.zeros(RESULT))
    with pytest.raises(jax.errors.JaxRuntimeError, match=match):
        call(**options)
