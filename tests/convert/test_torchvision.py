"""Comparison with torchvision's own networks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="requires PyTorch")
torchvision = pytest.importorskip("torchvision", reason="requires torchvision")

from effjax import convert  # noqa: E402
from effjax.convert.networks import NETWORKS  # noqa: E402
from effjax.models import linen as linen_models  # noqa: E402
from tests.convert import cases, torch_networks  # noqa: E402

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", torch_networks.NETWORKS)
def test_logits(name):
    """Compare logits in evaluation, and in training the logits and running statistics."""
    theirs = getattr(torchvision.models, name)(num_classes=5).double()
    state = {n: cases.random_array(n, a.shape) for n, a in theirs.state_dict().items()}
    # Small kernels of deep networks, so that values stay in range.
    state = {n: a / np.sqrt(a.size) if a.ndim > 1 else a for n, a in state.items()}
    theirs.load_state_dict({n: torch.as_tensor(a) for n, a in state.items()})
    make, table = NETWORKS[name]
    options = dict(num_classes=5, unbiased_running_var=True, param_dtype=jnp.float64)
    model = make(**options)
    x = cases.random_array("x", (4, 64, 64, 3))
    variables = convert.from_torch(state, cases.float64_shapes(model, x), table)
    assert list(convert.to_torch(variables, table, like=state)) == list(state)
    images = torch.from_numpy(np.ascontiguousarray(np.moveaxis(x, -1, 1)))

    def allclose(got, want):
        scale = np.abs(want).max(initial=1e-300)
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9 * scale)

    with torch.no_grad():
        allclose(jax.jit(model.apply)(variables, x), theirs.eval()(images).numpy())
        want = theirs.train()(images).numpy()
    train = jax.jit(lambda v, x: model.apply(v, x, train=True, mutable=["batch_stats"]))
    logits, new = train(variables, x)
    allclose(logits, want)
    after = convert.to_torch(new, table)
    for n, a in theirs.state_dict().items():
        if "running" in n:
            allclose(after[n], a.numpy())


def test_pyramid_levels():
    """`extra="pool"` adds the level of torchvision's LastLevelMaxPool."""
    from torchvision.ops import feature_pyramid_network as fpn

    theirs = fpn.FeaturePyramidNetwork([2, 4], 3, fpn.LastLevelMaxPool()).double()
    weights = {n: cases.random_array(n, a.shape) for n, a in theirs.state_dict().items()}
    theirs.load_state_dict({n: torch.as_tensor(a) for n, a in weights.items()})
    x = [cases.random_array(f"x{i}", (1, 8 >> i, 6 >> i, 2 << i)) for i in (0, 1)]
    ours = linen_models.FeaturePyramid(3, extra="pool", param_dtype=jnp.float64)
    shapes = cases.float64_shapes(ours, x)
    variables = convert.from_torch(weights, shapes, convert.TORCHVISION_PYRAMID)
    levels = theirs(
        {str(i): torch.from_numpy(np.moveaxis(a, -1, 1).copy()) for i, a in enumerate(x)}
    )
    got = ours.apply(variables, x)
    assert len(got) == len(levels) == 3
    for mine, their in zip(got, levels.values(), strict=True):
        their = np.moveaxis(their.detach().numpy(), 1, -1)
        np.testing.assert_allclose(mine, their, rtol=1e-10, atol=1e-10)
