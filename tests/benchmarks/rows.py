"""Helpers of the tests of subjects."""

from benchmarks.offload_forms import Setting

TINY = Setting(layers=2, width=8, heads=2, context=4, batch_size=2, vocab_size=16, mlp_width=12)


def by_name(result):
    return {row["name"]: row for row in result.rows}
