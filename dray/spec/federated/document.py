"""Federated learning: each client trains on its own data, and a server averages the updates."""

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
"""Default deadline, in seconds, of a round with clients outside the cluster. Without a deadline, a
client that never sends its update would block the round."""
SharedMetric = Annotated[
    str, StringConstraints(max_length=128, pattern=r"^(train/loss|val/[a-z0-9_]+)$")
]


def _without_what_silos_fill_in(schema: dict[str, Any]) -> None:
    """Remove the fields that default to the number of `silos` from the `required` fields of a JSON
    Schema."""
    filled_in = ("clients", "clients_per_round")
    schema["required"] = [name for name in schema["required"] if name not in filled_in]


class Federated(Document):
    """Federated learning. By default, the ranks simulate the clients, whose data comes from the
    job's data set. With `silos`, each client is a rank on the node that has the client's data. With
    `http`, clients outside the cluster train on their own data. A round is a step of the job.
    `train.optimizer` is the clients' optimizer, whose state is reset in each round, and
    `train.schedule` sets the optimizer's learning rate for each round."""

    model_config = ConfigDict(json_schema_extra=_without_what_silos_fill_in)

    algorithm: Literal["fedavg", "fedprox", "fedadam", "fedyogi", "scaffold"] = "fedavg"
    """fedavg: uses the mean of the clients' weights (arXiv:1602.05629). fedprox: pulls clients back
    towards the weights at the beginning of the round (arXiv:1812.06127). fedadam, fedyogi: use an
    adaptive optimizer on the server (arXiv:2003.00295). scaffold: estimates and corrects the drift
    of each client (arXiv:1910.06378)."""
    clients: Annotated[Int, Field(ge=2, le=MAX_CLIENTS)]
    """Number of clients. Leave this field out with `silos`."""
    clients_per_round: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)]
    """Number of clients to choose at random for each round. Leave this field out with `silos`,
    where all clients participate in each round."""
    silos: Annotated[list[Silo], Field(min_length=2, max_length=MAX_SILOS)] | None = None
    """Clients with their own nodes, one rank each. One additional rank aggregates the updates. Only
    this rank reads `data`, which defines the columns and classes and is used to validate the model.
    If unset, the ranks simulate the clients."""
    metrics: Annotated[list[SharedMetric], Field(max_length=64)] = ["train/loss"]
    """silos: metrics that a silo is allowed to send with its update, such as `val/loss` on its own
    validation samples. The owner of the silo's node can allow fewer."""
    deadline_s: Annotated[Number, Field(ge=1.0, le=7 * 24 * 3600.0)] | None = None
    """silos, http: seconds after which a round ends, provided that it has `quorum` updates. A round
    with fewer updates ends as soon as it has `quorum` updates; over HTTP, all clients can join it
    after the deadline. If unset, a round with silos waits for all connected silos, and a round over
    HTTP has a deadline of 600 s."""
    rounds: Annotated[Int, Field(ge=1, le=MAX_STEPS)]
    """Number of rounds."""
    local_epochs: Annotated[Int, Field(ge=1, le=1000)] = 1
    """Number of passes of a client over its samples in a round."""
    batch_size: Annotated[Int, Field(ge=1, le=2**24)] = 32
    """Number of samples per step of a client."""
    http: Http | None = None
    """Clients outside the cluster. If unset, the ranks simulate the clients."""
    partition: Partition = Partition()
    proximal_mu: Annotated[Number, Field(gt=0.0, le=1000.0)] | None = None
    """fedprox: strength of the pull towards the weights at the beginning of the round. Defaults to
    0.01."""
    server: ServerOptimizer = ServerOptimizer()
    dropout_rate: Rate = 0.0
    """Probability that a client chosen for a round sends no update."""
    stragglers: Stragglers | None = None
    """Simulated stragglers. If unset, every client that sends an update completes all its steps."""
    quorum: Annotated[Int, Field(ge=1, le=MAX_CLIENTS)] | None = None
    """Minimum number of updates for a round to count. With fewer updates, the weights remain
    unchanged. Defaults to 1."""
    aggregator: Aggregator = Aggregator()
    max_update_norm: Annotated[Number, Field(gt=0.0, le=1e6)] = 1000.0
    """Maximum L2 norm of an update. A larger update, or an update with a value that is not finite,
    is rejected, and the job's log names the client."""
    attack: Attack | None = None
    """Simulated attack. If unset, no client sends poisoned updates."""
    privacy: Privacy | None = None
    secure_aggregation: SecureAggregation | None = None
    """Options of secure aggregation. If unset, the server sees each update."""
    evaluate_every: Annotated[Int, Field(ge=1, le=MAX_STEPS)] = 1
    """Number of rounds between evaluations on all clients. Unless `checkpoint.every_steps` is
    given, a checkpoint is saved after each evaluation."""

    @property
    def least_updates(self) -> int:
        """The minimum number of updates for a round to count."""
        return 0 if self.privacy else max(self.quorum or 1, self.aggregator.least_updates)

    def steps_of(self, num_samples: int) -> int:
        """Return the number of local steps per round for a client with `num_samples` training
        samples."""
        return self.local_epochs * -(-num_samples // self.batch_size)

    @property
    def expected_updates(self) -> float:
        """The expected number of updates in a round."""
        expected = self.clients_per_round * (1 - self.dropout_rate)
        if self.stragglers is not None and self.stragglers.updates == "drop":
            expected *= 1 - self.stragglers.rate
        return expected

    @property
    def count_noise(self) -> float:
        """Standard deviation of the noise that adaptive clipping adds to the number of clipped
        updates: 1/20 of the number of clients per round, as in Andrew et al. 2021."""
        return self.clients_per_round / 20

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, given: Any) -> Any:
        """Fill in the number of clients if there are silos, and the deadline for HTTP clients."""
        if not isinstance(given, Mapping):
            return given
        if given.get("http") is not None and given.get("deadline_s") is None:
            given = {**given, "deadline_s": HTTP_DEADLINE_S}
        silos = given.get("silos")
        if not isinstance(silos, list | tuple):
            return given
        number = max(2, len(silos))  # shorter lists have their own error
        return {"clients": number, "clients_per_round": number, **given}

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        conflicts.refuse(self)
        return self
