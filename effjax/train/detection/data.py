"""Images with boxes in COCO's format: their files, batches of them, and average precision."""

import contextlib
import dataclasses
import functools
import hashlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..._extras import install_command
from ..errors import DataError, counted
from ..files import read_json
from ..images.dataset import SPLIT_SEED
from ..images.folder import SPLITS, open_image

SMALLEST_CROP = 0.5  # share of a side
PARTS = "train", "validation", "test"
ROBOFLOW = "_annotations.coco.json"


class ImageObjects(NamedTuple):
    """An image and the n objects in it."""

    file: Path
    size: tuple[int, int]  # width, height
    boxes: np.ndarray  # [n, 4], x0 y0 x1 y1 in pixels, within the image
    areas: np.ndarray  # [n], by which COCO tells small objects from large ones
    labels: np.ndarray  # int32 [n], indices into the names of the classes
    is_crowd: np.ndarray  # bool [n], whether a box has several objects


@dataclasses.dataclass(frozen=True)
class DetectionData:
    """A data set of object detection.

    Attributes:
        class_names: The names of the categories, in the order of their numbers.
        left_out: The number of boxes of no size within their image.
        sha256: The digest of the annotations.
        train, validation, test: The images of each part, which may be none.
    """

    class_names: tuple[str, ...]
    left_out: int
    sha256: str
    train: Sequence[ImageObjects]
    validation: Sequence[ImageObjects] = ()
    test: Sequence[ImageObjects] = ()


class Batch(NamedTuple):
    """Images and their objects, padded to a fixed number N."""

    images: Any  # uint8 [B, S, S, 3]
    labels: Any  # int32 [B, N], -1 is padding
    boxes: Any  # float32 [B, N, 4], (center x, center y, width, height) in shares


def load_coco(path: Path) -> DetectionData:
    """Read a folder in COCO's or Roboflow's layout. No image is opened.

    COCO has `annotations/instances_NAME.json` for the images in `NAME/` or `images/NAME/`, such as
    `train2017`. Roboflow has `NAME/_annotations.coco.json` beside the images.

    Raises:
        DataError: A file is missing or damaged, or the parts have different categories.
    """
    parts, left_out, digest = {}, 0, hashlib.sha256()
    categories: dict[int, str] = {}
    for part, (file, folder) in find_parts(path).items():
        names, parts[part], count = _read_part(file, folder)
        if odd := names.items() ^ (categories or names).items():
            raise DataError(f"{file}: category {min(odd)} must be in all parts, or in none.")
        categories, left_out = names, left_out + count
        digest.update(file.read_bytes())
    return DetectionData(tuple(categories.values()), left_out, digest.hexdigest(), **parts)


def find_parts(path: Path) -> dict[str, tuple[Path, Path]]:
    """Return the annotations and the folder of images of each part of a data set."""
    found: dict[str, tuple[Path, Path]] = {}
    for file in sorted([*path.glob(f"*/{ROBOFLOW}"), *path.glob("annotations/instances_*.json")]):
        folder = file.parent
        if file.name != ROBOFLOW:
            name = file.stem.removeprefix("instances_")
            folder = path / name if (path / name).is_dir() else path / "images" / name
        for part, names in SPLITS.items():
            if re.fullmatch(rf"({'|'.join(names)})\d*", folder.name.lower()):
                if part in found:
                    raise DataError(f"{found[part][0]} and {file} are both {part} sets. Keep one.")
                found[part] = file, folder
    if "train" not in found:
        raise DataError(
            f"{path}: must have annotations/instances_train2017.json and train2017/, or "
            f"train/{ROBOFLOW}"
        )
    return found


def _read_part(file: Path, folder: Path) -> tuple[dict[int, str], list[ImageObjects], int]:
    """Return the categories in order, the images, and the number of boxes of no size."""
    names: dict[int, str] = {}
    images: dict[Any, tuple[Path, tuple[int, int], list[tuple[float, ...]]]] = {}

    def add_category(entry: Any) -> None:
        if entry["id"] in names:
            raise ValueError("an `id` of two categories")
        names[int(entry["id"])] = str(entry["name"])

    def add_image(entry: Any) -> None:
        image = folder / entry["file_name"], (int(entry["width"]), int(entry["height"])), []
        if images.setdefault(entry["id"], image) is not image or min(image[1]) < 1:
            raise ValueError("an `id` of two images, or no pixels")

    def add_object(entry: Any) -> None:
        rows = images[entry["image_id"]][2]
        x, y, w, h = map(float, entry["bbox"])
        area, category = float(entry.get("area") or w * h), entry["category_id"]
        if category not in names:
            raise KeyError(category)
        if not math.isfinite(x + y + w + h + area):
            raise ValueError("not finite")
        rows.append((x, y, x + w, y + h, area, category, bool(entry.get("iscrowd"))))

    content = read_json(file)
    _read(file, content, "categories", add_category)
    _read(file, content, "images", add_image)
    _read(file, content, "annotations", add_object)
    names, result, left_out = dict(sorted(names.items())), [], 0
    for name, size, rows in images.values():
        if not name.is_file():
            raise DataError(f"{name}: not found, but {file} lists it.")
        table = np.array(rows, np.float64).reshape(-1, 7)
        boxes = table[:, :4].clip(0, size * 2)
        has_size = np.all(boxes[:, 2:] > boxes[:, :2], axis=1)
        left_out += int(np.sum(~has_size))
        boxes, (areas, numbers, is_crowd) = boxes[has_size], table[has_size, 4:].T
        labels = np.searchsorted([*names], numbers).astype(np.int32)
        result.append(ImageObjects(name, size, boxes, areas, labels, is_crowd > 0))
    if all(image.is_crowd.all() for image in result):
        raise DataError(f"{file}: has no object. Annotate some, or remove the set.")
    return names, result, left_out


