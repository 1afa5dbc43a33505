"""How the ranks keep their copies of the model in sync: one class for each `kind`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import Field, StrictBool, model_validator

from dray.spec.fields import MAX_STEPS, Document, Int, Number, Size, refuse_foreign, wrong
from dray.spec.resources import RoleResources
from dray.spec.training.parallel import MAX_WORKERS

MAX_EDGES: Final = 4 * MAX_WORKERS
"""Most edges of a graph: eight neighbours for each rank of the largest group. A document with more
edges would take long to check."""


class Compression(Document):
    """Compression of the gradients that are sent. All methods but fp16 and bf16 keep the
    compression error and add it to the next step's gradient (error feedback)."""

    name: Literal["fp16", "bf16", "powersgd", "topk"]
    """fp16, bf16: half the bytes. powersgd: factors of low rank (Vogels et al. 2019,
    arXiv:1905.13727). topk: the largest elements of each tensor, with momentum correction where the
    optimizer is sgd with momentum (Lin et al. 2018, arXiv:1712.01887)."""
    rank: Annotated[Int, Field(ge=1, le=256)] = 2
    """powersgd: columns of the factors."""
    warm_start: StrictBool = True
    """powersgd: whether each step starts from the factors of the previous step."""
    start_step: Annotated[Int, Field(ge=2, le=MAX_STEPS)] = 10
    """powersgd: number of exact steps after the start and after each re-formation of the group."""
    ratio: Annotated[Number, Field(gt=0.0, le=0.5)] = 0.001
    """topk: share of each tensor's elements to send, at least one element."""
    warmup_steps: Annotated[Int, Field(ge=0, le=MAX_STEPS)] = 0
    """topk: number of steps over which the share falls from a quarter to `ratio`, after the start
    and after each re-formation of the group."""

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
    """The optimizer that uses the mean change of the ranks' weights as a gradient: SGD with
    Nesterov momentum (DiLoCo, arXiv:2311.08105)."""

    lr: Annotated[Number, Field(gt=0.0, le=10.0)] = 0.7
    """Learning rate of the outer step."""
    momentum: Annotated[Number, Field(ge=0.0, lt=1.0)] = 0.9
    """Momentum of the outer step."""


class SyncKind(Document):
    """Base of the kinds, with the properties that the rest of dray needs."""

    @property
    def copies_differ(self) -> bool:
        """Whether each rank has its own weights and its own optimizer state."""
        return False

    @property
    def label(self) -> str:
        """Name of the kind in comparisons of jobs."""
        return "all-reduce"

    def check(self, num_ranks: int, /) -> None:
        """Refuse options that do not fit this number of ranks."""


