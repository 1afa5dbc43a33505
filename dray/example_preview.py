"""Examples of fine-tuning as the model sees them, before a job is submitted. torch is imported only
when it is needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dray.documents import validate
from dray.errors import SpecError
from dray.input import model_names
from dray.spec import JobSpec, Pretrained
from dray.spec.program import base_files
from dray.spec.training.data import uploaded_files

if TYPE_CHECKING:
    from dray.client import Client

_WITHOUT_CREDENTIALS = ("file:", "upload:")
_ResultFile = tuple[str, str, int, str]
"""Name, URL, bytes and SHA-256 of a file of a job's result."""
_DOWNLOADED = (".json", ".jinja", ".txt", ".model")
"""Suffixes of the files of a base that the preview reads."""


class Preview(NamedTuple):
    report: dict[str, Any]
    """The content of the artifact `examples.json`."""
    lines: list[str]
    """The lines about the examples in the job's log."""


def preview(
    document: Mapping[str, Any] | str | os.PathLike[str], client: Client | None = None
) -> Preview:
    """Convert the examples of a job of the recipe `fine_tuning` to tokens, on this machine and with
    the job's own code.

    document: a job document, or the file that contains it. client: downloads uploaded files, and
    the tokenizer of a base that is the result of a job or a registered model. Without a client,
    such documents are refused.

    Reads all examples and the base's tokenizer, but not its weights. Raises SpecError if the
    document or an example is invalid, if a source can't be read on this machine, and if the
    packages of `dray[tuning]` are missing; and the errors of the client.
    """
    spec = validate(document)
    file_ids = _readable_uploads(spec, client)
    try:
        from ray_workers import recipes
    except ModuleNotFoundError as error:
        raise SpecError(
            f"the preview needs the package {error.name}: pip install 'dray[tuning]'"
        ) from error
    with tempfile.TemporaryDirectory(prefix="dray-preview-") as name:
        folder = Path(name)
        result: list[_ResultFile] = []
        if client is not None:
            for file_id in file_ids:
                path = recipes.upload_path(folder, file_id)
                path.parent.mkdir(exist_ok=True)
                client.download_upload(file_id, path)
            spec = _with_job(spec, client)
            result += _result_of(spec, client, folder / "result")
        return Preview(*recipes.preview(spec, folder, result))


def _readable_uploads(spec: JobSpec, client: Client | None) -> set[str]:
    """Return the ids of the uploaded files with examples. Raises SpecError for examples and bases
    that can't be read on this machine."""
    model = spec.model
    if not isinstance(model, Pretrained):
        raise SpecError("only jobs of the recipe fine_tuning have a preview", pointer="/recipe")
    if model.is_named:
        raise SpecError(
            f"is the name {model.base!r} in the server's catalogue, which is not read here",
            pointer="/model/base",
            hint=f"give the address that `dray model bases {model.base}` shows",
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
    file_ids = {file_id for url in sources for file_id in uploaded_files(url)}
    on_server = model.base.startswith(("job://", model_names.SCHEME))
    if client is None and (file_ids or on_server):
        raise SpecError(
            "names files on the server, which only a preview with a client can read",
            pointer="/data" if file_ids else "/model/base",
            hint="use `dray preview`, or give dray.preview a client: dray.preview(document, "
            "dray.Client())",
        )
    return file_ids


def _with_job(spec: JobSpec, client: Client) -> JobSpec:
    """Replace a registered model by the job whose result it is, as the server does."""
    model = spec.model
    assert isinstance(model, Pretrained)
    if not model.base.startswith(model_names.SCHEME):
        return spec
    found = client.model_version(model.base)
    if found.step is not None:
        raise SpecError(
            f"names {model.base}, which is a checkpoint: a base must be the result of a job",
            pointer="/model/base",
        )
    changed = model.model_copy(update={"base": f"job://{found.job_id}"})
    return spec.model_copy(update={"model": changed})


def _result_of(spec: JobSpec, client: Client, folder: Path) -> Iterator[_ResultFile]:
    """Download the small files of the job whose result is the base, and return all its files."""
    assert isinstance(spec.model, Pretrained)
    job_id = base_files.job_of(spec.model.base)
    if job_id is None:
        return
    for one in client.artifacts(job_id):
        if one.path.lower().endswith(_DOWNLOADED):
            client.download(job_id, folder, one.path)
        yield one.path, (folder / one.path).as_uri(), one.size_bytes, one.sha256
