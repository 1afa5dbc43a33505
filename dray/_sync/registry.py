# Written by `make blocking` from dray/_async/registry.py: change that file instead.
"""The registry of models."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from os import PathLike
from pathlib import Path

from dray import views
from dray._http.downloads import OnProgress
from dray._http.transport import Call, present, segment
from dray._sync.downloads import DownloadCalls
from dray.input import model_names

PAGE = 100


class RegistryCalls(DownloadCalls):
    def register_model(
        self,
        name: str,
        job: str,
        *,
        step: int | str | None = None,
        card: str = "",
        aliases: Sequence[str] = (),
    ) -> views.ModelVersion:
        """Register the result of the job with the id `job` as the next version of a model. If it is
        already a version of the model, that version is returned.

        step: register this checkpoint (`latest`, `best` or a number) instead of the result. card:
        the model card, in Markdown. aliases: aliases to move to the version. Raises NotFound,
        InvalidDocument, and Forbidden if the model belongs to another user.
        """
        given = {"name": name, "job": job, "card": card, "aliases": list(aliases)}
        document = {**given, **present(step=step)}
        # Repeating the call is safe, because a result is registered only once.
        call = Call.with_json("POST", "/v1/models", document)
        return self._read(views.ModelVersion, call)

    def models(self) -> Generator[views.RegisteredModel, None, None]:
        """Yield the registered models of all users in the order of their names."""
        return self._items(views.RegisteredModelPage, "/v1/models", page_size=PAGE)

    def model(self, name: str) -> views.RegisteredModel:
        """Return a registered model. Raises ModelNotFound."""
        return self._read(views.RegisteredModel, Call("GET", _path(name)))

    def model_versions(self, name: str) -> Generator[views.ModelVersion, None, None]:
        """Yield the versions of a model, the highest number first. Raises ModelNotFound."""
        return self._items(views.ModelVersionPage, f"{_path(name)}/versions", page_size=PAGE)

    def model_version(self, reference: str) -> views.ModelVersion:
        """Return a version with its card, lineage and files, given `model://NAME@VERSION` or
        `model://NAME@ALIAS`. Raises ModelNotFound, ModelVersionNotFound, and ValueError if the text
        is no such reference."""
        return self._read(views.ModelVersion, Call("GET", _version_path(reference)))

    def set_model_card(self, reference: str, card: str) -> views.ModelVersion:
        """Replace the card of a version. Raises Forbidden if the model belongs to another user."""
        call = Call.with_json("PATCH", _version_path(reference), {"card": card})
        return self._read(views.ModelVersion, call)

    def set_model_alias(
        self, name: str, alias: str, version: int, *, from_version: int | None = None
    ) -> views.RegisteredModel:
        """Let an alias refer to a version. With `from_version`, raises AliasMoved if the alias does
        not refer to this version. Raises Forbidden if the model belongs to another user."""
        document = {"version": version, **present(from_version=from_version)}
        call = Call.with_json("PUT", f"{_path(name)}/aliases/{segment(alias)}", document)
        return self._read(views.RegisteredModel, call)

    def delete_model_alias(self, name: str, alias: str) -> None:
        """Remove an alias. Raises Forbidden if the model belongs to another user."""
        self._send(Call("DELETE", f"{_path(name)}/aliases/{segment(alias)}"))

    def alias_moves(self, name: str) -> Generator[views.AliasMove, None, None]:
        """Yield the changes of a model's aliases, the newest first. Raises ModelNotFound."""
        return self._items(views.AliasMovePage, f"{_path(name)}/moves", page_size=PAGE)

    def delete_model_version(self, name: str, version: int) -> None:
        """Delete a version, but not its job. Raises VersionInUse if an alias refers to it, and
        Forbidden if the model belongs to another user."""
        self._send(Call("DELETE", f"{_path(name)}/versions/{version}"))

    def delete_model(self, name: str) -> None:
        """Delete a model with its versions and aliases, but not their jobs. Raises Forbidden if the
        model belongs to another user."""
        self._send(Call("DELETE", _path(name)))

    def download_model(
        self,
        reference: str,
        dest: str | PathLike[str],
        *,
        on_progress: OnProgress | None = None,
    ) -> list[Path]:
        """Download the files of a version into the folder `dest`, in the same way as
        `download`."""
        found = self.model_version(reference)
        if found.step is None:
            return self.download(found.job_id, dest, on_progress=on_progress)
        return self.download_checkpoint(found.job_id, found.step, dest, on_progress=on_progress)


def _path(name: str) -> str:
    return f"/v1/models/{segment(name)}"


def _version_path(reference: str) -> str:
    named = model_names.parse(reference)
    return f"{_path(named.name)}/versions/{named.version}"
