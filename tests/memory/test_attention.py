"""Plans of programs with attention kernels, which ask for the device when they are traced."""

import functools
import threading

import jax
import jax.extend.backend
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import effjax
from effjax.memory import plan
from effjax.memory.compiler._device_queries_shim import answer_queries
from effjax.memory.compiler.lower import _abstract_device
from effjax.memory.devices import find_target
from tests.programs import needs_gpu_compiler
from tests.tiers import vary

pytestmark = needs_gpu_compiler

BATCH, LENGTH, HEADS, SIZE = 2, 1024, 4, 64
SCORES = 2 * BATCH * HEADS * LENGTH**2  # bytes in bfloat16
PAIRS = BATCH * HEADS * LENGTH * (LENGTH + 1) // 2  # of a query and a key, causal


def heads(number=HEADS, size=SIZE, dtype="bfloat16"):
    return jax.ShapeDtypeStruct((BATCH, LENGTH, number, size), dtype)


def gradients(attend):
    """Return a function of the gradients with respect to query, key and value."""

    def loss(q, k, v, *args):
        return attend(q, k, v, *args).astype(jnp.float32).sum()

    return jax.grad(loss, (0, 1, 2))


def cudnn_attention(q, k, v, **options):
    options = {"is_causal": True, "implementation": "cudnn"} | options
    return jax.nn.dot_product_attention(q, k, v, **options)


def test_cudnn():
    """Two products forward and five backward, no array of all scores, and a mask for each head.

    The time of packed rows has the bytes of the mask, forward and backward.
    """

    def attend(q, k, v, ids=None):
        return effjax.dot_product_attention(q, k, v, segment_ids=ids, implementation="cudnn")

    args, ids = [heads()] * 3, jax.ShapeDtypeStruct((BATCH, LENGTH), "int32")
    plain, packed = (plan(gradients(attend), *args, *more, target="h100") for more in ([], [ids]))
    assert plain.step_time.flops == {"bf16": 2 * PAIRS * SIZE * (2 + 5)}
    assert packed.step_time.flops == plain.step_time.flops
    assert not plain.step_time.unknown_kernels
    assert plain.device.temporaries < SCORES / 2
    more = packed.step_time.memory_bytes - plain.step_time.memory_bytes
    mask = 2 * BATCH * LENGTH**2
    # Two passes read it; it and its gradient, which cuDNN computes, are written.
    assert 2 * 2 * PAIRS <= more <= 2 * 2 * PAIRS + 4 * mask


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("options", "kv_heads", "target", "pairs"),
    [
        (dict(is_causal=False), 2, "b200", LENGTH**2),  # groups of heads share keys and values
        (dict(local_window_size=(127, 0)), 4, "h100", 128 * 129 // 2 + (LENGTH - 128) * 128),
    ],
)
def test_cudnn_with_other_masks(options, kv_heads, target, pairs):
    attend = functools.partial(cudnn_attention, **options)
    p = plan(attend, heads(), heads(kv_heads), heads(kv_heads), target=target)
    assert p.step_time.flops == {"bf16": 2 * BATCH * HEADS * pairs * SIZE * 2}


def test_answers_are_those_of_the_target():
    """CuDNN takes heads of 256 channels from Hopper on. On this machine it fails as before."""
    fun = jax.jit(cudnn_attention)
    large = heads(size=256)
    with pytest.raises(Exception) as before:
        jax.eval_shape(fun, large, large, large)
    with pytest.raises(NotImplementedError, match="head dim must be <= 128"):
        plan(fun, large, large, large, target="a100-80")
    assert plan(fun, large, large, large, target="h100").fits
    with pytest.raises(type(before.value), match=str(before.value)[:20]):
        jax.eval_shape(fun, large, large, large)


def asked():
    """Return what the process answers to a question about cuDNN and the device."""
    try:
        version = cudnn.check_cudnn_version()
    except RuntimeError as error:
        version = str(error)
    capable = cudnn.check_compute_capability("8.0")
    return version, capable, jax.extend.backend.get_default_device()


def test_other_threads_and_the_process_afterwards_get_the_true_answers():
    functions = cudnn.check_cudnn_version, jax.extend.backend.get_default_device
    truth, answers = asked(), {}
    with answer_queries(find_target("a100-40")):
        version, capable, device = asked()
        assert version == 91000 and capable and not cudnn.check_compute_capability("9.0")
        assert cudnn.is_cuda_compute_capability_equal("8.0")
        assert (device.platform, device.compute_capability) == ("gpu", "8.0")
        assert device.core_count == 108
        other = threading.Thread(target=lambda: answers.update(other=asked()))
        other.start()
        other.join()
        with answer_queries(find_target("b200")):
            assert cudnn.check_compute_capability("10.0")
        assert asked()[2].compute_capability == "8.0"
    assert answers["other"] == truth == asked()
    assert functions == (cudnn.check_cudnn_version, jax.extend.backend.get_default_device)


@pytest.mark.parametrize(
    ("target", "arch"), [("a100-40", (8, 0)), ("h100", (9, 0)), ("b200", (10, 0))]
)
def test_mosaic_gpu_compiles_for_the_target(target, arch):
    """The shim names the function that Mosaic GPU asks in every version of JAX."""
    gpu = find_target(target)
    module = pytest.importorskip("jax.experimental.mosaic.gpu.core")
    if not hasattr(module, "_infer_arch"):  # from jax 0.11 on
        module = pytest.importorskip("jax.experimental.mosaic.gpu.utils")
    with _abstract_device(gpu), answer_queries(gpu):
        assert module._infer_arch() == arch


@vary("target", ["h100", "b200"])
def test_pallas_mosaic_gpu(target):
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

    def double(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    p = plan(plgpu.kernel(double, out_type=x), x, target=target)
    assert list(p.step_time.unknown_kernels.values()) == [1]
    assert "mosaic_gpu" in next(iter(p.step_time.unknown_kernels))
    assert p.step_time.memory_bytes == 2 * 4 * 128**2


@pytest.mark.exhaustive
@pytest.mark.parametrize("implementation", ["triton", "mosaic", "cudnn"])
@pytest.mark.parametrize("target", ["h100", "b200"])
def test_tokamax(implementation, target):
    tokamax = pytest.importorskip("tokamax", reason="pip install tokamax")

    def attend(q, k, v):
        return tokamax.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)

    p = plan(gradients(attend), *[heads()] * 3, target=target)
    assert p.device.temporaries < SCORES
    if implementation == "cudnn":
        assert p.step_time.flops == {"bf16": 2 * PAIRS * SIZE * (2 + 5)}
    else:
        kernels = p.step_time.unknown_kernels
        assert sum(kernels.values()) >= 2 and all(implementation in name for name in kernels)
