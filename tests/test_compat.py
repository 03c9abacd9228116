"""Operators with PyTorch's signatures, against loops in float64 and results of torchvision."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from effjax import compat
from tests.ops.samplers.deform_conv import oracle
from tests.ops.samplers.roi import oracle as roi_oracle
from tests.tiers import vary

RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def to_nhwc(a):
    return None if a is None else np.asarray(a).transpose(0, 2, 3, 1)


def to_nchw(a):
    return np.asarray(a).transpose(0, 3, 1, 2)


# Deformable convolution

N, C, OUT, H, W, KH, KW, GROUPS, OFFSET_GROUPS = 2, 4, 6, 5, 6, 3, 2, 2, 2
K = KH * KW
GEOMETRY = STRIDE, PADDING, DILATION = (2, 1), (1, 0), (1, 2)
HO, WO = 3, 4
X, WEIGHT, BIAS = normal(N, C, H, W), normal(OUT, C // GROUPS, KH, KW), normal(OUT)
OFFSET, MASK = normal(N, OFFSET_GROUPS * K * 2, HO, WO), normal(N, OFFSET_GROUPS * K, HO, WO)


def run_oracle(x, offset, weight, mask=None, bias=None, dy=None, offset_groups=OFFSET_GROUPS):
    """Return y in PyTorch's layout; with dy also the gradients of the other arguments."""
    result = oracle.deform_conv(
        to_nhwc(x), to_nhwc(offset), weight.transpose(2, 3, 1, 0), to_nhwc(mask), bias,
        to_nhwc(dy), strides=STRIDE, padding=[(p, p) for p in PADDING], dilation=DILATION,
        groups=C // weight.shape[1], offset_groups=offset_groups,
    )  # fmt: skip
    if dy is None:
        return to_nchw(result)
    y, (dx, doffset, dkernel, dmask, dbias) = result
    dweight = dkernel.transpose(3, 2, 0, 1)
    return to_nchw(y), to_nchw(dx), to_nchw(doffset), dweight, to_nchw(dmask), dbias


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_operators_in_pytorch_argument_order():
    groups = GROUPS, OFFSET_GROUPS
    y = compat.modulated_deform_conv(X, OFFSET, MASK, WEIGHT, BIAS, *GEOMETRY, *groups)
    assert_close(y, run_oracle(X, OFFSET, WEIGHT, MASK, BIAS))
    y = compat.deform_conv(X, OFFSET, WEIGHT, *GEOMETRY, *groups, 64)
    assert_close(y, run_oracle(X, OFFSET, WEIGHT))


def test_signature_of_torchvision():
    parameters = inspect.signature(compat.deform_conv2d).parameters.values()
    names = "input", "offset", "weight", "bias", "stride", "padding", "dilation", "mask"
    assert tuple(p.name for p in parameters) == names
    assert [p.default for p in parameters][3:] == [None, (1, 1), (0, 0), (1, 1), None]


def test_deform_conv2d_and_its_gradients():
    dy = normal(N, OUT, HO, WO)

    @jax.jit
    def run(x, offset, weight, mask, bias):
        operator = lambda x, offset, weight, mask, bias: compat.deform_conv2d(  # noqa: E731
            x, offset, weight, bias, *GEOMETRY, mask
        )
        y, backward = jax.vjp(operator, x, offset, weight, mask, bias)
        return y, *backward(dy)

    arguments = X, OFFSET, WEIGHT, MASK, BIAS
    for got, want in zip(run(*arguments), run_oracle(*arguments, dy), strict=True):
        assert_close(got, want)
    whole, one_group = normal(OUT, C, KH, KW), OFFSET[:, : 2 * K]
    y = compat.deform_conv2d(X, one_group, whole, None, *GEOMETRY)
    assert_close(y, run_oracle(X, one_group, whole, offset_groups=1))


