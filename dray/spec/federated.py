"""Federated learning: clients train on data of their own, and a server averages the updates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from dray.secure_aggregation.messages import LEAST_CLIENTS, least_clients
from dray.spec.data import SourceUrl
from dray.spec.fields import (
    MAX_STEPS,
    Document,
    Int,
    LabelKey,
    NodeLabelValue,
    Number,
    refuse_foreign,
    wrong,
)
from dray.spec.model import Imported
from dray.spec.parallel import Parallel
from dray.spec.recipes import RECIPES
from dray.spec.train import Optimizer, Train

if TYPE_CHECKING:
    from dray.spec import JobSpec

MAX_CLIENTS = 10_000
MAX_SILOS = 1000
SharedMetric = Annotated[
    str, StringConstraints(max_length=128, pattern=r"^(train/loss|val/[a-z0-9_]+)$")
]
HTTP_RECIPES = ("image_classification", "tabular_classification", "tabular_regression")
"""Recipes whose clients may be outside of the cluster."""
HTTP_DEADLINE_S = 600.0
"""Of a round with clients outside of the cluster, if the document gives none: some never come."""
MAX_SECURE_CLIENTS = 500
"""Of a round with secure aggregation, in which each client has a mask for each other one."""
MAX_NORM_IN_32_BITS = 100.0
"""`max_update_norm` of secure aggregation with 32 bits. The default would leave few bits for
updates as they are."""
Rate = Annotated[Number, Field(ge=0.0, lt=1.0)]
Beta = Annotated[Number, Field(ge=0.0, lt=1.0)]


class Partition(Document):
    """How the samples are divided among the clients. Each sample, of training and of validation,
    belongs to one client, and each client has a sample to train with."""

    by: Literal["iid", "dirichlet", "classes"] = "iid"
    """iid: at random, equally many for each. dirichlet: of each class, shares drawn from a
    Dirichlet distribution (arXiv:1909.06335). classes: each client has samples of a few classes
    alone (McMahan et al. 2017, arXiv:1602.05629). dirichlet and classes are for classification."""
    alpha: Annotated[Number, Field(gt=0.0, le=1e6)] = 0.5
    """dirichlet: its concentration. At 0.1 most clients have one or two classes, at 100 all have
    nearly the same."""
    classes_per_client: Annotated[Int, Field(ge=1, le=10_000)] = 2
    """classes: number of classes of each client."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        owners: dict[str, tuple[str, ...]] = {
            "alpha": ("dirichlet",),
            "classes_per_client": ("classes",),
        }
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
    """Chance of a client to straggle in a round. It then has done a part of its steps, drawn
    evenly from all parts, when the round ends."""
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
        owners: dict[str, tuple[str, ...]] = {"trim": ("trimmed_mean",)}
        refuse_foreign(self, self.name, owners | dict.fromkeys(("malicious", "keep"), ("krum",)))
        return self

    @property
    def least_updates(self) -> int:
        """The number of updates without which there is no result: for trimmed_mean that with
        which one is left out at each end."""
        match self.name:
            case "krum":
                return 2 * self.malicious + 3
            case "trimmed_mean":
                return math.ceil(1 / self.trim)
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


class Http(Document):
    """Clients outside of the cluster, which take part by `dray federate join`. The job's only rank
    aggregates. Its `data` say which columns and classes there are, and validate the model."""

    max_samples: Annotated[Int, Field(ge=1, le=2**31)] = 100_000
    """A client that says that it has more samples weighs as much as one with so many."""


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


def _without_what_silos_fill_in(schema: dict[str, Any]) -> None:
    """Of a JSON Schema: what is required of a document as it is written."""
    filled_in = ("clients", "clients_per_round")
    schema["required"] = [name for name in schema["required"] if name not in filled_in]


