"""Options of `federated` that do not go together, each refused with the reason and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dray.secure_aggregation.messages import LEAST_CLIENTS, least_clients
from dray.spec.federated.parts import Aggregator, Privacy, SecureAggregation, Silo
from dray.spec.fields import refuse_set, wrong

if TYPE_CHECKING:
    from dray.spec.federated.document import Federated

MAX_SECURE_CLIENTS = 500
"""Most clients of a round with secure aggregation: each client has a mask for each other client."""
MAX_NORM_IN_32_BITS = 100.0
"""Largest `max_update_norm` of secure aggregation with 32 bits. The default of `max_update_norm`
would leave few bits for updates of usual size."""
SIMULATED = ("partition", "dropout_rate", "stragglers", "attack")
AT = "/federated"


def refuse(given: Federated) -> None:
    """Raise the error of `wrong` for the first conflict."""
    if given.silos is None:
        refuse_set(given, AT, ("metrics",), "is for silos: leave it out")
        if given.http is None:
            refuse_set(given, AT, ("deadline_s",), "is for silos and http: leave it out")
    else:
        _check_silos(given, given.silos)
    if given.clients_per_round > given.clients:
        raise wrong(
            "/federated/clients_per_round",
            f"is {given.clients_per_round}, more than the {given.clients} of federated.clients",
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
                "must not be scaffold with http: its corrections need each client in every round "
                "and on this server. Take fedprox",
            )
    if given.secure_aggregation is not None:
        _check_secure_aggregation(given, given.secure_aggregation)


def _check_silos(given: Federated, silos: list[Silo]) -> None:
    names = [silo.name for silo in silos]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise wrong(f"/federated/silos/{number}/name", f"names {name!r} twice")
    for option in ("clients", "clients_per_round"):
        if getattr(given, option) != len(names):
            raise wrong(
                f"/federated/{option}",
                f"must be {len(names)}, the number of silos, which all take part: leave it out",
            )
    _check_real_clients(given, "silos")
    refuse_set(given, AT, ("http", "secure_aggregation"), "is not for silos, in this version")


def _check_real_clients(given: Federated, place: str) -> None:
    message = f"is for a simulation, and must be unset with {place}"
    refuse_set(given, AT, SIMULATED, f"{message}: clients are real there")
    message += ", in this version: its noise comes from the job's seed, which the clients know"
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
            f"is {given.quorum}, more than the {chosen} of federated.clients_per_round: no "
            "round could count",
        )
    takes_nearest = aggregator.name == "krum"
    if aggregator.least_updates > chosen:
        option = "malicious" if takes_nearest else "trim"
        raise wrong(
            f"/federated/aggregator/{option}",
            f"is {getattr(aggregator, option):g}: {aggregator.name} needs "
            f"{aggregator.least_updates} clients in each round for that, and "
            f"clients_per_round is {chosen}",
        )
    if takes_nearest and aggregator.keep > (most := chosen - aggregator.malicious):
        raise wrong(
            "/federated/aggregator/keep",
            f"must be {most} or less: clients_per_round without the malicious ones",
        )
    if given.algorithm == "scaffold" and aggregator.name != "mean":
        raise wrong(
            "/federated/aggregator/name",
            "must be mean with scaffold, whose corrections a malicious client poisons as well",
        )


def _check_privacy(given: Federated, privacy: Privacy) -> None:
    if given.algorithm == "scaffold":
        raise wrong(
            "/federated/privacy",
            "is not for scaffold: its corrections would reveal each client. Take fedavg",
        )
    if given.aggregator.name != "mean":
        raise wrong("/federated/aggregator/name", "must be mean with privacy, which clips")
    message = "must be unset with privacy: a round that does not count would reveal who took part"
    refuse_set(given, AT, ("quorum",), message)
    if privacy.delta >= 1 / given.clients:
        raise wrong(
            "/federated/privacy/delta",
            f"must be below {1 / given.clients:g}, one over federated.clients: with more, a "
            "client's data may be published",
        )
    if privacy.adaptive is not None and privacy.noise_multiplier >= 2 * given.count_noise:
        raise wrong(
            "/federated/privacy/noise_multiplier",
            f"must be below {2 * given.count_noise:g} with adaptive, where the count of clipped "
            "updates needs a part of it: take more clients_per_round, or leave adaptive out",
        )


def _check_secure_aggregation(given: Federated, secure: SecureAggregation) -> None:
    if given.aggregator.name != "mean":
        raise wrong(
            "/federated/aggregator/name",
            f"must be mean with secure_aggregation: {given.aggregator.name} needs each update "
            "by itself, and the server has their sum alone",
        )
    if given.algorithm == "scaffold":
        raise wrong(
            "/federated/algorithm",
            "must not be scaffold with secure_aggregation: the control variates of each "
            "client, which reveal its updates, are in the job's checkpoints. Take fedavg",
        )
    message = "a client checks its own update there, and one that attacks would not"
    refuse_set(given, AT, ("attack",), f"must be unset with secure_aggregation: {message}")
    chosen = given.clients_per_round
    if not LEAST_CLIENTS <= chosen <= MAX_SECURE_CLIENTS:
        raise wrong(
            "/federated/clients_per_round",
            f"must be {LEAST_CLIENTS} to {MAX_SECURE_CLIENTS} with secure_aggregation: with "
            "fewer clients there are too few to hide among, and each has a mask for each other",
        )
    if secure.bits == 32 and given.max_update_norm > MAX_NORM_IN_32_BITS:
        raise wrong(
            "/federated/max_update_norm",
            f"must be {MAX_NORM_IN_32_BITS:g} or less with secure_aggregation.bits of 32, "
            "which round more with a larger one: give one near the norm of your updates",
        )
    least = least_clients(secure.threshold, chosen)
    if given.expected_updates < least:
        raise wrong(
            "/federated/secure_aggregation/threshold",
            f"is {secure.threshold:g}: {least} of {chosen} clients must stay to the end of a "
            f"round, and by dropout_rate and stragglers {given.expected_updates:g} will. Take "
            "more clients_per_round or a lower threshold",
        )