def test_empty_batch_and_non_finite_offsets():
    run = lambda x, offset: compat.deform_conv2d(x, offset, WEIGHT, None, *GEOMETRY)  # noqa: E731
    bad = np.stack([np.full_like(OFFSET[0], v) for v in (np.nan, 1e30)])

    @jax.jit
    def run_backward(x, offset):
        y, backward = jax.vjp(run, x, offset)
        return y, *backward(jnp.ones_like(y))

    for a in run_backward(X, bad):
        np.testing.assert_array_equal(a, np.zeros_like(a))
    assert run(X[:0], OFFSET[:0]).shape == (0, OUT, HO, WO)


def test_deform_groups_of_mmcv():
    groups = dict(zip(("stride", "padding", "dilation"), GEOMETRY, strict=True), groups=GROUPS)
    for run, arrays in (
        (compat.deform_conv, (X, OFFSET, WEIGHT)),
        (compat.modulated_deform_conv, (X, OFFSET, MASK, WEIGHT, BIAS)),
    ):
        for name in ("deform_groups", "deformable_groups"):
            y = jax.eval_shape(lambda run=run, a=arrays, n=name: run(*a, **groups, **{n: 2}))
            assert y.shape == (N, OUT, HO, WO)
        with pytest.raises(ValueError, match="two names of one number"):
            run(*arrays, **groups, deform_groups=2, deformable_groups=4)


def test_errors_name_the_arguments():
    """Names and shapes are those of the caller: `weight` OIHW, and images NCHW."""
    valid: dict = dict(
        input=X, offset=OFFSET, weight=WEIGHT, stride=STRIDE, padding=PADDING, dilation=DILATION
    )
    for argument, bad, message in (
        ("offset", OFFSET.transpose(0, 2, 3, 1), "of shape (2, 3, 4, 24) must be (2, 12, 3, 4)"),
        ("offset", OFFSET[:, 1:], "of shape (2, 23, 3, 4) must be (2, 12, 3, 4), [N, G * K * 2"),
        ("offset", OFFSET[0], "`offset` of shape (24, 3, 4) must have four axes"),
        ("mask", MASK[:, 1:], "`mask` of shape (2, 11, 3, 4) must be (2, 12, 3, 4), [N, G * K, Ho"),
        ("weight", WEIGHT[:, [0, 1, 1]], "`weight` of shape (6, 3, 3, 2) must be (O, 4, 3, 2)"),
        ("weight", WEIGHT[:5], "`groups` (=2) must divide the 5 outputs of `weight`"),
        ("bias", BIAS[1:], "`bias` of shape (5,) must be (6,), one for each output"),
        ("dilation", 9, "`input` of size (5, 6) with padding=((1, 1), (0, 0)) is smaller"),
    ):
        with pytest.raises(ValueError) as error:
            compat.deform_conv2d(**valid | {argument: bad})
        assert message in str(error.value)
    with pytest.raises(ValueError, match=r"`deformable_groups` \(=3\) must divide the 4 channels"):
        compat.deform_conv(X, OFFSET, WEIGHT, *GEOMETRY, GROUPS, 3)
    with pytest.raises(NotImplementedError, match=r"of effjax\.deform_conv2d\."):
        jax.jvp(lambda x: compat.deform_conv2d(x, OFFSET, WEIGHT, None, *GEOMETRY), (X,), (X,))


# Box pooling

INPUT = normal(2, 4, 8, 9)
ROIS = np.array([
    [1, 2.5, 3, 11, 12], [0, 0, 0, 17, 15], [1, -4, -3, 6, 5], [0, 8, 9, 8.5, 9.25],
    [1, 5, 5, 3, 9],
], np.float32)  # fmt: skip


def by_image(rois, **offset):
    """Yield the oracle's arguments (x, boxes, offset) of each box."""
    for i, (n, *box) in enumerate(rois):
        more = {k: v[i][None, None] for k, v in offset.items()}
        yield {"x": to_nhwc(INPUT)[int(n)][None], "boxes": np.array(box)[None, None]} | more


