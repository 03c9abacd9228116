"""Modelled time: FLOPs against closed formulas and XLA's analysis, and overlap of transfers."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from effjax import offload_jit, offload_scan
from effjax.memory import Rates, find_rates, list_targets, plan
from effjax.memory.devices import find_target
from effjax.memory.time.step_time import step_time
from effjax.models import DecoderConfig
from effjax.train.text.config import FinetuneConfig
from effjax.train.text.plans import FORMS, training_step
from tests.memory.conftest import f32
from tests.programs import needs_gpu_compiler

# One FLOP, or one byte, takes a second; links take two.
UNIT = Rates({"bf16": 1, "f32": 1, "f32_highest": 1}, 1, 0.5, 0.5, 0.5)
PRODUCT = 2 * 16**3  # seconds of a product of [16, 16] matrices: more than for its bytes
SIZE = 4 * 16**2  # bytes of such a matrix
COPY = 2 * SIZE  # seconds to copy it over a link


def program(*lines, others=""):
    """Return a module with the lines in its entry computation; its argument h is on the host."""
    return "\n".join([
        "HloModule m, is_scheduled=true", "", others,
        "ENTRY %main (h: f32[16,16], a: f32[16,16]) -> f32[16,16] {",
        "  %h = f32[16,16]{1,0:S(5)} parameter(0)",
        "  %a = f32[16,16]{1,0} parameter(1)",
        *[f"  {line}" for line in lines], "}",
    ])  # fmt: skip


START = "%s = (f32[16,16]{1,0}, f32[16,16]{1,0:S(5)}, u32[]) copy-start(%h)"
DONE = "%d = f32[16,16]{1,0} copy-done(%s)"
DOT = "f32[16,16]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("num_products", "place"), [(0, "between"), (1, "between"), (1, "after"), (2, "between")]
)
def test_transfer_is_hidden_by_the_time_of_products_beside_it(num_products, place):
    # A link half as fast as the others, so that one product does not hide the copy.
    rates = dataclasses.replace(UNIT, to_device=SIZE / (1.5 * PRODUCT))
    products = [f"%p{i} = {DOT}" for i in range(num_products)]
    body = [START, *products, DONE] if place == "between" else [START, DONE, *products]
    time = step_time(program(*body), rates)
    hidden = num_products * PRODUCT if place == "between" else 0
    assert time.to_device_bytes == SIZE and time.to_host_bytes == 0
    assert time.compute_seconds == num_products * PRODUCT
    assert time.to_device_seconds == pytest.approx(max(0, 1.5 * PRODUCT - hidden))
    assert time.seconds == pytest.approx(time.compute_seconds + time.to_device_seconds)


def test_copies_of_one_direction_share_their_link():
    starts = [START.replace("%s", f"%s{i}") for i in range(3)]
    dones = [DONE.replace("%d", f"%d{i}").replace("%s", f"%s{i}") for i in range(3)]
    assert step_time(program(*starts, *dones), UNIT).to_device_seconds == 3 * COPY

    store = "%t = (f32[16,16]{1,0:S(5)}, f32[16,16]{1,0}, u32[]) copy-start(%a)"
    stored = "%e = f32[16,16]{1,0:S(5)} copy-done(%t)"
    time = step_time(program(START, store, DONE, stored), UNIT)
    assert (time.to_device_seconds, time.to_host_seconds) == (COPY, 0)  # the directions overlap
    assert time.to_host_bytes == time.to_device_bytes == SIZE


def test_products_that_xla_recomputes():
    """XLA's rematerialization names its duplicates; JAX's names are those of operations."""
    names = "p.1", "p.1.remat2", "q.remat.4", "rematted.5"
    time = step_time(program(*[f"%{name} = {DOT}" for name in names]), UNIT)
    assert (time.total_flops, time.recomputed_flops) == (4 * PRODUCT, 2 * PRODUCT)


LOOP = """%body (t: (s32[], f32[16,16])) -> (s32[], f32[16,16]) {
  %t = (s32[], f32[16,16]{1,0}) parameter(0)
  %x = f32[16,16]{1,0} get-tuple-element(%t), index=1
  %y = f32[16,16]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %i = s32[] get-tuple-element(%t), index=0
  ROOT %r = (s32[], f32[16,16]{1,0}) tuple(%i, %y)
}

