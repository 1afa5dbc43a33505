"""Base models that documents name, and the acceptance of their licences."""

from __future__ import annotations

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
    if entry is None:
        accepts = model.accept_licence
        licensed = _licensed(model, catalogue, ancestors) if needs_licence else None
        if licensed is not None:
            accepts = _accepted(model, *licensed)
        model = model.model_copy(update={"catalogue": None, "accept_licence": accepts})
        return spec.model_copy(update={"model": model})
    accepts = model.accept_licence
    if needs_licence:
        inherited = None if entry.must_accept else _inherited(ancestors, catalogue)
        accepts = _accepted(model, *(inherited or (entry,)))
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


def _licensed(
    model: Pretrained, catalogue: Catalogue, ancestors: Sequence[Pretrained]
) -> tuple[CatalogueModel, str] | None:
    """Return the model in the catalogue whose licence also applies to a base with another address,
    and the reason; None if there is none."""
    strict = [one for one in catalogue.values() if one.must_accept]
    for one in strict:
        if one.sha256 is not None and one.sha256 == model.sha256:
            return one, "model.sha256 is the hash of its files"
        if any(_address(model.base).is_in(name) for name in _repositories(one)):
            return one, f"{model.base} is in the same repository"
    return _inherited(ancestors, catalogue)


def _inherited(
    ancestors: Sequence[Pretrained], catalogue: Catalogue
) -> tuple[CatalogueModel, str] | None:
    """Return the model in the catalogue whose licence applies to the results of jobs that have
    fine-tuned these bases, and the reason; None if there is none."""
    reason = "the base or the weights are a result of fine-tuning this model"
    for ancestor in ancestors:
        for one in catalogue.values():
            licences = (one.name == ancestor.catalogue, one.licence == ancestor.accept_licence)
            if one.must_accept and any(licences):
                return one, reason
        entry = _entry(ancestor, catalogue)
        if entry is not None and entry.must_accept:
            return entry, reason
        if (found := _licensed(ancestor, catalogue, ())) is not None:
            return found
    return None


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


def _accepted(model: Pretrained, entry: CatalogueModel, reason: str | None = None) -> str | bool:
    """Return the name of the licence if the document accepts it. reason: why the licence applies if
    the base is not the model itself."""
    applies = f", which also applies here because {reason}" if reason else ""
    given = model.accept_licence
    if given is False:
        if entry.must_accept:
            raise LicenceNotAccepted(
                f"the model {entry.name!r} requires that you accept its licence, "
                f"{entry.licence!r}{applies}",
                pointer="/model/accept_licence",
                hint=f"read it with `dray model bases {entry.name}`, and set model.accept_licence "
                "to true",
            )
        return False
    if given is not True and given != entry.licence:
        raise LicenceNotAccepted(
            f"accepts the licence {given!r}, but the licence of the model {entry.name!r} is "
            f"{entry.licence!r}{applies}",
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
    is_named = any(
        one.is_named or _entry(one, catalogue) or _licensed(one, catalogue, ()) for one in bases
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
