"""The parts of `federated` in a job document."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from dray.spec.fields import Document, Int, LabelKey, NodeLabelValue, Number, refuse_foreign
from dray.spec.training.data import SourceUrl

MAX_CLIENTS = 10_000
_NEAR = 1e-9
"""By which a product with a decimal fraction may be off."""
Rate = Annotated[Number, Field(ge=0.0, lt=1.0)]
Beta = Annotated[Number, Field(ge=0.0, lt=1.0)]


class Partition(Document):
    """How the samples are divided among the clients. Each sample, of training and of validation,
    belongs to one client, and each client has a sample to train with."""

    by: Literal["iid", "dirichlet", "dirichlet_per_client", "classes"] = "iid"
    """iid: at random, equally many for each. dirichlet: the shares of the clients in each class are
    drawn from a Dirichlet distribution, so clients differ in size (Yurochkin et al. 2019,
    arXiv:1905.12022). dirichlet_per_client: the shares of the classes in each client are, around
    those of the data, and clients have equally many samples (Hsu et al. 2019, arXiv:1909.06335).
    classes: each client has samples of a few classes alone (McMahan et al. 2017,
    arXiv:1602.05629). All but iid are for classification."""
    alpha: Annotated[Number, Field(gt=0.0, le=1e6)] = 0.5
    """dirichlet, dirichlet_per_client: its concentration. The smaller it is, the fewer classes a
    client has; at 100 all have nearly the same."""
    classes_per_client: Annotated[Int, Field(ge=1, le=10_000)] = 2
    """classes: number of classes of each client."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        drawn = ("dirichlet", "dirichlet_per_client")
        owners = {"alpha": drawn, "classes_per_client": ("classes",)}
        refuse_foreign(self, self.by, owners)
        return self


class ServerOptimizer(Document):
    """The optimizer that takes the mean of the clients' updates as a step's direction."""

    lr: Annotated[Number, Field(gt=0.0, le=1000.0)] = 1.0
    """Learning rate. With 1 and no momentum, fedavg takes the mean of the clients' weights."""
    momentum: Beta = 0.0
    """Momentum of the mean update, for fedavg and fedprox (FedAvgM, arXiv:1909.06335)."""
    betas: tuple[Beta, Beta] = (0.9, 0.99)
    """Decay of the running means of fedadam and fedyogi."""
    tau: Annotated[Number, Field(gt=0.0, le=1.0)] = 1e-3
    """Term added to the denominator of fedadam and fedyogi: how far they adapt."""


class Stragglers(Document):
    """Clients that do not get through all of their local steps in a round."""

    rate: Rate
    """Chance of a client to straggle in a round. It then has done a part of its `n` steps, drawn
    evenly from 1 to `n - 1`, when the round ends. A client of one step does not straggle."""
    updates: Literal["keep", "drop"] = "keep"
    """Whether the server uses an update of part of the steps. fedprox is made to keep it."""


