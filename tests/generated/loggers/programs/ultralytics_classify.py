"""ultralytics: a classifier from scratch on a few drawn images, twice."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from common import Truth

os.environ["YOLO_CONFIG_DIR"] = str(Path("settings").resolve())
os.environ["YOLO_OFFLINE"] = "true"
torch: Any = import_module("torch")
# torchvision of the registry is built for GPUs, and registers these only with one.
library: Any = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
numpy: Any = import_module("numpy")
image: Any = import_module("PIL.Image")
ultralytics: Any = import_module("ultralytics")

EPOCHS = 3


def main() -> None:
    truth = Truth()
    dice = numpy.random.default_rng(0)
    for split in ("train", "val"):
        for label, level in (("dark", 40), ("light", 200)):
            folder = Path("data", split, label)
            folder.mkdir(parents=True)
            for number in range(6):
                pixels = dice.integers(level - 30, level + 30, (32, 32, 3)).astype("uint8")
                image.fromarray(pixels).save(folder / f"{number}.png")
    for run in range(2):
        model = ultralytics.YOLO("yolov8n-cls.yaml")

        def tell(trainer: Any, run: int = run) -> None:
            if trainer.epoch < EPOCHS:  # it is called once more for the best model
                written = {**trainer.label_loss_items(trainer.tloss), **trainer.metrics}
                for name, value in {**written, **trainer.lr}.items():
                    truth.add(f"run{run}:{name}", trainer.epoch + 1, value)

        model.add_callback("on_fit_epoch_end", tell)
        model.train(
            data="data",
            epochs=EPOCHS,
            imgsz=32,
            batch=4,
            device="cpu",
            workers=0,
            plots=False,
            seed=run,
        )
    truth.write()


if __name__ == "__main__":
    main()
