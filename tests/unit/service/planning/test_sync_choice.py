"""The choice made by `sync: auto`: all-reduce, unless known facts favour another method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dray.spec import JobSpec
from service.planning.model.sync_choice import GAIN, SyncFacts, choose_sync
from service.planning.model.sync_costs import RankSpeeds, SyncCost, Work, sync_costs

MIB = 1 << 20
ALIKE = Work(
    num_ranks=4,
    weights_bytes=4 * MIB,
    compute_s=0.1,
    bandwidth_bytes_per_s=1e9,
    latency_s=1e-4,
)
FAST = SyncFacts(ALIKE, "as given in the document", True, 1, False)
ONE_SLOW = RankSpeeds(slowest=10.0, mean_speed=3.1 / 4, job_id="job-1")


def facts(*, is_known: bool = True, spot: bool = False, **work: Any) -> SyncFacts:
    return replace(FAST, work=replace(ALIKE, **work), knows_network=is_known, may_get_spot=spot)


def document(num_workers: int = 4, **parts: Any) -> JobSpec:
    base = {"recipe": "tabular_classification", "data": {"source": "sklearn://wine"}}
    resources = {"num_workers": num_workers}
    return JobSpec.model_validate({**base, "sync": "auto", "resources": resources, **parts})


SLOW_LINK = {"bandwidth_bytes_per_s": 10e6}
NO_COPIES = document(checkpoint={"every_steps": "auto"})
STALE = document(
    checkpoint={"every_steps": "auto"}, train={"optimizer": {"name": "sgd", "momentum": 0.9}}
)
PAIRS = "gossip, ad_psgd, ring"


@pytest.mark.parametrize(
    ("spec", "known", "chosen", "because"),
    [
        (
            document(),
            FAST,
            "all-reduce",
            "no other option that the document allows is known to be 1.5",
        ),
        (document(), facts(speeds=ONE_SLOW), PAIRS, "10.0 times as long as the median rank"),
        (document(), facts(speeds=ONE_SLOW, is_known=False), PAIRS, "as measured in job-1"),
        (
            document(),
            facts(speeds=RankSpeeds(1.3, 0.95, "job-1")),
            "all-reduce",
            "no other option that",
        ),
        (document(), facts(**SLOW_LINK), "local steps, every 32", "86% of a step with all-reduce"),
        (
            document(),
            facts(**SLOW_LINK, is_known=False),
            "all-reduce",
            "no other option that the document allows",
        ),
        (document(), facts(speeds=ONE_SLOW, **SLOW_LINK), PAIRS, "and sending gradients takes"),
        # Only messages take a long time, and their latency is a guess.
        (
            document(),
            facts(weights_bytes=6e3, compute_s=1e-4),
            "all-reduce",
            "no other option that",
        ),
        (NO_COPIES, facts(speeds=ONE_SLOW), "parameter servers, asynchronous", "10.0 times"),
        (
            NO_COPIES,
            facts(speeds=ONE_SLOW, spot=True),
            "all-reduce",
            "no other option that the document allows",
        ),
        (STALE, facts(speeds=ONE_SLOW), "all-reduce", "no other option that"),
        (document(3), facts(num_ranks=3, speeds=ONE_SLOW), "gossip, ad_psgd, random", "10.0"),
        (
            document(elastic={"min_workers": 1}),
            facts(speeds=ONE_SLOW),
            "all-reduce",
            "no other option that",
        ),
        (document(), "of the model nothing is known", "all-reduce", "of the model nothing"),
    ],
)
def test_another_way_than_all_reduce_is_for_a_reason(
    spec: JobSpec, known: SyncFacts | str, chosen: str, because: str
) -> None:
    found = choose_sync(spec, known)
    assert found.chosen.name == chosen
    assert because in found.chosen.why
    assert found.options[0].name == "all-reduce"
    assert all(option.why for option in found.options)
    assert found.chosen.spec is not None
    assert found.chosen.spec.sync is not None
    assert found.chosen.spec.sync.kind == found.chosen.sync["kind"]


def test_each_way_that_is_not_taken_says_what_speaks_against_it() -> None:
    elastic = choose_sync(document(elastic={"min_workers": 1}), facts(speeds=ONE_SLOW))
    against = {option.name: option.why for option in elastic.options[1:]}
    assert all("the job document does not allow this option" in why for why in against.values())
    assert (
        "option: elastic must be unset: with sync.kind gossip, the ranks' weights" in against[PAIRS]
    )
    spot = choose_sync(document(), facts(spot=True))
    assert "spot nodes" in spot.options[-1].why
    guessed = choose_sync(document(), facts(**SLOW_LINK, is_known=False))
    assert "set sync.bandwidth_bytes_per_s" in guessed.options[1].why
    quick = choose_sync(document(), facts(weights_bytes=6e3, compute_s=1e-4))
    assert "with an assumed latency" in quick.options[1].why
    slow = choose_sync(document(), facts(speeds=ONE_SLOW))
    whys = {option.name: option.why for option in slow.options}
    assert "no faster than all-reduce" in whys["parameter servers, synchronous"]
    assert "times as long as the chosen option" in whys["parameter servers, asynchronous"]
    assert "for which all ranks wait, takes 10.0 times" in whys["all-reduce"]


def test_facts_are_told_as_sentences() -> None:
    told = " | ".join(choose_sync(document(), facts(spot=True)).facts)
    for part in (
        "4.0 MiB",
        "100 ms",
        "953.7 MiB/s",
        "assumed to be equally fast",
        "all workers (4) run on 1 node",
        "spot",
    ):
        assert part in told
    assert "10.00 times" in " ".join(choose_sync(document(), facts(speeds=ONE_SLOW)).facts)
    gpus = document(resources={"num_workers": 4, "gpus_per_worker": 1})
    assert "speeds of ranks are not measured on GPUs" in " ".join(choose_sync(gpus, FAST).facts)


def of(cost: SyncCost) -> str:
    return str(cost.sync.get("mode", cost.sync.get("every", cost.sync["kind"])))


def test_the_costs_are_those_of_their_formulas() -> None:
    costs = {of(cost): cost for cost in sync_costs(ALIKE)}
    weights = ALIKE.weights_bytes
    sent = {name: cost.sent_bytes / weights for name, cost in costs.items()}
    assert sent == {
        "all_reduce": 6,  # 2 (n - 1), in a ring
        "4": 1.5,
        "d_psgd": 8,  # two neighbours each
        "sgp": 4,
        "ad_psgd": 4,
        "bounded": 2,  # one worker's gradient, and the weights for it
        "asynchronous": 2,
        "synchronous": 6,
    }
    assert costs["all_reduce"].step_time_s == pytest.approx(0.1 + 6 * (weights / 4e9 + 1e-4))
    assert costs["d_psgd"].step_time_s == 0.1, "sending is hidden"
    assert costs["asynchronous"].compute_s == pytest.approx(0.4 / 3)


def test_only_ways_that_wait_for_nobody_are_quick_with_a_slow_rank() -> None:
    slow = {of(cost): cost for cost in sync_costs(replace(ALIKE, speeds=ONE_SLOW))}
    base = slow["all_reduce"].step_time_s
    quick = {name for name, cost in slow.items() if base / cost.step_time_s >= GAIN}
    assert quick == {"ad_psgd", "asynchronous"}


@pytest.mark.parametrize(("num_ranks", "servers", "messages"), [(9, 1, 3), (18, 2, 4)])
def test_a_push_with_one_staleness_waits_for_the_first_of_several_servers(
    num_ranks: int, servers: int, messages: int
) -> None:
    work = replace(ALIKE, num_ranks=num_ranks)
    cost = next(c for c in sync_costs(work) if c.sync.get("mode") == "asynchronous")
    assert cost.sync["servers"] == servers
    workers = num_ranks - servers
    send_s = 4 * MIB / 1e9
    batch_s = 0.1 * num_ranks
    assert cost.step_time_s == pytest.approx((batch_s + 2 * send_s + messages * 1e-4) / workers)