class Aggregator(Document):
    """How the updates of a round become one. All but the mean bear some clients that send
    anything they like, and count each client once, however many samples it has."""

    name: Literal["mean", "median", "trimmed_mean", "krum"] = "mean"
    """mean: weighted by the clients' samples, but for scaffold and privacy. median, trimmed_mean:
    of each element (Yin et al. 2018, arXiv:1803.01498). krum: the mean of the updates that lie
    nearest to their neighbours (Blanchard et al. 2017)."""
    trim: Annotated[Number, Field(ge=1 / MAX_CLIENTS, lt=0.5)] = 0.1
    """trimmed_mean: share of the values left out at each end. It needs so many clients in a round
    that this is one at least."""
    malicious: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] = 1
    """krum: number of clients in a round that it must bear. It needs twice as many and three more
    in each round."""
    keep: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] = 1
    """krum: number of updates whose mean is taken (Multi-Krum)."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners = {"trim": ("trimmed_mean",), "malicious": ("krum",), "keep": ("krum",)}
        refuse_foreign(self, self.name, owners)
        return self

    def num_trimmed(self, num_updates: int) -> int:
        """trimmed_mean: the number of values left out at each end, one at least."""
        # 0.29 of 100 is 29, though their product as binary fractions is below it.
        return max(1, math.floor(self.trim * num_updates + _NEAR))

    @property
    def least_updates(self) -> int:
        """The number of updates without which there is no result: for trimmed_mean that with
        which one is left out at each end."""
        match self.name:
            case "krum":
                return 2 * self.malicious + 3
            case "trimmed_mean":
                return math.ceil(1 / self.trim - _NEAR)
            case "mean" | "median":
                return 1


class Attack(Document):
    """Clients that send poisoned updates, to try an aggregator on."""

    rate: Annotated[Number, Field(gt=0.0, lt=1.0)]
    """Share of all clients that attack, one at least, in every round in which they take part."""
    kind: Literal["sign_flip", "noise", "nan"] = "sign_flip"
    """sign_flip: the update that was learned, times -`scale`. noise: normal noise whose norm is
    about `scale` times that of the update. nan: nothing that is a number."""
    scale: Annotated[Number, Field(gt=0.0, le=1e6)] = 1.0
    """Size of the poisoned update."""


class AdaptiveClipping(Document):
    """The clipping norm follows a quantile of the updates' norms (Andrew et al. 2021,
    arXiv:1905.03871)."""

    quantile: Annotated[Number, Field(gt=0.0, lt=1.0)] = 0.5
    """Share of the updates that are not to be clipped."""
    lr: Annotated[Number, Field(gt=0.0, le=10.0)] = 0.2
    """Rate at which the norm follows."""


class Privacy(Document):
    """Differential privacy for clients (DP-FedAvg, arXiv:1710.06963): updates are clipped to a
    norm, and the mean gets normal noise. Each client takes part in a round by a chance of its own,
    of `clients_per_round` over `clients`. Needs the package `opacus` on the nodes."""

    noise_multiplier: Annotated[Number, Field(gt=0.0, le=1000.0)]
    """Standard deviation of the noise in the sum of the updates, relative to the clipping norm."""
    clip_norm: Annotated[Number, Field(gt=0.0, le=1e6)] = 1.0
    """Largest 2-norm of a client's update; where it adapts, the first one."""
    adaptive: AdaptiveClipping | None = None
    """Unset, the clipping norm stays as it is."""
    epsilon: Annotated[Number, Field(gt=0.0, le=1e6)]
    """Privacy that may be spent: the job ends before the round with which it would spend more."""
    delta: Annotated[Number, Field(gt=0.0, lt=1.0)]
    """Chance that the promise of epsilon does not hold; below one over the number of clients."""


class Silo(Document):
    """A client that is a rank on the node where its data lie. Nothing but updates and the metrics
    of `federated.metrics` leaves that node, unless the node's owner opens more."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_]{0,62}$")]
    """Name of the silo, by which events, metrics and the job's log call it."""
    node_labels: Annotated[dict[LabelKey, NodeLabelValue], Field(min_length=1, max_length=8)]
    """Labels of Ray's that the silo's node has."""
    source: SourceUrl | None = None
    """URL of the data, as the silo's node reads it; all else of `data` holds for them too. Only the
    rank of this silo is told: the job document that is stored and shown lacks it. Unset, the node's
    owner names it by DRAY_SILO_SOURCE."""
    max_samples: Annotated[Int, Field(ge=1, le=2**31)] = 2**31
    """A silo that reports more samples weighs as much as one with this many."""


class Http(Document):
    """Clients outside of the cluster, which take part by `dray federate join`. The job's only rank
    aggregates. Its `data` say which columns and classes there are, and validate the model."""

    max_samples: Annotated[Int, Field(ge=1, le=2**31)] = 100_000
    """A client that reports more samples weighs as much as one with this many."""


class SecureAggregation(Document):
    """The server learns the sum of the updates of a round, and no single one (Bonawitz et al. 2017,
    doi:10.1145/3133956.3133982): clients mask their updates by keys that each two of them agree on,
    and the masks cancel out in the sum. Needs the package `cryptography` on the nodes."""

    threshold: Annotated[Number, Field(gt=0.5, le=1.0)] = 0.6
    """Share of the clients of a round that must stay to its end, three at least, or it does not
    count. Fewer of them, together with the server, can't see another client's update."""
    bits: Literal[32, 64] = 64
    """Of each number that a client sends. 32 halve what it sends, and round more, the more the
    larger `max_update_norm` is, which must be 100 or less then. How much is in the job's log."""
