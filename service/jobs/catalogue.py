"""Base models that documents name, and the acceptance of their licences."""

from __future__ import annotations

from typing import Any, Final, TypeVar
from urllib.parse import unquote

from dray.input.names import nearest
from dray.spec import JobSpec, Pretrained
from service.config.models_file import Catalogue, CatalogueModel
from service.domain.errors import InvalidDocument, LicenceNotAccepted

S = TypeVar("S", bound=JobSpec)
AT_BASE: Final = "/model/base"
MAX_NAMED = 10


def resolve(spec: S, catalogue: Catalogue) -> S:
    """Replace the name of a base model by its address. A URL of a model in the catalogue is
    treated like its name, because its licence applies as well.

    Raises InvalidDocument if there is no such model, and LicenceNotAccepted.
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
        "accept_licence": _accepted(model, entry),
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
    address = _plain(model.base)
    same = [one for one in catalogue.values() if _plain(one.base) == address]
    named = (one for one in same if one.name == model.catalogue)
    strict = (one for one in same if one.must_accept)
    return next(named, None) or next(strict, None) or next(iter(same), None)


def _plain(address: str) -> str:
    return unquote(address).rstrip("/")


def _unknown(name: str, catalogue: Catalogue) -> InvalidDocument:
    names = list(catalogue)
    if not names:
        return InvalidDocument(
            f"names the model {name!r}, but this server has no catalogue of models",
            pointer=AT_BASE,
            hint="give the URL of a folder, such as file:///srv/models/llama",
        )
    hint = nearest(name, names) or "`dray models` lists the models"
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
                hint=f"read it with `dray models {entry.name}`, and set model.accept_licence to "
                "true",
            )
        return False
    if given is not True and given != entry.licence:
        raise LicenceNotAccepted(
            f"accepts the licence {given!r}, but the licence of the model {entry.name!r} is "
            f"{entry.licence!r}",
            pointer="/model/accept_licence",
            hint=f"read it with `dray models {entry.name}`, and accept it by its name",
        )
    return entry.licence or False


def _refuse_sweep(
    spec: JobSpec, model: Pretrained, entry: CatalogueModel | None, catalogue: Catalogue
) -> None:
    """Refuse a sweep over models of the catalogue, which are looked up only at submission."""
    swept = spec.sweep.parameters if spec.sweep is not None else {}
    choices = (swept["model.base"].choices or ()) if "model.base" in swept else ()
    bases = [model.model_copy(update={"base": base}) for base in choices if isinstance(base, str)]
    is_named = any(one.is_named or _entry(one, catalogue) for one in bases)
    for name, is_refused in (
        ("model.base", is_named or (bool(bases) and entry is not None)),
        ("model.catalogue", "model.catalogue" in swept),
    ):
        if is_refused:
            raise InvalidDocument(
                f"can't vary {name} among models of the catalogue: submit a sweep for each model",
                pointer=f"/sweep/parameters/{name}",
            )
