"""Every setting of the service, read once where the program is put together."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from dray.home_token import DEFAULT_HOME
from dray.spec.fields import LabelKey
from ray_workers.shared.net_policy import AllowedHosts
from service.config import node_types
from service.config.logging_setup import LogFormat
from service.config.node_types import NODE_LEVEL
from service.config.start_refusals import StartRefused


def _listed(value: Any) -> Any:
    """Names separated by commas."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _checked_hosts(hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
    AllowedHosts(hosts or ())  # a typing error must not wait for a job
    return hosts


def _addresses(given: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for one in given or ():
        try:
            ipaddress.ip_network(one)
        except ValueError as error:
            message = f"names {one!r}, which is no address and no network: {error}"
            raise ValueError(message) from None
    return given


def _distinct_levels(levels: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(levels)) < len(levels):
        raise ValueError("names a level twice")
    if NODE_LEVEL in levels:
        raise ValueError(f"names {NODE_LEVEL!r}, which is always the last level: leave it out")
    return levels


HostNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[^\s:/@]+$")], ...] | None,
    NoDecode,
    BeforeValidator(_listed),
]
Origins = Annotated[
    tuple[Annotated[str, Field(pattern=r"^https?://[^\s/@]+$")], ...] | None,
    NoDecode,
    BeforeValidator(_listed),
]