@vary("aligned, ratio", [(False, 2), (True, -1)])
def test_roi_align(aligned, ratio):
    given = dict(spatial_scale=0.5, sampling_ratio=ratio, aligned=aligned)
    got = compat.roi_align(INPUT, ROIS, (2, 3), **given)
    options = given | dict(output_size=(2, 3), sampling_ratio=max(ratio, 0))
    want = [roi_oracle.roi_align(**args, **options)[0, 0] for args in by_image(ROIS)]
    np.testing.assert_allclose(to_nhwc(got), want, atol=1e-5)

    listed = [ROIS[ROIS[:, 0] == n, 1:] for n in range(2)]
    by_list = compat.roi_align(INPUT, listed, (2, 3), **given)
    np.testing.assert_allclose(by_list, got[np.argsort(ROIS[:, 0], kind="stable")], atol=1e-6)


def test_deform_roi_pool():
    offset = normal(5, 2, 2, 3)
    got = compat.deform_roi_pool(INPUT, ROIS, offset, (2, 3), 0.5, 2, 0.3)
    options = dict(output_size=(2, 3), spatial_scale=0.5, sampling_ratio=2, gamma=0.3)
    moved = by_image(ROIS, offset=to_nhwc(offset))
    want = [roi_oracle.roi_align(**args, **options)[0, 0] for args in moved]
    np.testing.assert_allclose(to_nhwc(got), want, atol=1e-5)
    without = compat.deform_roi_pool(INPUT, ROIS, np.zeros(0, np.float32), 2, 0.5)
    want = compat.roi_align(INPUT, ROIS, 2, 0.5, aligned=True)
    np.testing.assert_array_equal(without, want)


def test_errors_of_pools():
    """A list names its entry; offsets and `data` have the shapes of the caller."""
    box, offset = ROIS[:1, 1:], np.zeros((5, 2, 3, 3), np.float32)
    for boxes, message in (
        ([box, ROIS[:1]], r"`boxes\[1\]` of shape \(1, 5\) must be \(L, 4\)"),
        ([box[0], box], r"`boxes\[0\]` of shape \(4,\) must be"),
        ([box], "`boxes` has 1 arrays, but must have one for each of the 2 images"),
    ):
        with pytest.raises(ValueError, match=message):
            compat.roi_align(INPUT, boxes, 2)
    with pytest.raises(ValueError, match=r"`offset` of shape \(5, 2, 3, 3\) must be \(5, 2, 2, 2"):
        compat.deform_roi_pool(INPUT, ROIS, offset, 2)
    with pytest.raises(ValueError, match=r"\(5, 2, 3, 3\) must be \(5, 2 \* G, 2, 2\)"):
        compat.deform_roi_pooling(INPUT, ROIS, offset, 1.0, 2, 4, False)
    with pytest.raises(ValueError, match=r"`data` of shape .* must be \(N, 12, H, W\)"):
        compat.deform_roi_pooling(INPUT, ROIS, None, 1.0, 2, 3, True, 2)


def test_deform_roi_pooling():
    """PyTorch orders channels as (channel, row, column), effjax as blocks of channels."""
    offset = normal(5, 2, 2, 2)
    got = compat.deform_roi_pooling(INPUT, ROIS, offset, 0.5, 2, 1, False, 2, None, 3, 0.1)
    options = dict(output_size=(2, 2), spatial_scale=0.5, group_size=2, sample_per_part=3)
    moved = by_image(ROIS, offset=to_nhwc(offset))
    want = [roi_oracle.deform_psroi_pool(**a, **options, trans_std=0.1)[0, 0] for a in moved]
    np.testing.assert_allclose(to_nhwc(got), want, atol=1e-5)
    plain = compat.deform_roi_pooling(INPUT, ROIS, offset, 0.5, 2, 4, True)
    given = dict(output_size=(2, 2), spatial_scale=0.5)
    want = [roi_oracle.deform_psroi_pool(**a, **given)[0, 0] for a in by_image(ROIS)]
    np.testing.assert_allclose(to_nhwc(plain), want, atol=1e-5)


