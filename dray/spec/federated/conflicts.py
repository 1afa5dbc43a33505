"""Conflicts between options of `federated`. Each error message states the reason and how to fix the
document."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.secure_aggregation.messages import LEAST_CLIENTS, least_clients
from dray.spec.federated.parts import Aggregator, Privacy, SecureAggregation, Silo
from dray.spec.fields import refuse_set, wrong

if TYPE_CHECKING:
    from dray.spec.federated.document import Federated

MAX_SECURE_CLIENTS = 500
"""Maximum number of clients in a round with secure aggregation. The number is limited because each
client needs a mask for every other client."""
MAX_NORM_IN_32_BITS = 100.0
"""Largest `max_update_norm` for secure aggregation with 32 bits. The default of `max_update_norm`
would leave too few bits for updates of a typical size."""
SIMULATED = ("partition", "dropout_rate", "stragglers", "attack")
AT = "/federated"


def refuse(given: Federated) -> None:
    """Raise a validation error for the first conflict."""
    if given.silos is None:
        refuse_set(given, AT, ("metrics",), "only applies to silos: leave it out")
        if given.http is None:
            refuse_set(given, AT, ("deadline_s",), "only applies to silos and http: leave it out")
    else:
        _check_silos(given, given.silos)
    if given.clients_per_round > given.clients:
        raise wrong(
            "/federated/clients_per_round",
            f"is {given.clients_per_round}, but must be at most federated.clients, which is "
            f"{given.clients}",
        )
    _check_algorithm(given)
    _check_updates(given, given.aggregator)
    if given.privacy is not None:
        _check_privacy(given, given.privacy)
    if given.http is not None:
        _check_real_clients(given, "http")
        if given.algorithm == "scaffold":
            raise wrong(
                "/federated/algorithm",
                "must not be scaffold with http: scaffold's corrections require every client in "
                "every round. Use fedprox",
            )
    if given.secure_aggregation is not None:
        _check_secure_aggregation(given, given.secure_aggregation)


def _check_silos(given: Federated, silos: list[Silo]) -> None:
    names = [silo.name for silo in silos]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise wrong(f"/federated/silos/{number}/name", f"is {name!r}, the name of another silo")
    for option in ("clients", "clients_per_round"):
        if getattr(given, option) != len(names):
            raise wrong(
                f"/federated/{option}",
                f"must be {len(names)}, the number of silos, because all silos participate: "
                "leave it out",
            )
    _check_real_clients(given, "silos")
    refuse_set(
        given, AT, ("http", "secure_aggregation"), "can't be combined with silos in this version"
    )


def _check_real_clients(given: Federated, option: str) -> None:
    message = f"only applies to simulations, and must be unset with {option}"
    refuse_set(given, AT, SIMULATED, f"{message}, whose clients are real")
    message += " in this version: the noise is derived from the job's seed, which the clients know"
    refuse_set(given, AT, ("privacy",), message)


def _check_algorithm(given: Federated) -> None:
    name = given.algorithm
    if name != "fedprox":
        message = f"is an option of fedprox, not of {name}"
        refuse_set(given, AT, ("proximal_mu",), message)
    if name not in ("fedadam", "fedyogi"):
        message = f"is an option of fedadam and fedyogi, not of {name}"
        refuse_set(given.server, "/federated/server", ("betas", "tau"), message)
    if name not in ("fedavg", "fedprox"):
        message = f"is an option of fedavg and fedprox, not of {name}"
        refuse_set(given.server, "/federated/server", ("momentum",), message)


def _check_updates(given: Federated, aggregator: Aggregator) -> None:
    chosen = given.clients_per_round
    if given.quorum is not None and given.quorum > chosen:
        raise wrong(
            "/federated/quorum",
            f"is {given.quorum}, but must be at most federated.clients_per_round, which is "
            f"{chosen}",
        )
    takes_nearest = aggregator.name == "krum"
    if aggregator.least_updates > chosen:
        option = "malicious" if takes_nearest else "trim"
        raise wrong(
            f"/federated/aggregator/{option}",
            f"is {getattr(aggregator, option):g}, so {aggregator.name} needs at least "
            f"{aggregator.least_updates} clients in each round, but clients_per_round is {chosen}",
        )
    if takes_nearest and aggregator.keep > (most := chosen - aggregator.malicious):
        raise wrong(
            "/federated/aggregator/keep",
            f"must be at most {most}, which is clients_per_round minus the number of malicious "
            "clients",
        )
    if given.algorithm == "scaffold" and aggregator.name != "mean":
        raise wrong(
            "/federated/aggregator/name",
            "must be mean with scaffold: a malicious client can also poison scaffold's "
            "corrections, which other aggregators don't protect",
        )


def _check_privacy(given: Federated, privacy: Privacy) -> None:
    if given.algorithm == "scaffold":
        raise wrong(
            "/federated/privacy",
            "can't be combined with scaffold, whose corrections would reveal the updates of "
            "each client. Use fedavg",
        )
    if given.aggregator.name != "mean":
        raise wrong(
            "/federated/aggregator/name", "must be mean with privacy, which clips the updates"
        )
    message = (
        "must be unset with privacy: a round without a quorum would reveal which clients "
        "participated"
    )
    refuse_set(given, AT, ("quorum",), message)
    if privacy.delta >= 1 / given.clients:
        raise wrong(
            "/federated/privacy/delta",
            f"must be below {1 / given.clients:g}, which is 1 / federated.clients: a larger "
            "delta would permit publishing the data of a client",
        )
    if privacy.adaptive is not None and privacy.noise_multiplier >= 2 * given.count_noise:
        raise wrong(
            "/federated/privacy/noise_multiplier",
            f"must be below {2 * given.count_noise:g} with adaptive, because part of the noise is "
            "added to the count of clipped updates: increase clients_per_round, or leave "
            "adaptive out",
        )


def _check_secure_aggregation(given: Federated, secure: SecureAggregation) -> None:
    if given.aggregator.name != "mean":
        raise wrong(
            "/federated/aggregator/name",
            f"must be mean with secure_aggregation: {given.aggregator.name} needs each "
            "client's update, but the server receives only the sum of the updates",
        )
    if given.algorithm == "scaffold":
        raise wrong(
            "/federated/algorithm",
            "must not be scaffold with secure_aggregation: the job's checkpoints contain the "
            "control variates of each client, which reveal its updates. Use fedavg",
        )
    message = "clients check their own updates, and an attacking client would skip the check"
    refuse_set(given, AT, ("attack",), f"must be unset with secure_aggregation: {message}")
    chosen = given.clients_per_round
    if not LEAST_CLIENTS <= chosen <= MAX_SECURE_CLIENTS:
        raise wrong(
            "/federated/clients_per_round",
            f"must be from {LEAST_CLIENTS} to {MAX_SECURE_CLIENTS} with secure_aggregation: fewer "
            "clients can't hide an update, and the number of masks grows with the square of the "
            "number of clients",
        )
    if secure.bits == 32 and given.max_update_norm > MAX_NORM_IN_32_BITS:
        raise wrong(
            "/federated/max_update_norm",
            f"must be {MAX_NORM_IN_32_BITS:g} or less if secure_aggregation.bits is 32, "
            "because a larger norm causes more rounding: set it close to the norm of your "
            "updates",
        )
    least = least_clients(secure.threshold, chosen)
    if given.expected_updates < least:
        raise wrong(
            "/federated/secure_aggregation/threshold",
            f"is {secure.threshold:g}, so {least} of {chosen} clients must remain until a round "
            "ends, but with dropout_rate and stragglers, only "
            f"{given.expected_updates:g} remain on average. "
            "Use more clients_per_round or a lower threshold",
        )
