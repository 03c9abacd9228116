"""The compile-only GPU target against programs whose bytes are known by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.gpu_target import Collective, collectives, compile_for_h200


def _f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _conv(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def test_matmul_bytes():
    program = compile_for_h200(lambda a, b: jnp.tanh(a @ b) @ b, _f32(1024, 1024), _f32(1024, 1024))
    matrix = 4 * 1024 * 1024
    assert program.argument_bytes == 2 * matrix
    assert program.output_bytes == matrix
    assert program.temp_bytes == matrix  # a @ b, the only intermediate
    assert program.host_temp_bytes == 0


def test_donation_is_seen():
    program = compile_for_h200(lambda x: x + 1, _f32(1024, 256), donate_argnums=0)
    assert program.alias_bytes == 4 * 1024 * 256
    assert program.total_bytes == 4 * 1024 * 256


def test_convolution_and_its_gradient():
    def loss(x, kernel):
        return jnp.sum(jnp.sin(_conv(jnp.sin(_conv(x, kernel)), kernel)))

    program = compile_for_h200(jax.grad(loss, (0, 1)), _f32(8, 32, 32, 64), _f32(3, 3, 64, 64))
    assert "__cudnn$conv" in program.hlo
    maps = 4 * 8 * 32 * 32 * 64  # bytes of one feature map
    assert maps <= program.temp_bytes <= 8 * maps


def test_checkpoint_saves_memory():
    # Eight wide layers: recomputing each from its narrow input keeps no wide activation.
    # XLA's CPU backend removes the barriers that this needs and shows the same bytes for both.
    def loss(kernels, x, checkpoint):
        def layer(x, k):
            return x + jnp.sin(jnp.sin(x @ k) ** 2) @ k.T

        for k in kernels:
            x = (jax.checkpoint(layer) if checkpoint else layer)(x, k)
        return jnp.sum(x)

    kernels, x = [_f32(64, 1024)] * 8, _f32(4096, 64)
    plain, recomputed = (
        compile_for_h200(jax.grad(lambda k, x, c=c: loss(k, x, c)), kernels, x).temp_bytes
        for c in (False, True)
    )
    assert plain >= 8 * 4 * 4096 * 1024
    assert recomputed <= plain / 2


def test_eight_devices_all_reduce(mesh8):
    f = jax.shard_map(
        lambda x: jax.lax.psum(x.sum(0), "data"), mesh=mesh8, in_specs=P("data"), out_specs=P()
    )
    program = compile_for_h200(f, _f32(4096, 128), num_devices=8)
    assert program.argument_bytes == 4 * 4096 * 128 // 8  # on one device
    assert collectives(program.hlo) == [Collective("all-reduce", 128)]


def test_eight_devices_through_shardings(mesh8):
    x = jax.ShapeDtypeStruct((4096, 128), jnp.float32, sharding=NamedSharding(mesh8, P("data")))
    program = compile_for_h200(lambda x: x.sum(0), x, out_shardings=NamedSharding(mesh8, P()))
    assert collectives(program.hlo) == [Collective("all-reduce", 128)]


def test_num_devices_must_match():
    with pytest.raises(ValueError, match="`num_devices` is 8 but the program spans 1"):
        compile_for_h200(jnp.sin, _f32(8), num_devices=8)


def test_the_process_keeps_its_backend():
    before = jax.devices()
    compile_for_h200(jnp.sin, _f32(8))
    assert jax.devices() == before
    np.testing.assert_array_equal(jax.jit(jnp.add)(1, jnp.arange(3)), [1, 2, 3])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%r = f32[128]{0} all-reduce(%p), channel_id=1", [Collective("all-reduce", 128)]),
        ("%r = (f32[2,3]{1,0}, f32[]) all-reduce-start(%p, %q)", [Collective("all-reduce", 7)]),
        ("%r = f32[4]{0} all-reduce-done(%s)", []),
        ("%g = (f32[16], f32[128]) all-gather-start(%p)", [Collective("all-gather", 128)]),
        ("%c = bf16[8,4]{1,0} collective-permute(%p)", [Collective("collective-permute", 32)]),
        ("%f = f32[4]{0} fusion(%all-reduce), calls=%all-reduce-computation", []),
    ],
)
def test_collectives_of_hlo_text(line, expected):
    assert collectives(line) == expected
