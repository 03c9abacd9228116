"""Small CIFAR archives and image folders, as their publishers lay them out."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BATCHES = [f"data_batch_{i}" for i in range(1, 6)]


def pixels(seed: int, n: int) -> np.ndarray:
    """uint8 [n, 3072]: the planes of red, green, blue."""
    return np.random.default_rng(seed).integers(0, 256, (n, 3072), np.uint8)


def labels(seed: int, n: int, num_classes: int) -> list[int]:
    """Every class of 10 is there; of 100, as many as fit."""
    return [(seed * n + i) % num_classes for i in range(n)]


def cifar10(n: int = 10) -> dict[str, bytes]:
    files = {}
    for seed, name in enumerate([*BATCHES, "test_batch"]):
        column = np.array(labels(seed, n, 10), np.uint8)[:, None]
        records = np.concatenate([column, pixels(seed, n)], axis=1)
        files[f"cifar-10-batches-bin/{name}.bin"] = records.tobytes()
    names = "\n".join(f"class{i}" for i in range(10)) + "\n\n"
    return files | {"cifar-10-batches-bin/batches.meta.txt": names.encode()}


def cifar100(n: int = 20) -> dict[str, bytes]:
    files = {}
    for seed, (name, count) in enumerate((("train", 5 * n), ("test", n))):
        fine = np.array(labels(seed, count, 100), np.uint8)[:, None]
        records = np.concatenate([fine * 0, fine, pixels(seed, count)], axis=1)
        files[f"cifar-100-binary/{name}.bin"] = records.tobytes()
    names = "\n".join(f"class{i}" for i in range(100)) + "\n"
    return files | {"cifar-100-binary/fine_label_names.txt": names.encode()}


def write_directory(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def write_tar(path: Path, files: dict[str, bytes], mode: Any = "w:gz") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_images(path: Path, counts: dict[str, int], size: tuple[int, int] = (9, 8)) -> Path:
    """Write `path/CLASS/0.png`, … of `size` (width, height)."""
    image_module = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(0)
    for name, count in counts.items():
        (path / name).mkdir(parents=True)
        for i in range(count):
            image = rng.integers(0, 256, (size[1], size[0], 3), np.uint8)
            image_module.fromarray(image).save(path / name / f"{i}.png")
    return path