# Results of torchvision 0.28 on a CPU in float64 by (aligned, sampling_ratio): the features of four
# boxes, and the sum of the squares of the gradient of the image.
RECORDED = {
    (True, -1): ([
        [0.037560037, 0.021190428, 0.048898179, -0.007929521],
        [0.000499826, -0.059371021, 0.054807731, 0.119496801],
        [0.0, 0.0, 0.0, 0.0],
        [0.047032372, 0.053087794, 0.011745605, 0.035736287],
    ], 1218.35261693),
    (False, 2): ([
        [-0.036716407, 0.057895435, -0.013292203, 0.065174361],
        [0.086613016, 0.165464409, 0.16257196, 0.288957624],
        [-0.429286347, -0.347819316, -0.420034528, -0.379924004],
        [0.256208308, 0.402325446, -0.342406877, -0.429286347],
    ], 2199.35489976),
}  # fmt: skip


@pytest.mark.usefixtures("x64")
@vary("aligned, ratio", RECORDED)
def test_matches_torchvision(aligned, ratio):
    """Boxes: inside, far outside, corners in the wrong order, and less than a pixel."""
    rows, columns = np.mgrid[:6, :5]
    image = np.sin(3.0 * rows + 5 * columns)[None, None]
    boxes = np.array([
        [0, 1, 1.5, 7.25, 9], [0, -3, -2, 4, 20], [0, 6, 5, 3, 2], [0, 5, 4, 5.5, 4.25],
    ])  # fmt: skip
    run = lambda x: compat.roi_align(x, boxes, 2, 0.5, ratio, aligned)  # noqa: E731

    @jax.jit
    def run_with_gradient(x, dy):
        y, backward = jax.vjp(run, x)
        return y, backward(dy)[0]

    y, dx = run_with_gradient(image, jnp.arange(16.0).reshape(4, 1, 2, 2))
    want, squares = RECORDED[aligned, ratio]
    np.testing.assert_allclose(y.reshape(4, 4), want, atol=2e-9)
    np.testing.assert_allclose(jnp.sum(dx**2), squares, rtol=1e-9)


