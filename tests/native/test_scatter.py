"""Scatter-adds of gradients in the machine code for GPUs, of which a warning tells."""

import re
from importlib import metadata

import jax
import jax.numpy as jnp

import effjax
from effjax.memory import plan
from effjax.memory.compiler import process
from effjax.native import defaults
from tests.programs import needs_gpu_compiler
from tests.tiers import vary


def shape(*sizes, dtype="float32"):
    return jax.ShapeDtypeStruct(sizes, dtype)


def gradients(table, tokens, x, offset, kernel, boxes):
    def loss(table, x):
        y = effjax.deform_conv2d(x, offset, kernel, padding=1, implementation="xla")
        bins = effjax.roi_align(x, boxes, output_size=2, sampling_ratio=1, implementation="xla")
        return sum(jnp.sum(jnp.sin(a)) for a in (table[tokens], y, bins))

    return jax.grad(loss, (0, 1))(table, x)


@needs_gpu_compiler
@vary("target", ["a100-80", "h100"])
def test_scatter_adds_are_as_the_warning_says(target, monkeypatch):
    """A loop of compare-and-swap in older versions of jaxlib, later an instruction that adds."""
    dumped = []
    read = process._read_dump

    def read_ptx(folder, name):
        dumped.extend(file.read_text() for file in (folder / "dump").rglob("*.ptx"))
        return read(folder, name)

    monkeypatch.setattr(process, "_read_dump", read_ptx)
    plan(
        gradients, shape(39, 128), shape(40, dtype="int32"), shape(1, 8, 8, 8),
        shape(1, 8, 8, 18), shape(3, 3, 8, 4), shape(1, 3, 4),
        target=target, compiler_options={"xla_dump_emitter_re": ".*"},
    )  # fmt: skip
    kernels = {}
    for entry in "".join(dumped).split(".entry ")[1:]:
        if operations := re.findall(r"\batom\.[\w.]*?\.(add|cas)\b", entry):
            kernels[entry.partition("(")[0]] = set(operations)
    # The embedding, and the corners of samples of deform_conv2d and of roi_align.
    assert len(kernels) >= 3
    version = tuple(int(n) for n in re.findall(r"\d+", metadata.version("jaxlib"))[:3])
    operation = "add" if version >= defaults._ATOMIC_SUMS else "cas"
    assert set().union(*kernels.values()) == {operation}
