"""The ways to keep the ranks' copies of the model in sync: one class for each `kind`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import Field, StrictBool, model_validator

from dray.spec.fields import MAX_STEPS, Document, Int, Number, Size, refuse_foreign, wrong
from dray.spec.resources import RoleResources
from dray.spec.training.parallel import MAX_WORKERS

MAX_EDGES: Final = 4 * MAX_WORKERS
"""Maximum number of edges in a graph: enough for eight neighbours of each rank in the largest
group. Documents with more edges would take too long to validate."""


class Compression(Document):
    """Compression of the exchanged gradients. All methods except fp16 and bf16 store the
    compression error and add it to the gradient of the next step (error feedback)."""

    name: Literal["fp16", "bf16", "powersgd", "topk"]
    """fp16, bf16: sends 16-bit numbers, which halves the number of bytes. powersgd: sends low-rank
    factors (Vogels et al. 2019, arXiv:1905.13727). topk: sends the largest elements of each tensor,
    with momentum correction if the optimizer is sgd with momentum (Lin et al. 2018,
    arXiv:1712.01887)."""
    rank: Annotated[Int, Field(ge=1, le=256)] = 2
    """powersgd: rank of the approximation, that is, the number of columns of each factor."""
    warm_start: StrictBool = True
    """powersgd: whether each step starts with the factors of the previous step."""
    start_step: Annotated[Int, Field(ge=2, le=MAX_STEPS)] = 10
    """powersgd: number of uncompressed steps at the start of training and after each time the group
    is re-formed."""
    ratio: Annotated[Number, Field(gt=0.0, le=0.5)] = 0.001
    """topk: fraction of each tensor's elements to send. At least one element of each tensor is
    sent."""
    warmup_steps: Annotated[Int, Field(ge=0, le=MAX_STEPS)] = 0
    """topk: number of steps over which the fraction falls from 0.25 to `ratio`, at the start of
    training and after each time the group is re-formed."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners: dict[str, tuple[str, ...]] = dict.fromkeys(
            ("rank", "warm_start", "start_step"), ("powersgd",)
        )
        refuse_foreign(
            self, self.name, owners | dict.fromkeys(("ratio", "warmup_steps"), ("topk",))
        )
        return self


class Outer(Document):
    """The outer optimizer, which uses the mean change in the ranks' weights as its gradient: SGD
    with Nesterov momentum (DiLoCo, arXiv:2311.08105)."""

    lr: Annotated[Number, Field(gt=0.0, le=10.0)] = 0.7
    """Learning rate of the outer step."""
    momentum: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum of the outer step."""


class SyncKind(Document):
    """Base class of all kinds of `sync`, with the properties that the rest of dray uses."""

    @property
    def copies_differ(self) -> bool:
        """Whether each rank has its own weights and its own optimizer state."""
        return False

    @property
    def label(self) -> str:
        """Name of the kind in job comparisons."""
        return "all-reduce"

    def check(self, num_ranks: int, /) -> None:
        """Reject options that don't fit this number of ranks."""


