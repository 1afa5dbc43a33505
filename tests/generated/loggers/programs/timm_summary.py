"""The summary that timm's training script writes, for two runs."""

from __future__ import annotations

import sys
from collections import OrderedDict
from importlib import util
from pathlib import Path

from common import Truth


def main() -> None:
    # timm itself needs torchvision.
    (folder,) = util.find_spec("timm").submodule_search_locations or ()  # type: ignore[union-attr]
    spec = util.spec_from_file_location("summary", Path(folder, "utils", "summary.py"))
    assert spec is not None
    assert spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules["summary"] = module
    spec.loader.exec_module(module)
    truth = Truth()
    for run in ("resnet-a", "resnet-b"):
        folder = Path("output", "train", run)
        folder.mkdir(parents=True)
        for epoch in range(4):
            train = OrderedDict(loss=2.0 / (epoch + 1.5))
            evaluated = OrderedDict(loss=2.5 / (epoch + 1.5), top1=20.0 * epoch + len(run))
            path = folder / "summary.csv"
            module.update_summary(
                epoch, train, evaluated, path, lr=0.1 / (epoch + 1), write_header=epoch == 0
            )
            for name, value in train.items():
                truth.add(f"{run}:train_{name}", epoch, value)
            for name, value in evaluated.items():
                truth.add(f"{run}:eval_{name}", epoch, value)
            truth.add(f"{run}:lr", epoch, 0.1 / (epoch + 1))
    truth.write()


if __name__ == "__main__":
    main()