%condition (u: (s32[], f32[16,16])) -> pred[] {
  ROOT %less = pred[] custom-call()
}
"""


@pytest.mark.parametrize(
    ("config", "trips"), [("", None), (', backend_config={"known_trip_count":{"n":"7"}}', 7)]
)
def test_loop_counts_as_often_as_it_runs_and_hides_a_transfer(config, trips):
    loop = [
        "%zero = s32[] constant(0)",
        "%t0 = (s32[], f32[16,16]{1,0}) tuple(%zero, %a)",
        f"%w = (s32[], f32[16,16]{{1,0}}) while(%t0), condition=%condition, body=%body{config}",
    ]
    time = step_time(program(START, *loop, DONE, others=LOOP), UNIT)
    assert time.flops == {"f32": (trips or 1) * PRODUCT} and time.compute_seconds >= PRODUCT
    assert time.unknown_loops == (trips is None) and time.to_device_seconds == 0


def custom_call(target, operands="%a", shape="f32[16,16]{1,0}", more=""):
    return f'{shape} custom-call({operands}), custom_call_target="{target}"{more}'


def gemm(precision):
    config = (
        ', backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
        '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]},"precision_config"'
        f':{{"operand_precision":["{precision}","{precision}"],"algorithm":"ALG_UNSET"}}}}}}'
    )
    return custom_call("__cublas$gemm", "%a, %a", "(f32[16,16]{1,0}, s8[4194304]{0})", config)


def all_reduce(groups):
    return f"f32[16,16]{{1,0}} all-reduce(%a), replica_groups={groups}, to_apply=%add"


FLASH = custom_call("mosaic_gpu_v2", more=', metadata={op_name="jit(f)/flash"}')
SOLVE = "__cublas$triangularSolve"
NAMED = custom_call("TopK", more=', metadata={op_name="ConcatBitcast"}')  # by its user
GATHER = "f32[64,16]{1,0} all-gather(%a), replica_groups=[2,4]<=[8], dimensions={0}"


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        # A transfer that is not asynchronous is not hidden. It also writes device memory.
        (
            ["f32[16,16]{1,0} copy(%h)", DOT],
            dict(compute_seconds=PRODUCT + SIZE, to_device_seconds=COPY - SIZE),
        ),
        ([custom_call("AllocateBuffer", "", "f32[16,16]{1,0:S(5)}")], dict(seconds=0)),
        ([custom_call("AllocatePersistentBuffer")], dict(memory_bytes=0, unknown_kernels={})),
        ([custom_call("AssumeGather")], dict(memory_bytes=0, unknown_kernels={})),
        ([custom_call("ConcatBitcast")], dict(memory_bytes=0, unknown_kernels={})),
        ([NAMED], dict(memory_bytes=2 * SIZE)),
        ([FLASH, FLASH], dict(unknown_kernels={"mosaic_gpu_v2 (flash)": 2}, flops={})),
        ([FLASH], dict(memory_bytes=2 * SIZE)),
        # Calls of cuBLAS count by their dimensions and precision, without their workspace.
        ([gemm("HIGHEST")], dict(flops={"f32_highest": PRODUCT}, unknown_kernels={})),
        ([gemm("DEFAULT")], dict(flops={"f32": PRODUCT}, memory_bytes=3 * SIZE)),
        ([custom_call(SOLVE, "%a, %a")], dict(flops={}, unknown_kernels={SOLVE: 1})),
        ([f"{DOT}, algorithm=dot_bf16_bf16_f32"], dict(flops={"bf16": PRODUCT})),
        ([f"{DOT}, algorithm=dot_bf16_bf16_f32_x3"], dict(flops={"f32": PRODUCT})),
        ([all_reduce("{{0,1,2,3}}")], dict(collective_bytes=1.5 * SIZE, seconds=1.5 * COPY)),
        ([all_reduce("{}")], dict(collective_bytes=SIZE)),  # of both devices
        ([GATHER], dict(collective_bytes=3 * SIZE)),
    ],
)
def test_instructions(instructions, expected):
    lines = [f"%i{number} = {text}" for number, text in enumerate(instructions)]
    time = step_time(program(*lines), UNIT, num_devices=2)
    assert {name: getattr(time, name) for name in expected} == expected


@pytest.mark.parametrize("opcode", ["async-start", "call-start"])
def test_what_a_computation_that_is_started_sends(opcode):
    inner = f"""%inner (p: f32[16,16]) -> f32[16,16] {{
  %p = f32[16,16]{{1,0}} parameter(0)
  ROOT %r = {all_reduce("{{0,1,2,3}}").replace("%a)", "%p)")}
}}
"""
    start = f"%s = ((f32[16,16]{{1,0}}), f32[16,16]{{1,0}}, u32[]) {opcode}(%a), calls=%inner"
    assert step_time(program(start, others=inner), UNIT).collective_bytes == 1.5 * SIZE


def test_slices_of_stacked_arrays_count_in_part():
    """A fusion that reads one layer of a stack, and one that writes a layer in place."""
    fusions = """%read (p: f32[8,16,16], i: s32[]) -> f32[1,16,16] {
  %p = f32[8,16,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %slice = f32[1,16,16]{2,1,0} dynamic-slice(%p, %i, %i, %i), dynamic_slice_sizes={1,16,16}
}

%write (q: f32[8,16,16], v: f32[1,16,16], k: s32[]) -> f32[8,16,16] {
  %q = f32[8,16,16]{2,1,0} parameter(0)
  %v = f32[1,16,16]{2,1,0} parameter(1)
  %k = s32[] parameter(2)
  ROOT %update = f32[8,16,16]{2,1,0} dynamic-update-slice(%q, %v, %k, %k, %k)
}
"""
    body = [
        "%stack = f32[8,16,16]{2,1,0} parameter(2)",
        "%index = s32[] parameter(3)",
        "%one = f32[1,16,16]{2,1,0} fusion(%stack, %index), kind=kLoop, calls=%read",
        "%new = f32[8,16,16]{2,1,0} fusion(%stack, %one, %index), kind=kLoop, calls=%write",
    ]
    read, both = (step_time(program(*body[:n], others=fusions), UNIT).memory_bytes for n in (3, 4))
    for size in (read, both - read):
        assert 2 * SIZE <= size <= 2 * SIZE + 16


def convolution(**options):
    """Return a convolution and its gradients as a function, and the shapes of its arguments."""
    groups = options.get("feature_group_count", 1)

    def conv(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
        )

    def gradients(x, kernel):
        y, pull_back = jax.vjp(conv, x, kernel)
        return pull_back(y)

    return jax.jit(gradients), f32(2, 14, 13, 8), f32(3, 3, 8 // groups, 12)


@pytest.mark.parametrize(
    "options",
    [
        dict(window_strides=(1, 1), padding="SAME"),
        dict(window_strides=(2, 2), padding="SAME"),
        dict(window_strides=(2, 1), padding=((3, 0), (0, 2)), rhs_dilation=(2, 1)),
        dict(window_strides=(1, 1), padding=((1, 2), (0, 1)), lhs_dilation=(2, 3)),
        dict(window_strides=(1, 1), padding="SAME", feature_group_count=4),
    ],
)
def test_convolutions_as_xla_counts_them(options):
    """XLA's own analysis counts the products of a program without loops: forward and backward."""
    fun, *args = convolution(**options)
    lowered = fun.lower(*args)
    hlo = lowered.compiler_ir("hlo").as_hlo_module().to_string()
    assert step_time(hlo, UNIT).total_flops == pytest.approx(
        lowered.cost_analysis()["flops"], rel=0.01
    )


@needs_gpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("stride", [1, 2])
def test_convolutions_on_a_gpu(stride):
    """Calls of cuDNN count as the convolutions that they replace."""
    fun, *args = convolution(window_strides=(stride, stride), padding=((1, 1), (1, 1)))
    p = plan(fun, *args, target="h100")
    assert "__cudnn$conv" in p.hlo
    flops = fun.lower(*args).cost_analysis()["flops"]
    assert p.step_time.total_flops == pytest.approx(flops, rel=0.02)
    assert not p.step_time.unknown_kernels and math.isfinite(p.step_seconds)


@pytest.mark.parametrize("name", list_targets())
def test_every_target_has_rates(name):
    rates = find_rates(name)
    assert rates == find_rates(find_target(name))
    assert rates.flops["bf16"] > rates.flops["f32_highest"] > 1e12
    assert rates.to_device < rates.memory < 1e13


def described(name, old="", new=""):
    """Return a GPU whose rates follow from its description, with a text in it replaced."""
    target = find_target(name)
    return dataclasses.replace(target, config=target.config.replace(old, new), rates=None)


@pytest.mark.parametrize("name", ["h100", "a100-80", "b200", "l4"])
def test_rates_of_a_described_gpu(name):
    """The figures of a data sheet follow from the number of cores and the clock, to a tenth."""
    rates, published = find_rates(described(name)), find_rates(name)
    for dtype in ("bf16", "f32", "f32_highest", "f64"):
        assert rates.flops[dtype] == pytest.approx(published.flops[dtype], rel=0.1)
    assert rates.memory == pytest.approx(published.memory, rel=0.01)


def test_rates_of_changed_descriptions(tmp_path):
    rates, clock = find_rates(described("l4")), "clock_rate_ghz: 2.04"
    (tmp_path / "gpu.txt").write_text(find_target("l4").config)
    for same in (
        described("l4", clock, "clock_rate_ghz: 204e-2"),
        tmp_path / "gpu.txt",
        str(tmp_path / "gpu.txt"),
    ):
        assert find_rates(same) == rates
    slow = find_rates(described("l4", clock, "clock_rate_ghz: 1.02"))
    assert slow.flops["bf16"] == pytest.approx(rates.flops["bf16"] / 2, rel=0.1)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: find_rates("h300"), "h200"),  # names those that there are
        (lambda: find_rates(described("l4", "core_count", "cores")), "core_count"),
        (lambda: dataclasses.replace(UNIT, flops={"f32_highest": 1}), "`flops`.*bf16"),
        (lambda: dataclasses.replace(UNIT, to_host=0), "`to_host`"),
    ],
)
def test_rejects(call, match):
    with pytest.raises(ValueError, match=match):
        call()


