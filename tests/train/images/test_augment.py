import numpy as np
import pytest

from effjax.train.images.augment import Augmentation, augment, default_padding


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(1, 256, (32, 8, 6, 2), np.uint8)


def test_the_seed_determines_the_images(images):
    def draw(seed, padding=2, flip=True):
        return augment(images, Augmentation(padding, flip), np.random.default_rng(seed))

    np.testing.assert_array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))
    assert draw(1).shape == images.shape and draw(1).dtype == np.uint8
    np.testing.assert_array_equal(draw(0, 0, False), images)


def test_each_image_is_a_crop_of_itself(images):
    out = augment(images, Augmentation(1, False), np.random.default_rng(0))
    padded = np.pad(images, ((0, 0), (1, 1), (1, 1), (0, 0)))
    offsets = set()
    for image, source in zip(out, padded, strict=True):
        found = {
            (i, j) for i in range(3) for j in range(3)
            if np.array_equal(image, source[i : i + 8, j : j + 6])
        }  # fmt: skip
        assert len(found) == 1
        offsets |= found
    assert len(offsets) > 5


def test_flip_mirrors_about_half(images):
    out = augment(images, Augmentation(0, True), np.random.default_rng(0))
    mirrored = np.all(out == images[:, :, ::-1], axis=(1, 2, 3))
    np.testing.assert_array_equal(np.all(out == images, axis=(1, 2, 3)), ~mirrored)
    assert 8 <= sum(mirrored) <= 24


def test_default_padding():
    assert [default_padding((n, n + 9, 3)) for n in (4, 8, 32, 224)] == [1, 1, 4, 28]
