from __future__ import annotations

import subprocess
import sys

import pytest

import dray


def test_the_exported_names_are_these() -> None:
    assert sorted(dray.__all__) == [
        "AsyncClient",
        "Client",
        "JobSpec",
        "JobState",
        "Retry",
        "__version__",
        "errors",
        "load",
        "load_spec",
        "preview",
        "validate",
    ]


@pytest.mark.parametrize("name", dray.__all__)
def test_every_exported_name_is_there_and_listed(name: str) -> None:
    assert getattr(dray, name) is not None
    assert name in dir(dray)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Clint'"):
        dray.Clint  # noqa: B018


def imported_by(statement: str) -> set[str]:
    code = f"{statement}; import sys; print(' '.join(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_dray_loads_nothing_heavy() -> None:
    assert not imported_by("import dray") & {"httpx", "pydantic", "yaml", "rich", "typer", "torch"}


def test_the_client_needs_nothing_of_the_server() -> None:
    modules = imported_by("import dray; dray.Client; dray.AsyncClient; dray.load_spec")
    assert not modules & {"ray", "torch", "fastapi", "sqlalchemy", "numpy", "service", "api"}
