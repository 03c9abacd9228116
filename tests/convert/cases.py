"""Recorded results of PyTorch, for machines without PyTorch.

A case is a dict of float64 arrays by name, with channels last. `x`, `dy` and the initial
`weights/NAME` are inputs. `y`, `dx` and `gradients/NAME` are results of training, and `after/NAME`
the running statistics after it. `evaluated` is the module's output in evaluation mode.
"""

import json
import pathlib
import zlib

import jax
import numpy as np

RECORDED = pathlib.Path(__file__).parent / "recorded"
INPUTS = "weights/", "x", "dy"  # generated, not recorded


def random_array(name, shape):
    """Return reproducible normal numbers; variances are positive, counters are 0."""
    if name.endswith("num_batches_tracked"):
        return np.zeros(shape, np.int64)
    values = np.random.default_rng(zlib.crc32(name.encode())).normal(0, 0.3, shape)
    return np.abs(values) + 0.1 if name.endswith("running_var") else values


def save(name, case):
    shapes = {key: array.shape for key, array in case.items()}
    computed = [array.ravel() for key, array in case.items() if not key.startswith(INPUTS)]
    RECORDED.mkdir(exist_ok=True)
    np.savez_compressed(
        RECORDED / f"{name}.npz", shapes=json.dumps(shapes), computed=np.concatenate(computed)
    )


def load(name):
    with np.load(RECORDED / f"{name}.npz") as archive:
        shapes, computed = archive.values()
    case = {}
    for key, shape in json.loads(str(shapes)).items():
        if key.startswith(INPUTS):
            case[key] = random_array(key, shape)
        else:
            size = int(np.prod(shape))
            case[key], computed = computed[:size].reshape(shape), computed[size:]
    return case


def select(case, name):
    """Return the arrays of a case below a name."""
    return {
        key.removeprefix(f"{name}/"): array
        for key, array in case.items()
        if key.startswith(f"{name}/")
    }


def float64_shapes(model, x):
    """Return the shapes of the variables of a linen model, all in float64."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), x)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, "float64"), shapes)
