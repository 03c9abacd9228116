"""Comparison with PyTorch: recorded cases, networks, names and tensors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

torch = pytest.importorskip("torch", reason="requires PyTorch")

from effjax import convert, models  # noqa: E402
from effjax.models.densenet import DENSENET_OPTIONS  # noqa: E402
from effjax.models.linen import DenseNet as LinenDenseNet  # noqa: E402
from effjax.models.linen import ResNet  # noqa: E402
from effjax.models.resnet import RESNET_OPTIONS  # noqa: E402
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
        loaded, recorded = (
            convert.load_weights(file),
            convert.load_weights(cases.RECORDED / file.name),
        )
        jax.tree.map(np.testing.assert_array_equal, loaded, recorded)


def test_densenet121():
    """Compare logits, gradients and running statistics of a training step with recomputation."""
    theirs = torch_networks.DenseNet(num_classes=10)
    case = record.run(theirs, (16, 32, 32, 3))
    options = dict(num_classes=10, unbiased_running_var=True, param_dtype=jnp.float64)
    model = models.densenet121(LinenDenseNet, **options)
    shapes = jax.eval_shape(model.init, jax.random.key(0), case["x"])
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float64), shapes)
    variables = convert.from_torch(cases.select(case, "weights"), shapes, convert.DENSENET)

    @jax.jit
    def step(params, stats, x):
        def loss(params, x):
            variables = {"params": params, "batch_stats": stats}
            y, new = model.apply(variables, x, train=True, mutable=["batch_stats"])
            return jnp.sum(y * case["dy"]), (y, new)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)

    (_, (y, new)), (grads, dx) = step(variables["params"], variables["batch_stats"], case["x"])
    allclose(y, case["y"])
    allclose(dx, case["dx"])
    for tree, kind in ((grads, "gradients"), (new, "after")):
        got = convert.to_torch(tree, convert.DENSENET)
        for key, array in cases.select(case, kind).items():
            allclose(got[key], array, err_msg=key)


def zeros(network, *args, **options):
    """Return a network's weights as zeros that take no memory."""
    with torch.device("meta"):
        state = network(*args, **options).state_dict()
    return {name: np.broadcast_to(np.zeros((), np.float32), a.shape) for name, a in state.items()}


IMAGES = jax.ShapeDtypeStruct((1, 64, 64, 3), jnp.float32)


@pytest.mark.parametrize("name", torch_networks.DENSENETS)
def test_names_of_densenets(name):
    weights = zeros(torch_networks.DenseNet, **torch_networks.DENSENETS[name])
    model = LinenDenseNet(**DENSENET_OPTIONS[name])
    check_names(weights, model, convert.DENSENET)


@pytest.mark.parametrize("name", RESNET_OPTIONS)
def test_names_of_resnets(name):
    weights = zeros(torch_networks.ResNet, *torch_networks.RESNETS[name])
    check_names(weights, ResNet(**RESNET_OPTIONS[name]), convert.RESNET)


def check_names(weights, model, table):
    shapes = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
    back = convert.to_torch(convert.from_torch(weights, shapes, table), table)
    assert {n: a.shape for n, a in back.items()} == {n: a.shape for n, a in weights.items()}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (dict(bottleneck=False), dict(bottleneck=False)),
        (dict(bottleneck=True), {}),
        (
            dict(bottleneck=True, groups=32, width_per_group=4),
            dict(inner_width=128, feature_group_count=32),
        ),
    ],
    ids=["basic", "bottleneck", "grouped"],
)
def test_resnet(theirs, ours):
    """Convert tensors directly, and load the result back into PyTorch."""
    theirs = torch_networks.ResNet(**theirs, layers=(1, 2, 1, 1), num_classes=5).double().eval()
    for name, value in theirs.state_dict().items():
        if "running" in name or "bn" in name:
            value.copy_(torch.as_tensor(cases.random_array(f"{name}.running_var", value.shape)))
    model = ResNet(**ours, stage_sizes=(1, 2, 1, 1), num_classes=5)
    x = cases.random_array("x", (2, 32, 32, 3))
    shapes = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, jnp.float64),
        jax.eval_shape(model.init, jax.random.key(0), x),
    )
    variables = convert.from_torch(theirs.state_dict(), shapes, convert.RESNET)
    with torch.no_grad():
        want = theirs(torch.from_numpy(record.first(x))).numpy()
        allclose(jax.jit(model.apply)(variables, x), want)
        for value in theirs.state_dict().values():
            value.zero_()
        back = convert.to_torch(variables, convert.RESNET)
        theirs.load_state_dict({name: torch.as_tensor(a.copy()) for name, a in back.items()})
        np.testing.assert_array_equal(theirs(torch.from_numpy(record.first(x))).numpy(), want)


def test_rejects_tensors_without_numpy_equivalent():
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    weights = torch.nn.Linear(2, 3)
    for odd in (dict(weights.named_parameters()), weights.bfloat16().state_dict()):
        with pytest.raises(TypeError, match=r"`weights\['weight'\]`: this .* pass tensor.detach"):
            convert.from_torch(odd, layer)


def test_a_module_instead_of_its_weights():
    with pytest.raises(TypeError, match=r"`weights` must be arrays by name, .* \.state_dict\(\)"):
        convert.from_torch(torch.nn.Linear(2, 3), nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
