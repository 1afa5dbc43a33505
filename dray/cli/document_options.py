"""Options of `dray submit` that add packages, environment variables and metrics to a document."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from dray.code.packing import PackedCode


def with_environment(
    document: dict[str, Any], requirements: Path | None, variables: list[str]
) -> dict[str, Any]:
    """Return the document with the packages and environment variables from the options."""
    from dray.code.packages import read_requirements

    found: dict[str, Any] = dict(document.get("environment") or {})
    if requirements is not None:
        try:
            found["requirements"] = read_requirements(requirements)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
            raise typer.BadParameter(f"{requirements} can't be read: {reason}") from None
    for given in variables:
        name, equals, value = given.partition("=")
        if not equals:
            raise typer.BadParameter(f"--env must have the form NAME=VALUE, but {given!r} has no =")
        found["env"] = {**found.get("env", {}), name: value}
    return {**document, "environment": found} if found else document


def with_found_packages(document: dict[str, Any], packed: PackedCode) -> dict[str, Any]:
    """Return the document with the packages that the uploaded folder lists, unless the document or
    an option already names packages."""
    from dray.cli.display.output import warn
    from dray.code.packages import PackagesUnreadable, find_packages

    environment = dict(document.get("environment") or {})
    if environment.get("requirements") is not None or environment.get("python_packages"):
        return document
    try:
        found = find_packages(packed.root, {file.path for file in packed.files})
        if found is None:
            return document
        _check_requirements(found.source, found.requirements)
    except PackagesUnreadable as error:
        warn(
            f"no packages will be installed for the job: {error}; use --requirements FILE to "
            "list the packages"
        )
        return document
    if found.without is not None:
        warn(
            f"{found.without}: installing the packages listed in {found.source}, but not in the "
            "versions that the lock file pins"
        )
    count = "1 package" if found.num_packages == 1 else f"{found.num_packages} packages"
    warn(f"{count} from {found.source} will be installed, unless --no-packages is given")
    return {**document, "environment": {**environment, "requirements": found.requirements}}


def _check_requirements(source: str, text: str) -> None:
    """Raise PackagesUnreadable if these requirements are not allowed in a job."""
    from pydantic import ValidationError

    from dray.code.packages import PackagesUnreadable
    from dray.spec import Environment

    try:
        Environment(requirements=text)
    except ValidationError as error:
        why = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise PackagesUnreadable(f"{source}: {why}") from None


def with_metrics(document: dict[str, Any], metrics: list[str]) -> dict[str, Any]:
    """Return the document with the metrics from the options, which replace metrics of the same
    name."""
    found = {}
    for given in metrics:
        name, equals, pattern = given.partition("=")
        if not (name and equals and pattern):
            raise typer.BadParameter(
                "--metric must have the form NAME=PATTERN, such as 'train/loss=loss: "
                f"([0-9.]+)', not {given!r}"
            )
        found[name] = {"name": name, "pattern": pattern}
    others = [each for each in document.get("metrics") or [] if each.get("name") not in found]
    return {**document, "metrics": [*others, *found.values()]} if found else document
