"""The parts of `federated` in a job document."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from dray.spec.fields import Document, Int, LabelKey, NodeLabelValue, Number, refuse_foreign
from dray.spec.training.data import SourceUrl

MAX_CLIENTS = 10_000
_NEAR = 1e-9
"""Tolerance for rounding errors of products with decimal fractions."""
Rate = Annotated[Number, Field(ge=0.0, lt=1.0)]
Beta = Annotated[Number, Field(ge=0.0, lt=1.0)]


class Partition(Document):
    """How the samples are divided among the clients. Each training and validation sample belongs to
    one client, and each client has at least one training sample."""

    by: Literal["iid", "dirichlet", "dirichlet_per_client", "classes"] = "iid"
    """iid: at random, with the same number for each client. dirichlet: for each class, the clients'
    shares are drawn from a Dirichlet distribution, so clients differ in size (Yurochkin et al.
    2019, arXiv:1905.12022). dirichlet_per_client: for each client, the shares of the classes are
    drawn from a Dirichlet distribution around their shares in the data, and all clients have the
    same number of samples (Hsu et al. 2019, arXiv:1909.06335). classes: each client has samples of
    only a few classes (McMahan et al. 2017, arXiv:1602.05629). All but iid are for
    classification."""
    alpha: Annotated[Number, Field(gt=0.0, le=1e6)] = 0.5
    """dirichlet, dirichlet_per_client: concentration of the distribution. The smaller it is, the
    fewer classes a client has; at 100 all clients have nearly the same shares."""
    classes_per_client: Annotated[Int, Field(ge=1, le=10_000)] = 2
    """classes: number of classes of each client."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        drawn = ("dirichlet", "dirichlet_per_client")
        owners = {"alpha": drawn, "classes_per_client": ("classes",)}
        refuse_foreign(self, self.by, owners)
        return self


class ServerOptimizer(Document):
    """The server's optimizer, which uses the mean of the clients' updates as the direction of its
    step."""

    lr: Annotated[Number, Field(gt=0.0, le=1000.0)] = 1.0
    """Learning rate. With 1 and no momentum, the result of fedavg is the mean of the clients'
    weights."""
    momentum: Beta = 0.0
    """Momentum of the mean update, for fedavg and fedprox (FedAvgM, arXiv:1909.06335)."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Decay of the running means of fedadam and fedyogi."""
    tau: Annotated[Number, Field(gt=0.0, le=1.0)] = 1e-3
    """Term added to the denominator of fedadam and fedyogi; the larger it is, the less they
    adapt."""


class Stragglers(Document):
    """Clients that do not finish all of their local steps in a round."""

    rate: Rate
    """Probability that a client straggles in a round. When the round ends, a straggler has done
    only some of its `n` steps: a number drawn uniformly from 1 to `n - 1`. A client with one step
    does not straggle."""
    updates: Literal["keep", "drop"] = "keep"
    """Whether the server uses the updates of stragglers. fedprox is designed to keep them."""


class Aggregator(Document):
    """How the updates of a round are combined. All methods but the mean tolerate some malicious
    clients, and weight all clients equally, however many samples they have."""

    name: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    """mean: weighted by the clients' numbers of samples, except with scaffold and privacy. median,
    trimmed_mean: computed for each element (Yin et al. 2018, arXiv:1803.01498). krum: the mean of
    the updates that lie nearest to their neighbours (Blanchard et al. 2017)."""
    trim: Annotated[Number, Field(ge=1 / MAX_CLIENTS, lt=0.5)] = 0.1
    """trimmed_mean: share of the values left out at each end. A round needs enough clients that
    this share is at least one value."""
    malicious: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] = 1
    """krum: number of malicious clients in a round to tolerate. A round needs at least
    `2 * malicious + 3` clients."""
    keep: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] = 1
    """krum: number of selected updates whose mean is the result (Multi-Krum)."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners = {"trim": ("trimmed_mean",), "malicious": ("krum",), "keep": ("krum",)}
        refuse_foreign(self, self.name, owners)
        return self

    def num_trimmed(self, num_updates: int) -> int:
        """trimmed_mean: return the number of values left out at each end, at least one."""
        # 0.29 of 100 is 29, though their product as binary fractions is below it.
        return max(1, math.floor(self.trim * num_updates + _NEAR))

    @property
    def least_updates(self) -> int:
        """The least number of updates that the method needs. For trimmed_mean, one value is then
        left out at each end."""
        match self.name:
            case "krum":
                return 2 * self.malicious + 3
            case "trimmed_mean":
                return math.ceil(1 / self.trim - _NEAR)
            case "mean" | "median":
                return 1


class Attack(Document):
    """Simulated clients that send poisoned updates, to test an aggregator."""

    rate: Annotated[Number, Field(gt=0.0, lt=1.0)]
    """Share of all clients, at least one, that attack in every round in which they take part."""
    kind: Literal["sign_flip", "noise", "nan"] = "sign_flip"
    """sign_flip: the trained update times -`scale`. noise: normal noise whose norm is about `scale`
    times the norm of the update. nan: all values are NaN."""
    scale: Annotated[Number, Field(gt=0.0, le=1e6)] = 1.0
    """Size of the poisoned update."""


class AdaptiveClipping(Document):
    """The clipping norm follows a quantile of the updates' norms (Andrew et al. 2021,
    arXiv:1905.03871)."""

    quantile: Annotated[Number, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the updates that should not be clipped."""
    lr: Annotated[Number, Field(gt=0.0, le=10.0)] = 0.2
    """Rate at which the clipping norm is adapted."""


