"""Comparison of ResNets with PyTorch: logits, gradients and running statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="requires PyTorch")

from effjax import convert, models  # noqa: E402
from effjax.models.linen import ResNet  # noqa: E402
from tests.convert import cases  # noqa: E402
from tests.convert.torch_detection import DEPTHS  # noqa: E402
from tests.convert.torch_detection import ResNet as TorchResNet  # noqa: E402

pytestmark = pytest.mark.usefixtures("x64")


def run_torch(module, x, dy):
    module = module.double().train()
    weights = {n: cases.random_array(n, a.shape) for n, a in module.state_dict().items()}
    module.load_state_dict({name: torch.as_tensor(a) for name, a in weights.items()})
    images = torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1))).requires_grad_()
    y = module(images)
    y.backward(torch.from_numpy(dy))
    grads = {name: p.grad.numpy() for name, p in module.named_parameters()}
    after = {name: a.numpy() for name, a in module.state_dict().items() if "running" in name}
    dx = np.moveaxis(images.grad.numpy(), 1, -1)
    return weights, (y.detach().numpy(), dx, grads, after)


def allclose(got, want, err_msg=""):
    atol = 1e-10 * np.abs(want).max(initial=1)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=atol, err_msg=err_msg)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_training_step(name):
    # The images have an odd size.
    x, dy = cases.random_array("x", (8, 65, 64, 3)), cases.random_array("dy", (8, 5))
    weights, (y, dx, grads, after) = run_torch(TorchResNet(*DEPTHS[name], 5), x, dy)
    options = dict(num_classes=5, unbiased_running_var=True, param_dtype=jnp.float64)
    model = getattr(models, name)(ResNet, **options)
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float64),
        jax.eval_shape(model.init, jax.random.key(0), x),
    )
    variables = convert.from_torch(weights, shapes, convert.RESNET)

    def loss(params, x):
        given = {**variables, "params": params}
        logits, new = model.apply(given, x, train=True, mutable=["batch_stats"])
        return jnp.sum(logits * dy), (logits, new)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (logits, new)), (dparams, found) = step(variables["params"], x)
    allclose(logits, y)
    allclose(found, dx)
    for tree, want in ((dparams, grads), (new, after)):
        got = convert.to_torch(tree, convert.RESNET)
        assert got.keys() - {n for n in got if "num_batches" in n} == want.keys()
        for key, array in want.items():
            allclose(got[key], array, err_msg=key)
