"""Federated learning: clients train on data of their own, and a server averages the updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, StringConstraints, model_validator

from dray.spec.federated import conflicts
from dray.spec.federated.parts import (
    MAX_CLIENTS,
    Aggregator,
    Attack,
    Http,
    Partition,
    Privacy,
    Rate,
    SecureAggregation,
    ServerOptimizer,
    Silo,
    Stragglers,
)
from dray.spec.fields import MAX_STEPS, Document, Int, Number

MAX_SILOS = 1000
HTTP_DEADLINE_S = 600.0
"""Default deadline of a round with clients outside of the cluster: some may never send an
update."""
SharedMetric = Annotated[
    str, StringConstraints(max_length=128, pattern=r"^(train/loss|val/[a-z0-9_]+)$")
]


def _without_what_silos_fill_in(schema: dict[str, Any]) -> None:
    """Remove fields from a JSON Schema's `required` that are filled in from `silos`."""
    filled_in = ("clients", "clients_per_round")
    schema["required"] = [name for name in schema["required"] if name not in filled_in]


class Federated(Document):
    """Federated learning. By default the ranks simulate the clients, whose data come from the job's
    data set. With `silos`, each client is a rank on the node that has the client's data. With
    `http`, clients outside of the cluster train on their own data. A round is a step of the job.
    `train.optimizer` is the clients' optimizer, whose state is new in each round, and
    `train.schedule` gives its learning rate for each round."""

    model_config = ConfigDict(json_schema_extra=_without_what_silos_fill_in)

    algorithm: Literal["fedavg", "fedprox", "fedadam", "fedyogi", "scaffold"] = "fedavg"
    """fedavg: the mean of the clients' weights (arXiv:1602.05629). fedprox: clients are pulled back
    towards the weights that the round began with (arXiv:1812.06127). fedadam, fedyogi: an adaptive
    optimizer on the server (arXiv:2003.00295). scaffold: each client's drift is estimated and
    corrected (arXiv:1910.06378)."""
    clients: Annotated[Int, Field(ge=2, le=MAX_CLIENTS)]
    """Number of clients; leave it out with `silos`."""
    clients_per_round: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)]
    """Number of clients that are chosen at random for each round; leave it out with `silos`, where
    all clients take part in each round."""
    silos: Annotated[list[Silo], Field(min_length=2, max_length=MAX_SILOS)] | None = None
    """Clients with nodes of their own, one rank each. One more rank aggregates the updates; it
    alone reads `data`, which defines the columns and classes and validates the model. Unset, the
    ranks simulate the clients."""
    metrics: Annotated[list[SharedMetric], Field(max_length=64)] = ["train/loss"]
    """silos: metrics that a silo may send with its update, such as `val/loss` on its own validation
    samples. The owner of the silo's node may allow fewer."""
    deadline_s: Annotated[Number, Field(ge=1.0, le=7 * 24 * 3600.0)] | None = None
    """silos, http: seconds after which a round ends if it has at least `quorum` updates. With fewer
    updates, the round ends as soon as it has `quorum` updates; until then, over HTTP, it is open to
    all clients. Unset, a round of silos waits for all connected silos; over HTTP it is 600."""
    rounds: Annotated[Int, Field(ge=1, le=MAX_STEPS)]
    """Number of rounds."""
    local_epochs: Annotated[Int, Field(ge=1, le=1000)] = 1
    """Passes of a client over its samples in a round."""
    batch_size: Annotated[Int, Field(ge=1, le=2**24)] = 32
    """Number of samples in a client's step."""
    http: Http | None = None
    """Clients outside of the cluster; unset, the ranks simulate the clients."""
    partition: Partition = Partition()
    proximal_mu: Annotated[Number, Field(gt=0.0, le=1000.0)] | None = None
    """fedprox: strength of the pull; unset, 0.01."""
    server: ServerOptimizer = ServerOptimizer()
    dropout_rate: Rate = 0.0
    """Probability that a client that was chosen for a round sends no update."""
    stragglers: Stragglers | None = None
    """Simulated stragglers; unset, every client that sends an update has done all its steps."""
    quorum: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] | None = None
    """Least number of updates for a round to count; with fewer updates the weights stay unchanged.
    Unset, one."""
    aggregator: Aggregator = Aggregator()
    max_update_norm: Annotated[Number, Field(gt=0.0, le=1e6)] = 1000.0
    """An update with a larger 2-norm, or with a value that is not finite, is refused; the job's log
    names its client."""
    attack: Attack | None = None
    """Simulated attack; unset, no client sends a poisoned update."""
    privacy: Privacy | None = None
    secure_aggregation: SecureAggregation | None = None
    """Options of secure aggregation; unset, the server sees each update."""
    evaluate_every: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 1
    """Rounds between two evaluations on all clients. Unless `checkpoint.every_steps` is given, a
    checkpoint is saved after each evaluation."""

    @property
    def least_updates(self) -> int:
        """The number of updates below which a round does not count."""
        return 0 if self.privacy else max(self.quorum or 1, self.aggregator.least_updates)

    def steps_of(self, num_samples: int) -> int:
        """Return the local steps of a client with this many training samples in a round."""
        return self.local_epochs * -(-num_samples // self.batch_size)

    @property
    def expected_updates(self) -> float:
        """The mean number of updates in a round, as expected from the document."""
        expected = self.clients_per_round * (1 - self.dropout_rate)
        if self.stragglers is not None and self.stragglers.updates == "drop":
            expected *= 1 - self.stragglers.rate
        return expected

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise in the number of clipped updates, where the clipping
        norm adapts: a twentieth of the clients of a round, as in Andrew et al. 2021."""
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
        number = max(2, len(silos))  # a list of fewer silos has an error of its own
        return {"clients": number, "clients_per_round": number, **given}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        conflicts.refuse(self)
        return self
