"""Valid arguments of every operator that takes arrays."""

import numpy as np

from tests.ops.dense_block.cases import make_params


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


X, Q, BOXES = ones(2, 5, 4, 8), ones(2, 4, 4, 8), ones(2, 3, 4)
IMAGE = ones(2, 4, 4, 3)
POOL = {"x": X, "boxes": BOXES, "output_size": 2}
GOOD = {
    "dot_product_attention": {"q": Q, "k": Q, "v": Q},
    "linear_cross_entropy": {"x": ones(4, 3), "kernel": ones(3, 5), "labels": ones(4, dtype=int)},
    "expert_mlp": {
        "x": ones(4, 3), "experts": ones(4, 2, dtype=int), "weights": ones(4, 2),
        "gate": ones(5, 3, 6), "up": ones(5, 3, 6), "down": ones(5, 6, 3),
    },
    "fp8_linear": {"x": ones(4, 3), "kernel": ones(3, 5)},
    "sync_batch_norm": {"x": ones(4, 3, 5)},
    "batch_norm_inference": {"x": ones(4, 5), "mean": ones(5), "var": ones(5)},
    "bn_relu_conv": {"x": X, "scale": ones(8), "bias": ones(8), "kernel": ones(1, 1, 8, 4)},
    "dense_block": {"x": IMAGE, "params": make_params(2, dtype=np.float32)},
    "deform_conv2d": {
        "x": X, "offset": ones(2, 3, 2, 18), "kernel": ones(3, 3, 8, 4), "mask": ones(2, 3, 2, 9),
        "bias": ones(4),
    },
    "ms_deform_attn": {
        "value": ones(2, 7, 3, 4), "spatial_shapes": ((2, 3), (1, 1)),
        "sampling_locations": ones(2, 5, 3, 2, 4, 2), "attention_weights": ones(2, 5, 3, 2, 4),
    },
    "dcn_aggregate": {"x": X, "offset": ones(2, 3, 2, 36), "mask": ones(2, 3, 2, 18)},
    "roi_align": POOL,
    "multiscale_roi_align": {
        "features": [X, X], "boxes": BOXES, "output_size": 2, "spatial_scales": (1.0, 0.5)
    },
    "deform_roi_pool": POOL,
    "deform_psroi_pool": POOL | {"group_size": 2},
}  # fmt: skip
