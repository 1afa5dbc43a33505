"""The body of a submit: read within its limit, parsed strictly, checked, and hashed."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from fastapi import Request
from pydantic import BaseModel, ValidationError

from api.problems import Refused, plainly
from dray.spec import JobSpec

MAX_DEPTH = 32


async def read_json(request: Request, limit_bytes: int) -> dict[str, Any]:
    """The body as a JSON object; Refused if it is too large, not JSON, or ambiguous JSON."""
    _check_content_type(request.headers.get("content-type", ""))
    return parse(await _read(request, limit_bytes))


def _check_content_type(value: str) -> None:
    media_type, _, parameters = value.partition(";")
    charset = re.search(r'charset\s*=\s*"?([^\s;"]+)', parameters, re.IGNORECASE)
    if media_type.strip().lower() != "application/json":
        raise Refused(
            "unsupported_media_type",
            f"the content type is {value!r}, not application/json",
            hint="a YAML document is turned into JSON by `dray submit`",
        )
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise Refused("unsupported_media_type", f"the charset is {charset[1]!r}, not UTF-8")


async def _read(request: Request, limit_bytes: int) -> bytes:
    """The body; refused as soon as it is known to be too large, unread."""
    too_large = Refused("body_too_large", f"the body is larger than {limit_bytes} bytes")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit_bytes:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit_bytes:
            raise too_large
    return bytes(body)


def parse(body: bytes) -> dict[str, Any]:
    """A JSON object in UTF-8, each key once, no NaN, no text that a database can't hold."""
    try:
        document = json.loads(
            body.decode("utf-8"), object_pairs_hook=_each_key_once, parse_constant=_no_constant
        )
    except RecursionError:
        raise Refused("malformed_request", _TOO_DEEP) from None
    except UnicodeDecodeError:
        raise Refused("malformed_request", "the body is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise Refused("malformed_request", f"the body is not JSON: {error.msg} ({where})") from None
    except ValueError as error:
        raise Refused("malformed_request", f"the body is not JSON: {error}") from None
    if not isinstance(document, dict):
        raise Refused("malformed_request", "the body is JSON, but not an object")
    _check_values(document)
    return document


_TOO_DEEP = f"the body is nested deeper than {MAX_DEPTH} levels"


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise Refused("malformed_request", f"the key {key[:100]!r} appears twice")
        found[key] = value
    return found


def _no_constant(name: str) -> None:
    raise Refused("malformed_request", f"{name} is not JSON")


def _check_values(document: Any) -> None:
    """Bounded depth, and no NUL or lone surrogate in any text."""
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        if not level:
            return
        below: list[Any] = []
        for value in level:
            if isinstance(value, str):
                _check_text(value)
            elif isinstance(value, dict):
                below += value.keys()
                below += value.values()
            elif isinstance(value, list):
                below += value
        level = below
    if level:
        raise Refused("malformed_request", _TOO_DEEP)


def _check_text(text: str) -> None:
    if "\0" in text or (not text.isascii() and re.search("[\ud800-\udfff]", text)):
        raise Refused("malformed_request", "a text holds NUL or half of a surrogate pair")


def check(document: Mapping[str, Any]) -> JobSpec:
    """The document as a JobSpec; Refused names the first field at fault, and says why."""
    try:
        return JobSpec.model_validate(document)
    except ValidationError as error:
        raise _invalid(error.errors(include_url=False), document) from None


def fingerprint(document: Mapping[str, Any]) -> str:
    """SHA-256 of the document in canonical form: what an idempotency key stands for."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _invalid(errors: Iterable[Mapping[str, Any]], document: Mapping[str, Any]) -> Refused:
    """One problem of all that is wrong: the first field in full, the others by name."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        found.setdefault(_pointer(error, document), []).append(error)
    pointer, at_first = next(iter(found.items()))
    detail = "; or ".join(dict.fromkeys(_message(error) for error in at_first))
    others = [name or "the document" for name in found if name != pointer]
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        detail += f"; also wrong: {', '.join(others[:5])}{more}"
    return Refused("invalid_document", detail, pointer, _hint(at_first[0]))


def _pointer(error: Mapping[str, Any], document: Any) -> str:
    """RFC 6901, without the parts of pydantic's location that name types, not fields."""
    if error["type"] == "wrong_together":
        pointer: str = error["ctx"]["pointer"]
        return pointer
    pointer, here = "", document
    for part in error["loc"]:
        is_item = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if is_item or (isinstance(here, dict) and part in here):
            here = here[part]
        elif isinstance(here, dict) and error["type"] == "missing":
            here = None
        elif isinstance(here, dict) and here.get("name") == part:
            continue  # the tag of a model, which the location names between `model` and a field
        else:
            break
        pointer += "/" + str(part).replace("~", "~0").replace("/", "~1")
    return pointer


def _message(error: Mapping[str, Any]) -> str:
    match error["type"]:
        case "extra_forbidden":
            return f"there is no field {error['loc'][-1]!r}"
        case "missing":
            return f"the field {error['loc'][-1]!r} is missing"
        case _:
            return plainly(str(error["msg"]))


def _hint(error: Mapping[str, Any]) -> str | None:
    """What was probably meant, by likeness."""
    if error["type"] == "extra_forbidden":
        *parents, name = error["loc"]
        candidates = list(_fields_at(parents))
        close = difflib.get_close_matches(str(name), candidates, n=1)
        listed = f"its fields are {', '.join(candidates)}" if candidates else None
        return f"did you mean {close[0]!r}?" if close else listed
    if error["type"] == "literal_error" and isinstance(error.get("input"), str):
        candidates = re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))
        close = difflib.get_close_matches(error["input"], candidates, n=1)
        return f"did you mean {close[0]!r}?" if close else None
    return None


def _fields_at(parents: Iterable[Any]) -> Iterator[str]:
    """Names of the fields of the part of the document that `parents` leads to."""
    models: list[type[BaseModel]] = [JobSpec]
    for parent in parents:
        tagged = [m for m in models if "name" in m.model_fields and _default_name(m) == parent]
        if len(models) > 1 and tagged:
            models = tagged
            continue
        fields = [m.model_fields[str(parent)] for m in models if str(parent) in m.model_fields]
        models = [model for field in fields for model in _models_in(field.annotation)]
    for name in dict.fromkeys(name for model in models for name in model.model_fields):
        yield name


def _default_name(model: type[BaseModel]) -> Any:
    return model.model_fields["name"].default


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models_in(part)
