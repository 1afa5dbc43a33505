"""Examples of fine-tuning as the model sees them, before a job is submitted. torch is imported only
when it is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from dray.documents import validate
from dray.errors import SpecError
from dray.spec import JobSpec, Pretrained
from dray.spec.program import base_files

_WITHOUT_CREDENTIALS = ("file:", "upload:")


class Preview(NamedTuple):
    report: dict[str, Any]
    """The content of the artifact `examples.json`."""
    lines: list[str]
    """The lines about the examples in the job's log."""


def preview(document: Mapping[str, Any] | str | os.PathLike[str]) -> Preview:
    """Convert the examples of a job of the recipe `fine_tuning` to tokens, on this machine and with
    the job's own code. document: a job document, or the file that contains it.

    Reads all examples and the base's tokenizer, but not its weights. Raises SpecError if the
    document or an example is invalid, if a source can't be read on this machine, and if the
    packages of `dray[tuning]` are missing.
    """
    spec = validate(document)
    _refuse_unreadable(spec)
    try:
        from ray_workers import recipes
    except ModuleNotFoundError as error:
        raise SpecError(
            f"the preview needs the package {error.name}: pip install 'dray[tuning]'"
        ) from error
    return Preview(*recipes.preview(spec))


def _refuse_unreadable(spec: JobSpec) -> None:
    """Raise SpecError for examples and bases that only a job can read."""
    model = spec.model
    if not isinstance(model, Pretrained):
        raise SpecError("only jobs of the recipe fine_tuning have a preview", pointer="/recipe")
    if model.is_named:
        raise SpecError(
            f"is the name {model.base!r} in the server's catalogue, which is not read here",
            pointer="/model/base",
            hint=f"give the address that `dray model bases {model.base}` shows",
        )
    if (job := base_files.job_of(model.base)) is not None:
        raise SpecError(
            f"is the result of the job {job}, which can't be read on this machine",
            pointer="/model/base",
            hint=f"download it with `dray download {job} result`, and give the folder's URL",
        )
    held_out = spec.data.held_out
    every = [*spec.data.mixed, *([held_out] if held_out is not None else [])]
    sources = [one.source for one in every]
    for pointer, name, urls in (
        ("/model/credentials", model.credentials, [model.base]),
        ("/data/credentials", spec.data.credentials, sources),
    ):
        if name is not None and not all(url.startswith(_WITHOUT_CREDENTIALS) for url in urls):
            raise SpecError(
                f"names the credentials {name!r}, which only the cluster's nodes have",
                pointer=pointer,
                hint="download the files, and give them as file:///path",
            )
    if any(url.startswith("upload://") for url in sources):
        raise SpecError(
            "names uploaded files, which can't be read on this machine",
            pointer="/data",
            hint="give the files that you uploaded, as file:///path",
        )
