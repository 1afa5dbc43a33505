"""The names of files and folders in the storage, which other processes write as well."""

from __future__ import annotations

import fsspec

from dray.train.files import local_path
from dray.train.storage_room import StorageError


def names_below(url: str) -> list[str]:
    """The names directly below a URL, sorted; none if there is nothing. StorageError."""
    path = local_path(url)
    try:
        if path is not None:
            return sorted(entry.name for entry in path.iterdir())
        filesystem, place = fsspec.core.url_to_fs(url)
        filesystem.invalidate_cache()
        found = filesystem.ls(place, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except Exception as error:  # storage clients raise many types
        raise StorageError(f"{url} can't be listed: {error}") from error
    return sorted(str(name).rstrip("/").rpartition("/")[2] for name in found)
