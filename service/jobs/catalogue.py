"""Base models that documents name, and the acceptance of their licences."""

from __future__ import annotations

import posixpath
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
HUB_HOSTS: Final = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
MAX_NAMED = 10


def resolve(spec: S, catalogue: Catalogue, *, needs_licence: bool = True) -> S:
    """Replace the name of a base model by its address. A URL of a model in the catalogue is
    treated like its name, because its licence applies as well. needs_licence: whether the licence
    must be accepted, which a plan does not need.

    Raises InvalidDocument if there is no such model, and LicenceNotAccepted if its licence is not
    accepted.
    """
    model = spec.model
    if not isinstance(model, Pretrained):
        return spec
    entry = _entry(model, catalogue)
    _refuse_sweep(spec, model, entry, catalogue)
    if entry is None:
        if model.catalogue is not None:
            model = model.model_copy(update={"catalogue": None})
        return spec.model_copy(update={"model": model})
    changes: dict[str, Any] = {
        "catalogue": entry.name,
        "base": entry.base,
        "credentials": entry.credentials,
        "accept_licence": _accepted(model, entry) if needs_licence else model.accept_licence,
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
        host, path = "huggingface.co", path.lower()  # the hub ignores the case of names
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


def _accepted(model: Pretrained, entry: CatalogueModel) -> str | bool:
    """Return the name of the licence if the document accepts it."""
    given = model.accept_licence
    if given is False:
        if entry.must_accept:
            raise LicenceNotAccepted(
                f"the model {entry.name!r} requires that you accept its licence, {entry.licence!r}",
                pointer="/model/accept_licence",
                hint=f"read it with `dray model bases {entry.name}`, and set model.accept_licence "
                "to true",
            )
        return False
    if given is not True and given != entry.licence:
        raise LicenceNotAccepted(
            f"accepts the licence {given!r}, but the licence of the model {entry.name!r} is "
            f"{entry.licence!r}",
            pointer="/model/accept_licence",
            hint=f"read it with `dray model bases {entry.name}`, and accept it by its name",
        )
    return entry.licence or False


def _refuse_sweep(
    spec: JobSpec, model: Pretrained, entry: CatalogueModel | None, catalogue: Catalogue
) -> None:
    """Refuse a sweep over models of the catalogue, or over results of jobs, which are looked up
    only at submission."""
    swept = spec.sweep.parameters if spec.sweep is not None else {}
    choices = (swept["model.base"].choices or ()) if "model.base" in swept else ()
    bases = [model.model_copy(update={"base": base}) for base in choices if isinstance(base, str)]
    is_named = any(one.is_named or _entry(one, catalogue) for one in bases)
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
