"""Comparison with PyTorch: recorded cases, networks, names and tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch", reason="requires PyTorch")

from effjax import convert  # noqa: E402
from effjax.convert.networks import NETWORKS, network_variables  # noqa: E402
from effjax.models.linen import FeaturePyramid, ResNet  # noqa: E402
from tests.convert import cases, record, torch_networks  # noqa: E402

pytestmark = pytest.mark.usefixtures("x64")


def allclose(got, want, err_msg=""):
    atol = 1e-10 * np.abs(want).max(initial=1)
    np.testing.assert_allclose(got, want, rtol=1e-10, atol=atol, err_msg=err_msg)


@pytest.mark.parametrize("name", record.CASES)
def test_recorded_cases_match_torch(name):
    recorded, computed = cases.load(name), record.CASES[name]()
    assert recorded.keys() == computed.keys()
    for key, array in computed.items():
        allclose(recorded[key], array, err_msg=key)


def test_recorded_checkpoints_match_torch(tmp_path):
    record.save_checkpoints(tmp_path)
    for file in tmp_path.iterdir():
        both = convert.load_weights(file), convert.load_weights(cases.RECORDED / file.name)
        jax.tree.map(np.testing.assert_array_equal, *both)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("densenet121", (16, 32, 32, 3)),
        ("resnet18", (8, 65, 64, 3)),  # of an odd size
        ("resnet50", (8, 65, 64, 3)),
    ],
)
def test_training_step(name, shape):
    """Compare logits, all gradients and running statistics."""
    case = record.run(torch_networks.NETWORKS[name](num_classes=5), shape)
    make, table = NETWORKS[name]
    model = make(num_classes=5, unbiased_running_var=True, param_dtype=jnp.float64)
    shapes = cases.float64_shapes(model, case["x"])
    variables = convert.from_torch(cases.select(case, "weights"), shapes, table)

    def loss(params, x):
        given = {**variables, "params": params}
        y, new = model.apply(given, x, train=True, mutable=["batch_stats"])
        return jnp.sum(y * case["dy"]), (y, new)

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (_, (y, new)), (grads, dx) = step(variables["params"], case["x"])
    allclose(y, case["y"])
    allclose(dx, case["dx"])
    for tree, kind in ((grads, "gradients"), (new, "after")):
        got, want = convert.to_torch(tree, table), cases.select(case, kind)
        assert {name for name in got if "num_batches" not in name} == want.keys()
        for key, array in want.items():
            allclose(got[key], array, err_msg=key)


@pytest.mark.parametrize("name", torch_networks.NETWORKS)
def test_names(name):
    assert NETWORKS.keys() - {"densenet40_12", "densenet100_12"} == torch_networks.NETWORKS.keys()
    with torch.device("meta"):
        state = torch_networks.NETWORKS[name]().state_dict()
    weights = {n: np.broadcast_to(np.float32(0), a.shape) for n, a in state.items()}
    back = convert.to_torch(network_variables(name, weights, "", {}), NETWORKS[name][1])
    assert {n: a.shape for n, a in back.items()} == {n: a.shape for n, a in weights.items()}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", torch_networks.NETWORKS)
def test_copies_are_the_networks_of_torchvision(name):
    """Compare logits of a training step, and those with its running statistics."""
    torchvision = pytest.importorskip("torchvision", reason="requires torchvision")
    theirs = getattr(torchvision.models, name)(num_classes=5).double()
    copy = torch_networks.NETWORKS[name](num_classes=5).double()
    copy.load_state_dict(theirs.state_dict())
    images = torch.from_numpy(record.first(cases.random_array("x", (4, 64, 64, 3))))
    with torch.no_grad():
        for train in (True, False):
            allclose(copy.train(train)(images).numpy(), theirs.train(train)(images).numpy())


def test_pyramid_levels():
    """`extra="pool"` adds the level of torchvision's LastLevelMaxPool."""
    fpn = pytest.importorskip("torchvision.ops.feature_pyramid_network")
    theirs = fpn.FeaturePyramidNetwork([2, 4], 3, fpn.LastLevelMaxPool()).double()
    x = [cases.random_array(f"x{i}", (1, 8 >> i, 6 >> i, 2 << i)) for i in (0, 1)]
    with torch.no_grad():
        want = theirs({str(i): torch.from_numpy(record.first(a)) for i, a in enumerate(x)})
    ours = FeaturePyramid(3, extra="pool", param_dtype=jnp.float64)
    shapes = cases.float64_shapes(ours, x)
    got = ours.apply(
        convert.from_torch(theirs.state_dict(), shapes, convert.TORCHVISION_PYRAMID), x
    )
    assert len(got) == len(want) == 3
    for mine, their in zip(got, want.values(), strict=True):
        allclose(mine, record.last(their))


def test_tensors():
    """Tensors are converted directly, and the result is loaded back into PyTorch."""
    theirs = torch_networks.ResNet(True, (1, 2, 1, 1), 32, 4, num_classes=5).double().eval()
    for name, value in theirs.state_dict().items():
        if "running" in name or "bn" in name:
            value.copy_(torch.as_tensor(cases.random_array(f"{name}.running_var", value.shape)))
    options = dict(stage_sizes=(1, 2, 1, 1), inner_width=128, feature_group_count=32)
    model = ResNet(**options, num_classes=5)
    x = cases.random_array("x", (2, 32, 32, 3))
    shapes = cases.float64_shapes(model, x)
    variables = convert.from_torch(theirs.state_dict(), shapes, convert.RESNET)
    with torch.no_grad():
        images = torch.from_numpy(record.first(x))
        want = theirs(images).numpy()
        allclose(jax.jit(model.apply)(variables, x), want)
        for value in theirs.state_dict().values():
            value.zero_()
        back = convert.to_torch(variables, convert.RESNET)
        theirs.load_state_dict({name: torch.as_tensor(a.copy()) for name, a in back.items()})
        np.testing.assert_array_equal(theirs(images).numpy(), want)


def test_rejects_tensors_without_numpy_equivalent_and_modules():
    layer, module = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), torch.nn.Linear(2, 3)
    with pytest.raises(TypeError, match=r"`weights` must be arrays by name, .* \.state_dict\(\)"):
        convert.from_torch(module, layer)
    for odd in (dict(module.named_parameters()), module.bfloat16().state_dict()):
        with pytest.raises(TypeError, match=r"`weights\['weight'\]`: this .* pass tensor.detach"):
            convert.from_torch(odd, layer)
