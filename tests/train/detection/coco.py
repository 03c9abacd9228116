"""Small data sets of drawn rectangles, as COCO and Roboflow lay them out, and a small RT-DETR."""

import json
from pathlib import Path

import numpy as np
import pytest
from flax import nnx

from effjax.convert import save_detector
from effjax.models import RTDetr, RTDetrConfig

COLORS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
NUMBERS = {"red": 3, "blue": 90}  # of the categories, with gaps


def write_part(file: Path, folder: Path, count: int, side: int = 64, seed: int = 0) -> dict:
    """Write images of at most two rectangles and their annotations, which are returned."""
    Image, ImageDraw = map(pytest.importorskip, ("PIL.Image", "PIL.ImageDraw"))  # noqa: N806
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    images, annotations = [], []
    for number in range(count):
        image = Image.new("RGB", (side, side + 16), (90, 90, 90))
        for name in rng.permutation([*COLORS])[: number % 3]:
            w, h = rng.integers(side // 4, side // 2, 2).tolist()
            x, y = rng.integers(0, side // 2, 2).tolist()
            ImageDraw.Draw(image).rectangle((x, y, x + w - 1, y + h - 1), COLORS[name])
            entry = {"image_id": 10 * number, "category_id": NUMBERS[name], "bbox": [x, y, w, h]}
            annotations.append(entry | {"id": len(annotations), "area": w * h, "iscrowd": 0})
        image.save(folder / f"{number}.png")
        entry = {"id": 10 * number, "file_name": f"{number}.png"}
        images.append(entry | {"width": side, "height": side + 16})
    categories = [{"id": number, "name": name} for name, number in reversed(NUMBERS.items())]
    content = {"images": images, "annotations": annotations, "categories": categories}
    file.write_text(json.dumps(content))
    return content


def write_coco(path: Path, train: int = 8, val: int = 5, side: int = 64) -> Path:
    """Write a data set as COCO lays it out."""
    for seed, (name, count) in enumerate((("train2017", train), ("val2017", val))):
        if count:
            file = path / "annotations" / f"instances_{name}.json"
            write_part(file, path / name, count, side, seed)
    return path


def write_roboflow(path: Path) -> Path:
    """Write a data set as Roboflow lays it out."""
    for seed, name in enumerate(("train", "valid", "test")):
        write_part(path / name / "_annotations.coco.json", path / name, 4, seed=seed)
    return path


def change(path: Path, part: str = "train2017", **entries) -> None:
    """Replace entries of an annotation file of COCO."""
    file = path / "annotations" / f"instances_{part}.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | entries))


MODEL = dict(
    backbone_config=dict(
        layer_type="basic", embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], out_indices=[1, 2]
    ),
    encoder_hidden_dim=8, encoder_ffn_dim=8, encoder_attention_heads=1, encode_proj_layers=[1],
    d_model=8, decoder_ffn_dim=8, decoder_attention_heads=1, decoder_layers=1, decoder_n_points=1,
    num_feature_levels=2, num_queries=6, num_denoising=4,
)  # fmt: skip


def write_detector(path, **changes):
    """Write an RT-DETR of random weights in Hugging Face's layout."""
    config = RTDetrConfig(**MODEL | {"id2label": ["a", "b", "c"]} | changes)
    save_detector(RTDetr(config, rngs=nnx.Rngs(0)), path)
    return path
