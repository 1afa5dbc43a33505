"""The parts of `federated` in a job document."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from dray.spec.fields import (
    Document,
    Int,
    LabelKey,
    NodeLabelValue,
    Number,
    a_number,
    refuse_foreign,
)
from dray.spec.training.data import SourceUrl

MAX_CLIENTS = 10_000
_NEAR = 1e-9
"""Tolerance for rounding errors in products with decimal fractions."""
Rate = Annotated[Number, Field(ge=0.0, lt=1.0)]
Beta = Annotated[Number, Field(ge=0.0, lt=1.0)]


class Partition(Document):
    """How the samples are divided among the clients. Each training or validation sample belongs to
    exactly one client, and each client has at least one training sample."""

    by: Literal["iid", "dirichlet", "dirichlet_per_client", "classes"] = "iid"
    """iid: samples are assigned at random, the same number to each client. dirichlet: for each
    class, the clients' proportions are drawn from a Dirichlet distribution, so clients differ in
    size (Yurochkin et al. 2019, arXiv:1905.12022). dirichlet_per_client: for each client, the class
    proportions are drawn from a Dirichlet distribution around the proportions in the data, and all
    clients have the same number of samples (Hsu et al. 2019, arXiv:1909.06335). classes: each
    client has samples from only a few classes (McMahan et al. 2017, arXiv:1602.05629). All methods
    except iid require a classification recipe."""
    alpha: Annotated[Number, Field(gt=0.0, le=1e6)] = 0.5
    """dirichlet, dirichlet_per_client: concentration of the distribution. With smaller values, each
    client has fewer classes. With 100, all clients have nearly the same proportions."""
    classes_per_client: Annotated[Int, Field(ge=1, le=10_000)] = 2
    """classes: number of classes per client."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        drawn = ("dirichlet", "dirichlet_per_client")
        owners = {"alpha": drawn, "classes_per_client": ("classes",)}
        refuse_foreign(self, self.by, owners)
        return self


class ServerOptimizer(Document):
    """The server's optimizer. The direction of the optimizer's step is the mean of the clients'
    updates."""

    lr: Annotated[Number, Field(gt=0.0, le=1000.0)] = 1.0
    """Learning rate. With a rate of 1 and no momentum, the result of fedavg is the mean of the
    clients' weights."""
    momentum: Beta = 0.0
    """fedavg, fedprox: momentum of the mean update (FedAvgM, arXiv:1909.06335)."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """fedadam, fedyogi: decay rates of the running means."""
    tau: Annotated[Number, Field(gt=0.0, le=1.0)] = 1e-3
    """fedadam, fedyogi: term added to the denominator. Larger values reduce the adaptivity."""


class Stragglers(Document):
    """Clients that don't finish all of their local steps in a round."""

    rate: Rate
    """Probability that a client is a straggler in a round. A straggler completes only some of its
    `n` steps before the round ends; the number of completed steps is drawn uniformly from 1 to `n -
    1`. A client with a single step is never a straggler."""
    updates: Literal["keep", "drop"] = "keep"
    """Whether the server keeps or drops the updates of stragglers. fedprox is designed to keep
    them."""