VariableNames = Annotated[
    tuple[Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")], ...],
    NoDecode,
    BeforeValidator(_listed),
]
TopologyLevels = Annotated[
    tuple[LabelKey, ...], NoDecode, BeforeValidator(_listed), AfterValidator(_distinct_levels)
]
Hosts = Annotated[
    tuple[str, ...] | None, NoDecode, BeforeValidator(_listed), AfterValidator(_checked_hosts)
]
Addresses = Annotated[
    tuple[str, ...] | None, NoDecode, BeforeValidator(_listed), AfterValidator(_addresses)
]
Folders = Annotated[tuple[Path, ...] | None, NoDecode, BeforeValidator(_listed)]
NodeTypes = Annotated[tuple[node_types.NodeType, ...], NoDecode, BeforeValidator(node_types.parse)]

EMBEDDED = "local"
"""As `ray_address`: the service runs a Ray of its own."""


class Settings(BaseSettings):
    """Read from `DRAY_*` in the environment, then from `.env`; the defaults run everything here."""

    model_config = SettingsConfigDict(
        env_prefix="DRAY_",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )

    home: Path = Path(DEFAULT_HOME)
    """Folder with the state of the embedded mode. One service at a time uses it."""
    host: str = "127.0.0.1"
    """Address to listen on. An address that other machines reach needs `DRAY_TOKENS_FILE`."""
    port: int = Field(8420, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    database_url: str = Field("", repr=False)
    """`sqlite:///path` or `postgresql://user@host/database`; by default a SQLite file in the home.
    It may hold a password, so it is never printed."""
    storage_url: str = ""
    """URL of logs, checkpoints and artifacts; by default a folder in the home. `s3://` takes the
    AWS variables of each process."""
    ray_address: str = EMBEDDED
    """`local` runs the embedded Ray; `host:port` joins a cluster."""
    ray_token_file: Path | None = None
    """File with the token of that cluster."""
    autoscale_nodes: NodeTypes = ()
    """Nodes that Ray's autoscaler may add when jobs wait, such as `8x CPU=16, 4x CPU=32 GPU=4`."""
    autoscale_idle_s: float = Field(60.0, ge=0, le=24 * 3600)
    """Seconds without a job after which dray leaves a node to the autoscaler."""
    topology: TopologyLevels = ()
    """Keys of Ray's node labels, the widest level first, such as `zone,rack,nvlink`. The workers of
    a job are placed near each other by these levels."""
    silo_source: str | None = Field(None, repr=False)
    """On a silo's node of a cluster: the silo's data. A service with the embedded Ray does not
    start with this setting, since its one node could run nothing else."""
    local_slots: int | None = Field(None, ge=1)
    """One-CPU workers that the embedded Ray offers where there is no GPU; by default the number of
    CPUs."""
    tokens_file: Path | None = None
    """File with the callers' tokens, in lines of `name:sha256-of-the-token`. `:admin` at the end of
    a line allows changes of queues. Changes of the file take effect at once. Set it for all
    processes of dray."""
    open_to_local_users: bool = False
    """Without a tokens file: whether every user of this machine may call, and so run programs as
    the service's user. If not, other users need the token in the home."""
    prices_file: Path | None = None
    """File with the prices of slots, in YAML or JSON. Changes of the file take effect within
    seconds."""

    mlflow_tracking_uri: str | None = Field(None, repr=False)
    """Address of an MLflow that gets every job as a run. It may hold a password."""

    allowed_hosts: HostNames = None
    """Names, without port and with commas between, that the server answers under besides localhost
    and IP addresses; unset with tokens: any."""
    allowed_origins: Origins = None
    """Origins, such as `https://dray.example.org`, of web pages that may call the API besides the
    server's own; unset with tokens: any, as far as their browsers let them."""

    forwarded_allow_ips: Addresses = None
    """Addresses and networks (CIDR) of proxies before the server, whose `X-Forwarded-For` names the
    caller; unset, the header is ignored."""

    public_url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")
    """Address under which people reach the server, for links in messages; unset: its host and
    port."""
    webhook_private_hosts: Hosts = None
    """Names, addresses and networks (CIDR) that webhooks may be sent to though they are private;
    also without encryption."""

    rank_env: VariableNames = ()
    """Names of environment variables that ranks get besides those of the allow-list; the embedded
    Ray's alone, since the nodes of a cluster have environments of their own."""
    data_roots: Folders = None
    """Folders on the nodes that `file://` data must be in; unset, any without tokens and none with
    them."""
    data_private_hosts: Hosts = None
    """Names, addresses and networks (CIDR) that data may come from though they are private."""
    data_cache_dir: Path | None = None
    """Where each node keeps the data it fetched; unset, in its temporary folder."""
    data_cache_limit_bytes: int = Field(100 << 30, ge=1 << 20)
    """Most bytes of data that a node caches, and the largest source that is read."""
    data_credentials_dir: Path | None = None
    """Folder on each node with the files that `data.credentials` names."""
    secrets_dir: Path | None = None
    """Folder on each node with the files that `environment.secrets` names."""
    environment_limit_bytes: int = Field(20 << 30, ge=1 << 20)
    """Most that the environments of a machine take together with the installer's cache."""
    environment_build_limit_s: float = Field(1800.0, gt=0)
    """How long an environment may take to be built on a node."""
    s3_endpoint_url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+/?$")
    """Where data of `s3://` are served, if not by AWS."""

    max_connections: int = Field(2048, ge=16)
    """Requests that are answered at a time, and connections that are kept; fewer where the limit of
    open files is lower."""
    max_connections_per_client: int | None = Field(None, ge=1)
    """Requests of one address that are answered at a time; unset, half of
    `DRAY_MAX_CONNECTIONS`."""
    max_body_bytes: int = Field(1 << 20, ge=1024)
    """Largest body of a request; uploads have limits of their own."""
    code_limit_bytes: int = Field(512 << 20, ge=1 << 20)
    """Most bytes that the files of one upload may have together."""
    max_array_size: int = Field(10_000, ge=1)
    """Most jobs that one document may make by `array` or `sweep`."""
    takes_functions: bool = True
    """Whether jobs of `submit_function`, which are pickles, are taken."""
    log_limit_bytes: int = Field(256 << 20, ge=1024)
    """Most log text that is kept of one job; further lines are counted."""
    spool_limit_bytes: int = Field(64 << 20, ge=1 << 20)
    """Most undelivered bytes that one rank keeps on its node, for logs and for metrics each."""
    output_limit_bytes: int = Field(100 << 30, ge=1 << 20)
    """Most bytes that the files of an attempt's output folders may have together, and the artifacts
    that one rank saves; counted as the storage gets them, with the holes of sparse files."""
    system_metrics_s: float = Field(10.0, ge=0, le=3600)
    """Seconds between two samples of what ranks and nodes use, at least 10; 0 turns them off."""
    retention_days: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Days after which finished jobs are deleted; unset or 0 keeps them."""
    retention_jobs: int | None = Field(None, ge=0)
    """Finished jobs of each project that are kept, the newest; unset or 0 keeps all."""
    storage_quota_bytes: int | None = Field(None, ge=1)
    """Most that checkpoints, artifacts and logs may take together. When it is reached, no job is
    taken or started until some were deleted; jobs that run go on."""
    min_free_bytes: int | None = Field(None, ge=1)
    """Bytes of disk that must stay free under the storage and the database; below it no job is
    taken or started."""
    log_format: LogFormat = "text"
    """Format of the service's own log on stderr: `text`, or `json` with an object in each line."""
    infra_retries: int = Field(10, ge=0)
    """How often a job is tried again after faults of the cluster or of a data source."""
    start_timeout_s: float = Field(60.0, gt=0)
    """How long Ray may take to give the slots before the job goes back to the queue."""
    preempt_grace_s: float = Field(30.0, ge=0, le=24 * 3600)
    """Seconds that a job that is asked to leave has for its checkpoint, unless the call has
    others."""
    elastic_sizing: bool = True
    """Whether the sizes of elastic recipes are chosen by the step times that they report; if not,
    they get free slots as other jobs do, and none leaves because others gain more."""
    min_run_s: float = Field(300.0, ge=0, le=7 * 24 * 3600)
    """How long a job holds its slots before the scheduler may ask it to leave or to shrink."""
    silence_limit_s: float = Field(60.0, ge=1, le=3600)
    """After how many seconds without an answer a process of dray that lives is replaced."""
    scheduler_tick_s: float = Field(1.0, gt=0)
    """Longest time between two looks at the queue; a change of it wakes the scheduler at once."""
    poll_wait_s: float = Field(5.0, gt=0)
    """How long a poll of an attempt waits for something to happen."""

    @field_validator("autoscale_nodes")
    @classmethod
    def _has_an_autoscaler(
        cls, types: tuple[node_types.NodeType, ...], info: ValidationInfo
    ) -> tuple[node_types.NodeType, ...]:
        if types and info.data.get("ray_address") == EMBEDDED:
            raise ValueError(
                "the embedded Ray has no autoscaler: unset it, or set DRAY_RAY_ADDRESS to a cluster"
            )
        return types

    @field_validator("silo_source")
    @classmethod
    def _is_of_a_cluster(cls, source: str | None, info: ValidationInfo) -> str | None:
        if source and info.data.get("ray_address") == EMBEDDED:
            raise ValueError(
                "a node with a silo's data takes ranks of silos alone, and the embedded Ray has "
                "one node: unset it here, and set it where Ray is started on the silo's node"
            )
        return source

    @model_validator(mode="after")
    def _fill_in_what_follows_from_the_home(self) -> Self:
        self.home = self.home.expanduser().absolute()
        if not self.database_url:
            self.database_url = f"sqlite:///{self.home / 'dray.db'}"
        if not self.storage_url:
            self.storage_url = (self.home / "storage").as_uri()
        return self

    @property
    def base_url(self) -> str:
        """Address of this server in links, without a slash at its end."""
        return (self.public_url or f"http://{self.host}:{self.port}").rstrip("/")


def read_settings() -> Settings:
    """From the environment and `.env`; StartRefused with the first that is wrong."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        why = first["msg"].removeprefix("Value error, ")
        raise StartRefused(f"the setting DRAY_{name} is wrong: {why}") from None
