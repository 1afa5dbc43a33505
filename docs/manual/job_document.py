"""Generates the reference of the job document from the classes in `dray.spec`."""

from __future__ import annotations

from collections.abc import Iterable

from dray.spec.authoring.describing import Part, parts
from dray.spec.fields import TAG_FIELDS
from dray.spec.program.recipes import OPTIONAL, RECIPES
from dray.spec.training.parallel import MODELS_OF

_HEAD = """# The job document

This page lists every field of a job document. Omitted fields have their default values. Unknown
fields are refused with a suggestion, and so is a job that could never fit the cluster. Seconds can
also be written as a duration (`90s`, `2h`, `1h30m`), and bytes as a size (`500MB`, `8GiB`); the
stored document contains the number.

Jobs train on CPU unless `resources: {gpus_per_worker: 1}` gives each worker a GPU, or 0.5 [half of
one](../guides/placement.md#shared-gpus). Jobs start in the order of `priority`; among jobs with the
same priority, [the job with the least remaining work](../explanation/scheduling.md) comes first.

`dray init RECIPE` writes a document to start from. `dray schema` prints the JSON Schema, which the
server also serves at `/v1/schema`. Editors use the schema for completion if a document begins with

```yaml
# yaml-language-server: $schema=http://127.0.0.1:8420/v1/schema
```

The column *for* lists the recipes that use a field. A field that the job's recipe doesn't use is
refused, unless the field only modifies another setting.
"""

_SCRIPTS = frozenset(
    (
        *("version", "name", "labels", "resources", "after", "array", "sweep"),
        *("queue", "priority", "max_retries", "max_runtime_s"),
        *("begin_at", "deadline", "time_zone", "singleton"),
        "reservation",
    )
)
"""Fields of the document that scripts also use."""
_BLOCKS = ("gpt", "resnet", "unet")


def page() -> str:
    sections = [_HEAD, _recipes()]
    for part in parts():
        rows = [
            f"| `{field.name}` | {_cell(field.takes)} | {field.default} "
            f"| {users(part, field.name)} | {_cell(field.sentence)} |"
            for field in part.fields
        ]
        head = "| field | takes | default | for | meaning |\n|---|---|---|---|---|"
        sections.append(
            "\n".join([f"## {_title(part)}", "", part.sentence, "", head, *rows]).replace(
                "\n\n\n", "\n\n"
            )
            + "\n"
        )
    return "\n".join(sections)


def users(part: Part, field: str) -> str:
    """Returns the recipes that use the field, as text for a table cell."""
    path = f"{part.path}.{field}" if part.path else field
    top = path.partition(".")[0]
    if top in ("script", "metrics"):
        return "scripts"
    if top in _SCRIPTS:
        return "all, scripts"
    if part.path == "model" and part.variant:
        return _of_models(part.variant)
    if path == "train.recompute":
        return _of_models(*_BLOCKS)
    if part.path == "parallel" and field in MODELS_OF:
        return _of_models(*MODELS_OF[field])
    return _named(recipe for recipe in RECIPES if takes(recipe, path))


def takes(recipe: str, path: str) -> bool:
    """Whether a recipe uses a field that not all recipes use."""
    options = RECIPES[recipe]
    part, _, field = path.partition(".")
    option = field.partition(".")[0]
    if part == "data" and option in OPTIONAL:
        return options.reads(option)
    if path == "data.classes":
        return options.reads_masks
    return options.classifies if path == "train.label_smoothing" else True


def _of_models(*models: str) -> str:
    return _named(recipe for recipe, has in RECIPES.items() if {*models} & {*has.models})


def _named(recipes: Iterable[str]) -> str:
    found = list(recipes)
    return "all" if len(found) == len(RECIPES) else ", ".join(found)


def _recipes() -> str:
    rows = [
        f"| `{name}` | {_listed(has.models)} | {_listed(has.formats)} "
        f"| {_listed(has.sklearn_sets)} | {_listed(has.metrics)} |"
        for name, has in RECIPES.items()
    ]
    head = "| recipe | models | formats | of scikit-learn | metrics |\n|---|---|---|---|---|"
    return "\n".join(["## The recipes", "", "The first model is the default.", "", head, *rows, ""])


def _listed(words: tuple[str, ...]) -> str:
    return ", ".join(f"`{word}`" for word in words) or "none"


def _title(part: Part) -> str:
    if not part.path:
        return "The document"
    tag = next((name for name in TAG_FIELDS if any(f.name == name for f in part.fields)), "")
    return f"`{part.path}`" + (f" with the {tag} `{part.variant}`" if part.variant else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
