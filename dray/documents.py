"""Strict and safe reading of job documents in YAML or JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Hashable, Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from dray.code.local import packed_code, with_upload
from dray.errors import SpecError
from dray.input.validation import MAX_DEPTH, TOO_DEEP
from dray.spec import JobSpec

MAX_DOCUMENT_BYTES = 1 << 20
MAX_DIGITS = 4_300
"""Maximum number of digits that int() reads."""
_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str", "int", "float", "bool", "null")
)


class _Loader(yaml.SafeLoader):
    """Loads only the data that JSON has, and refuses duplicate keys. PyYAML would silently use the
    last value of a duplicate key."""

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        # The scanner would take seconds for thousands of open brackets.
        if self.flow_level > MAX_DEPTH:
            raise yaml.scanner.ScannerError(None, None, TOO_DEEP, self.get_mark())
        super().fetch_flow_collection_start(token)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in _TAGS:
            message = f"the tag {node.tag[:100]!r} is not allowed"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (LookupError, ValueError):  # `!!int x`, or more digits than int() reads
            message = f"{str(node.value)[:40]!r} can't be read as a value of its type"
            if node.tag.endswith(":int") and len(node.value) > MAX_DIGITS:
                message = "a number has more than 4,300 digits"
            raise yaml.constructor.ConstructorError(None, None, message, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is not a string", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} appears twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not allowed", mark)
        return super().compose_node(parent, index)


def _core_scalars() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Return the core schema of YAML 1.2, in which JSON's scalars have the same meaning as in JSON.

    PyYAML implements YAML 1.1, in which `1e-3` is a string, `no` a boolean, `1:30` the number 90
    and `2024-01-01` a date.
    """
    core = (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
        (
            "float",
            r"[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+)"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
            "-+.0123456789",
        ),
        ("null", r"~|null|Null|NULL|", "~nN"),
    )
    resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    for kind, pattern, first_characters in core:
        rule = (f"tag:yaml.org,2002:{kind}", re.compile(rf"(?:{pattern})\Z"))
        for character in (*first_characters, *([""] if kind == "null" else [])):
            resolvers.setdefault(character, []).append(rule)
    return resolvers


_Loader.yaml_implicit_resolvers = _core_scalars()


def parse_yaml(text: str, *, source: str) -> Any:
    """Parse YAML or JSON into plain data. Raises SpecError with `source`, line and column."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader, see above
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise SpecError(f"{source}{where}: {error.problem}") from None
    # An escape such as "\UFFFFFFFF" is beyond the range of chr().
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise SpecError(f"{source} is not YAML or JSON: {error}") from None


def position_of(text: str, pointer: str) -> tuple[int, int] | None:
    """Return the line and column, starting at 1, of the value to which the JSON pointer refers in a
    YAML document, or of the nearest object that would contain it. None if the document is empty.
    """
    node = yaml.compose(text, Loader=_Loader)
    if node is None:
        return None
    at = node.start_mark
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, yaml.MappingNode):
            found = next(((k, v) for k, v in node.value if k.value == key), None)
        elif isinstance(node, yaml.SequenceNode) and key.isdigit() and int(key) < len(node.value):
            found = (node.value[int(key)], node.value[int(key)])
        else:
            found = None
        if found is None:
            break
        at, node = found[0].start_mark, found[1]
    return at.line + 1, at.column + 1


def load_document(path: str | PathLike[str]) -> dict[str, Any]:
    """Load the job document from a YAML or JSON file without validation; `-` is standard input.

    Raises SpecError if the file can't be read, is not a mapping, or contains a key twice.
    """
    path = Path(path)
    if str(path) == "-":
        return _mapping(_standard_input(), source="standard input")
    try:
        if path.stat().st_size > MAX_DOCUMENT_BYTES:
            raise SpecError(
                f"{path} is larger than {MAX_DOCUMENT_BYTES} bytes, the maximum size of a job "
                "document"
            )
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8 text") from None
    return _mapping(text, source=str(path))


def _standard_input() -> str:
    try:
        return sys.stdin.read(MAX_DOCUMENT_BYTES)
    except UnicodeDecodeError:
        raise SpecError("standard input is not UTF-8 text") from None


def _mapping(text: str, *, source: str) -> dict[str, Any]:
    if source.endswith(".py"):
        raise SpecError(_no_document(source))
    document = parse_yaml(text, source=source)
    if not isinstance(document, dict):
        raise SpecError(
            f"{source} is not a job document, which is a mapping such as `name: digits`; "
            "run `dray init` to create one"
        )
    return document


def _no_document(script: str) -> str:
    """Return the error message for a training script that was given instead of a job document."""
    return (
        f"{script} is a training script; submit a job document that names it instead. Save "
        "this as job.yaml and submit that file:\n"
        f"  script: {{entrypoint: {json.dumps(str(Path(script).absolute()))}}}\n"
        "  resources: {num_workers: 1}\n"
        f"or create a document with all fields: dray init {script}"
    )


def load_spec(path: str | PathLike[str]) -> JobSpec:
    """Load a job from a YAML or JSON file and validate it as the server does. If the document names
    a folder as its code, the folder is replaced by the id that the uploaded code would have.

    Raises SpecError with the invalid field if the document is not a valid job.
    """
    document = load_document(path)
    packed = packed_code(document, folder_of(path))
    if packed is not None:
        document = with_upload(document, packed)
    return check(document, source=str(path))


def folder_of(path: str | PathLike[str]) -> Path:
    """Return the folder to which paths in a document are relative: the folder of the document, or
    the current folder for standard input."""
    return Path() if str(path) == "-" else Path(path).parent


def validate(spec: Mapping[str, Any] | str | PathLike[str]) -> JobSpec:
    """Check a job document, given as a mapping or a file, without a server.

    Raises SpecError with the same pointer, message and hint as the server. Conditions that only the
    server can check (such as the size of the cluster, the data, or other jobs) are not checked.
    """
    if isinstance(spec, Mapping):
        return check(spec, source=None)
    return load_spec(spec)


def check(document: Mapping[str, Any], *, source: str | None) -> JobSpec:
    """Return `document` as a JobSpec. Raises SpecError with `source`, the invalid field and the
    reason."""
    from dray.input import validation

    try:
        validation.check_values(document)
        return validation.check(document)
    except validation.Fault as fault:
        raise SpecError(
            fault.detail, source=source, pointer=fault.pointer, hint=fault.hint
        ) from None


def apply_settings(document: Mapping[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return a copy of `document` with each setting `a.b.c=value` applied, with values in YAML.

    Raises SpecError if a setting has no `=`, has an empty name, or refers to a field of a value
    that has no fields.
    """
    fields = []
    for setting in settings:
        dotted, equals, text = setting.partition("=")
        if not equals or not all(dotted.split(".")):
            raise SpecError(f"--set {setting}: write it as field=value, such as train.epochs=3")
        fields.append((dotted, parse_yaml(text, source=f"--set {dotted}")))
    return with_fields(document, fields)


def with_fields(document: Mapping[str, Any], fields: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return a copy of `document` in which these fields, given as (dotted path, value), are set.

    Raises SpecError for a field of a value that has no fields.
    """
    changed = dict(document)
    for dotted, value in fields:
        names = dotted.split(".")
        parent = changed
        for depth, name in enumerate(names[:-1], start=1):
            below = parent.get(name)
            if below is not None and not isinstance(below, Mapping):
                raise SpecError(f"--set {dotted}: {'.'.join(names[:depth])} has no fields")
            parent[name] = dict(below or {})
            parent = parent[name]
        parent[names[-1]] = value
    return changed