class Privacy(Document):
    """Differential privacy for clients (DP-FedAvg, arXiv:1710.06963): updates are clipped to a
    norm, and normal noise is added to their mean. Each client takes part in a round independently,
    with the probability `clients_per_round / clients`. Needs the package `opacus` on the nodes."""

    noise_multiplier: Annotated[Number, Field(gt=0.0, le=1000.0)]
    """Standard deviation of the noise in the sum of the updates, relative to the clipping norm."""
    clip_norm: Annotated[Number, Field(gt=0.0, le=1e6)] = 1.0
    """Largest 2-norm of a client's update; with `adaptive`, its initial value."""
    adaptive: AdaptiveClipping | None = None
    """Adaptation of the clipping norm; unset, the norm is constant."""
    epsilon: Annotated[Number, Field(gt=0.0, le=1e6)]
    """Privacy budget: the job ends before the round that would exceed it."""
    delta: Annotated[Number, Field(gt=0.0, lt=1.0)]
    """Probability that the guarantee of epsilon does not hold; below `1 / clients`."""


class Silo(Document):
    """A client that is a rank on the node that has its data. Only updates and the metrics of
    `federated.metrics` leave that node, unless the node's owner allows more."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]{0,62}$")]
    """Name of the silo in events, metrics and the job's log."""
    node_labels: Annotated[dict[LabelKey, NodeLabelValue], Field(min_length=1, max_length=8)]
    """Ray labels that the silo's node has."""
    source: SourceUrl | None = None
    """URL of the data, as the silo's node reads it; the other options of `data` apply to this data
    too. Only the rank of this silo receives the URL: the job document that is stored and shown
    lacks it. Unset, the node's owner sets it by DRAY_SILO_SOURCE."""
    max_samples: Annotated[Int, Field(ge=1, le=2**31)] = 2**31
    """A silo that reports more samples weighs as much as one with this many."""


class Http(Document):
    """Clients outside of the cluster, which join by `dray federate join`. The job's only rank
    aggregates the updates. The job's `data` defines the columns and classes, and validates the
    model."""

    max_samples: Annotated[Int, Field(ge=1, le=2**31)] = 100_000
    """A client that reports more samples weighs as much as one with this many."""


class SecureAggregation(Document):
    """The server sees only the sum of the updates of a round, and no single update (Bonawitz et al.
    2017, doi:10.1145/3133956.3133982): clients mask their updates with keys that each pair of
    clients agrees on, and the masks cancel out in the sum. Needs the package `cryptography` on the
    nodes."""

    threshold: Annotated[Number, Field(gt=0.5, le=1.0)] = 0.6
    """Share of the clients of a round, at least three, that must stay until its end, or the round
    does not count. Fewer clients than that, even together with the server, can't see another
    client's update."""
    bits: Literal[32, 64] = 64
    """Bits of each number that a client sends. 32 bits halve the traffic but round more coarsely,
    the more so the larger `max_update_norm` is, which must then be 100 or less. The job's log has
    the rounding error."""
