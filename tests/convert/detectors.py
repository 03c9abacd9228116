"""Small configurations of RT-DETR, as the content of config.json."""

import numpy as np

_SIZES = dict(
    num_labels=3, num_queries=7, d_model=16, decoder_layers=2, decoder_ffn_dim=12,
    decoder_attention_heads=2, encoder_hidden_dim=8, encoder_ffn_dim=12, encoder_attention_heads=2,
    decoder_in_channels=[8, 8, 8], batch_norm_eps=1e-4, layer_norm_eps=1e-4,
)  # fmt: skip
_BASIC = dict(
    model_type="rt_detr_resnet", layer_type="basic", embedding_size=4, depths=[1, 2, 1, 1],
    hidden_sizes=[4, 8, 16, 32], out_indices=[2, 3, 4],
)  # fmt: skip
_BOTTLENECK = dict(
    model_type="rt_detr_resnet", layer_type="bottleneck", embedding_size=2, depths=[1, 1, 2, 1],
    hidden_sizes=[8, 16, 32, 64], out_features=["stage2", "stage3", "stage4"],
    downsample_in_bottleneck=True,
)  # fmt: skip
CONFIGS = {
    "v1, basic": _SIZES | dict(
        model_type="rt_detr", backbone_config=_BASIC, encoder_in_channels=[8, 16, 32],
        hidden_expansion=0.5, decoder_n_points=4,
    ),
    "v2, bottleneck": _SIZES | dict(
        model_type="rt_detr_v2", backbone_config=_BOTTLENECK, encoder_in_channels=[16, 32, 64],
        decoder_n_points=2, decoder_offset_scale=0.3, freeze_backbone_batch_norms=False,
        normalize_before=True, encode_proj_layers=[1, 2], activation_function="gelu",
        encoder_activation_function="gelu_new", decoder_activation_function="silu",
    ),
}  # fmt: skip


def make_images(*shape):
    """Return images with values in [0, 1]."""
    return np.random.default_rng(0).uniform(size=shape)


def make_denoising(num_queries, num_labels, count=6, batch=2):
    """Return labels, with padding, boxes before the sigmoid, and a mask of two groups."""
    rng = np.random.default_rng(1)
    labels = rng.integers(0, num_labels + 1, (batch, count)).astype(np.int32)
    group = np.repeat([0, 1, 2], [count // 2, count // 2, num_queries])
    mask = (group[:, None] == group) | (group == 2)
    return labels, rng.normal(size=(batch, count, 4)), mask
