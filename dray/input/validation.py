"""Validation of documents, which reports an error as one sentence with its location and a
suggestion.

The server and the client use the same functions, so the client finds the same errors without a
connection.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from dray.input.names import nearest
from dray.spec import JobSpec, Sweep
from dray.spec.authoring.synonyms import MEANT, MEANT_VALUES, as_ours
from dray.spec.fields import TAG_FIELDS

MAX_DEPTH = 32
"""Maximum nesting of objects and lists in a document."""
MAX_FAULTS = 20
"""Maximum number of errors to process per document, so that a document with thousands of errors
can't keep a server busy."""
TOO_DEEP = f"the document is nested deeper than {MAX_DEPTH} levels"

_PLAINLY = (
    ("Value error, ", ""),
    ("Input should be a valid number", "must be a number"),
    ("Input should be a valid tuple", "must be a list"),
    ("Input should", "must"),
    ("String should", "must"),
    ("List should", "must"),
    ("Value should", "must"),
    ("Tuple should", "must"),
    ("Dictionary should", "must"),
)

D = TypeVar("D", bound=BaseModel)
Error = Mapping[str, Any]
"""An item of pydantic's `ValidationError.errors()`."""


class Fault(ValueError):
    """An error in a document. `code` is the API's problem code, and `pointer` is the JSON pointer
    (RFC 6901) of the invalid field."""

    def __init__(
        self, code: str, detail: str, pointer: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.pointer = pointer
        self.hint = hint


def check(document: Mapping[str, Any]) -> JobSpec:
    """Return the document as a JobSpec. Raises Fault with the first invalid field and
    the reason."""
    spec = check_as(JobSpec, document)
    if spec.sweep is not None:
        _check_values_of(spec, spec.sweep)
    return spec


def _check_values_of(spec: JobSpec, sweep: Sweep) -> None:
    """Raise Fault if a sweep parameter is not a field of the recipe's document, or has a value that
    the field can never have. Conflicts between values are found later, in each trial's document."""
    if spec.recipe is None:
        return
    for name, parameter in sweep.parameters.items():
        for value in parameter.extremes:
            document = spec.of_trial({name: value})
            try:
                JobSpec.model_validate(document)
            except ValidationError as error:
                own = [e for e in error.errors(include_url=False) if _is_of(e, name, document)]
                if not own:
                    continue
                fault = _first_of(own, document, JobSpec)
                raise Fault(
                    fault.code,
                    f"with the value {_cut(json.dumps(value))}: {fault.detail}",
                    f"/sweep/parameters/{_escaped(name)}",
                    fault.hint,
                ) from None


def _is_of(error: Error, name: str, document: Mapping[str, Any]) -> bool:
    """Whether an error concerns the named field itself, regardless of other fields."""
    field, location = f"/{name.replace('.', '/')}", _pointer(error, document, JobSpec)
    if error["type"] == "wrong_together":
        return False
    if error["type"] == "value_error":
        return location == field
    return f"{field}/".startswith(f"{location}/")


def check_as(kind: type[D], document: Mapping[str, Any]) -> D:
    """Like `check`, but for any kind of document."""
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise _first_of(error.errors(include_url=False), document, kind) from None


def check_values(document: Any) -> None:
    """Raise Fault if the document is nested too deeply, or contains a string that a database can't
    store."""
    level: list[tuple[str, Any]] = [("", document)]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        below: list[tuple[str, Any]] = []
        for pointer, value in level:
            if isinstance(value, str):
                _check_text(value, pointer)
            elif isinstance(value, Mapping):
                for key, inner in value.items():
                    _check_text(key, pointer)
                    below.append((f"{pointer}/{_escaped(key)}", inner))
            elif isinstance(value, list):
                # Skip numbers, because building pointers for thousands of numbers would be slow.
                below += [
                    (f"{pointer}/{index}", inner)
                    for index, inner in enumerate(value)
                    if isinstance(inner, str | Mapping | list)
                ]
        level = below
    if level:
        raise Fault("malformed_request", TOO_DEEP)


def _check_text(text: Any, pointer: str) -> None:
    if isinstance(text, str) and (
        "\0" in text or (not text.isascii() and re.search("[\ud800-\udfff]", text))
    ):
        detail = "must not contain NUL or an unpaired surrogate"
        raise Fault("invalid_document", detail, pointer)


def _escaped(part: Any) -> str:
    return str(part).replace("~", "~0").replace("/", "~1")


def plainly(message: str) -> str:
    """Return pydantic's message in a form that can follow the name of a field."""
    for theirs, ours in _PLAINLY:
        if message.startswith(theirs):
            return ours + message.removeprefix(theirs)
    return message


def _first_of(errors: Iterable[Error], document: Mapping[str, Any], root: type[BaseModel]) -> Fault:
    """Return one Fault for all errors. The Fault describes the first invalid field, and lists the
    names of the other invalid fields."""
    found: dict[str, list[Error]] = {}
    for error in islice(errors, MAX_FAULTS):
        found.setdefault(_pointer(error, document, root), []).append(error)
    pointer, at_first = next(iter(found.items()))
    detail = "; or ".join(dict.fromkeys(_message(error) for error in at_first))
    others = [_cut(name) or "the document" for name in found if name != pointer]
    if others:
        more = " and more" if len(others) > 5 else ""
        detail += f"; also wrong: {', '.join(others[:5])}{more}"
    return Fault("invalid_document", detail, pointer, _hint(at_first[0], pointer, root))


def _pointer(error: Error, document: Any, root: type[BaseModel]) -> str:
    """Return the JSON pointer of an error: pydantic's location without the parts that name
    types."""
    if error["type"] == "wrong_together":
        pointer: str = error["ctx"]["pointer"]
        return pointer
    location: Sequence[Any] = error["loc"]
    pointer, here = "", document
    models = [root]
    for part in location:
        chosen = _tagged(models, part)
        if chosen is not None:
            models = [chosen]
            continue
        is_item = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if is_item or (isinstance(here, Mapping) and part in here):
            here = here[part]
        elif isinstance(here, Mapping) and error["type"] == "missing":
            here = None
        else:
            break
        models = _models_of(models, part)
        pointer += f"/{_escaped(part)}"
    is_untagged = error["type"].startswith("union_tag_")
    return f"{pointer}/{_tag_field(error)}" if is_untagged else pointer


def _tag_field(error: Error) -> str:
    """Return the field that selects one of the types of a union."""
    return str(error["ctx"]["discriminator"]).strip("'")


def _message(error: Error) -> str:
    match error["type"]:
        case "extra_forbidden":
            return f"there is no field {_shown(error['loc'][-1])}"
        case "missing":
            return f"the field {error['loc'][-1]!r} is missing"
        case "model_type" | "model_attributes_type" | "dict_type":
            return "must be an object with fields"
        case "union_tag_invalid":
            return f"must be one of {error['ctx']['expected_tags']}"
        case "union_tag_not_found":
            return f"the field {_tag_field(error)!r} is missing"
        case "float_type" if type(error["input"]) is int:  # too large for a float
            return "must be a finite number"
        case _:
            return plainly(str(error["msg"]))


def _shown(name: Any) -> str:
    return repr(_cut(str(name)))


def _cut(text: str) -> str:
    """Truncate the text to 100 characters, followed by an ellipsis."""
    return text if len(text) <= 100 else f"{text[:100]}..."


def _hint(error: Error, pointer: str, root: type[BaseModel]) -> str | None:
    """Suggest a correction, usually a field with a similar name."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        *parents, name = error["loc"]
        candidates = list(_fields_at(parents, root))
        listed = f"its fields are {', '.join(candidates)}" if candidates else None
        return (
            _meant(str(name), pointer, root)
            or _of_another_kind(parents, str(name), root)
            or _elsewhere(str(name), pointer, root)
            or nearest(str(name), candidates)
            or listed
        )
    if kind == "union_tag_invalid":
        return nearest(context["tag"], _quoted(context["expected_tags"]))
    if kind == "string_type" and not isinstance(error.get("input"), list | Mapping | None):
        return "write it in quotes"
    if kind in ("literal_error", "enum") and isinstance(error.get("input"), str):
        choices = _quoted(str(context.get("expected", "")))
        meant = MEANT_VALUES.get(as_ours(error["input"]))
        return nearest(meant if meant in choices else error["input"], choices)
    return None


def _quoted(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _of_another_kind(parents: Sequence[Any], name: str, root: type[BaseModel]) -> str | None:
    """Suggest other types of a union if they have the field and the chosen type does not."""
    if not parents:
        return None
    models = _models_at(parents[:-1], root)
    chosen = _tagged(models, parents[-1])
    others = [m for m in models if m is not chosen and name in m.model_fields]
    if chosen is None or not others:
        return None
    tag = next(field for field in TAG_FIELDS if field in chosen.model_fields)
    names = " or ".join(str(model.model_fields[tag].default) for model in others)
    return f"this field requires {tag}: {names}"


def _elsewhere(name: str, pointer: str, root: type[BaseModel]) -> str | None:
    """Suggest a field of the same name in another part of the document: `epochs` belongs in
    `train`.

    Never suggests the path `pointer` itself, even if another model has a field at that path.
    """
    parts: list[tuple[str, list[type[BaseModel]]]] = [("", [root])]
    for part, models in parts:
        for field in dict.fromkeys(field for model in models for field in model.model_fields):
            location = f"{part}/{field}"
            if field == name and location != pointer:
                return f"did you mean {location!r}?"
            below = _models_of(models, field)
            if below:
                parts.append((location, below))
    return None


def _meant(name: str, pointer: str, root: type[BaseModel]) -> str | None:
    """Suggest dray's name for a field that other programs name differently: `batch_size` is
    `global_batch_size`."""
    ours = as_ours(name) if len(name) <= 100 else ""
    location = MEANT.get(ours)
    if location is None or not issubclass(root, JobSpec):
        return None
    part, _, field = location.rpartition("/")
    is_here = part == pointer.rpartition("/")[0]
    return f"did you mean {(field if is_here else location)!r}?"


def _fields_at(parents: Iterable[Any], root: type[BaseModel]) -> Iterator[str]:
    """Yield the names of the fields in the part of the document at `parents`."""
    models = _models_at(parents, root)
    yield from dict.fromkeys(name for model in models for name in model.model_fields)


def _models_at(parents: Iterable[Any], root: type[BaseModel]) -> Sequence[type[BaseModel]]:
    """Return the possible models of the part of the document at `parents`."""
    models = [root]
    for parent in parents:
        chosen = _tagged(models, parent)
        models = [chosen] if chosen is not None else _models_of(models, parent)
    return models


def _tagged(models: Sequence[type[BaseModel]], part: Any) -> type[BaseModel] | None:
    """If `part` of a location is the tag of a model in a union, return this model."""
    if len(models) < 2:
        return next((model for model in models if model.__name__ == part), None)
    return next((model for model in models if part in _tags(model)), None)


def _tags(model: type[BaseModel]) -> list[Any]:
    """Return the values of the fields by which unions select a model."""
    fields = model.model_fields
    return [fields[name].default for name in TAG_FIELDS if name in fields]


def _models_of(models: Iterable[type[BaseModel]], field: Any) -> list[type[BaseModel]]:
    fields = [m.model_fields[str(field)] for m in models if str(field) in m.model_fields]
    return [model for found in fields for model in _models_in(found.annotation)]


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
