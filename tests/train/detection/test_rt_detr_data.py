import json

import numpy as np
import pytest

from effjax.train.detection import data
from effjax.train.errors import DataError
from tests.train.detection import coco

pytest.importorskip("PIL")


def annotation(box, image=0, category=3, **more):
    return {"id": 1, "image_id": image, "category_id": category, "bbox": box, **more}


def test_layouts(tmp_path):
    """Labels follow the numbers of the categories, which have gaps."""
    found = data.load_coco(coco.write_coco(tmp_path / "coco"))
    assert found.class_names == ("red", "blue") and not found.test
    assert [len(image.labels) for image in found.train] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert {label for image in found.train for label in image.labels} == {0, 1}
    moved = tmp_path / "coco" / "images"
    moved.mkdir()
    (tmp_path / "coco" / "train2017").rename(moved / "train2017")
    assert data.load_coco(tmp_path / "coco").train[1].file == moved / "train2017" / "1.png"
    found = data.load_coco(coco.write_roboflow(tmp_path / "roboflow"))
    assert [len(getattr(found, part)) for part in data.PARTS] == [4, 4, 4]


def test_odd_boxes(tmp_path):
    """Boxes are clipped, and left out if nothing is in the image. Crowds are not trained on."""
    path = coco.write_coco(tmp_path)
    boxes = annotation([-10, 50, 30, 100]), annotation([70, 0, 5, 5]), annotation([1, 1, 0, 9])
    coco.change(path, annotations=[*boxes, annotation([0, 0, 64, 64], iscrowd=1)])
    found = data.load_coco(path)
    assert found.left_out == 2 and data.most_objects(found)[0] == 2
    np.testing.assert_array_equal(found.train[0].boxes, [[0, 50, 20, 80], [0, 0, 64, 64]])
    batch = data.make_batch(found.train[:2], 32, max_objects=3)
    assert batch.images.shape == (2, 32, 32, 3) and batch.images.dtype == np.uint8
    np.testing.assert_array_equal(batch.labels, [[0, -1, -1], [-1, -1, -1]])
    np.testing.assert_allclose(batch.boxes[0, 0], [10 / 64, 65 / 80, 20 / 64, 30 / 80])


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"annotations": [annotation([0, 0, 1, 1], image=7)]}, "train2017.json: .*KeyError: 7"),
        ({"annotations": [annotation([0, 0, 1, 1], category=4)]}, "`annotations` .*KeyError: 4"),
        ({"annotations": [annotation([0, float("nan"), 1, 1])]}, "ValueError: not finite"),
        ({"annotations": [annotation([0, 0, 1])]}, "not enough values to unpack"),
        ({"annotations": [annotation([0, 0, 1, 1], iscrowd=1)]}, "has no object"),
        ({"annotations": [5]}, "train2017.json: 5 of `annotations` is not as in COCO's format"),
        ({"images": {}}, "`images` must be a list"),
        ({"images": [{"id": 0, "file_name": "0.png"}]}, "KeyError: 'width'"),
        ({"categories": [{"id": 3, "name": "red"}] * 2}, "an `id` of two categories"),
        (
            {"categories": [{"id": 3, "name": "red"}, {"id": 90, "name": "x"}]},
            r"val2017.json: category .90, 'blue'. must be in all parts",
        ),
    ],
)
def test_damaged_annotations(tmp_path, entries, message):
    path = coco.write_coco(tmp_path)
    coco.change(path, **entries)
    with pytest.raises(DataError, match=message):
        data.load_coco(path)


def test_damaged_files(tmp_path):
    path = coco.write_coco(tmp_path)
    found = data.load_coco(path)
    image = path / "train2017" / "1.png"
    image.write_bytes(image.read_bytes()[:80])
    with pytest.raises(DataError, match="1.png: not a readable image"):
        data.make_batch(found.train[:2], 32, 2)
    image.unlink()
    with pytest.raises(DataError, match=r"1.png: not found, but .*train2017.json lists it"):
        data.load_coco(path)
    file = path / "annotations" / "instances_train2017.json"
    file.write_text(file.read_text()[:100])
    with pytest.raises(DataError, match=r"train2017.json: must be a JSON object"):
        data.load_coco(path)
    file.unlink()
    with pytest.raises(DataError, match="must have annotations/instances_train2017.json"):
        data.load_coco(path)
    file.with_name("instances_val2014.json").write_text("{}")
    with pytest.raises(DataError, match="are both validation sets"):
        data.find_parts(path)


