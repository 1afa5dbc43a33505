"""Finds the document fields that the program reads, by the types of its expressions.

Types are followed through annotations, assignments, loops, attributes and results, by class names,
so `optimizer.lr` does not count as a read of `server.lr`. JSON keys count for a part if the mapping
has the name of a field that holds the part, as in `train["seed"]`.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import dray.spec
from tests.generated.documents.fields import classes, models_in

ROOT = Path(__file__).resolve().parents[3]
CODE = ("api", "dray", "ray_workers", "service")
SPEC = "dray/spec"
CHECKS = (
    SPEC,
    "dray/cli",
    "dray/input",
    "service/domain/init_from",
    "service/planning/model/memory.py",
)
"""Reads in these modules have no effect on a job: they only check, estimate, compare or show."""
SPEAKS_OF_DOCUMENTS = re.compile("(?<![a-z])(spec|document|federated)(?![a-z])")
"""Content of files that import `dray.spec`, or have a document available."""
Types = frozenset[str]
"""Names of classes."""
NONE: Types = frozenset()
UNPACKED = "*"
"""Represents the parts of a tuple with names."""
SAME = frozenset({"get", "values", "items", "pop", "model_copy", "setdefault"})
"""Methods whose result is, or contains, the mapping or the part itself."""
THROUGH = frozenset(
    {
        *("list", "tuple", "sorted", "set", "enumerate", "zip", "reversed", "next", "iter", "max"),
        *("min", "cast", "replace", "deepcopy", "dict", "map", "filter", "model_validate"),
    }
)
"""Functions whose result is, or contains, one of their arguments."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Program:
    """The classes and functions of all files, and the document fields that each function reads."""

    def __init__(self) -> None:
        self.models = {model.__name__: model for model in classes()}
        self.held_by = self._places()
        self.aliases = self._aliases()
        self.trees = {
            path: ast.parse(text)
            for folder in CODE
            for path in sorted((ROOT / folder).rglob("*.py"))
            if SPEAKS_OF_DOCUMENTS.search(text := path.read_text())
        }
        self.bases: dict[str, list[str]] = defaultdict(list)
        self.attributes: dict[tuple[str, str], Types] = defaultdict(frozenset)
        self.results: dict[str, Types] = defaultdict(frozenset)
        self._above: dict[str, set[str]] = {}
        self._learn_classes()
        self.readings = [
            (str(path.relative_to(ROOT)), Reading(self, function, owner))
            for path, tree in self.trees.items()
            for function, owner in functions(tree)
        ]
        for _ in range(3):  # the type of an attribute can depend on another's
            for _, reading in self.readings:
                reading.learn()

    def _places(self) -> dict[str, set[str]]:
        """Return, for each class, the names of the fields that hold it."""
        found: dict[str, set[str]] = defaultdict(set)
        for model in self.models.values():
            for name, field in model.model_fields.items():
                for inner in models_in(field.annotation):
                    found[inner.__name__].add(name)
        return found

    def _aliases(self) -> dict[str, Types]:
        """Return the names in `dray.spec` that stand for parts, such as unions of them."""
        found: dict[str, Types] = {}
        for module in pkgutil.walk_packages(dray.spec.__path__, "dray.spec."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if not isinstance(value, type) and (models := [*models_in(value)]):
                    found[name] = frozenset(model.__name__ for model in models)
        return found

    def _learn_classes(self) -> None:
        for model in self.models.values():
            for name, field in model.model_fields.items():
                inner = (one.__name__ for one in models_in(field.annotation))
                self.add(model.__name__, name, frozenset(inner))
        classes_there = [
            node
            for tree in self.trees.values()
            for node in tree.body
            if isinstance(node, ast.ClassDef)
        ]
        for node in classes_there:
            self.bases[node.name] += [name for base in node.bases for name in named(base)]
        for node in classes_there:
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                    types = self.annotated(part.annotation)
                    self.add(node.name, part.target.id, types)
                    if "NamedTuple" in self.bases[node.name]:
                        self.add(node.name, UNPACKED, types)
        for tree in self.trees.values():
            for function, owner in functions(tree):
                if isinstance(function, Function):
                    result = self.annotated(function.returns)
                    if owner is None:
                        self.results[function.name] |= result
                    else:
                        self.add(owner, function.name, result)

    def add(self, owner: str, attribute: str, types: Types) -> None:
        self.attributes[owner, attribute] |= types

    def annotated(self, annotation: ast.expr | None) -> Types:
        found: set[str] = set()
        for name in named(annotation):
            found |= self.aliases.get(name, {name} if name in self.bases else NONE)
        return frozenset(found)

    def attribute(self, types: Types, name: str) -> Types:
        found: set[str] = set()
        for one in types:
            for each in self.with_bases(one):
                found |= self.attributes.get((each, name), NONE)
        return frozenset(found)

    def with_bases(self, name: str) -> set[str]:
        if name not in self._above:
            self._above[name] = {name}
            for base in self.bases.get(name, ()):
                self._above[name] |= self.with_bases(base)
        return self._above[name]

    def read(self) -> set[str]:
        """Return `Class.field` for each field that is read outside of the document checks, or in a
        function of `dray.spec` that is not a check and whose name is used elsewhere."""
        read, names = set[str](), set[str]()
        inside: dict[str, tuple[set[str], set[str]]] = defaultdict(lambda: (set(), set()))
        for path, reading in self.readings:
            of = read, names
            if path.startswith(CHECKS):
                if not path.startswith(SPEC) or is_check(reading.function):
                    continue
                of = inside[getattr(reading.function, "name", "")]
            fields, called = reading.fields()
            of[0].update(fields)
            of[1].update(called)
        while reached := inside.keys() & names:
            for name in reached:
                fields, called = inside.pop(name)
                read |= fields
                names |= called
        return read


class Reading:
    """One function: the types of its names, and the fields that it reads."""

    def __init__(self, program: Program, function: ast.AST, owner: str | None) -> None:
        self.program = program
        self.function = function
        self.owner = owner
        self.names: dict[str, Types] = defaultdict(frozenset)
        self.json: dict[str, set[str]] = defaultdict(set)
        """Field names from which a name that holds JSON was assigned."""
        self.nodes = list(walk(function))
        self.assigned = [pair for node in self.nodes for pair in assigned(node)]
        if isinstance(function, Function):
            self._take_arguments(function.args)

    def _take_arguments(self, given: ast.arguments) -> None:
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs):
            self.names[argument.arg] = self.program.annotated(argument.annotation)
            if argument.arg == "self" and self.owner:
                self.names["self"] = frozenset({self.owner})

    def learn(self) -> None:
        """Follow the assignments, and record the types of attributes of `self`."""
        for target, value in self.assigned:
            self._assign(target, value)

    def _assign(self, target: ast.AST, value: ast.expr) -> None:
        types = self.types(value)
        if isinstance(target, ast.Tuple):
            types |= self.program.attribute(types, UNPACKED)
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                self.names[part.id] |= types
                self.json[part.id] |= self.places(value)
        if isinstance(target, ast.Attribute):
            for one in self.types(target.value):
                self.program.add(one, target.attr, types)

    def types(self, node: ast.expr | None) -> Types:
        match node:
            case ast.Name(id=name):
                return self.names.get(name, NONE) or (
                    frozenset({name}) if name in self.program.bases else NONE
                )
            case ast.Attribute(value=value, attr=name):
                found = self.program.attribute(self.types(value), name)
                return found or (frozenset({name}) if name in self.program.bases else NONE)
            case ast.Call(func=function):
                return self._result(node, function)
            case ast.Subscript(value=value) | ast.Await(value=value) | ast.Starred(value=value):
                return self.types(value)
            case ast.NamedExpr(value=value):
                return self.types(value)
            case ast.IfExp(body=first, orelse=second):
                return self.types(first) | self.types(second)
            case ast.BoolOp(values=several) | ast.List(elts=several) | ast.Tuple(elts=several):
                return frozenset().union(*map(self.types, several))
            case ast.Dict(values=several):
                return frozenset().union(*map(self.types, several))
            case ast.ListComp(elt=one) | ast.GeneratorExp(elt=one) | ast.SetComp(elt=one):
                return self.types(one)
            case ast.DictComp(value=one):
                return self.types(one)
        return NONE

    def _result(self, call: ast.Call, function: ast.expr) -> Types:
        match function:
            case ast.Attribute(value=value, attr=name) if name in SAME:
                return self.types(value)
            case ast.Attribute(value=value, attr=name):
                own = self.types(value)
                found = self.program.attribute(own, name)
            case ast.Name(id=name):
                own, found = NONE, NONE
            case _:
                return NONE
        if name in THROUGH:
            return own.union(*map(self.types, call.args))
        if name in self.program.bases:
            return frozenset({name})
        return found or self.program.results.get(name, NONE)

    def places(self, node: ast.AST | None) -> set[str]:
        """Return the names by which a JSON mapping is known."""
        match node:
            case ast.Name(id=name):
                return {name.lstrip("_")} | self.json.get(name, set())
            case ast.Attribute(attr=name):
                return {name.lstrip("_")}
            case ast.Subscript(value=value, slice=key):
                return {key.value} if is_text(key) else self.places(value)
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[key, *_]):
                return {key.value} if name == "get" and is_text(key) else self.places(value)
            case ast.Call(func=ast.Attribute(value=value)):
                return self.places(value)
            case ast.Call(args=several) | ast.BoolOp(values=several):
                return set().union(*map(self.places, several))
            case ast.IfExp(body=first, orelse=second):
                return self.places(first) | self.places(second)
        return set()

    def fields(self) -> tuple[set[str], set[str]]:
        """Return (`Class.field` of each read, names of all attributes and functions)."""
        read, names = set[str](), set[str]()
        for node in self.nodes:
            match node:
                case ast.Attribute(value=value, attr=name, ctx=ast.Load()):
                    names.add(name)
                    read |= self._of_parts(self.types(value), name)
                case ast.MatchClass(cls=cls, kwd_attrs=attributes):
                    for name in attributes:
                        read |= self._of_parts(self.program.annotated(cls), name)
                case ast.Subscript(value=value, slice=key) if is_text(key):
                    read |= self._of_json(value, key.value)
                case ast.Call(func=ast.Attribute(value=value, attr="get"), args=[key, *_]) if (
                    is_text(key)
                ):
                    read |= self._of_json(value, key.value)
                case ast.Call(func=ast.Name(id="getattr"), args=[value, key, *_]) if is_text(key):
                    read |= self._of_parts(self.types(value), key.value)
                case ast.keyword(
                    arg=None, value=ast.Call(func=ast.Attribute(value=value, attr=name))
                ):
                    if name == "model_dump":
                        types = self.types(value)
                        read |= {
                            f"{one}.{field}" for one in types for field in self._fields_of(one)
                        }
                case ast.Name(id=name, ctx=ast.Load()):
                    names.add(name)
        return read, names

    def _of_parts(self, types: Types, name: str) -> set[str]:
        return {f"{one}.{name}" for one in types if name in self._fields_of(one)}

    def _fields_of(self, name: str) -> Iterable[str]:
        model = self.program.models.get(name)
        return () if model is None else model.model_fields

    def _of_json(self, value: ast.expr, key: str) -> set[str]:
        places = self.places(value)
        return {
            f"{name}.{key}"
            for name, model in self.program.models.items()
            if key in model.model_fields
            and (name == "JobSpec" or places & self.program.held_by[name])
        }