def _read(file: Path, content: Mapping[str, Any], name: str, add: Callable[[Any], None]) -> None:
    """Call a function with each entry of a list; raise its errors as DataError."""
    entries = content.get(name)
    if not isinstance(entries, list) or not entries:
        raise DataError(f"{file}: `{name}` must be a list that is not empty, as in COCO's format.")
    for entry in entries:
        try:
            add(entry)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{file}: {entry!s:.200} of `{name}` is not as in COCO's format "
                f"({type(error).__name__}: {error}). Correct or remove it."
            ) from error


def hold_out(data: DetectionData, validation: float) -> DetectionData:
    """Move a part of the train set to the validation set, unless the data set has its own.

    `validation` is a share of it if below 1, else a number of images. The part is the same in
    every run. Raise DataError if it has no object, or is the whole set.
    """
    if validation == 0 or data.validation:
        return data
    size = len(data.train)
    count = round(validation * size if validation < 1 else validation)
    order = np.random.default_rng(SPLIT_SEED).permutation(size)
    held_out, train = ([data.train[i] for i in sorted(p)] for p in (order[:count], order[count:]))
    if not train or all(image.is_crowd.all() for image in held_out):
        raise DataError(
            f"`validation` (={validation:g}) must hold out at least one object and not all of "
            f"{counted(size, 'image')}. Use another number, or 0 for no validation."
        )
    return dataclasses.replace(data, train=train, validation=held_out)


def most_objects(data: DetectionData) -> tuple[int, Path]:
    """Return the largest number of objects in an image, without crowds, and its file."""
    images = [image for part in PARTS for image in getattr(data, part)]
    return max((int(np.sum(~image.is_crowd)), image.file) for image in images)


def make_batch(
    images: Sequence[ImageObjects],
    side: int,
    max_objects: int,
    rngs: Sequence[np.random.Generator] | None = None,
) -> Batch:
    """Decode and resize images, by threads. With random numbers, crop and flip them before."""
    make = functools.partial(make_example, side=side, max_objects=max_objects)
    with ThreadPoolExecutor() as threads:  # Pillow decodes without Python's lock
        rows = threads.map(make, images, rngs or [None] * len(images))
        return Batch(*map(np.stack, zip(*rows, strict=True)))


def make_example(
    image: ImageObjects, rng: np.random.Generator | None, side: int, max_objects: int
) -> Batch:
    """Return a row of `make_batch`. Objects of a crop are those whose center is inside."""
    picture = open_image(image.file)
    if picture.size != image.size:
        raise DataError(
            f"{image.file}: {picture.width}×{picture.height} pixels, but its annotation has "
            f"{image.size[0]}×{image.size[1]}. Correct `width` and `height`."
        )
    start, end, is_mirrored = np.zeros(2), np.array(image.size, np.float64), False
    if rng is not None:
        is_mirrored, is_cropped = rng.random(2) < 0.5
        share, place = rng.uniform(SMALLEST_CROP, 1, 2), rng.random(2)
        if is_cropped:
            start, end = place * (1 - share) * end, (place * (1 - share) + share) * end
    corners = image.boxes.reshape(-1, 2, 2)
    centers = corners.mean(1)
    chosen = ~image.is_crowd & np.all((centers > start) & (centers < end), axis=1)
    corners = (corners[chosen].clip(start, end) - start) / (end - start)
    pixels = np.asarray(picture.resize((side, side), 2, box=(*start, *end)))  # 2: bilinear
    if is_mirrored:
        pixels, corners[..., 0] = pixels[:, ::-1], 1 - corners[:, ::-1, 0]
    count = len(corners)
    labels, boxes = np.full(max_objects, -1, np.int32), np.zeros((max_objects, 4), np.float32)
    labels[:count] = image.labels[chosen]
    boxes[:count] = np.concatenate([corners.mean(1), corners[:, 1] - corners[:, 0]], axis=1)
    return Batch(pixels, labels, boxes)


def average_precision(
    images: Sequence[ImageObjects],
    num_classes: int,
    scores: np.ndarray,
    labels: np.ndarray,
    boxes: np.ndarray,
) -> dict[str, float]:
    """Return COCO's AP, the mean over IoU of 0.5 to 0.95, and AP50, by pycocotools.

    Detections of each image are those of `decode_detections`: [N, K], [N, K] and [N, K, 4].
    """
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ModuleNotFoundError as error:
        raise DataError(f"{error.name} is missing. Run {install_command('detection')}.") from error
    objects = [
        {"image_id": number, "category_id": int(label), "area": area, "iscrowd": int(is_crowd),
         "bbox": [*box[:2], *(box[2:] - box[:2])]}
        for number, image in enumerate(images)
        for box, area, label, is_crowd in zip(*image[2:], strict=True)
    ]  # fmt: skip
    numbers = np.broadcast_to(np.arange(len(images))[:, None], scores.shape)
    x0, y0, x1, y1 = np.moveaxis(boxes, -1, 0)
    found = np.stack([numbers, x0, y0, x1 - x0, y1 - y0, scores, labels], -1, dtype=np.float64)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        truth: Any = COCO()
        truth.dataset = {
            "images": [{"id": number} for number in range(len(images))],
            "categories": [{"id": label} for label in range(num_classes)],
            # From 1, because it takes 0 for an object that is not detected.
            "annotations": [{"id": i, **entry} for i, entry in enumerate(objects, 1)],
        }
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(found.reshape(-1, 7)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {"ap": float(evaluation.stats[0]), "ap50": float(evaluation.stats[1])}