class Federated(Document):
    """Federated learning. The ranks play the clients, whose data come from the job's data set; or
    with `silos` each client is a rank where its own data lie; or with `http` clients outside of the
    cluster train on data of their own. A round is a step of the job. `train.optimizer` is that of
    the clients, which begin each round with a fresh one, and
    `train.schedule` gives its rate for each round."""

    model_config = ConfigDict(json_schema_extra=_without_what_silos_fill_in)

    algorithm: Literal["fedavg", "fedprox", "fedadam", "fedyogi", "scaffold"] = "fedavg"
    """fedavg: the mean of the clients' weights (arXiv:1602.05629). fedprox: clients are pulled back
    to the weights that they began with (arXiv:1812.06127). fedadam, fedyogi: an adaptive optimizer
    on the server (arXiv:2003.00295). scaffold: each client's drift is estimated and corrected
    (arXiv:1910.06378)."""
    clients: Annotated[Int, Field(ge=2, le=MAX_CLIENTS)]
    """Number of clients; leave it out with `silos`."""
    clients_per_round: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)]
    """Number of clients that are chosen at random for each round; leave it out with `silos`, which
    all take part."""
    silos: Annotated[list[Silo], Field(min_length=2, max_length=MAX_SILOS)] | None = None
    """Clients with nodes of their own, one rank each. One rank more, which reads `data` alone,
    aggregates: `data` say which columns and classes there are, and validate the model. Unset, the
    ranks play the clients."""
    metrics: Annotated[list[SharedMetric], Field(max_length=64)] = ["train/loss"]
    """silos: metrics that a silo may send with its update, such as `val/loss` on its own validation
    samples. The owner of its node may allow fewer."""
    deadline_s: Annotated[Number, Field(ge=1.0, le=7 * 24 * 3600.0)] | None = None
    """silos, http: seconds after which a round ends with as many updates as `quorum` asks for. If
    fewer have come by then, the round ends with the update that makes them, and over HTTP is open
    to all clients. Unset, a round of silos waits for all that are there; over HTTP it is 600."""
    rounds: Annotated[Int, Field(ge=1, le=MAX_STEPS)]
    """Number of rounds."""
    local_epochs: Annotated[Int, Field(ge=1, le=1000)] = 1
    """Passes of a client over its samples in a round."""
    batch_size: Annotated[Int, Field(ge=1, le=2**24)] = 32
    """Samples of a client's step."""
    http: Http | None = None
    """Unset, the ranks play the clients."""
    partition: Partition = Partition()
    proximal_mu: Annotated[Number, Field(gt=0.0, le=1000.0)] | None = None
    """fedprox: strength of the pull; unset, 0.01."""
    server: ServerOptimizer = ServerOptimizer()
    dropout_rate: Rate = 0.0
    """Chance of a client that was chosen for a round to send nothing."""
    stragglers: Stragglers | None = None
    """Unset, every client that sends an update has done all its steps."""
    quorum: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] | None = None
    """Least number of updates for a round to count; with fewer the weights stay as they are.
    Unset, one."""
    aggregator: Aggregator = Aggregator()
    max_update_norm: Annotated[Number, Field(gt=0.0, le=1e6)] = 1000.0
    """An update with a larger 2-norm is refused, and its client named in the log. So is one with a
    value that is not finite."""
    attack: Attack | None = None
    """Unset, no client sends a poisoned update."""
    privacy: Privacy | None = None
    secure_aggregation: SecureAggregation | None = None
    """Unset, the server sees each update."""
    evaluate_every: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 1
    """Rounds between two evaluations on all clients. Unless `checkpoint.every_steps` is given, a
    checkpoint follows each."""

    @property
    def least_updates(self) -> int:
        """The number of updates below which a round does not count."""
        return 0 if self.privacy else max(self.quorum or 1, self.aggregator.least_updates)

    @property
    def expected_updates(self) -> float:
        """The mean number of updates that come in a round, by the document alone."""
        expected = self.clients_per_round * (1 - self.dropout_rate)
        if self.stragglers is not None and self.stragglers.updates == "drop":
            expected *= 1 - self.stragglers.rate
        return expected

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise in the number of clipped updates, where the clipping
        norm adapts: as Andrew et al. 2021 choose it, a twentieth of the clients of a round."""
        return self.clients_per_round / 20

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Fill in the number of clients of silos, and the deadline of clients over HTTP."""
        if not isinstance(given, Mapping):
            return given
        if given.get("http") is not None and given.get("deadline_s") is None:
            given = {**given, "deadline_s": HTTP_DEADLINE_S}
        silos = given.get("silos")
        if not isinstance(silos, list | tuple):
            return given
        number = max(2, len(silos))  # of fewer it is the list that is refused
        return {"clients": number, "clients_per_round": number, **given}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        self._check_silos()
        if self.clients_per_round > self.clients:
            raise wrong(
                "/federated/clients_per_round",
                f"is {self.clients_per_round}, more than the {self.clients} of federated.clients",
            )
        self._check_options()
        self._check_updates()
        if self.privacy is not None:
            self._check_privacy(self.privacy)
        if self.http is not None:
            self._check_http()
        if self.secure_aggregation is not None:
            self._check_secure_aggregation(self.secure_aggregation)
        return self

    def _check_silos(self) -> None:
        if self.silos is None:
            if self.metrics != Federated.model_fields["metrics"].default:
                raise wrong("/federated/metrics", "is for silos: leave it out")
            if self.deadline_s is not None and self.http is None:
                raise wrong("/federated/deadline_s", "is for silos and http: leave it out")
            return
        names = [silo.name for silo in self.silos]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise wrong(f"/federated/silos/{number}/name", f"names {name!r} twice")
        for name in ("clients", "clients_per_round"):
            if getattr(self, name) != len(names):
                raise wrong(
                    f"/federated/{name}",
                    f"must be {len(names)}, the number of silos, which all take part: leave it out",
                )
        for name in ("partition", "dropout_rate", "stragglers", "attack"):
            if getattr(self, name) != Federated.model_fields[name].default:
                raise wrong(f"/federated/{name}", "is for a simulation, not for silos")
        if self.privacy is not None:
            raise wrong(
                "/federated/privacy",
                "is for a simulation, not for silos, in this version: its noise comes from the "
                "job's seed, which the silos know",
            )
        for name in ("http", "secure_aggregation"):
            if getattr(self, name) is not None:
                raise wrong(f"/federated/{name}", "is not for silos, in this version")

    def _check_http(self) -> None:
        for name in ("partition", "dropout_rate", "stragglers", "attack"):
            if getattr(self, name) != Federated.model_fields[name].default:
                raise wrong(f"/federated/{name}", "must be unset with http: clients are real there")
        if self.algorithm == "scaffold":
            raise wrong(
                "/federated/algorithm",
                "must not be scaffold with http: its corrections need each client in every round "
                "and on this server. Take fedprox",
            )
        if self.privacy is not None:
            raise wrong(
                "/federated/privacy",
                "must be unset with http, in this version: which clients send something is not by "
                "chance there, and the noise would come from the job's seed",
            )

    def _check_options(self) -> None:
        name, server = self.algorithm, self.server
        if self.proximal_mu is not None and name != "fedprox":
            raise wrong("/federated/proximal_mu", f"is an option of fedprox, not of {name}")
        adapts = name in ("fedadam", "fedyogi")
        for option in ("betas", "tau"):
            is_given = getattr(server, option) != ServerOptimizer.model_fields[option].default
            if is_given and not adapts:
                at = f"/federated/server/{option}"
                raise wrong(at, f"is an option of fedadam and fedyogi, not of {name}")
        if server.momentum and name not in ("fedavg", "fedprox"):
            at = "/federated/server/momentum"
            raise wrong(at, f"is an option of fedavg and fedprox, not of {name}")

    def _check_updates(self) -> None:
        chosen = self.clients_per_round
        if self.quorum is not None and self.quorum > chosen:
            raise wrong(
                "/federated/quorum",
                f"is {self.quorum}, more than the {chosen} of federated.clients_per_round: no "
                "round could count",
            )
        takes_nearest = self.aggregator.name == "krum"
        if self.aggregator.least_updates > chosen:
            option = "malicious" if takes_nearest else "trim"
            raise wrong(
                f"/federated/aggregator/{option}",
                f"is {getattr(self.aggregator, option):g}: {self.aggregator.name} needs "
                f"{self.aggregator.least_updates} clients in each round for that, and "
                f"clients_per_round is {chosen}",
            )
        if takes_nearest and self.aggregator.keep > chosen - self.aggregator.malicious:
            raise wrong(
                "/federated/aggregator/keep",
                f"must be {chosen - self.aggregator.malicious} or less: clients_per_round without "
                "the malicious ones",
            )
        if self.algorithm == "scaffold" and self.aggregator.name != "mean":
            raise wrong(
                "/federated/aggregator/name",
                "must be mean with scaffold, whose corrections a malicious client poisons as well",
            )

    def _check_privacy(self, privacy: Privacy) -> None:
        if self.algorithm == "scaffold":
            raise wrong(
                "/federated/privacy",
                "is not for scaffold: its corrections would tell of each client. Take fedavg",
            )
        if self.aggregator.name != "mean":
            raise wrong("/federated/aggregator/name", "must be mean with privacy, which clips")
        if self.quorum is not None:
            raise wrong(
                "/federated/quorum",
                "must be unset with privacy: that a round does not count would tell who was there",
            )
        if privacy.delta >= 1 / self.clients:
            raise wrong(
                "/federated/privacy/delta",
                f"must be below {1 / self.clients:g}, one over federated.clients: with more, a "
                "client's data may be published",
            )
        if privacy.adaptive is not None and privacy.noise_multiplier >= 2 * self.count_noise:
            raise wrong(
                "/federated/privacy/noise_multiplier",
                f"must be below {2 * self.count_noise:g} with adaptive, where the count of clipped "
                "updates needs a part of it: take more clients_per_round, or leave adaptive out",
            )

    def _check_secure_aggregation(self, secure: SecureAggregation) -> None:
        if self.aggregator.name != "mean":
            raise wrong(
                "/federated/aggregator/name",
                f"must be mean with secure_aggregation: {self.aggregator.name} needs each update "
                "by itself, and the server has their sum alone",
            )
        if self.algorithm == "scaffold":
            raise wrong(
                "/federated/algorithm",
                "must not be scaffold with secure_aggregation: the control variates of each "
                "client, which tell its updates, are in the job's checkpoints. Take fedavg",
            )
        if self.attack is not None:
            raise wrong(
                "/federated/attack",
                "must be unset with secure_aggregation: a client checks its own update there, and "
                "one that attacks would not",
            )
        chosen = self.clients_per_round
        if not LEAST_CLIENTS <= chosen <= MAX_SECURE_CLIENTS:
            raise wrong(
                "/federated/clients_per_round",
                f"must be {LEAST_CLIENTS} to {MAX_SECURE_CLIENTS} with secure_aggregation: with "
                "fewer clients there are too few to hide among, and each has a mask for each other",
            )
        if secure.bits == 32 and self.max_update_norm > MAX_NORM_IN_32_BITS:
            raise wrong(
                "/federated/max_update_norm",
                f"must be {MAX_NORM_IN_32_BITS:g} or less with secure_aggregation.bits of 32, "
                "which round more with a larger one: give one near the norm of your updates",
            )
        least = least_clients(secure.threshold, chosen)
        if self.expected_updates < least:
            raise wrong(
                "/federated/secure_aggregation/threshold",
                f"is {secure.threshold:g}: {least} of {chosen} clients must stay to the end of a "
                f"round, and by dropout_rate and stragglers {self.expected_updates:g} will. Take "
                "more clients_per_round or a lower threshold",
            )


