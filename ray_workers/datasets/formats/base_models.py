"""The files of a base model on this node."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dray import spec
from dray.spec.program import base_files
from ray_workers.datasets.core.errors import broken, reading
from ray_workers.datasets.sources.node_cache import NodeCache
from ray_workers.datasets.sources.source import Source, location_of
from ray_workers.shared.node_needs import DataPolicy

WEIGHTS = ".safetensors"
SMALL_SUFFIXES = (".json", ".jinja", ".txt", ".model")
SUFFIXES = (*SMALL_SUFFIXES, WEIGHTS)


@dataclass(frozen=True)
class BaseModel:
    location: str
    """The folder's URL, for errors."""
    paths: Mapping[str, Path]
    """The path of each file by its name. Downloaded files have other names in the
    cache."""
    config: Mapping[str, Any]
    """Content of `config.json`."""
    sha256: str
    """Hash of all files."""

    @property
    def weight_files(self) -> list[str]:
        """Names of the files with weights. A single file takes precedence over an index, as in
        transformers. Raises DataError if one of the files is missing."""
        if base_files.SINGLE in self.paths or base_files.INDEX not in self.paths:
            return [base_files.SINGLE]
        location = f"{self.location}/{base_files.INDEX}"
        with reading(location, "is not an index of safetensors files"):
            found = json.loads(self.paths[base_files.INDEX].read_text())["weight_map"]
            names = sorted(set(found.values()))
        for name in names:
            if name not in self.paths:
                raise broken(location, f"names the file {name}, which is missing")
        return names


def open_base(
    model: spec.Pretrained, policy: DataPolicy, max_length: int, *, needs_weights: bool = True
) -> BaseModel:
    """Return the files of a base model, which are downloaded to the node's cache if they are on
    another machine. The files stay there until this process ends. Without `needs_weights`, only the
    small files are returned, and `model.sha256` is not compared. Raises DataError."""
    url = model.base
    location = location_of(url).rstrip("/")
    with reading(location):
        cache = NodeCache.of(policy)
        every = (SUFFIXES, base_files.FILES)
        few = (SMALL_SUFFIXES, base_files.SMALL_FILES)
        source = Source(
            *(url, policy, cache, model.credentials), *(every if needs_weights else few)
        )
        with cache.lock(url):
            content = source.identify(size_bytes=None, sha256=None)
            if not content.is_folder:
                raise broken(location, "is a file: give the folder of the model")
            if needs_weights and model.sha256 not in (None, content.sha256):
                found = f"has the hash {content.sha256}, but model.sha256 is {model.sha256}"
                raise broken(location, found)
            _refuse_licensed(content.sha256, policy, location)
            paths = {file.name: file.path for file in source.files(content)}
            cache.sweep()
        names = list(paths)
        if not needs_weights:
            names = Source(url, policy, cache, model.credentials, *every).names()
    fault = base_files.fault_of_names([*names, *_pickles(model, policy, names)])
    if fault is not None:
        raise broken(location, fault)
    at_config = f"{location}/{base_files.CONFIG}"
    with reading(at_config, "is not a JSON document"):
        config = json.loads(paths[base_files.CONFIG].read_text())
    if (fault := base_files.fault_of_config(config, max_length)) is not None:
        raise broken(at_config, fault)
    return BaseModel(location, paths, config, content.sha256)


def _refuse_licensed(sha256: str, policy: DataPolicy, location: str) -> None:
    for one in policy.licensed:
        if one.sha256 == sha256:
            raise broken(
                location,
                f"has the same files as the model {one.name!r} of the server's catalogue, whose "
                f"licence must be accepted: read it with `dray model bases {one.name}`, and set "
                f"model.accept_licence to {one.licence!r}, or add this name to its list",
            )


def _pickles(model: spec.Pretrained, policy: DataPolicy, names: Collection[str]) -> list[str]:
    """Return the names of files with pickled weights, if there are no other weights."""
    if any(name.endswith(WEIGHTS) for name in names):
        return []
    cache = NodeCache.of(policy)
    files = base_files.PICKLED
    return Source(model.base, policy, cache, model.credentials, base_files.PICKLES, files).names()
