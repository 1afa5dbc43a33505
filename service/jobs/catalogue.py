"""Base models that documents name, and the acceptance of their licences."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from dray.input.names import nearest
from dray.spec import JobSpec, Pretrained
from dray.spec.program import base_files
from ray_workers.shared.net_policy import canonical_host
from service.config.models_file import Catalogue, CatalogueModel
from service.domain.errors import InvalidDocument, LicenceNotAccepted

S = TypeVar("S", bound=JobSpec)
AT_BASE: Final = "/model/base"
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
HUB_HOST: Final = "huggingface.co"
HUB_HOSTS: Final = frozenset({HUB_HOST, "www.huggingface.co", "hf.co"})
MAX_NAMED = 10


def resolve(
    spec: S,
    catalogue: Catalogue,
    ancestors: Sequence[Pretrained] = (),
    *,
    needs_licence: bool = True,
) -> S:
    """Replace the name of a base model by its address. A URL of a model in the catalogue is
    treated like its name, because its licence applies as well. The licence also applies to other
    revisions, known copies and results of fine-tuning, which keep their address.

    ancestors: the models of the jobs from which the job gets its base or its weights.
    needs_licence: whether the licence must be accepted, which a plan does not need.

    Raises InvalidDocument if there is no such model, and LicenceNotAccepted if its licence is not
    accepted.
    """
    model = spec.model
    if not isinstance(model, Pretrained):
        return spec
    entry = _entry(model, catalogue)
    _refuse_sweep(spec, model, entry, catalogue)
    own = _of_copies(model, catalogue) if entry is None else [_Applying(entry)]
    accepts = model.accept_licence
    if needs_licence and (applying := _distinct([*own, *_inherited(ancestors, catalogue)])):
        accepts = _accepted(model, applying)
    if entry is None:
        model = model.model_copy(update={"catalogue": None, "accept_licence": accepts})
        return spec.model_copy(update={"model": model})
    changes: dict[str, Any] = {
        "catalogue": entry.name,
        "base": entry.base,
        "credentials": entry.credentials,
        "accept_licence": accepts,
        "sha256": entry.sha256 or model.sha256,
        "chat_template": entry.chat_template or model.chat_template,
    }
    return spec.model_copy(update={"model": model.model_copy(update=changes)})


def _entry(model: Pretrained, catalogue: Catalogue) -> CatalogueModel | None:
    if model.is_named:
        found = catalogue.get(model.base)
        if found is None:
            raise _unknown(model.base, catalogue)
        return found
    address = _address(model.base)
    same = [one for one in catalogue.values() if _address(one.base).is_folder_of(address)]
    named = (one for one in same if one.name == model.catalogue)
    strict = (one for one in same if one.must_accept)
    return next(named, None) or next(strict, None) or next(iter(same), None)


class _Applying(NamedTuple):
    """A model in the catalogue whose licence applies."""

    entry: CatalogueModel
    reason: str | None = None
    """Why the licence applies; None if the base is the model itself."""


def _of_copies(model: Pretrained, catalogue: Catalogue) -> list[_Applying]:
    """Return the models in the catalogue whose licences also apply to a base with another
    address."""
    found = []
    for one in catalogue.values():
        if one.must_accept and one.sha256 is not None and one.sha256 == model.sha256:
            found.append(_Applying(one, "model.sha256 is the hash of its files"))
        elif one.must_accept and any(
            _address(model.base).is_in(name) for name in _repositories(one)
        ):
            found.append(_Applying(one, f"{model.base} is in the same repository"))
    return found


def _inherited(ancestors: Sequence[Pretrained], catalogue: Catalogue) -> list[_Applying]:
    """Return the models in the catalogue whose licences apply to the results of jobs that have
    fine-tuned these bases."""
    reason = "the base or the weights are a result of fine-tuning this model"
    found: list[_Applying] = []
    for ancestor in ancestors:
        entry = _entry(ancestor, catalogue)
        models = [one for one in catalogue.values() if one.name == ancestor.catalogue]
        models += [entry] if entry is not None else []
        models += [one for one in catalogue.values() if one.licence in ancestor.licences]
        found += [_Applying(one, reason) for one in models if one.must_accept]
        found += _of_copies(ancestor, catalogue)
    return found


def _distinct(applying: Sequence[_Applying]) -> list[_Applying]:
    """Return the first model with each licence, but prefer models whose licence must be
    accepted."""
    first: dict[str | None, _Applying] = {}
    for one in sorted(applying, key=lambda one: not one.entry.must_accept):
        first.setdefault(one.entry.licence, one)
    return [one for one in applying if first[one.entry.licence] is one]


def _repositories(entry: CatalogueModel) -> list[str]:
    address = _address(entry.base)
    own = address.path.split("/")[1:3] if address.host == HUB_HOST else []
    return [*entry.repositories, *(["/".join(own)] if len(own) == 2 else [])]


class _Address(NamedTuple):
    """The address of a folder, which is the same for all spellings of its URL."""

    kind: str
    """The scheme; `web` for both http and https."""
    host: str
    path: str
    query: str = ""

    def is_folder_of(self, given: _Address) -> bool:
        """Whether the given address leads to this folder. Web servers usually ignore a query that
        they don't expect."""
        return self == given or self == given._replace(query="")

    def is_in(self, repository: str) -> bool:
        """Whether this is a folder in a repository on the hub, at any revision. Some paths on the
        hub begin with other parts, such as `/api/resolve-cache/models`."""
        return self.host == HUB_HOST and f"/{repository.lower()}/" in f"{self.path}/"