def check(document: JobSpec) -> None:
    """Refuse what does not go together with `federated`, or has no meaning there."""
    federated = document.federated
    if federated is None:
        return
    if document.script is not None:
        raise wrong("/federated", "is for recipes; a script trains its clients itself")
    _check_group(document, federated)
    _check_train(document.train, federated)
    assert document.recipe is not None
    if federated.partition.by != "iid" and not RECIPES[document.recipe].classifies:
        raise wrong(
            "/federated/partition/by",
            f"must be iid for {document.recipe}, whose samples are of no class",
        )


def _check_group(document: JobSpec, federated: Federated) -> None:
    if document.sync is not None:
        raise wrong("/sync", "must be unset with federated: clients send updates, not gradients")
    if document.parallel != Parallel():
        raise wrong(
            "/parallel", "must be unset with federated, where each rank has the whole model"
        )
    if document.profile is not None:
        raise wrong("/profile", "must be unset with federated, in this version")
    if document.data.loader_workers:
        raise wrong("/data/loader_workers", "must be 0 with federated, in this version")
    num_workers = document.resources.num_workers
    if federated.silos is not None:
        _check_silos(document, len(federated.silos))
        return
    if federated.http is not None:
        _check_outside(document, federated)
        return
    if num_workers > federated.clients_per_round:
        raise wrong(
            "/resources/num_workers",
            f"is {num_workers}: with more workers than the {federated.clients_per_round} clients "
            "of a round, some have nothing to do",
        )


