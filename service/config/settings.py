"""All settings of the service, read once when the program is composed."""

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
    """Split names separated by commas."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _checked_hosts(hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
    AllowedHosts(hosts or ())  # a typing error must be found at the start, not with a job
    return hosts


def _addresses(given: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for one in given or ():
        try:
            ipaddress.ip_network(one)
        except ValueError as error:
            message = f"names {one!r}, which is neither an address nor a network: {error}"
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
"""The `ray_address` with which the service runs its own Ray."""


class Settings(BaseSettings):
    """Settings from `DRAY_*` in the environment, then `.env`. Defaults run everything locally."""

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
    server's own pages; unset with tokens: any that the browser allows."""

    forwarded_allow_ips: Addresses = None
    """Addresses and networks (CIDR) of proxies before the server, whose `X-Forwarded-For` names the
    caller; unset, the header is ignored."""

    public_url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")
    """Address of the server for links in messages; unset: its host and port."""
    webhook_private_hosts: Hosts = None
    """Private names, addresses and networks (CIDR) for webhooks, even without encryption."""

    rank_env: VariableNames = ()
    """Names of environment variables that ranks get in addition to the allow-list. Only for the
    embedded Ray, because the nodes of a cluster have their own environments."""
    data_roots: Folders = None
    """Folders on the nodes that `file://` data must be in; unset, any without tokens and none with
    them."""
    data_private_hosts: Hosts = None
    """Private names, addresses and networks (CIDR) that data may come from."""
    data_cache_dir: Path | None = None
    """Folder where each node caches fetched data; unset, its temporary folder."""
    data_cache_limit_bytes: int = Field(100 << 30, ge=1 << 20)
    """Most bytes of data that a node caches, and the largest source that is read."""
    data_credentials_dir: Path | None = None
    """Folder on each node with the files that `data.credentials` names."""
    secrets_dir: Path | None = None
    """Folder on each node with the files that `environment.secrets` names."""
    environment_limit_bytes: int = Field(20 << 30, ge=1 << 20)
    """The most bytes of a machine's environments, including the installer's cache."""
    environment_build_limit_s: float = Field(1800.0, gt=0)
    """The most seconds that building an environment on a node may take."""
    s3_endpoint_url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+/?$")
    """Server of `s3://` data, if it is not AWS."""

    max_connections: int = Field(2048, ge=16)
    """Requests that are answered at a time, and connections that are kept; fewer where the limit of
    open files is lower."""
    max_connections_per_client: int | None = Field(None, ge=1)
    """Requests of one address that are answered at a time; unset, half of
    `DRAY_MAX_CONNECTIONS`."""
    max_body_bytes: int = Field(1 << 20, ge=1024)
    """Largest body of a request; uploads have limits of their own."""
    code_limit_bytes: int = Field(512 << 20, ge=1 << 20)
    """The most bytes of the files of one upload."""
    max_array_size: int = Field(10_000, ge=1)
    """The most jobs that one document may make with `array` or `sweep`."""
    takes_functions: bool = True
    """Whether jobs of `submit_function`, which are pickles, are accepted."""
    log_limit_bytes: int = Field(256 << 20, ge=1024)
    """The most bytes of log text that are kept of a job; further lines are only counted."""
    spool_limit_bytes: int = Field(64 << 20, ge=1 << 20)
    """The most undelivered bytes that a rank keeps on its node, for logs and for metrics each."""
    output_limit_bytes: int = Field(100 << 30, ge=1 << 20)
    """The most bytes of the files in an attempt's output folders, and of the artifacts that one
    rank saves. Sparse files count with their holes, as the storage gets them."""
    system_metrics_s: float = Field(10.0, ge=0, le=3600)
    """Seconds between samples of ranks' and nodes' resource use, at least 10; 0 turns them off."""
    retention_days: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Days after which finished jobs are deleted; unset or 0 keeps them."""
    retention_jobs: int | None = Field(None, ge=0)
    """Finished jobs of each project that are kept, the newest; unset or 0 keeps all."""
    storage_quota_bytes: int | None = Field(None, ge=1)
    """The most bytes of all checkpoints, artifacts and logs. When it is reached, no job is accepted
    or started until jobs are deleted; running jobs continue."""
    min_free_bytes: int | None = Field(None, ge=1)
    """Bytes of disk that must stay free under the storage and the database; below it no job is
    taken or started."""
    log_format: LogFormat = "text"
    """Format of the service's own log on stderr: `text`, or `json` with an object in each line."""
    infra_retries: int = Field(10, ge=0)
    """How often a job is tried again after faults of the cluster or of a data source."""
    start_timeout_s: float = Field(60.0, gt=0)
    """How long Ray may take to provide the slots before the job returns to the queue."""
    preempt_grace_s: float = Field(30.0, ge=0, le=24 * 3600)
    """Seconds that a job that is asked to leave has for its checkpoint, unless the call has
    others."""
    elastic_sizing: bool = True
    """Whether the sizes of elastic recipes are chosen by their reported step times. Otherwise they
    get free slots like other jobs, and no worker leaves because another job would gain more."""
    min_run_s: float = Field(300.0, ge=0, le=7 * 24 * 3600)
    """How long a job holds its slots before the scheduler may preempt or shrink it."""
    silence_limit_s: float = Field(60.0, ge=1, le=3600)
    """A live process of dray is replaced after this many seconds without an answer."""
    scheduler_tick_s: float = Field(1.0, gt=0)
    """The longest time between scheduler rounds; a change of the queue starts one at once."""
    poll_wait_s: float = Field(5.0, gt=0)
    """How long a poll of an attempt waits for news."""

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
                "a node with a silo's data runs only ranks of silos, and the embedded Ray has a "
                "single node: unset it here, and set it where Ray is started on the silo's node"
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
        """Address of this server for links, without a trailing slash."""
        return (self.public_url or f"http://{self.host}:{self.port}").rstrip("/")


def read_settings() -> Settings:
    """Read the settings. Raises StartRefused, which names the first invalid setting."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        why = first["msg"].removeprefix("Value error, ")
        raise StartRefused(f"the setting DRAY_{name} is invalid: {why}") from None
