"""Randomly drawn snapshots of a full cluster with a long queue, to time one plan of the policy."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from ray_workers.shared.slices import Slice
from service.domain.scheduling import policy
from service.domain.scheduling.placement import slots
from service.domain.scheduling.rules.dependencies import ArrayLimit, Dependency
from service.domain.scheduling.rules.queues import DEFAULT, Queue
from service.domain.scheduling.rules.reservations import Reservation

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NUM_NODES, GPUS_PER_NODE = 1000, 8
NODE = {"CPU": 96.0, "GPU": float(GPUS_PER_NODE), "memory": 1024.0 * 2**30}
NUM_USERS = 200
FULL = 0.99
"""The share of the GPUs that are in use."""
QUEUES = (
    Queue(DEFAULT),
    Queue("night", weight=0.5, limit={"GPU": 1000.0}, user_limit={"GPU": 64.0}),
    Queue("research", weight=2.0, quota={"GPU": 1500.0}),
    Queue("product", weight=4.0, quota={"GPU": 2000.0}, max_running_per_user=20),
)
GANGS = (1, 1, 1, 1, 2, 2, 4, 4, 8, 8, 16, 32, 64, 128)
SHRUNK = 0.3
"""The share of the elastic groups that run with their minimum size."""
MAX_WIDTH = 128
"""Maximum number of nodes of a running gang."""
BUNDLES = (
    {"CPU": 8.0, "GPU": 1.0},
    {"CPU": 8.0, "GPU": 1.0},
    {"CPU": 12.0, "GPU": 1.0, "memory": 64.0 * 2**30},
    {"CPU": 4.0, "GPU": 2.0},
    {"CPU": 64.0, "GPU": 8.0},
    {"CPU": 16.0},
    {"CPU": 1.0, "memory": 4.0 * 2**30},
)


def drawn(num_waiting: int, seed: int = 0, num_nodes: int = NUM_NODES) -> policy.Snapshot:
    """Return a snapshot of a nearly full cluster with `num_waiting` waiting jobs with different
    sizes, queues and users. Some of them are elastic, held, in arrays, dependent on other jobs or
    backing off."""
    chance = random.Random(seed)
    free = {f"node-{number:05}": dict(NODE) for number in range(num_nodes)}
    running, growing = _running(chance, free)
    queue = tuple(_waiting(chance, seq, 10_000_000 + seq) for seq in range(num_waiting))
    return policy.Snapshot(
        queue,
        tuple(policy.Node(name, NODE, there) for name, there in free.items()),
        connected=True,
        holders=tuple(
            policy.Holder(job.job_id, job.slices, job.request.bundle, job.queue, job.owner)
            for job in running
        ),
        growing=growing,
        running=running,
        queues=QUEUES,
        used_s={
            (queue.name, f"user-{user}"): chance.expovariate(1 / 3600.0)
            for queue in QUEUES
            for user in range(NUM_USERS)
        },
    )


def racked(snapshot: policy.Snapshot, share_required: float) -> policy.Snapshot:
    """Return the snapshot with its nodes in zones, racks and NVLink domains. share_required: share
    of the gangs that require a rack."""
    chance = random.Random(0)
    nodes = [
        slots.Node.labelled(
            *(node.id, node.total, node.available_to_us),
            {"zone": f"z{at // 500}", "rack": f"r{at // 16}", "nvlink": f"n{at // 4}"},
        )
        for at, node in enumerate(snapshot.nodes)
    ]
    queue = [
        replace(job, request=replace(job.request, required_level="rack"))
        if job.request.least > 1 and chance.random() < share_required
        else job
        for job in snapshot.queue
    ]
    levels = ("zone", "rack", "nvlink")
    return replace(snapshot, nodes=tuple(nodes), queue=tuple(queue), topology=levels)


def reserved(snapshot: policy.Snapshot, number: int) -> policy.Snapshot:
    """Return the snapshot with reservations of 1 to 8 nodes in the next four weeks. Half of the
    jobs have a limit, and each limit is different."""
    chance = random.Random(0)
    reservations = []
    for at in range(number):
        begins_at = NOW + timedelta(seconds=chance.uniform(-3600, 28 * 86400))
        is_maintenance = chance.random() < 0.1
        reservations.append(
            Reservation(
                f"reservation-{at}",
                begins_at,
                begins_at + timedelta(hours=chance.choice((1, 4, 8, 24))),
                frozenset(node.id for node in chance.sample(snapshot.nodes, chance.randint(1, 8))),
                users=() if is_maintenance else (_owner(chance), _owner(chance)),
                accepts_unnamed=not is_maintenance and chance.random() < 0.3,
                at_begin=chance.choice(("preempt", "wait", "cancel")),
            )
        )

    def limit_s() -> float | None:
        return chance.choice((None, chance.expovariate(1 / 86400)))

    queue = tuple(replace(job, ends_within_s=limit_s()) for job in snapshot.queue)
    running = tuple(replace(job, ends_within_s=limit_s()) for job in snapshot.running)
    return replace(
        snapshot,
        queue=queue,
        running=running,
        reservations=tuple(reservations),
        leave_s=45.0,
    )


def in_tree(snapshot: policy.Snapshot, num_queues: int) -> policy.Snapshot:
    """Return the snapshot with its jobs in the leaves of a tree of queues with up to four levels.
    Half of the queues have quotas, and half of these keep some of their quota for themselves."""
    chance = random.Random(0)
    queues: list[Queue] = []
    gpus = len(snapshot.nodes) * GPUS_PER_NODE
    for at in range(num_queues):
        parent = None if at < 4 else queues[(at - 4) // 4].name
        quota = {"GPU": float(gpus // num_queues)} if chance.random() < 0.5 else {}
        queues.append(
            Queue(
                f"queue-{at}",
                weight=chance.choice((0.5, 1.0, 2.0)),
                parent=parent,
                quota=quota,
                lending_limit={"GPU": quota["GPU"] / 2} if quota and at % 2 else {},
                limit={"GPU": gpus / 4} if chance.random() < 0.2 else {},
                user_limit={"GPU": 64.0} if chance.random() < 0.1 else {},
            )
        )
    parents = {queue.parent for queue in queues}
    leaves = [queue.name for queue in queues if queue.name not in parents]
    names = [*(job.job_id for job in snapshot.queue), *(job.job_id for job in snapshot.running)]
    of_job = {name: chance.choice(leaves) for name in names}
    return replace(
        snapshot,
        queue=tuple(replace(job, queue=of_job[job.job_id]) for job in snapshot.queue),
        running=tuple(replace(job, queue=of_job[job.job_id]) for job in snapshot.running),
        holders=tuple(replace(each, queue=of_job[each.job_id]) for each in snapshot.holders),
        growing=tuple(replace(each, queue=of_job[each.job_id]) for each in snapshot.growing),
        queues=tuple(queues),
        used_s={
            (leaf, f"user-{user}"): chance.expovariate(1 / 3600.0)
            for leaf in leaves
            for user in range(NUM_USERS)
        },
    )


def _running(
    chance: random.Random, free: dict[str, dict[str, float]]
) -> tuple[tuple[policy.RunningJob, ...], tuple[policy.Growing, ...]]:
    """Return running jobs, whose bundles are subtracted from `free`, and the jobs that could
    use more slots."""
    running: list[policy.RunningJob] = []
    growing: list[policy.Growing] = []
    nodes = list(free)
    left = len(nodes) * GPUS_PER_NODE
    least_left = left * (1 - FULL)
    while left > least_left:
        request = _request(chance, chance.choice(BUNDLES[:4]))
        slices = _first_fit(request, free, nodes, chance.random() < SHRUNK)
        nodes = [name for name in nodes[:MAX_WIDTH] if free[name]["GPU"]] + nodes[MAX_WIDTH:]
        if not slices:
            continue
        seq = len(running)
        job = policy.RunningJob(
            job_id=f"running-{seq}",
            priority=chance.choice((40, 50, 50, 50, 60)),
            seq=seq,
            request=slots.Request(slots.count(slices), request.bundle),
            slices=slices,
            held_s=chance.expovariate(1 / 7200.0),
            left_s=chance.choice((None, chance.expovariate(1 / 36000.0))),
            waited_s=chance.expovariate(1 / 7200.0),
            lost_s=chance.expovariate(1 / 600.0),
            yields=chance.random() < 0.5,
            is_leaving=chance.random() < 0.01,
            queue=chance.choice(QUEUES).name,
            owner=_owner(chance),
        )
        left -= slots.count(slices) * int(request.bundle["GPU"])
        running.append(job)
        if not job.is_leaving and slots.count(slices) < request.num_workers:
            growing.append(_growing(job, request))
    return tuple(running), tuple(growing)


def _growing(job: policy.RunningJob, request: slots.Request) -> policy.Growing:
    return policy.Growing(
        job.job_id, 1, job.priority, job.seq, request, job.slices, 0, job.queue, job.owner
    )


def _first_fit(
    request: slots.Request,
    free: dict[str, dict[str, float]],
    nodes: list[str],
    of_the_least_size: bool,
) -> tuple[Slice, ...]:
    """Return slices on the first nodes with enough room, subtracted from `free`. Empty if there are
    too few."""
    slices: list[Slice] = []
    lacking = wanted = request.least if of_the_least_size else request.num_workers
    for node in nodes[:MAX_WIDTH]:
        number = min(lacking, slots.fits(request.bundle, free[node]))
        if number:
            slices.append(Slice(node, number))
            lacking -= number
        if not lacking:
            break
    if wanted - lacking < request.least:
        return ()
    for part in slices:
        slots.add(free[part.node_id], request.bundle, -part.num_workers)
    return tuple(slices)


def _waiting(chance: random.Random, seq: int, number: int) -> policy.WaitingJob:
    special = chance.random()
    return policy.WaitingJob(
        job_id=f"waiting-{seq}",
        attempt=0,
        priority=chance.choice((30, 40, 50, 50, 50, 50, 60)),
        seq=number,
        request=_request(chance, chance.choice(BUNDLES)),
        not_before=NOW + timedelta(seconds=30) if special < 0.01 else None,
        left_s=chance.choice((None, chance.expovariate(1 / 36000.0))),
        waited_s=chance.expovariate(1 / 14400.0),
        yields=chance.random() < 0.5,
        held="ann" if 0.01 < special < 0.02 else None,
        after=(Dependency("running-0", "success", "RUNNING"),) if 0.02 < special < 0.04 else (),
        array=ArrayLimit(f"array-{seq % 50}", 4) if 0.04 < special < 0.1 else None,
        queue=chance.choice(QUEUES).name,
        owner=_owner(chance),
    )


def _request(chance: random.Random, bundle: dict[str, float]) -> slots.Request:
    size = chance.choice(GANGS)
    return slots.Request(size, bundle, max(1, size // 4) if chance.random() < 0.2 else None)


def _owner(chance: random.Random) -> str:
    """Draw an owner. A few users have most of the jobs."""
    return f"user-{min(int(chance.expovariate(0.05)), NUM_USERS - 1)}"