def with_num_workers(document: Any) -> Any:
    """A job document with `resources.num_workers` filled in, where silos say it and it is unset."""
    if not isinstance(document, Mapping):
        return document
    federated, resources = document.get("federated"), document.get("resources", {})
    silos = federated.get("silos") if isinstance(federated, Mapping) else None
    if not isinstance(silos, list | tuple) or not isinstance(resources, Mapping):
        return document
    return {**document, "resources": {"num_workers": len(silos) + 1, **resources}}


def _check_silos(document: JobSpec, num_silos: int) -> None:
    """Refuse what silos can't have, and all by which a submitter's own code would run in one."""
    resources, chosen = document.resources, "with federated.silos"
    if resources.num_workers != num_silos + 1:
        raise wrong(
            "/resources/num_workers",
            f"must be {num_silos + 1}, one for each silo and one that aggregates: leave it out",
        )
    if resources.gpus_per_worker:
        raise wrong(
            "/resources/gpus_per_worker",
            f"must be 0 {chosen}, in this version: a group on GPUs does not recover in place",
        )
    if resources.required_topology is not None:
        raise wrong(
            "/resources/required_topology", f"must be unset {chosen}, whose nodes are given"
        )
    if document.elastic is not None:
        raise wrong("/elastic", f"must be unset {chosen}: each silo has its node. Give a quorum")
    if isinstance(document.model, Imported):
        raise wrong("/model", f"must be one of dray's {chosen}: no code of yours runs in a silo")
    if document.environment is not None:
        raise wrong(
            "/environment", f"must be unset {chosen}: no code and no variables of yours go there"
        )
    for name in ("array", "sweep"):
        if getattr(document, name) is not None:
            raise wrong(f"/{name}", f"must be unset {chosen}, in this version")