@needs_gpu_compiler
def test_plan_has_its_time(matmul_plan):
    time = matmul_plan.step_time
    assert time.flops == {"f32": 2 * 2 * 1024**3} and not time.unknown_kernels
    # Two products, each with two operands and a result; tanh may be fused.
    matrix = 4 * 1024**2
    assert 6 * matrix <= time.memory_bytes <= 8 * matrix
    rates = find_rates("h200")
    least = max(2 * 2 * 1024**3 / rates.flops["f32"], time.memory_bytes / rates.memory)
    assert least <= matmul_plan.step_seconds <= 2 * least
    assert "4.3 GFLOP" in str(matmul_plan)
    record = json.loads(json.dumps(matmul_plan.to_dict()))
    assert record["step_seconds"] == matmul_plan.step_seconds
    assert record["step_time"]["flops"] == {"f32": 2 * 2 * 1024**3}
    assert record["step_time"]["rates"]["memory"] == rates.memory


@needs_gpu_compiler
@pytest.mark.parametrize(("tokens", "least", "most"), [(512, 0.9, 1), (16384, 0, 0.25)])
def test_long_products_hide_the_weights_that_arrive(tokens, least, most):
    """Weights take 131 us a layer to arrive; products take 4 us at 512 tokens, 139 at 16384."""
    on_host = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    weights = jax.ShapeDtypeStruct((16, 2048, 2048), jnp.bfloat16, sharding=on_host)
    x = jax.ShapeDtypeStruct((tokens, 2048), jnp.bfloat16)

    def forward(w, x):
        return offload_scan(lambda w, x, key: jnp.tanh(x @ w), w, x)

    time = plan(offload_jit(forward, donate=False), weights, x, target="h100").step_time
    assert time.flops == {"bf16": 2 * 16 * tokens * 2048**2}
    assert time.to_device_bytes == 16 * 2 * 2048**2
    alone = time.to_device_bytes / find_rates("h100").to_device
    assert least * alone <= time.to_device_seconds <= most * alone


