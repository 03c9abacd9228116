import numpy as np
import pytest

from effjax.train.images.augment import Augmentation, augment, default_padding


@pytest.fixture
def images():
    return np.random.default_rng(0).integers(1, 256, (32, 8, 6, 2), np.uint8)


def test_the_same_seed_gives_the_same_images(images):
    def draw(seed):
        return augment(images, Augmentation(2, True), np.random.default_rng(seed))

    np.testing.assert_array_equal(draw(1), draw(1))
    assert not np.array_equal(draw(1), draw(2))
    assert draw(1).shape == images.shape and draw(1).dtype == np.uint8


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
    mirrored = [np.array_equal(new, old[:, ::-1]) for new, old in zip(out, images, strict=True)]
    same = [np.array_equal(new, old) for new, old in zip(out, images, strict=True)]
    assert all(m != s for m, s in zip(mirrored, same, strict=True))
    assert 8 <= sum(mirrored) <= 24


def test_nothing_to_do_changes_nothing(images):
    out = augment(images, Augmentation(0, False), np.random.default_rng(0))
    np.testing.assert_array_equal(out, images)


def test_default_padding():
    assert [default_padding((n, n + 9, 3)) for n in (4, 8, 32, 224)] == [1, 1, 4, 28]
