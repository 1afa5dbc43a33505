"""Random snapshots: all kinds of nodes, queues with rules, and jobs in all states."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

from ray_workers.shared.slices import RoleSlots, Slice
from service.domain.scheduling.elastic.resizing import spare
from service.domain.scheduling.elastic.sizing import ElasticJob, ReportedStep
from service.domain.scheduling.placement.shared_gpus import parts_on, with_shared_gpus
from service.domain.scheduling.policy import (
    Growing,
    Holder,
    Node,
    Request,
    RunningJob,
    Snapshot,
    WaitingJob,
)
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency
from service.domain.scheduling.rules.queues import Queue
from tests.unit.service.domain.scheduling.snapshots import HOUR, NOW

GIB = 2.0**30
BUNDLES: tuple[Mapping[str, float], ...] = (
    {"CPU": 1.0},
    {"CPU": 2.0},
    {"CPU": 1.0, "GPU": 1.0},
    {"CPU": 1.0, "GPU": 1.0},
    {"CPU": 2.0, "GPU": 2.0},
    {"CPU": 1.0, "memory": 3.5 * GIB},
    {"CPU": 1.0, "memory": 15.504 * GIB},
    {"CPU": 1.0, "GPU": 1.0, "accelerator_type:H100": 0.001},
    {"CPU": 1.0, "label:disk=ssd": 0.001},
    {"CPU": 3.0, "GPU": 3.0},
)
PARTS: tuple[Mapping[str, float], ...] = ({"CPU": 1.0, "GPU": 0.5}, {"CPU": 1.0, "GPU": 0.25})
TOPOLOGY = ("zone", "rack")
QUEUES = ("default", "night", "research")
OWNERS = ("ann", "ben")


class Drawn:
    """A random snapshot."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._shares_gpus = self._chance(0.15)
        self._totals = {f"n{at}": self._total() for at in range(self._dice.randint(1, 5))}
        self._left = {name: dict(total) for name, total in self._totals.items()}
        self._elastic: dict[str, ElasticJob] = {}
        self._growing: list[Growing] = []
        self._arrays: Counter[str] = Counter()
        running = list(self._all_running())
        extra: dict[str, Any] = {}
        if self._chance(0.15):
            extra["to_come"] = (self._node("later", self._total(), None),)
        if self._chance(0.03):
            extra["storage_problem"] = "the storage holds 2 GB of 2 GB"
        if self._chance(0.1):
            queue = self._dice.choice(QUEUES)
            extra["used_up"] = {queue: f"the queue {queue!r} has used up its budget of 5"}
        if self._chance(0.4):
            accounts = [(queue, owner) for queue in QUEUES for owner in OWNERS]
            extra["used_s"] = {each: self._dice.choice((0.0, 1e3, 1e5)) for each in accounts}
        holders = tuple(
            Holder(
                job.job_id, job.slices, job.request.bundle, job.queue, job.owner, job.request.roles
            )
            for job in running
        )
        nodes = tuple(self._node(name, total, holders) for name, total in self._totals.items())
        waiting = tuple(self._waiting(f"w{at}", at) for at in range(self._dice.randint(1, 6)))
        gone = self._dice.randint(0, 5)  # a holder whose job is not asked for slots
        self.snapshot = Snapshot(
            waiting,
            nodes,
            not self._chance(0.04),
            holders,
            growing=tuple(self._growing),
            running=tuple(job for at, job in enumerate(running) if at != gone or job.spare),
            queues=tuple(self._queue(name) for name in QUEUES if self._chance(0.5)),
            topology=TOPOLOGY if self._chance(0.7) else (),
            running_of_arrays=self._arrays,
            elastic=self._elastic,
            **extra,
        )

    def _chance(self, share: float) -> bool:
        return self._dice.random() < share

    def _total(self) -> dict[str, float]:
        dice = self._dice
        total = {
            "CPU": float(dice.choice((2, 4, 8, 16))),
            "memory": dice.choice((15.503, 64, 2000)) * GIB,
        }
        if self._chance(0.75):
            total["GPU"] = float(dice.choice((1, 2, 4, 4)))
            if self._chance(0.7):
                total["accelerator_type:H100"] = 1.0
        for key, values in (("zone", "z"), ("rack", "rs"), ("disk", ("ssd", "ssd", "hdd"))):
            if self._chance(0.75):
                total[f"label:{key}={dice.choice(values)}"] = 1.0
        if self._chance(0.12):
            total |= {"label:dray.io/silo=true": 1.0, f"label:site={dice.choice('ab')}": 1.0}
            total["open to all jobs"] = 0.0
        return total

    def _node(self, name: str, total: dict[str, float], holders: Any) -> Node:
        if holders is None:
            return Node(name, total, dict(total))
        left, stuck = self._left[name], {}
        if self._chance(0.15):  # used by another Ray application
            left["CPU"] = max(0.0, left["CPU"] - self._dice.choice((1, 2)))
        if self._chance(0.1):
            stuck = {each: 1.0 for each in ("CPU", "GPU") if left.get(each, 0.0) >= 1.0}
            left |= {each: left[each] - amount for each, amount in stuck.items()}
        parts = parts_on(name, holders)
        if self._shares_gpus and total.get("GPU"):
            left = with_shared_gpus(left, parts)
        accepted = not self._chance(0.08)
        return Node(
            name, total, left, accepted, stuck, is_starting=not accepted and self._chance(0.3)
        )

    def _bundle(self) -> Mapping[str, float]:
        return self._dice.choice((*BUNDLES, *(PARTS * 3 if self._shares_gpus else ())))

    def _request(self, bundle: Mapping[str, float], num_workers: int) -> Request:
        dice = self._dice
        is_part = 0 < bundle.get("GPU", 0.0) < 1
        draw = dice.random()
        if draw < 0.3 and num_workers > 1:
            return Request(num_workers, bundle, dice.randint(1, num_workers))
        if draw < 0.5:
            level = dice.choice(("zone", "rack", "rack", "node", "row"))
            least = dice.choice((None, 1))
            return Request(num_workers, bundle, least, level)
        if draw < 0.6 and not is_part:
            number = dice.randint(1, 2)
            own = dice.choice(({"CPU": 4.0}, {"CPU": 1.0, "memory": 12 * GIB}, {"CPU": 1.0}))
            role = RoleSlots("server", num_workers, number, own)
            return Request(num_workers + number, bundle, roles=(role,))
        if draw < 0.66 and "GPU" not in bundle:
            homes = tuple((f"label:site={dice.choice('ab')}",) for _ in range(num_workers))
            return Request(num_workers + 1, bundle, homes=homes)
        return Request(num_workers, bundle)

    def _waiting(self, name: str, at: int) -> WaitingJob:
        dice = self._dice
        bundle = self._bundle()
        request = self._request(bundle, dice.choice((1, 1, 1, 2, 2, 2, 3, 4, 8)))
        facts: dict[str, Any] = {}
        if self._chance(0.05):
            facts["held"] = "ann"
        elif self._chance(0.06):
            names = dice.sample(["r0", "r1", "gone", "array-1", "other"], dice.randint(1, 5))
            facts["after"] = tuple(
                Dependency(n, self._dice.choice(("success", "end", "failure")), "RUNNING")
                for n in names
            )
        elif self._chance(0.1):
            facts["not_before"] = NOW + timedelta(seconds=dice.choice((-5, 5, 120)))
        elif self._chance(0.05):
            facts["preparing"] = "its environment is being prepared"
        if self._chance(0.1):
            facts["array"] = ArrayLimit("array-1", dice.choice((1, 2, 3)))
        if request.min_workers is not None and self._chance(0.4) and not request.required_level:
            self._elastic[name] = self._elastic_job(request)
            facts["yields"] = True
        return WaitingJob(
            name,
            **{
                "attempt": 0,
                "priority": dice.choice((40, 50, 50, 50, 60)),
                "seq": 100 + at,
                "request": request,
                "left_s": dice.choice((None, 60.0, HOUR, 10 * HOUR)),
                "waited_s": dice.choice((0.0, 0.0, 0.0, 25 * HOUR)),
                "yields": self._chance(0.5),
                "ends_within_s": dice.choice((None, None, None, 60.0, 1000.0)),
                "queue": dice.choice(QUEUES),
                "owner": dice.choice(OWNERS),
                "place": dice.choice((0,) * 9 + (-at,)),
                **facts,
            },
        )

    def _elastic_job(self, request: Request) -> ElasticJob:
        dice = self._dice
        times = tuple(
            ReportedStep(number, 1, 64, dice.choice((0.2, 1.0)) + 1.0 / number ** dice.random())
            for number in dice.sample((1, 2, 3, 4), dice.randint(0, 2))
        )
        return ElasticJob(
            request.least,
            request.num_workers,
            64,
            16,
            times,
            in_place=self._chance(0.5),
            steps_left=dice.choice((None, 10.0, 1e4)),
        )

    def _all_running(self) -> Iterator[RunningJob]:
        for at in range(self._dice.randint(0, 5)):
            bundle = self._bundle()
            slices = self._held(bundle, self._dice.randint(1, 4))
            if slices:
                yield self._running(f"r{at}", at, bundle, slices)

    def _held(self, bundle: Mapping[str, float], most: int) -> tuple[Slice, ...]:
        found = []
        for name in self._dice.sample(list(self._left), len(self._left)):
            left, number = self._left[name], 0
            if not self._totals[name].get("open to all jobs", 1.0):
                continue
            gpus = math.ceil(bundle.get("GPU", 0.0))  # here, each part has its own GPU
            taken = {**bundle, **({"GPU": float(gpus)} if gpus else {})}
            while number < most and all(left.get(n, 0.0) >= each for n, each in taken.items()):
                number += 1
                for each, amount in bundle.items():
                    left[each] -= amount
                if gpus and bundle["GPU"] < 1:
                    break
            if number:
                found.append(Slice(name, number))
                most -= number
            if not most:
                break
        return tuple(found)

    def _running(
        self, name: str, at: int, bundle: Mapping[str, float], slices: tuple[Slice, ...]
    ) -> RunningJob:
        dice = self._dice
        held = sum(part.num_workers for part in slices)
        job = RunningJob(
            name,
            dice.choice((40, 50, 50, 60)),
            at,
            Request(held, bundle),
            slices,
            held_s=dice.choice((10.0, 400.0, 5000.0, 5000.0)),
            left_s=dice.choice((None, 60.0, HOUR, 20 * HOUR)),
            waited_s=dice.choice((0.0, 0.0, 25 * HOUR)),
            yields=self._chance(0.7),
            queue=dice.choice(QUEUES),
            owner=dice.choice(OWNERS),
            place=dice.choice((0,) * 9 + (-2,)),
        )
        if self._chance(0.15):
            self._arrays["array-1"] += 1
        if self._chance(0.15):
            return replace(job, is_leaving=True)
        if self._chance(0.45):
            return self._elastic_group(job, held)
        if self._chance(0.1):
            self._grows(job, held + 1, held + 1, lacking=1)
        return job

    def _elastic_group(self, job: RunningJob, held: int) -> RunningJob:
        least, most = self._dice.randint(1, held), held + self._dice.randint(0, 3)
        given = spare(job.slices, least)
        request = Request(most, job.request.bundle, least)
        if given and self._chance(0.2):
            return replace(job, recalled=given[:1])
        if most > held:
            self._grows(job, most, least)
        if self._chance(0.6):
            self._elastic[job.job_id] = self._elastic_job(request)
            job = replace(job, yields=True)
        return replace(job, spare=given)

    def _grows(self, job: RunningJob, most: int, least: int, lacking: int = 0) -> None:
        request = Request(most, job.request.bundle, least if least < most else None)
        trains = lacking > 0 and self._chance(0.3)
        self._growing.append(
            Growing(
                *(job.job_id, 1, job.priority, job.seq, request, job.slices, lacking),
                *(job.queue, job.owner, trains),
            )
        )

    def _queue(self, name: str) -> Queue:
        def some(choices: Mapping[str, tuple[float, ...]]) -> dict[str, float]:
            names = [each for each in choices if self._chance(0.25)]
            return {each: self._dice.choice(choices[each]) for each in names}

        amounts = {
            "CPU": (1.0, 4.0, 7.0),
            "GPU": (1.0, 2.0, 3.0),
            "memory": (1.0, 5e8, 15.504 * GIB, 1234.5 * GIB),
            "accelerator_type:H100": (1.0, 2.0),
        }
        return Queue(
            name,
            weight=self._dice.choice((1.0, 1.0, 3.0)),
            quota=some(amounts) if self._chance(0.4) else {},
            limit=some(amounts),
            user_limit=some(amounts),
            max_running=self._dice.choice((None,) * 4 + (1, 3)),
            max_running_per_user=self._dice.choice((None,) * 4 + (1, 2)),
        )