def language_model(layers, width, hidden, heads):
    return DecoderConfig(
        model_type="llama", vocab_size=256, hidden_size=width, intermediate_size=hidden,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads,
        head_dim=width // heads,
    )  # fmt: skip


SMALL = language_model(4, 256, 768, 4), FinetuneConfig(max_length=256, dtype="float32")
QWEN_8B_LIKE = language_model(36, 4096, 11008, 32), FinetuneConfig(max_length=1024, batch_size=4)


@needs_gpu_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("form", "case"), [("in memory", SMALL), ("offload all, fused", QWEN_8B_LIKE)]
)
def test_flops_of_a_language_model(form, case):
    """Count the products of the layers, of attention and of the head of a training step."""
    model, config = case
    config = dataclasses.replace(config, param_dtype="float32", packing=False, **FORMS[form])
    offloads = form != "in memory"
    fun, *args = training_step(config, model=model)
    p = plan(fun, *args, target="h100", host_memory_bytes=2**40)
    layers, width, hidden = model.num_hidden_layers, model.hidden_size, model.intermediate_size
    layer = 4 * width**2 + 3 * width * hidden  # q, k, v, o; gate, up, down
    # The backward pass has two products for each of the forward pass. Recomputation does without
    # the last product of a layer.
    products = 3 * layer + (layer - width * hidden if offloads else 0)
    # All pairs of positions, as the blocks of this context are not skipped. The backward pass of
    # attention computes its first product again, unless recomputation has it already.
    attention = (2 + 4 + 2 if offloads else 2 + 5) * config.max_length * width
    head = 3 * 256 * width  # XLA shares the logits of both passes
    tokens = config.batch_size * config.max_length
    flops = 2 * tokens * (layers * (products + attention) + head)
    assert p.step_time.total_flops == pytest.approx(flops, rel=0.02)
    assert not p.step_time.unknown_kernels and not p.step_time.unknown_loops
    for direction in ("to_device", "to_host"):
        listed = sum(t.bytes * t.count for t in p.transfers if t.direction == direction)
        counted = getattr(p.step_time, f"{direction}_bytes")
        assert counted == pytest.approx(listed, rel=0.001)
    if offloads:
        # Parameters and two moments arrive and leave; parameters also arrive for the forward pass.
        size, boundaries = 4 * layers * layer, 2 * layers * tokens * width
        assert p.step_time.to_device_bytes == pytest.approx(4 * size + boundaries, rel=0.25)
        assert p.step_time.to_host_bytes == pytest.approx(3 * size + boundaries, rel=0.25)
