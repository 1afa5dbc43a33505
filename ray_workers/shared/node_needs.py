"""The needs of a job on a node before its ranks start there, and how far the node is with them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class DataPolicy:
    """The sources that a rank may read, and a node's cache of data: the operator's settings.

    It holds no secrets, only the folder of their files.
    """

    cache_dir: str | None
    """Folder on each node; None for one in the machine's temporary folder."""
    cache_limit_bytes: int
    private_hosts: tuple[str, ...]
    """Names, addresses and networks (CIDR) that may be read from though they are private."""
    file_roots: tuple[str, ...] | None
    """Folders that `file://` sources must be in; None for any."""
    credentials_dir: str | None
    """Folder on each node with a file for each name that `data.credentials` can give."""
    s3_endpoint_url: str | None
    """The endpoint of `s3://`, if not AWS's."""

    @classmethod
    def open(cls, cache_dir: str | None = None) -> DataPolicy:
        """Every public host and every local file may be read, with nobody's credentials."""
        return cls(
            cache_dir=cache_dir,
            cache_limit_bytes=100 << 30,
            private_hosts=(),
            file_roots=None,
            credentials_dir=None,
            s3_endpoint_url=None,
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataPolicy:
        """The policy from JSON of `asdict`, which has lists for tuples."""
        fields: dict[str, Any] = dict(data)
        for name in ("private_hosts", "file_roots"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        return cls(**fields)


@dataclass(frozen=True)
class EnvironmentPolicy:
    """The operator's settings for environments. It holds no secrets, only the folder of their
    files."""

    secrets_dir: str | None
    """Folder on each node with a file for each name that `environment.secrets` can give."""
    limit_bytes: int
    """Most that the environments of a machine take together with the installer's cache."""
    build_limit_s: float
    """How long an environment may take to be built."""
    owner: str | None
    """The owner of the job that asks, who may have secrets besides those of all."""

    @classmethod
    def open(cls) -> EnvironmentPolicy:
        """The defaults of the settings."""
        return cls(secrets_dir=None, limit_bytes=20 << 30, build_limit_s=1800.0, owner=None)


@dataclass(frozen=True)
class CodeRef:
    """Uploaded code, for a node to fetch."""

    id: str
    manifest_url: str
    """Of its description, which says where in the storage each part of its files is."""
    manifest_sha256: str


@dataclass(frozen=True)
class RemoteCodeRef:
    """Code for a node to fetch from elsewhere: of `script.code`, either `git` and `commit`, or
    `url` and `sha256`."""

    git: str | None
    commit: str | None
    url: str | None
    sha256: str | None
    credentials: str | None
    """The name of a file with credentials, on the node."""
    policy: DataPolicy
    limit_bytes: int

    @property
    def digest(self) -> str:
        """Names the code on a node. The address is in it, since a commit's hash alone must not
        open one user's repository to another."""
        named = [self.git, self.commit, self.url, self.sha256, self.credentials]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()


@dataclass(frozen=True)
class NodeNeeds:
    """Everything that a node has to have before ranks of a job start there."""

    environment: Mapping[str, Any] | None
    """`JobSpec.environment` as JSON data."""
    keeps_all: bool
    """Whether no package of the node may be replaced, as for a recipe."""
    policy: EnvironmentPolicy
    code: RemoteCodeRef | None
    """Code that the node fetches itself."""


class JobNeed(StrEnum):
    """A kind of need that a node may have to prepare."""

    ENVIRONMENT = "environment"
    CODE = "code"


class BuildState(StrEnum):
    """How far a node is with an environment, or with code that it fetches."""

    READY = "ready"
    BUILDING = "building"
    FAILED = "failed"
    """Another try would end in the same way."""
    UNREACHABLE = "unreachable"
    """A server or a disk is at fault; the node tries again when it is asked again."""


@dataclass(frozen=True)
class NodeEnvironment:
    """How far a node is with what a job needs there."""

    need: JobNeed
    """The need that the answer is about: of two, the one that is not ready."""
    state: BuildState
    message: str
    """The installer's own sentence, where it failed."""
    packages: tuple[str, ...]
    """`name==version` of those that differ from the node's own, once it is ready."""
    replaced: tuple[str, ...]
    """Modules that training processes there have imported from elsewhere before they are forked."""
    log: str
    """The last lines of the installer and the setup commands."""


@dataclass(frozen=True)
class CodeProblem:
    """Why a node does not get a job's code."""

    message: str
    is_final: bool
    """Whether another try would end in the same way."""