def functions(tree: ast.AST, owner: str | None = None) -> Iterator[tuple[ast.AST, str | None]]:
    """Yield each function with the class to which it belongs, and the code outside of functions."""
    rest = ast.Module(body=[], type_ignores=[])
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, node.name)
        elif isinstance(node, Function):
            yield node, owner
        elif isinstance(node, ast.stmt):
            rest.body.append(node)
    if owner is None:
        yield rest, None


def is_check(function: ast.AST) -> bool:
    """Whether it is called only when a document is created."""
    if not isinstance(function, Function):
        return False
    decorators = map(ast.unparse, function.decorator_list)
    return function.name.startswith(("check_", "_check")) or any(
        "validator" in decorator for decorator in decorators
    )


def assigned(node: ast.AST) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Return the targets of an assignment, and the value or its container."""
    match node:
        case ast.Assign(targets=targets, value=value):
            yield from ((target, value) for target in targets)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            yield target, value
        case ast.NamedExpr(target=target, value=value):
            yield target, value
        case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
            yield target, value
        case ast.comprehension(target=target, iter=value):
            yield target, value
        case ast.withitem(optional_vars=target, context_expr=value) if target is not None:
            yield target, value
        case ast.Match(subject=value, cases=cases):
            for case in cases:
                for part in ast.walk(case.pattern):
                    if isinstance(part, ast.MatchAs) and part.name:
                        yield ast.Name(part.name), value


def named(annotation: ast.AST | None) -> Iterator[str]:
    """Return the names in an annotation, even if it is a string."""
    for node in ast.walk(annotation) if annotation is not None else ():
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                yield name
            case ast.Constant(value=str(text)):
                yield from named(ast.parse(text, mode="eval")) if text.isidentifier() else ()


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Like `ast.walk`, which takes three times as long."""
    left = [node]
    while left:
        one = left.pop()
        yield one
        for value in vars(one).values():
            if isinstance(value, list):
                left += [inner for inner in value if isinstance(inner, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                left.append(value)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
