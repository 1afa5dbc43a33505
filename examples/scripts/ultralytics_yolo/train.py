"""Train the smallest Ultralytics YOLO from scratch on generated images.

torchrun --nproc-per-node 1 train.py
dray submit --code . --requirements requirements.txt --env YOLO_OFFLINE=true -- train.py

On CPUs Ultralytics trains in one process. With GPUs, `--workers 4 --gpus 1` starts four.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from ultralytics import YOLO

SIDE = 64
"""Width and height of an image, in pixels."""


def write_images(folder: Path, count: int, seed: int) -> None:
    """Write images with one bright square each, and labels with its position."""
    random = np.random.default_rng(seed)
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for number in range(count):
        image = random.integers(0, 60, (SIDE, SIDE, 3), np.uint8)
        side = int(random.integers(16, 32))
        left, top = (int(at) for at in random.integers(0, SIDE - side, 2))
        image[top : top + side, left : left + side] = (230, 60, 60)
        Image.fromarray(image).save(folder / "images" / f"{number}.png")
        box = [(left + side / 2) / SIDE, (top + side / 2) / SIDE, side / SIDE, side / SIDE]
        label = " ".join(f"{value:.6f}" for value in box)
        (folder / "labels" / f"{number}.txt").write_text(f"0 {label}\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", type=Path, default=os.environ.get("DRAY_OUTPUT_DIR", "."))
    options = parser.parse_args()

    data = Path(tempfile.mkdtemp())
    write_images(data / "train", count=16, seed=0)
    write_images(data / "val", count=4, seed=1)
    description = data / "data.yaml"
    description.write_text(f"path: {data}\ntrain: train\nval: val\nnames: [square]\n")

    model = YOLO("yolo11n.yaml")
    model.add_callback(
        "on_train_epoch_end",
        lambda trainer: print(f"epoch {trainer.epoch + 1}: loss {trainer.loss.item():.9f}"),
    )
    model.train(
        data=str(description),
        epochs=options.epochs,
        imgsz=SIDE,
        batch=8,
        plots=False,
        seed=0,
        project=str(data / "runs"),
    )
    torch.save(model.trainer.model.state_dict(), options.output / "model.pt")


if __name__ == "__main__":
    main()