class Aggregator(Document):
    """How the updates of a round are combined. All methods except the mean tolerate some malicious
    clients, and weight all clients equally, regardless of their number of samples."""

    name: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    """mean: the mean, weighted by the clients' numbers of samples except with scaffold and privacy.
    median, trimmed_mean: computed separately for each element (Yin et al. 2018, arXiv:1803.01498).
    krum: the mean of the updates that are closest to their neighbours (Blanchard et al. 2017)."""
    trim: Annotated[Number, Field(ge=1 / MAX_CLIENTS, lt=0.5)] = 0.1
    """trimmed_mean: fraction of the values to discard at each end. A round needs at least `1 /
    trim` clients, so that at least one value is discarded at each end."""
    malicious: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] = 1
    """krum: number of malicious clients to tolerate in a round. A round needs at least `2 *
    malicious + 3` clients."""
    keep: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] = 1
    """krum: number of updates to select; the result is their mean (Multi-Krum)."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners = {"trim": ("trimmed_mean",), "malicious": ("krum",), "keep": ("krum",)}
        refuse_foreign(self, self.name, owners)
        return self

    def num_trimmed(self, num_updates: int) -> int:
        """Return the number of values that trimmed_mean discards at each end, at least one."""
        # Without the tolerance, 0.29 * 100 would be rounded down to 28.
        return max(1, math.floor(self.trim * num_updates + _NEAR))

    @property
    def least_updates(self) -> int:
        """The minimum number of updates that the method needs. For trimmed_mean, this is the
        smallest number of updates for which at least one value is discarded at each end."""
        match self.name:
            case "krum":
                return 2 * self.malicious + 3
            case "trimmed_mean":
                return math.ceil(1 / self.trim - _NEAR)
            case "mean" | "median":
                return 1


class Attack(Document):
    """Simulated clients that send poisoned updates, for testing an aggregator."""

    rate: Annotated[Number, Field(gt=0.0, lt=1.0)]
    """Fraction of all clients that attack; at least one client attacks. An attacking client attacks
    in every round in which it participates."""
    kind: Literal["sign_flip", "noise", "nan"] = "sign_flip"
    """sign_flip: the trained update multiplied by -`scale`. noise: Gaussian noise whose norm is
    about `scale` times the norm of the trained update. nan: all values are NaN."""
    scale: Annotated[Number, Field(gt=0.0, le=1e6)] = 1.0
    """Size of the poisoned update relative to the trained update."""


class AdaptiveClipping(Document):
    """Adapts the clipping norm to a quantile of the updates' norms (Andrew et al. 2021,
    arXiv:1905.03871)."""

    quantile: Annotated[Number, Field(gt=0.0, lt=1.0)] = 0.5
    """Fraction of the updates that should not be clipped."""
    lr: Annotated[Number, Field(gt=0.0, le=10.0)] = 0.2
    """Learning rate of the clipping norm."""


class Privacy(Document):
    """Client-level differential privacy (DP-FedAvg, arXiv:1710.06963): updates are clipped to a
    norm, and Gaussian noise is added to their mean. Each client is sampled independently for each
    round, with probability `clients_per_round / clients`. Requires the package `opacus` on the
    nodes."""

    noise_multiplier: Annotated[Number, Field(gt=0.0, le=1000.0)]
    """Standard deviation of the noise in the sum of the updates, relative to the clipping norm."""
    clip_norm: Annotated[Number, Field(gt=0.0, le=1e6)] = 1.0
    """L2 norm to which each client's update is clipped. With `adaptive`, this is the initial
    norm."""
    adaptive: AdaptiveClipping | None = None
    """Adaptation of the clipping norm. If unset, the norm is constant."""
    epsilon: Annotated[Number, Field(gt=0.0, le=1e6)]
    """Privacy budget: the job ends before the round that would exceed it."""
    delta: Annotated[Number, Field(gt=0.0, lt=1.0)]
    """Probability that the epsilon guarantee fails. Must be less than `1 / clients`."""


class Silo(Document):
    """A client that runs as a rank on the node that has its data. Only updates and the metrics in
    `federated.metrics` leave this node, unless the node's owner allows more."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]{0,62}$")]
    """Name of the silo in events, metrics and the job's log."""
    node_labels: Annotated[dict[LabelKey, NodeLabelValue], Field(min_length=1, max_length=8)]
    """Ray labels that the silo's node must have."""
    source: SourceUrl | None = None
    """URL from which the silo's node reads its data. The other options of `data` also apply to this
    data. Only the rank of this silo receives the URL, which is removed from the stored and
    displayed job document. If unset, the node's owner sets the URL with DRAY_SILO_SOURCE."""
    max_samples: Annotated[Int, Field(ge=1, le=2**31)] = 2**31
    """Maximum weight of the silo, in samples. If the silo reports more samples, its weight is
    limited to this number."""


class Http(Document):
    """Clients outside the cluster, which join with `dray federate join`. The job's only rank
    aggregates the updates. The job's `data` defines the columns and classes, and is used to
    validate the model."""

    max_samples: Annotated[Int, Field(ge=1, le=2**31)] = 100_000
    """Maximum weight of a client, in samples. If a client reports more samples, its weight is
    limited to this number."""


class SecureAggregation(Document):
    """Secure aggregation: the server sees only the sum of a round's updates, never a single update
    (Bonawitz et al. 2017, doi:10.1145/3133956.3133982). Clients mask their updates with keys that
    each pair of clients agrees on, and the masks cancel out in the sum. Requires the package
    `cryptography` on the nodes."""

    threshold: Annotated[Number, Field(gt=0.5, le=1.0)] = 0.6
    """Fraction of a round's clients (but at least three clients) that must remain in the round
    until it ends; otherwise the round does not count. A smaller group of clients can't reveal
    another client's update, even if the group colludes with the server."""
    bits: Annotated[Literal[32, 64], BeforeValidator(a_number)] = 64
    """Number of bits of each number that a client sends. 32 bits halve the traffic but round more
    coarsely, especially for a large `max_update_norm`. With 32 bits, `max_update_norm` must be at
    most 100. The job's log contains the rounding error."""
