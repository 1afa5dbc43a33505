"""All settings of the service. They are read once, at startup."""

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
    """Split a comma-separated list."""
    return [name.strip() for name in value.split(",")] if isinstance(value, str) else value


def _checked_hosts(hosts: tuple[str, ...] | None) -> tuple[str, ...] | None:
    AllowedHosts(hosts or ())  # report a typing error at startup, not when a job runs
    return hosts


def _addresses(given: tuple[str, ...] | None) -> tuple[str, ...] | None:
    for one in given or ():
        try:
            ipaddress.ip_network(one)
        except ValueError as error:
            message = f"contains {one!r}, which is neither an address nor a network: {error}"
            raise ValueError(message) from None
    return given


def _distinct_levels(levels: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(levels)) < len(levels):
        raise ValueError("names a level twice")
    if NODE_LEVEL in levels:
        raise ValueError(
            f"contains {NODE_LEVEL!r}, which is always added as the last level: remove it"
        )
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
"""The value of `ray_address` that makes the service run its own Ray."""


class Settings(BaseSettings):
    """Settings, read from the environment variables `DRAY_*` and then from `.env`. With the
    defaults, everything runs locally."""

    model_config = SettingsConfigDict(
        env_prefix="DRAY_",
        env_file=".env",
        env_ignore_empty=True,
        extra="ignore",
        use_attribute_docstrings=True,
    )

    home: Path = Path(DEFAULT_HOME)
    """Folder with the database, the storage and the state of the embedded Ray. Only one service can
    use the folder at a time."""
    host: str = "127.0.0.1"
    """Address to listen on. If other machines can reach the address, `DRAY_TOKENS_FILE` is
    required."""
    port: int = Field(8420, ge=0, le=65535)
    """Port to listen on; 0 selects a free port."""
    database_url: str = Field("", repr=False)
    """`sqlite:///path` or `postgresql://user@host/database`; by default a SQLite file in the home
    directory. The URL can contain a password, so it is never printed."""
    storage_url: str = ""
    """URL for logs, checkpoints and artifacts; by default a folder in the home directory. For
    `s3://`, each process uses the AWS variables in its environment."""
    ray_address: str = EMBEDDED
    """With `local`, the service runs the embedded Ray; with `host:port`, it joins a Ray cluster."""
    ray_token_file: Path | None = None
    """File with the token of the Ray cluster."""
    autoscale_nodes: NodeTypes = ()
    """Nodes that Ray's autoscaler may add for waiting jobs, such as `8x CPU=16, 4x CPU=32
    GPU=4`."""
    autoscale_idle_s: float = Field(60.0, ge=0, le=24 * 3600)
    """Seconds without a job after which dray releases a node to the autoscaler."""
    topology: TopologyLevels = ()
    """Keys of Ray node labels that describe the topology, widest level first, such as
    `zone,rack,nvlink`. The workers of a job are placed close to each other in this topology."""
    silo_source: str | None = Field(None, repr=False)
    """URL of a silo's data, to be set on the cluster node that belongs to the silo. A service with
    the embedded Ray does not start with this setting, because its only node could then run only
    ranks of silos."""
    local_slots: int | None = Field(None, ge=1)
    """Number of one-CPU workers for which the embedded Ray has slots on a machine without a GPU.
    The default is the number of CPUs."""
    tokens_file: Path | None = None
    """File with the callers' tokens, one `name:sha256-of-the-token` per line. If `:admin` is
    appended to a line, the caller is an admin, who can change queues. Changes to the file take
    effect immediately. All of dray's processes need this setting."""
    open_to_local_users: bool = False
    """Whether every user of this machine can call a service without a tokens file, and thereby run
    programs as the service's user. If false, other users need the token stored in `home`."""
    prices_file: Path | None = None
    """YAML or JSON file with the prices of slots. Changes to the file take effect within
    seconds."""
    models_file: Path | None = None
    """YAML or JSON file with the catalogue of base models for fine-tuning. Changes to the file take
    effect within seconds."""

    mlflow_tracking_uri: str | None = Field(None, repr=False)
    """Address of an MLflow server to which every job is exported as a run. The address can contain
    a password."""

    allowed_hosts: HostNames = None
    """Comma-separated host names, without ports, that requests may use for the server, in addition
    to localhost and IP addresses. If unset and there is a tokens file, requests may use any host
    name."""
    allowed_origins: Origins = None
    """Origins, such as `https://dray.example.org`, of web pages that may call the API in addition
    to the server's own pages. If unset and there is a tokens file, pages of any origin may call the
    API."""

    forwarded_allow_ips: Addresses = None
    """Addresses and networks (CIDR) of proxies in front of the server. In requests from these
    proxies, the header `X-Forwarded-For` is trusted to identify the caller. If unset, the header is
    ignored."""

    public_url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+(/[^\s?#]*)?$")
    """Address of the server for links in messages. The default is the server's host and port."""
    webhook_private_hosts: Hosts = None
    """Private names, addresses and networks (CIDR) to which webhooks may send messages, even over
    plain `http://`."""

    rank_env: VariableNames = ()
    """Names of environment variables that are passed to ranks in addition to the allow-list.
    Applies only to the embedded Ray, because the nodes of a cluster have their own environments."""
    data_roots: Folders = None
    """Folders on the nodes from which `file://` data may be read. If unset, all folders are allowed
    on a server without a tokens file, and no folders on a server with one."""
    data_private_hosts: Hosts = None
    """Private names, addresses and networks (CIDR) from which data may be fetched."""
    data_cache_dir: Path | None = None
    """Folder in which each node caches fetched data. The default is the node's temporary folder."""
    data_cache_limit_bytes: int = Field(100 << 30, ge=1 << 20)
    """Maximum bytes of data in a node's cache, which is also the maximum size of a source."""
    data_credentials_dir: Path | None = None
    """Folder on each node with the files that `data.credentials` names."""
    secrets_dir: Path | None = None
    """Folder on each node with the files that `environment.secrets` names."""
    environment_limit_bytes: int = Field(20 << 30, ge=1 << 20)
    """Maximum bytes of all environments on a machine, including the installer's cache."""
    environment_build_limit_s: float = Field(1800.0, gt=0)
    """Maximum time in seconds for building an environment on a node."""
    s3_endpoint_url: str | None = Field(None, pattern=r"^https?://[^\s/@?#]+/?$")
    """Server for `s3://` data, if it is not AWS."""

    max_connections: int = Field(2048, ge=16)
    """Maximum number of concurrent requests, and of open connections. A low limit on open files
    reduces both maximums."""
    max_connections_per_client: int | None = Field(None, ge=1)
    """Maximum number of concurrent requests from one address. The default is half of
    `DRAY_MAX_CONNECTIONS`."""
    max_body_bytes: int = Field(1 << 20, ge=1024)
    """Maximum size of a request body in bytes; uploads have separate limits."""
    code_limit_bytes: int = Field(512 << 20, ge=1 << 20)
    """Maximum total bytes of the files in one code upload."""
    file_limit_bytes: int = Field(256 << 20, ge=1 << 10)
    """Maximum bytes of a file that is uploaded for fine-tuning. The server receives at most two
    such files at a time, and needs twice their size in memory."""
    max_array_size: int = Field(10_000, ge=1)
    """Maximum number of jobs that one document can create with `array` or `sweep`."""
    max_schedules: int = Field(100, ge=0)
    """Maximum number of schedules of one user."""
    takes_functions: bool = True
    """Whether jobs from `submit_function`, which are pickles, are accepted."""
    log_limit_bytes: int = Field(256 << 20, ge=1024)
    """Maximum bytes of log text that are stored per job. Further lines are counted, but not
    stored."""
    spool_limit_bytes: int = Field(64 << 20, ge=1 << 20)
    """Maximum bytes of logs, and of metrics, that a rank keeps on its node until the service has
    received them."""
    output_limit_bytes: int = Field(100 << 30, ge=1 << 20)
    """Maximum bytes of the files in an attempt's output folders, and of the artifacts that one rank
    saves. Holes in sparse files count, because they are also uploaded."""
    system_metrics_s: float = Field(10.0, ge=0, le=3600)
    """Seconds between samples of the resource usage of ranks and nodes; at least 10, or 0 to
    disable sampling."""
    retention_days: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Number of days after which finished jobs are deleted. If unset or 0, finished jobs are
    kept."""
    retention_jobs: int | None = Field(None, ge=0)
    """Number of finished jobs to keep per project; older jobs are deleted. If unset or 0, all
    finished jobs are kept."""
    accounting_days: float | None = Field(None, ge=0, le=36500)
    """Number of days for which accounting lists the attempts of deleted jobs after their end, but
    at least as long as usage counts towards shares. If unset or 0, these attempts are kept."""
    storage_quota_bytes: int | None = Field(None, ge=1)
    """Maximum total bytes of checkpoints, artifacts and logs. Once this quota is reached, no job is
    accepted or started until jobs are deleted. Running jobs continue."""
    min_free_bytes: int | None = Field(None, ge=1)
    """Minimum free bytes on the disks of the storage and the database. With less free space, no job
    is accepted or started."""
    log_format: LogFormat = "text"
    """Format of the service's own log on stderr: `text`, or `json` with one object per line."""
    infra_retries: int = Field(10, ge=0)
    """Maximum number of times that a job is retried after faults of the cluster or of a data
    source."""
    start_timeout_s: float = Field(60.0, gt=0)
    """How long Ray may take to provide the slots before the job returns to the queue."""
    preempt_grace_s: float = Field(30.0, ge=0, le=24 * 3600)
    """Seconds that a preempted job has to save a checkpoint, unless the request sets a different
    time."""
    elastic_sizing: bool = True
    """Whether the scheduler chooses the numbers of workers of elastic recipes based on reported
    step times. If false, elastic recipes get free slots like other jobs, and never release a worker
    because another job would gain more from it."""
    min_run_s: float = Field(300.0, ge=0, le=7 * 24 * 3600)
    """Minimum seconds that a job holds its slots before the scheduler can preempt or shrink it."""
    silence_limit_s: float = Field(60.0, ge=1, le=3600)
    """Seconds without a response after which a live process of dray is replaced."""
    scheduler_tick_s: float = Field(1.0, gt=0)
    """Maximum seconds between scheduler rounds; a change in the queue starts a round
    immediately."""
    poll_wait_s: float = Field(5.0, gt=0)
    """Maximum seconds that a poll of an attempt waits for new reports."""

    @field_validator("autoscale_nodes")
    @classmethod
    def _has_an_autoscaler(
        cls, types: tuple[node_types.NodeType, ...], info: ValidationInfo
    ) -> tuple[node_types.NodeType, ...]:
        if types and info.data.get("ray_address") == EMBEDDED:
            raise ValueError(
                "the embedded Ray has no autoscaler: unset DRAY_AUTOSCALE_NODES, or set "
                "DRAY_RAY_ADDRESS to a cluster"
            )
        return types

    @field_validator("silo_source")
    @classmethod
    def _is_of_a_cluster(cls, source: str | None, info: ValidationInfo) -> str | None:
        if source and info.data.get("ray_address") == EMBEDDED:
            raise ValueError(
                "a node with a silo's data runs only ranks of silos, but the embedded Ray has a "
                "single node: unset DRAY_SILO_SOURCE here, and set it where Ray is started on the "
                "silo's node"
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
        """The address of this server for links, without a trailing slash."""
        return (self.public_url or f"http://{self.host}:{self.port}").rstrip("/")


def read_settings() -> Settings:
    """Read the settings. Raises StartRefused with a message about the first invalid setting."""
    try:
        return Settings()
    except ValidationError as error:
        first = error.errors()[0]
        name = "_".join(str(part) for part in first["loc"]).upper()
        why = first["msg"].removeprefix("Value error, ")
        raise StartRefused(f"the setting DRAY_{name} is invalid: {why}") from None