class AllReduce(SyncKind):
    """Every rank takes the same step, using the mean of all gradients. With `every` above 1, each
    rank takes that many steps on its own, and then the ranks average their weights. If `sync` is
    given, the job's metrics include the number of bytes sent."""

    kind: Literal["all_reduce"] = "all_reduce"
    """Selects this kind. This is the default."""
    compression: Compression | None = None
    """Compression of the gradients. If unset, gradients are not compressed."""
    every: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 1
    """Number of independent optimizer steps after which the ranks average their weights (local SGD,
    arXiv:1805.09767). The ranks also average their weights before each evaluation and each
    checkpoint. If 1, the ranks exchange gradients in every step instead."""
    outer: Outer | None = None
    """Outer optimizer, for `every` above 1. If unset, the ranks continue with the mean of their
    weights."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.every == 1 and self.outer is not None:
            raise wrong(
                "/sync/outer",
                "requires sync.every above 1: with 1, ranks exchange gradients instead of "
                "averaging their weights",
            )
        if self.every > 1 and self.compression is not None:
            raise wrong(
                "/sync/compression",
                "requires sync.every to be 1: above 1, ranks average their weights instead of "
                "exchanging gradients",
            )
        return self

    @property
    def copies_differ(self) -> bool:
        return self.every > 1

    @property
    def label(self) -> str:
        return f"local steps, every {self.every}" if self.every > 1 else super().label


Rank = Annotated[Int, Field(ge=0, lt=MAX_WORKERS)]
Edge = Annotated[list[Rank], Field(min_length=2, max_length=2)]


class Gossip(SyncKind):
    """Each rank updates its own weights and averages them with a few other ranks, which are its
    neighbours in a graph. Evaluations and the result use the mean of all copies."""

    kind: Literal["gossip"] = "gossip"
    """Selects this kind."""
    mode: Literal["d_psgd", "sgp", "ad_psgd"] = "d_psgd"
    """d_psgd: each rank averages its weights with its neighbours in every step (Lian et al. 2017,
    arXiv:1705.09056). sgp: each rank pushes a share of its weights to its neighbours, which don't
    have to reply (Assran et al. 2019, arXiv:1811.10792). ad_psgd: ranks average in pairs while all
    ranks keep computing, so that a slow rank does not delay the others (Lian et al. 2018,
    arXiv:1710.06952)."""
    graph: Literal["ring", "exponential", "random", "complete", "custom"] = "ring"
    """Which ranks are neighbours. ring: the previous and the next rank. exponential: one rank per
    step, at distances 1, 2, 4 and so on in turn (arXiv:2110.13363). random: one random rank per
    step. complete: all other ranks. custom: the ranks given in `edges`."""
    edges: Annotated[list[Edge], Field(min_length=1, max_length=MAX_EDGES)] | None = None
    """custom: pairs of neighbours, such as `[[0, 1], [1, 2]]`. With `sgp`, the first rank of a pair
    sends to the second rank."""

    @property
    def copies_differ(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"gossip, {self.mode}, {self.graph}"

    @model_validator(mode="after")
    def _has_edges_if_custom(self) -> Self:
        if (self.graph == "custom") != (self.edges is not None):
            raise wrong(
                "/sync/edges",
                "is required with `graph: custom`, and must be unset with other graphs",
            )
        return self

    def check(self, num_workers: int) -> None:
        """Reject graphs in which the weights of some rank would never reach some other rank."""
        if num_workers == 1:
            raise wrong(
                "/resources/num_workers",
                "must be 2 or more with sync.kind gossip: a single rank has no neighbours",
            )
        if self.mode == "ad_psgd" and self.graph == "exponential":
            raise wrong(
                "/sync/graph",
                "must not be exponential with ad_psgd, which pairs an even rank with an odd rank: "
                "use ring, random or complete",
            )
        if self.mode == "ad_psgd" and self.graph == "ring" and num_workers % 2:
            raise wrong(
                "/sync/graph",
                f"must not be ring with ad_psgd and {num_workers} workers: even and odd ranks "
                "must alternate around the ring, which requires an even number of workers. Use "
                "random or complete",
            )
        for number, (one, other) in enumerate(self.edges or ()):
            if max(one, other) >= num_workers:
                raise wrong(
                    f"/sync/edges/{number}",
                    f"contains rank {max(one, other)}, but the ranks are 0 to {num_workers - 1}: "
                    "change the edge, or resources.num_workers",
                )
            if one == other:
                raise wrong(
                    f"/sync/edges/{number}",
                    "connects a rank to itself: remove this edge. Each rank always keeps a share "
                    "of its own weights",
                )
        if self.edges is not None:
            self._check_reach(self.edges, num_workers)

    def _check_reach(self, edges: Sequence[Sequence[int]], num_workers: int) -> None:
        at, is_directed = "/sync/edges", self.mode == "sgp"
        backwards = [(other, one) for one, other in edges]
        both = [*edges, *backwards]
        for ways in (edges, backwards) if is_directed else (both,):
            away = distances(ways, num_workers)
            if len(away) < num_workers:
                lost = next(rank for rank in range(num_workers) if rank not in away)
                start, end = (lost, 0) if ways is backwards else (0, lost)
                raise wrong(
                    at,
                    f"must connect all ranks: no path leads from rank {start} to rank {end}. Add "
                    "edges, or use another graph",
                )
        if self.mode == "ad_psgd":
            away = distances(both, num_workers)
            odd = next((edge for edge in edges if (away[edge[0]] - away[edge[1]]) % 2 == 0), None)
            if odd is not None:
                raise wrong(
                    at,
                    f"must form a bipartite graph with ad_psgd: the edge {list(odd)} closes an "
                    "odd cycle. Remove this edge",
                )


class Correction(Document):
    """Correction of updates whose gradients were computed with outdated weights."""

    name: Literal["staleness_lr", "delay_compensation"]
    """staleness_lr: divides the learning rate by the staleness (Zhang et al. 2016,
    arXiv:1511.05950). delay_compensation: adds an estimate of how the gradient has changed since
    the weights were pulled (DC-ASGD, Zheng et al. 2017, arXiv:1609.08326)."""
    strength: Annotated[Number, Field(gt=0.0, le=100.0)] = 0.04
    """delay_compensation: factor of the estimate, called lambda in the paper."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        is_changed = self.strength != type(self).model_fields["strength"].default
        if self.name != "delay_compensation" and is_changed:
            raise wrong(
                "/sync/correction/strength",
                "only applies to delay_compensation: leave this field out",
            )
        return self


