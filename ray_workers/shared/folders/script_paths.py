"""The places of the folders whose files dray keeps for a script."""

from __future__ import annotations

from pathlib import Path

from dray.train import files


def output_dir(folders: Path) -> Path:
    """DRAY_OUTPUT_DIR. folders: `ray_workers.shared.paths.folders_dir`."""
    return folders / "output"


def checkpoint_dir(folders: Path, folder_url: str) -> Path:
    """DRAY_CHECKPOINT_DIR: the storage's own folder, or the node's copy of it."""
    return files.local_path(folder_url) or folders / "checkpoints"
