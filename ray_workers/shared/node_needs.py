"""Prerequisites for starting a job's ranks on a node, and their current state."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


@dataclass(frozen=True)
class ResultFile:
    """A file of a job's result in the storage."""

    name: str
    url: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class LicensedModel:
    """A model in the server's catalogue whose licence the job has not accepted."""

    name: str
    licence: str
    sha256: str
    """Hash of the model's files."""


@dataclass(frozen=True)
class DataPolicy:
    """The operator's settings for the sources that a rank may read, and for a node's data cache.

    The policy contains no secrets, only the path of the folder of secret files.
    """

    cache_dir: str | None
    """Folder on each node; None means a folder in the machine's temporary folder."""
    cache_limit_bytes: int
    private_hosts: tuple[str, ...]
    """Private names, addresses and networks (CIDR) from which data may be read."""
    file_roots: tuple[str, ...] | None
    """Folders in which `file://` sources must be; None allows any folder."""
    credentials_dir: str | None
    """Folder on each node with a file for each name that `data.credentials` may contain."""
    s3_endpoint_url: str | None
    """The endpoint for `s3://`; None means AWS."""
    result: tuple[ResultFile, ...]
    """The files of the job whose result the rank may read as `job://ID`."""
    uploads_url: str | None
    """URL of the folder with uploaded files, in the storage; None if there are no uploads."""
    licensed: tuple[LicensedModel, ...]
    """Models that a base with any address must not be a copy of."""

    @classmethod
    def open(cls, cache_dir: str | None = None) -> DataPolicy:
        """Return a policy that allows every public host and every local file, without
        credentials."""
        return cls(
            cache_dir=cache_dir,
            cache_limit_bytes=100 << 30,
            private_hosts=(),
            file_roots=None,
            credentials_dir=None,
            s3_endpoint_url=None,
            result=(),
            uploads_url=None,
            licensed=(),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DataPolicy:
        """Create the policy from the JSON of `asdict`, in which tuples are lists."""
        fields: dict[str, Any] = dict(data)
        for name in ("private_hosts", "file_roots"):
            fields[name] = None if fields[name] is None else tuple(fields[name])
        fields["result"] = tuple(ResultFile(**one) for one in fields["result"])
        fields["licensed"] = tuple(LicensedModel(**one) for one in fields["licensed"])
        return cls(**fields)


@dataclass(frozen=True)
class EnvironmentPolicy:
    """The operator's settings for environments. The settings contain no secrets, only the path of
    the folder of secret files."""

    secrets_dir: str | None
    """Folder on each node with a file for each name that `environment.secrets` may contain."""
    limit_bytes: int
    """Maximum total size in bytes of a machine's environments and the installer's cache."""
    build_limit_s: float
    """Maximum time that building an environment may take, in seconds."""
    owner: str | None
    """The owner of the job, who may have private secrets in addition to the secrets of all
    owners."""

    @classmethod
    def open(cls) -> EnvironmentPolicy:
        """Return a policy with the default settings."""
        return cls(secrets_dir=None, limit_bytes=20 << 30, build_limit_s=1800.0, owner=None)


@dataclass(frozen=True)
class CodeRef:
    """Uploaded code, for a node to fetch."""

    id: str
    manifest_url: str
    """URL of the manifest, which lists the location of each file part in the storage."""
    manifest_sha256: str


@dataclass(frozen=True)
class RemoteCodeRef:
    """Code that a node fetches from a Git repository or a URL. Either `git` and `commit` or `url`
    and `sha256` are set, as in `script.code`."""

    git: str | None
    commit: str | None
    url: str | None
    sha256: str | None
    credentials: str | None
    """Name of a file with credentials on the node."""
    policy: DataPolicy
    limit_bytes: int

    @property
    def digest(self) -> str:
        """The name of the code on a node. The hash includes the address, since a user who knows
        only a commit's hash must not get access to another user's repository."""
        named = [self.git, self.commit, self.url, self.sha256, self.credentials]
        return hashlib.sha256(json.dumps(named).encode()).hexdigest()


@dataclass(frozen=True)
class NodeNeeds:
    """Everything that a node must have before a job's ranks can start on it."""

    environment: Mapping[str, Any] | None
    """`JobSpec.environment` as JSON data."""
    keeps_all: bool
    """Whether all of the node's packages must remain unchanged, as for a recipe."""
    policy: EnvironmentPolicy
    code: RemoteCodeRef | None
    """Code that the node fetches itself."""


class JobNeed(StrEnum):
    """A kind of prerequisite that a node may have to prepare for a job."""

    ENVIRONMENT = "environment"
    CODE = "code"


class BuildState(StrEnum):
    """The state of an environment or of code that a node fetches."""

    READY = "ready"
    BUILDING = "building"
    FAILED = "failed"
    """A retry would fail in the same way."""
    UNREACHABLE = "unreachable"
    """A server or a disk has failed. The node tries again at the next request."""


@dataclass(frozen=True)
class NodeEnvironment:
    """The state of a job's needs on a node."""

    need: JobNeed
    """The need that this state describes. If the job has two needs and one is ready, this is the
    need that is not ready."""
    state: BuildState
    message: str
    """The installer's error, if it failed."""
    packages: tuple[str, ...]
    """`name==version` of the packages that differ from the node's own, once the environment is
    ready."""
    replaced: tuple[str, ...]
    """Modules of the environment that the node's forkserver has already imported from elsewhere."""
    log: str
    """The last output lines of the installer and the setup commands."""


@dataclass(frozen=True)
class CodeProblem:
    """The reason why a node can't get a job's code."""

    message: str
    is_final: bool
    """Whether a retry would fail in the same way."""