class ParameterServer(SyncKind):
    """The last ranks of the job are servers, each of which holds an equal part of the weights and
    the optimizer state. The other ranks are workers, which pull weights from the servers and push
    gradients to them. For recipes."""

    kind: Literal["parameter_server"] = "parameter_server"
    """Selects this kind."""
    servers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)] = 1
    """Number of servers. The servers are included in `resources.num_workers`. Must not exceed the
    number of workers."""
    server_resources: RoleResources | None = None
    """Resources of each server. If unset, a server has the resources of a worker. Required if
    workers have GPUs, because servers have none."""
    mode: Literal["synchronous", "asynchronous", "bounded"] = "synchronous"
    """synchronous: each step uses the gradients of all workers, as with all_reduce. asynchronous:
    each worker computes a complete global batch and pushes its gradient, which is applied as one
    step; workers never wait for each other. bounded: like asynchronous, but a worker that is more
    than `max_staleness` steps ahead of the slowest worker waits before its next step (stale
    synchronous parallel, Ho et al. 2013)."""
    max_staleness: Annotated[Int, Field(ge=0, le=1000)] | None = None
    """bounded: a worker begins a step only if it is at most this many steps ahead of the slowest
    worker, so it can be one step further ahead at the end of the step. The staleness of an update
    can exceed this value."""
    correction: Correction | None = None
    """asynchronous, bounded: correction of stale updates. If unset, stale updates are not
    corrected."""
    push_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Data type in which gradients are sent to the servers. fp16 and bf16 halve the number of
    bytes."""
    shards_kept_by: Literal["snapshot", "replica"] = "snapshot"
    """How a server's part is restored after the server dies. snapshot: the job resumes from its
    latest checkpoint. replica: the next server keeps a copy of the part and also receives each
    gradient; a new process replaces the server that died, and training continues without losing a
    step. Requires at least 2 servers."""

    @property
    def label(self) -> str:
        return f"parameter servers, {self.mode}"

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if (self.mode == "bounded") != (self.max_staleness is not None):
            raise wrong(
                "/sync/max_staleness",
                "is required with `mode: bounded` (for example `max_staleness: 4`), and must be "
                "unset with other modes",
            )
        if self.mode == "synchronous" and self.correction is not None:
            raise wrong(
                "/sync/correction",
                "only applies to the modes asynchronous and bounded: synchronous updates are "
                "never stale. Leave out the correction, or change the mode",
            )
        return self

    def check(self, num_ranks: int) -> None:
        """Reject a number of servers that doesn't fit the number of ranks."""
        num_workers = num_ranks - self.servers
        if num_workers < 2:
            raise wrong(
                "/resources/num_workers",
                f"is {num_ranks}, including {self.servers} for sync.servers: set it to "
                f"{self.servers + 2} or more, because parameter servers require at least two "
                "workers",
            )
        if self.servers > num_workers:
            raise wrong(
                "/sync/servers",
                f"is {self.servers}, but only {num_workers} of the {num_ranks} ranks are workers: "
                f"use {num_ranks // 2} servers or fewer",
            )
        if self.shards_kept_by == "replica" and self.servers == 1:
            raise wrong(
                "/sync/shards_kept_by",
                "must be snapshot if there is only one server, because the replica is kept on the "
                "next server: set sync.servers to 2 or more",
            )


class AutoSync(SyncKind):
    """The service chooses the kind when the job is submitted, and stores the chosen kind in the
    job. The service chooses all_reduce, unless another kind is expected to be much faster on the
    known workers and their network. The event `submitted` gives the chosen kind and the reason."""

    kind: Literal["auto"] = "auto"
    """Leaves the choice to the service. `sync: auto` is the short form."""
    bandwidth_bytes_per_s: Size | None = None
    """Bytes per second that each worker can send while all workers are sending. A number, or a size
    such as `100MiB`. If unset, the speed of the network is unknown, and is not considered in the
    choice."""


def distances(ways: Iterable[Sequence[int]], num_workers: int) -> dict[int, int]:
    """Return the distance in edges from rank 0 to each reachable rank."""
    following: list[list[int]] = [[] for _ in range(num_workers)]
    for one, other in ways:
        following[one].append(other)
    found, reached = {0: 0}, [0]
    for rank in reached:
        for other in following[rank]:
            if other not in found:
                found[other] = found[rank] + 1
                reached.append(other)
    return found


Sync = Annotated[AllReduce | Gossip | ParameterServer | AutoSync, Field(discriminator="kind")]


def with_kind(given: Any) -> Any:
    """Fill in the default `kind: all_reduce`, and expand the short form `auto`."""
    if given == "auto":
        return {"kind": "auto"}
    if isinstance(given, str):
        raise wrong("/sync", "must be `auto`, or an object such as {kind: gossip}")
    if not isinstance(given, Mapping):
        return given
    if given.get("kind") == "auto":
        for kind in get_args(get_args(Sync)[0]):
            for name in kind.model_fields.keys() & given.keys() - AutoSync.model_fields.keys():
                raise wrong(
                    f"/sync/{name}",
                    "does not apply to kind auto, for which the service chooses the options: "
                    "leave it out, or set sync.kind to the kind that has this option",
                )
    return {"kind": "all_reduce", **given}