def test_sharded_images():
    x = np.concatenate([INPUT] * 4)
    rois = np.concatenate([ROIS + np.eye(5, dtype=np.float32)[0] * 2 * i for i in range(4)])
    pool = jax.jit(lambda x, rois: compat.roi_align(x, rois, 2, 0.5, 2))
    want = pool(x, rois)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), (kind,))
        sharded = jax.device_put(x, jax.NamedSharding(mesh, jax.P("data")))
        np.testing.assert_allclose(pool(sharded, rois), want, atol=1e-6)
    # The second device has the images of the first one in reverse order: boxes count from its own.
    images = np.concatenate([INPUT, INPUT[::-1]])
    boxes = np.concatenate([ROIS, np.where(np.arange(5) == 0, 1 - ROIS, ROIS)])
    kind = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("data",), kind, devices=jax.devices()[:2])
    mapped = jax.shard_map(pool, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    halves = jax.jit(mapped)(images, boxes)
    np.testing.assert_allclose(halves, np.tile(want[:5], (2, 1, 1, 1)), atol=1e-6)


POOLS = {
    "roi_align": lambda x, rois: compat.roi_align(x, rois, 1, 1.0, 2, True),
    "deform_roi_pool": lambda x, rois: compat.deform_roi_pool(x, rois, None, 1, 1.0, 2),
    "deform_roi_pooling": lambda x, rois: compat.deform_roi_pooling(
        x, rois, None, 1.0, 1, 1, no_trans=True
    ),
}


@vary("pool, dtype, image", [
    ("roi_align", "bfloat16", 256), ("deform_roi_pool", "bfloat16", 256),
    ("deform_roi_pooling", "float16", 2048), ("roi_align", "float32", 2049),
    ("roi_align", "int16", 257), ("roi_align", "uint8", 255),
])  # fmt: skip
def test_each_box_reads_one_image(pool, dtype, image):
    """Images have the value of their number; 257 as bfloat16 is 256, and 2049 as float16 2048."""
    x = jnp.arange(2050.0)[:, None, None, None] * jnp.ones((1, 1, 4, 4))
    rois = jnp.array([[image, 0, 0, 3, 3]], dtype)
    assert POOLS[pool](x, rois).ravel().tolist() == [image]


def test_the_index_of_an_image_is_truncated():
    """Kernels of torchvision and mmcv read `int(rois[k, 0])`; there are images 0 and 1 here."""
    numbers = jnp.array([1.75, -0.5, -1, 2, jnp.nan, jnp.inf, -jnp.inf, 2.0**31, 2.0**40])
    rois = jnp.concatenate([numbers[:, None], jnp.tile(jnp.array([0.0, 0, 3, 3]), (9, 1))], 1)
    x = jnp.array([1.0, 2])[:, None, None, None] * jnp.ones((1, 1, 4, 4))
    for dtype in "float32", "bfloat16", "float16":
        for pool in POOLS.values():
            assert pool(x, rois.astype(dtype)).ravel().tolist() == [2, 1] + [0] * 7


def test_pooling_of_an_empty_batch():
    cases = (INPUT[:0], []), (INPUT[:0], ROIS[:0]), (INPUT, [ROIS[:0, 1:]] * 2)
    results = jax.jit(lambda: [compat.roi_align(x, boxes, 2) for x, boxes in cases])()
    assert [y.shape for y in results] == [(0, 4, 2, 2)] * 3


# Results of torchvision 0.29 in float64 for channels sin(3 row + 5 column + channel).
IMAGES = np.sin(
    np.arange(8.0)[:, None, None] + 3 * np.arange(6)[:, None] + 5 * np.arange(5)[None, None]
)[None]
RECORDED_PARTS = {
    -1: ([
        [0.037560037, 0.056152429, -0.032979476, 0.015341533,
         0.004987593, -0.044931982, 0.050831817, 0.028898097],
        [0.000499826, 0.017279831, -0.072121585, -0.117953361,
         -0.041071423, -0.073088898, 0.067778171, 0.091707052],
        [0.047032372, -0.025404988, -0.17858425, -0.059813255,
         0.02754659, 0.07669716, 0.064652454, -0.086814025],
    ], 1409.0162274719758),
    2: ([
        [0.037560037, 0.056152429, -0.032979476, 0.015341533,
         0.004987593, -0.044931982, 0.050831817, 0.028898097],
        [0.03819831, 0.118691086, -0.240349373, -0.38631087,
         -0.174551503, -0.295997572, 0.20916391, 0.27579885],
        [0.047032372, -0.025404988, -0.17858425, -0.059813255,
         0.02754659, 0.07669716, 0.064652454, -0.086814025],
    ], 1490.1111476421356),
}  # fmt: skip


@pytest.mark.usefixtures("x64")
@vary("ratio", RECORDED_PARTS)
def test_ps_roi_align_matches_torchvision(ratio):
    boxes = np.array([[0, 1, 1.5, 7.25, 9], [0, -3, -2, 4, 20], [0, 5, 4, 5.5, 4.25]])

    def loss(x):
        y = compat.ps_roi_align(x, boxes, 2, 0.5, ratio)
        return jnp.sum(y * jnp.arange(24.0).reshape(y.shape)), y

    dx, y = jax.jit(jax.grad(loss, has_aux=True))(IMAGES)
    want, squares = RECORDED_PARTS[ratio]
    np.testing.assert_allclose(y.reshape(3, 8), want, atol=2e-9)
    np.testing.assert_allclose(jnp.sum(dx**2), squares, rtol=1e-9)
    listed = compat.ps_roi_align(IMAGES, [boxes[:, 1:]], 2, 0.5, ratio)
    np.testing.assert_allclose(listed, y, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_multi_scale_roi_align_matches_torchvision():
    """Scales come from the largest image, 95 x 79, before it was padded to 96 x 80."""
    levels = {
        "0": IMAGES[:, :2].repeat(4, 2).repeat(4, 3), "1": IMAGES[:, 2:4].repeat(2, 2).repeat(2, 3),
        "unused": IMAGES,
    }  # fmt: skip
    boxes = [np.array([[3.0, 4, 50, 60], [0, 0, 1, 2], [1, 1, 94, 75]])]
    pool = compat.MultiScaleRoIAlign(["0", "1"], 2, 2)
    want = [
        [0.042888495, -0.061746141, 0.030830034, -0.068473183,
         0.054342869, -0.005696451, 0.056670102, -0.024950736],
        [0, 0, 0, 0, *[0.841470985] * 4],
        [-0.064400919, 0.049245909, -0.052305865, 0.09436661,
         -0.02183443, -0.041946926, -0.062429678, 0.040427593],
    ]  # fmt: skip
    y = pool(levels, boxes, [(95, 79)])
    np.testing.assert_allclose(y.reshape(3, 8), want, atol=2e-9)
    with pytest.raises(ValueError, match=r"`x\['0'\]` of \(24, 20\) pixels must have one scale"):
        pool(levels, boxes, [(95, 200)])
    with pytest.raises(KeyError, match="p6"):
        compat.MultiScaleRoIAlign(["0", "p6"], 2, 2)(levels, boxes, [(95, 79)])


NUMBERS = np.arange(40)
CORNERS = np.stack([NUMBERS * 7 % 40, NUMBERS * 11 % 40], 1)
OVERLAPPING = np.concatenate(
    [CORNERS, CORNERS + np.stack([8 + NUMBERS % 5 * 4, 8 + NUMBERS % 7 * 3], 1)], 1
).astype(np.float32)
SCORES = np.float32(NUMBERS * 13 % 40 / 40)
CHOSEN = {
    0.1: [3, 6, 9, 15, 30, 36, 11, 17, 0],
    0.3: [3, 6, 9, 12, 15, 18, 21, 24, 30, 33, 36, 39, 5, 8, 20, 35, 28, 34, 0],
}  # by torchvision


@vary("threshold", CHOSEN)
def test_nms_chooses_as_torchvision(threshold):
    run = jax.jit(lambda boxes, scores: compat.nms(boxes, scores, threshold))
    got = run(OVERLAPPING, SCORES)
    want = CHOSEN[threshold]
    assert got.tolist() == want + [-1] * (40 - len(want))
    first = compat.nms(OVERLAPPING, SCORES, threshold, max_outputs=4)
    assert first.tolist() == want[:4]


def test_nms_of_padding_and_equal_scores():
    boxes = np.array([[0, 0, 4, 4], [np.nan] * 4, [0, 0, 4, 4], [9, 9, 9, 9], [9, 9, 9, 9]])
    scores = np.array([0.5, 0.9, 0.5, 0.7, -np.inf])
    both = jax.vmap(lambda b, s: compat.nms(b, s, 0.5))(
        np.stack([boxes, boxes]).astype(np.float32),
        np.stack([scores, [np.nan] * 5]).astype(np.float32),
    )
    assert both.tolist() == [[3, 0, -1, -1, -1], [-1] * 5]
    assert compat.nms(boxes[:0].astype(np.float32), scores[:0], 0.5).shape == (0,)
    for kind in (jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit):
        mesh = jax.make_mesh((8,), ("data",), (kind,))
        sharded = jax.device_put(OVERLAPPING, jax.NamedSharding(mesh, jax.P("data")))
        got = jax.jit(lambda b: compat.nms(b, SCORES, 0.1))(sharded)
        np.testing.assert_array_equal(got, compat.nms(OVERLAPPING, SCORES, 0.1))
    with pytest.raises(ValueError, match=r"`iou_threshold` \(=50.*\) must be from 0 to 1"):
        compat.nms(OVERLAPPING, SCORES, 50)
    with pytest.raises(ValueError, match=r"`scores` of shape \(39,\) must be \(40,\)"):
        compat.nms(OVERLAPPING, SCORES[:39], 0.5)
    with pytest.raises(ValueError, match=r"`output_size` \(=\(2, 3\)\) must have as many rows"):
        compat.ps_roi_align(IMAGES, [OVERLAPPING], (2, 3))