class AllReduce(SyncKind):
    """Every rank takes the same step, with the mean of all gradients; or, with `every` above 1, the
    ranks average their weights after that many steps. If given, the job's metrics include the
    bytes sent."""

    kind: Literal["all_reduce"] = "all_reduce"
    """Chooses this kind, which is the default."""
    compression: Compression | None = None
    """Compression of gradients; unset, none."""
    every: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 1
    """Optimizer steps between two averages of the ranks' weights, with independent steps in between
    (local SGD, arXiv:1805.09767). The ranks also average before an evaluation and a checkpoint.
    With 1, gradients are exchanged in every step."""
    outer: Outer | None = None
    """With `every` above 1, an optimizer for the averages; unset, the mean of the weights is
    used."""

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.every == 1 and self.outer is not None:
            raise wrong("/sync/outer", "needs sync.every above 1: with 1, gradients are exchanged")
        if self.every > 1 and self.compression is not None:
            raise wrong(
                "/sync/compression", "needs sync.every 1: above, no gradients are exchanged"
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
    """Each rank takes steps on its own weights, and averages its weights with a few other ranks:
    its neighbours in a graph. Evaluations and the result use the mean of all copies."""

    kind: Literal["gossip"] = "gossip"
    """Chooses this kind."""
    mode: Literal["d_psgd", "sgp", "ad_psgd"] = "d_psgd"
    """d_psgd: a rank averages with its neighbours in every step (Lian et al. 2017,
    arXiv:1705.09056). sgp: a rank pushes parts of its weights, and neighbours need not answer
    (Assran et al. 2019, arXiv:1811.10792). ad_psgd: two ranks average at a time while all go on
    computing, so that a slow rank delays no other (Lian et al. 2018, arXiv:1710.06952)."""
    graph: Literal["ring", "exponential", "random", "complete", "custom"] = "ring"
    """Neighbours of a rank. ring: the previous and the next rank. exponential: one rank per step,
    at the distances 1, 2, 4 and so on in turn (arXiv:2110.13363). random: one random rank per step.
    complete: all ranks. custom: the ranks that `edges` names."""
    edges: Annotated[list[Edge], Field(min_length=1, max_length=MAX_EDGES)] | None = None
    """custom: pairs of ranks that are neighbours, such as `[[0, 1], [1, 2]]`. With sgp the first
    rank of a pair sends to the second."""

    @property
    def copies_differ(self) -> bool:
        return True

    @property
    def label(self) -> str:
        return f"gossip, {self.mode}, {self.graph}"

    @model_validator(mode="after")
    def _has_edges_if_custom(self) -> Self:
        if (self.graph == "custom") != (self.edges is not None):
            raise wrong("/sync/edges", "and graph: custom go together: give both or neither")
        return self

    def check(self, num_workers: int) -> None:
        """Refuse a graph in which the weights of some rank would never reach another rank."""
        if num_workers == 1:
            raise wrong(
                "/resources/num_workers",
                "must be 2 or more with sync.kind gossip: a single rank has no neighbours",
            )
        if self.mode == "ad_psgd" and self.graph == "exponential":
            raise wrong(
                "/sync/graph",
                "must not be exponential with ad_psgd, where neighbours are one even and one odd "
                "rank: take ring, random or complete",
            )
        if self.mode == "ad_psgd" and self.graph == "ring" and num_workers % 2:
            raise wrong(
                "/sync/graph",
                f"must not be ring with ad_psgd and {num_workers} workers: around it ranks take "
                "two sides in turn, which needs an even number. Take random or complete",
            )
        for number, (one, other) in enumerate(self.edges or ()):
            if max(one, other) >= num_workers:
                raise wrong(
                    f"/sync/edges/{number}",
                    f"names rank {max(one, other)}, and the ranks are 0 to {num_workers - 1}: "
                    "change the edge, or resources.num_workers",
                )
            if one == other:
                raise wrong(
                    f"/sync/edges/{number}",
                    "joins a rank with itself: leave it out, each keeps a part anyway",
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
                    "edges, or take another graph",
                )
        if self.mode == "ad_psgd":
            away = distances(both, num_workers)
            odd = next((edge for edge in edges if (away[edge[0]] - away[edge[1]]) % 2 == 0), None)
            if odd is not None:
                raise wrong(
                    at,
                    "must have two sides with ad_psgd, and all edges between them: the edge "
                    f"{list(odd)} closes an odd cycle. Leave it out",
                )


class Correction(Document):
    """Correction of updates whose gradients were computed with older weights."""

    name: Literal["staleness_lr", "delay_compensation"]
    """staleness_lr: divides the learning rate by the staleness (Zhang et al. 2016,
    arXiv:1511.05950). delay_compensation: adds to the gradient an estimate of its change since the
    weights were pulled (DC-ASGD, Zheng et al. 2017, arXiv:1609.08326)."""
    strength: Annotated[Number, Field(gt=0.0, le=100.0)] = 0.04
    """delay_compensation: the factor of the estimate, lambda in the paper."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        is_changed = self.strength != type(self).model_fields["strength"].default
        if self.name != "delay_compensation" and is_changed:
            raise wrong("/sync/correction/strength", "is for delay_compensation: leave it out")
        return self


class ParameterServer(SyncKind):
    """The last ranks of the job are servers, which each hold an equal part of the weights and the
    optimizer state. The other ranks, the workers, pull weights from the servers and push gradients
    to the servers. Servers are counted in `resources.num_workers`. For recipes."""

    kind: Literal["parameter_server"] = "parameter_server"
    """Chooses this kind."""
    servers: Annotated[Int, Field(ge=1, le=MAX_WORKERS)] = 1
    """Number of servers, counted in `resources.num_workers`; at most the number of workers."""
    server_resources: RoleResources | None = None
    """Resources of each server; unset, a server has the resources of a worker. Required if workers
    have GPUs, since servers have none."""
    mode: Literal["synchronous", "asynchronous", "bounded"] = "synchronous"
    """synchronous: a step uses the gradients of all workers, as with all_reduce. asynchronous: each
    worker computes a whole global batch and pushes its gradient, which is applied as one step; no
    worker waits for another. bounded: as asynchronous, but a worker that is more than
    `max_staleness` steps ahead of the slowest worker waits before its next step (stale synchronous
    parallel, Ho et al. 2013)."""
    max_staleness: Annotated[Int, Field(ge=0, le=1000)] | None = None
    """bounded: most steps that a worker may be ahead of the slowest worker when it begins a step,
    so the fastest worker may get one step further ahead. The staleness of an update may be
    larger."""
    correction: Correction | None = None
    """asynchronous, bounded: correction of stale updates; unset, none."""
    push_dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type in which gradients are sent to the servers; fp16 and bf16 halve the bytes."""
    shards_kept_by: Literal["snapshot", "replica"] = "snapshot"
    """How a server's part is restored when the server dies. snapshot: the job resumes from its
    newest checkpoint. replica: the next server has a copy, to which each gradient is sent too;
    another process takes the server's place, and the training goes on without losing a step. Needs
    2 servers or more."""

    @property
    def label(self) -> str:
        return f"parameter servers, {self.mode}"

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if (self.mode == "bounded") != (self.max_staleness is not None):
            raise wrong(
                "/sync/max_staleness",
                "and mode: bounded go together: give both, such as `mode: bounded` and "
                "`max_staleness: 4`, or neither",
            )
        if self.mode == "synchronous" and self.correction is not None:
            raise wrong(
                "/sync/correction",
                "is for mode asynchronous or bounded: synchronous updates are not stale. Leave it "
                "out, or change the mode",
            )
        return self

    def check(self, num_ranks: int) -> None:
        """Refuse a number of servers that does not fit the number of ranks."""
        num_workers = num_ranks - self.servers
        if num_workers < 2:
            raise wrong(
                "/resources/num_workers",
                f"is {num_ranks}, of which sync.servers takes {self.servers}: make it "
                f"{self.servers + 2} or more, since parameter servers are for two or more workers",
            )
        if self.servers > num_workers:
            raise wrong(
                "/sync/servers",
                f"is {self.servers}, more than the {num_workers} workers that are left of the "
                f"{num_ranks} ranks: take {num_ranks // 2} servers or fewer",
            )
        if self.shards_kept_by == "replica" and self.servers == 1:
            raise wrong(
                "/sync/shards_kept_by",
                "must be snapshot with one server: a replica is on the next server. Take "
                "sync.servers 2 or more",
            )


class AutoSync(SyncKind):
    """The service chooses the kind when the job is submitted, and the job is stored with the chosen
    kind: all_reduce, unless another kind is expected to be much faster on the known workers and
    their network. The event `submitted` names the chosen kind and the reason."""

    kind: Literal["auto"] = "auto"
    """Leaves the choice to the service; `sync: auto` is the short form."""
    bandwidth_bytes_per_s: Size | None = None
    """Bytes per second that each worker can send to others while all workers send; a number, or a
    size such as `100MiB`. Unset, the speed of the network is unknown, and is no reason to choose
    another kind than all_reduce."""


def distances(ways: Iterable[Sequence[int]], num_workers: int) -> dict[int, int]:
    """Return the distance in edges from rank 0, for each rank that can be reached from it."""
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
    """Fill in the default, `kind: all_reduce`, and expand the short form `auto`."""
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
                    "is not for kind auto, with which the service chooses: leave it out, or name "
                    "the kind that it belongs to",
                )
    return {"kind": "all_reduce", **given}