def test_an_image_of_another_size(tmp_path):
    path = coco.write_coco(tmp_path)
    image = {"id": 0, "file_name": "0.png", "width": 80, "height": 64}
    coco.change(path, images=[image], annotations=[annotation([0, 0, 9, 9])])
    with pytest.raises(DataError, match="64×80 pixels, but its annotation has 80×64"):
        data.make_batch(data.load_coco(path).train, 32, 1)


def test_validation_is_held_out(tmp_path):
    found = data.load_coco(coco.write_coco(tmp_path, val=0))
    split = data.hold_out(found, 0.25)
    files = [image.file.name for image in (*split.train, *split.validation)]
    assert len(split.validation) == 2 and sorted(files) == [f"{i}.png" for i in range(8)]
    assert [*map(str, data.hold_out(found, 2).validation)] == [*map(str, split.validation)]
    for share in (0.01, 8):
        message = f"`validation` .={share}. must hold out at least one object"
        with pytest.raises(DataError, match=message):
            data.hold_out(found, share)


def test_crops_and_flips_move_boxes_with_pixels(tmp_path):
    """In each crop, the pixels of a box have its color, and those beside it do not."""
    found = data.load_coco(coco.write_coco(tmp_path, side=128)).train
    examples = [found[i] for i in (1, 4, 7)] * 8  # of one object
    rngs = [np.random.default_rng(i) for i in range(len(examples))]
    batch = data.make_batch(examples, 128, 2, rngs)
    different = {image.tobytes() for image in batch.images}
    assert len(different) > len(examples) / 2  # those without a crop are flipped at most
    count = 0
    for pixels, (label, _), ((x, y, w, h), _) in zip(*batch, strict=True):
        if label >= 0:
            inside = np.zeros((128, 128), bool)
            x0, y0, x1, y1 = (128 * np.array([x - w / 2, y - h / 2, x + w / 2, y + h / 2])).round()
            inside[int(y0) : int(y1), int(x0) : int(x1)] = True
            colored = pixels[..., 2 * label].astype(int) - pixels[..., 1] > 60
            assert np.mean(inside == colored) > 0.98
            count += 1
    assert count > 12
    again = data.make_batch(examples, 128, 2, [np.random.default_rng(i) for i in range(24)])
    np.testing.assert_array_equal(batch.images, again.images)


def test_average_precision(tmp_path):
    """Perfect detections, also in a crowd, have AP 1. Wrong ones before them cost some."""
    path = coco.write_coco(tmp_path)
    content = json.loads((path / "annotations" / "instances_val2017.json").read_text())
    crowd = annotation([0, 60, 64, 20], image=10, iscrowd=1)
    coco.change(path, "val2017", annotations=[*content["annotations"], crowd])
    images = data.load_coco(path).validation
    scores, labels, boxes = np.zeros((5, 3)), np.zeros((5, 3), int), np.zeros((5, 3, 4))
    for number, image in enumerate(images):
        count = len(image.labels)
        scores[number, :count], labels[number, :count] = 0.8, image.labels
        boxes[number, :count] = image.boxes
    found = data.average_precision(images, 2, scores, labels, boxes)
    assert found == {"ap": pytest.approx(1), "ap50": pytest.approx(1)}
    small = boxes.copy()
    small[..., 2] -= 0.3 * (boxes[..., 2] - boxes[..., 0])  # IoU of 0.7: five of ten thresholds
    found = data.average_precision(images, 2, scores, labels, small)
    assert found["ap50"] == pytest.approx(1) and 0.4 <= found["ap"] <= 0.51
    scores[:, 2] = 0.9  # boxes of no size
    assert data.average_precision(images, 2, scores, labels, boxes)["ap50"] < 0.8