def _check_outside(document: JobSpec, federated: Federated) -> None:
    """Clients outside of the cluster, who run nothing that the job brings along."""
    if document.resources.num_workers != 1:
        raise wrong(
            "/resources/num_workers",
            f"is {document.resources.num_workers}, and must be 1 with federated.http: the only "
            "rank aggregates",
        )
    if document.elastic is not None:
        raise wrong("/elastic", "must be unset with federated.http, whose only rank aggregates")
    if document.recipe not in HTTP_RECIPES:
        raise wrong(
            "/recipe",
            f"is {document.recipe}: federated.http takes {' and '.join(HTTP_RECIPES)}, in this "
            "version",
        )
    if document.model is not None and document.model.name == "imported":
        raise wrong(
            "/model/name", "must not be imported with federated.http: clients run no code of a job"
        )


_INSTEAD: dict[str, str] = {
    "epochs": "federated.rounds and local_epochs",
    "max_steps": "federated.rounds",
    "global_batch_size": "federated.batch_size",
    "batch_range": "federated.batch_size",
    "micro_batch_size": "federated.batch_size",
    "eval_every_epochs": "federated.evaluate_every",
}
"""Options of `train` that a federated job has another one for."""


def _check_train(train: Train, federated: Federated) -> None:
    for name, field in Train.model_fields.items():
        if name in _INSTEAD and getattr(train, name) != field.default:
            raise wrong(f"/train/{name}", f"must be unset with federated: give {_INSTEAD[name]}")
    for name in ("lr_scaling", "recompute", "compile", "measure_noise"):
        if getattr(train, name) != Train.model_fields[name].default:
            raise wrong(f"/train/{name}", "must be unset with federated, in this version")
    if train.precision == "fp16":
        raise wrong("/train/precision", "must be fp32 or bf16 with federated")
    for name in ("state_dtype", "offload"):
        if getattr(train.optimizer, name) != Optimizer.model_fields[name].default:
            raise wrong(
                f"/train/optimizer/{name}",
                "must be unset with federated: clients keep no optimizer state between rounds",
            )
    plain = train.optimizer.name == "sgd" and not train.optimizer.momentum
    if federated.algorithm == "scaffold" and not plain:
        raise wrong(
            "/train/optimizer/name",
            "must be sgd without momentum with scaffold, whose corrections are made for it",
        )
