"""The sources of a job's data and code, as its document states them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def data_of(document: Mapping[str, Any]) -> tuple[list[str], str | None]:
    """Return the sources of a document's data, and the digest that the document requires."""
    data = document.get("data") or {}
    sources = data.get("sources") or ([data] if data.get("source") else [])
    return [one["source"] for one in sources], data.get("sha256")


def git_of(document: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the commit of the job's code, as in `dray.spec.program.origin.GitState`; None if it is
    unknown. Code that nodes fetch from a repository is never dirty."""
    code = (document.get("script") or {}).get("code")
    if isinstance(code, Mapping) and code.get("git"):
        return {"commit": code["commit"], "dirty": False, "branch": None}
    origin = document.get("origin") or {}
    git: dict[str, Any] | None = origin.get("git")
    return git
