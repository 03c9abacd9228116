"""Names that have moved are still found where they were."""

import importlib

import pytest


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("effjax.nnx", "effjax.models", "DenseNet"),
        ("effjax.nnx", "effjax.models", "DeformResNet"),
        ("effjax.nnx", "effjax.models", "TransformerLM"),
        ("effjax.linen", "effjax.models.linen", "DenseNet"),
        ("effjax.compat", "effjax.convert", "convert_deform_conv"),
    ],
)
def test_moved(old, new, name):
    before, now = importlib.import_module(old), importlib.import_module(new)
    with pytest.warns(DeprecationWarning, match=f"{old}.{name} has moved to {new}.{name}, .* 0.3"):
        assert getattr(before, name) is getattr(now, name)
    with pytest.raises(AttributeError, match=f"module '{old}' has no attribute 'Absent'"):
        before.Absent  # noqa: B018
