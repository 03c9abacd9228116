"""Planned memory of programs on a TPU, in plain JAX and with effjax.

XLA's compiler for TPUs compiles all programs on this machine. Nothing runs on a TPU.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flax import nnx

from . import cross_entropy, deform_attention, deform_conv, dense_block, gpu_sampling, offload
from . import offload_forms as forms
from .measure import need_compiler, plan_steps
from .results import Result, Size
from .transformer import TransformerLM

TARGET = "v5e"
PLAIN, CHECKPOINT, OURS = "plain JAX", "jax.checkpoint", "effjax"
Steps = Mapping[str, tuple]  # `(fn, *args)` by name


def dense_block_steps(layers: int, batch_size: int) -> Steps:
    args = dense_block.step_shapes(layers, batch_size)
    blocks = {
        PLAIN: dense_block.plain,
        CHECKPOINT: dense_block.checkpoint_pass_through("conv2"),
        OURS: dense_block.effjax_block("features"),
    }
    return {name: (dense_block.train_step(block), *args) for name, block in blocks.items()}


def cross_entropy_steps(config: Mapping[str, Any], batch_size: int, context: int) -> Steps:
    model = nnx.eval_shape(lambda: TransformerLM(**config, rngs=nnx.Rngs(0)))
    losses: dict[str, Callable] = {
        PLAIN: cross_entropy.whole_logits,
        CHECKPOINT: cross_entropy.scan_time,
        OURS: cross_entropy.effjax_loss,
    }
    return {
        name: cross_entropy.gradient_steps(model, loss, batch_size, context)["head"]
        for name, loss in losses.items()
    }


def training_steps(setting: forms.Setting) -> Steps:
    names = {PLAIN: forms.IN_MEMORY, CHECKPOINT: forms.REMAT, OURS: forms.FUSED}
    return {n: forms.abstract_step(setting, forms.FORMS[form]) for n, form in names.items()}


def sampler_steps(steps: Steps) -> Steps:
    """Return the steps without kernels, which do not exist for TPUs."""
    plain, ours, *_ = steps.values()
    return {PLAIN: plain, OURS: ours}


def make_programs(size: Size) -> dict[str, Steps]:
    vocabulary = dict(num_layers=1, width=512, num_heads=8, vocab_size=32768, dtype="bfloat16")
    layers, blocks, batches, context = 24, 24, (64, 16), 1024
    setting, conv = offload.SHALLOW, deform_conv.CASES["published"][-1]
    attention = deform_attention.CASES["published"][-1]
    if size == "small":
        vocabulary |= dict(width=128, num_heads=4)
        layers, blocks, batches, context = 2, 1, (8, 2), 128
        setting = dataclasses.replace(setting, width=128, context=32)
        conv, attention = deform_conv.Case(2, 32, 16, 16), deform_attention.Case(50, ((8, 10),))
    return {
        f"dense block of {blocks} layers": dense_block_steps(blocks, batches[0]),
        f"cross entropy of {batches[1] * context} tokens": cross_entropy_steps(
            vocabulary, batches[1], context
        ),
        f"training step of {layers} layers": training_steps(
            dataclasses.replace(setting, layers=layers)
        ),
        "deform_conv2d": sampler_steps(gpu_sampling.conv_steps(conv, True)),
        "ms_deform_attn": sampler_steps(gpu_sampling.attention_steps(attention, True)),
    }


def plan_programs(programs: Mapping[str, Steps], target: str = TARGET) -> Result:
    """Plan the forms of each program; "ratio" is relative to plain JAX."""
    rows = []
    for program, steps in programs.items():
        plans = plan_steps(steps, target)
        rows += [
            {
                "name": name,
                "of": program,
                "peak_bytes": plan.peak_device_bytes,
                "temp_bytes": plan.device.temporaries,
                "planned_host_bytes": plan.host.total,
                "fits": plan.fits,
                "ratio": round(plan.peak_device_bytes / plans[PLAIN].peak_device_bytes, 4),
            }
            for name, plan in plans.items()
        ]
    return Result(
        f"tpu_memory_{target}",
        f"programs on one chip, planned for {target}",
        {"target": target},
        rows,
        ["Planned by XLA's compiler for TPUs. Nothing ran on a TPU."],
    )


def run(size: Size) -> Iterator[Result]:
    need_compiler(TARGET)
    yield plan_programs(make_programs(size))