@lru_cache(maxsize=4096)
def _address(base: str) -> _Address:
    base = base_files.web_address(base)
    try:
        url = urlsplit(base)
        port = url.port
    except ValueError:  # a value of a sweep that is no URL
        return _Address("", "", base)
    host = canonical_host(url.hostname or "")
    path = posixpath.normpath("/" + unquote(url.path).lstrip("/"))
    if url.scheme not in DEFAULT_PORTS:
        return _Address(url.scheme, host, path)
    if host in HUB_HOSTS:
        host, path = HUB_HOST, path.lower()  # the hub ignores the case of names
    if port not in (None, DEFAULT_PORTS[url.scheme]):
        host = f"{host}:{port}"
    return _Address("web", host, path, url.query)


def _unknown(name: str, catalogue: Catalogue) -> InvalidDocument:
    names = list(catalogue)
    if not names:
        return InvalidDocument(
            f"names the model {name!r}, but this server has no catalogue of models",
            pointer=AT_BASE,
            hint="give the URL of a folder, such as file:///srv/models/llama",
        )
    hint = nearest(name, names) or "`dray model bases` lists the models"
    shown = ", ".join(names[:MAX_NAMED]) + (", ..." if len(names) > MAX_NAMED else "")
    return InvalidDocument(
        f"names the model {name!r}, which is not in the catalogue: {shown}",
        pointer=AT_BASE,
        hint=hint,
    )


def _accepted(model: Pretrained, applying: Sequence[_Applying]) -> bool | str | list[str]:
    """Return the names of the licences that the document accepts. Raises LicenceNotAccepted if the
    document lacks a licence that must be accepted, or names only licences that don't apply."""
    names = [one.entry.licence for one in applying if one.entry.licence is not None]
    accepts = names if model.accept_licence is True else model.licences
    missing = [
        one for one in applying if one.entry.must_accept and one.entry.licence not in accepts
    ]
    if missing or (accepts and not set(names).intersection(accepts)):
        raise _not_accepted(accepts, missing or applying, names)
    kept = list(dict.fromkeys([*(name for name in names if name in accepts), *accepts]))
    if len(kept) > 1:
        return kept
    return kept[0] if kept else False


def _not_accepted(
    accepts: Sequence[str], missing: Sequence[_Applying], names: Sequence[str]
) -> LicenceNotAccepted:
    faults = []
    for entry, reason in missing:
        fault = f"requires that you accept its licence, {entry.licence!r}"
        if accepts:
            fault = f"has the licence {entry.licence!r}"
        applies = f", which also applies here because {reason}" if reason else ""
        faults.append(f"the model {entry.name!r} {fault}{applies}")
    detail = "; ".join(faults)
    hint = "set model.accept_licence to true"
    if accepts:
        given = " and ".join(map(repr, accepts))
        detail = f"accepts the licence {given}, but {detail}"
        hint = f"set model.accept_licence to {json.dumps(names[0] if len(names) == 1 else names)}"
    commands = " and ".join(f"`dray model bases {one.entry.name}`" for one in missing)
    return LicenceNotAccepted(
        detail,
        pointer="/model/accept_licence",
        hint=f"read {'them' if len(missing) > 1 else 'it'} with {commands}, and {hint}",
    )


def _refuse_sweep(
    spec: JobSpec, model: Pretrained, entry: CatalogueModel | None, catalogue: Catalogue
) -> None:
    """Refuse a sweep over models of the catalogue, or over results of jobs, which are looked up
    only at submission."""
    swept = spec.sweep.parameters if spec.sweep is not None else {}
    choices = (swept["model.base"].choices or ()) if "model.base" in swept else ()
    bases = [model.model_copy(update={"base": base}) for base in choices if isinstance(base, str)]
    is_named = any(
        one.is_named or _entry(one, catalogue) or _of_copies(one, catalogue) for one in bases
    )
    if any(base_files.job_of(one.base) for one in bases):
        raise InvalidDocument(
            "can't vary model.base among results of jobs: submit a job for each of them",
            pointer="/sweep/parameters/model.base",
        )
    for name, is_refused in (
        ("model.base", is_named or (bool(bases) and entry is not None)),
        ("model.catalogue", "model.catalogue" in swept),
    ):
        if is_refused:
            raise InvalidDocument(
                f"can't vary {name} among models of the catalogue: submit a sweep for each model",
                pointer=f"/sweep/parameters/{name}",
            )
