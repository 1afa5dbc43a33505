"""The composition root: builds the service from its settings, starts it and stops it.

Only this module reads settings, opens connections and starts loops.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import logging
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy.orm import Session

from ray_workers.shared.paths import nonce_path
from service.cluster.port import Cluster, ClusterSnapshot
from service.cluster.ray.embedded import EmbeddedRay
from service.cluster.ray.gateway import GatewayCluster, RayTarget
from service.config.home_lock import HomeLock
from service.config.models_file import ModelsFile
from service.config.settings import EMBEDDED, Settings
from service.config.start_refusals import StartRefused, reason_of
from service.costs.prices_file import PricesFile
from service.db import damage
from service.db.engines import normalise_url
from service.db.migrate import migrate
from service.db.models import StorageStateRow
from service.db.notifications import QUEUE, Signals
from service.db.repositories import attempts as attempts_repository
from service.db.repositories import storage as storage_repository
from service.db.repositories.catalog import document_values
from service.db.repositories.scheduling import cluster as repository
from service.db.session import Database, utc_now
from service.domain.errors import DomainError
from service.domain.tracking.document_values import defaults
from service.jobs.faults import FaultService
from service.jobs.queries import Queries
from service.jobs.service import Jobs
from service.jobs.status_cache import StatusCache
from service.lifecycle import preemption
from service.loops.attempts.reconciler import Reconciler
from service.loops.leader import Leader, Loops
from service.loops.metering import Metering
from service.loops.mlflow_exporter import MlflowExporter
from service.loops.retention import Retention
from service.loops.schedule_runner import ScheduleRunner
from service.loops.scheduling.autoscaler import Autoscaler
from service.loops.scheduling.cluster_watcher import NOT_ASKED, ClusterWatcher
from service.loops.scheduling.decision_recorder import DecisionRecorder
from service.loops.scheduling.forecaster import Forecaster
from service.loops.scheduling.node_checker import NodeChecker
from service.loops.scheduling.scheduler import Scheduler
from service.loops.shared.fencing import LoopDatabase
from service.loops.shared.term import Launches, LoopContext
from service.loops.shared.timings import LoopTimings
from service.loops.webhook_sender import WebhookSender
from service.nodes import node_table
from service.storage.storage import Storage
from service.tracking.mlflow.process import MlflowProcess

logger = logging.getLogger(__name__)

SWITCH_S = 0.0005
READY_LIMIT_S = 3.0
"""Seconds for which `Runtime.ready` waits for the database."""


@dataclass(frozen=True)
class Readiness:
    """Whether the service is ready, and the state of each of its parts.

    Full storage is reported, but the service still counts as ready, because users need it to free
    space. Nodes that get no work are also reported; the other nodes and the queue continue to work.
    """

    ok: bool
    checks: dict[str, str]


class Runtime:
    """A running service. With `loops=False`, scheduling is left to another process."""

    def __init__(
        self,
        settings: Settings,
        database: Database,
        storage: Storage,
        home: HomeLock | None,
        timings: LoopTimings,
        prices: PricesFile,
    ) -> None:
        self.settings = settings
        self.prices = prices
        self.database = database
        self.signals: Signals = database.signals
        self.storage = storage
        self.jobs = Jobs(
            database,
            storage,
            self.signals,
            settings,
            models_file=ModelsFile(settings.models_file),
        )
        self.faults = FaultService(database, settings)
        self.status = StatusCache(database)
        self.queries = Queries(database, storage, self.signals, settings)
        self.metering = Metering(database, timings)
        self.watch: ClusterWatcher | None = None
        self.cluster: Cluster | None = None
        self.leader: Leader | None = None
        self._launches = Launches()
        self._autoscaler: Autoscaler | None = None
        """The autoscaler of this process's latest term as leader."""
        self._exporter: MlflowExporter | None = None
        """The exporter of this process's latest term as leader."""
        self._home = home
        self._timings = timings
        self._leading: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._asking: asyncio.Future[StorageStateRow | None] | None = None
        """A query by `ready` for which the database has not returned a result yet."""
        self._halted = asyncio.Event()
        """Set when no more attempts may be started."""

    @classmethod
    async def open(
        cls,
        settings: Settings,
        *,
        loops: bool = True,
        cluster: Cluster | None = None,
        clock: Callable[[], datetime] = utc_now,
        timings: LoopTimings | None = None,
    ) -> Runtime:
        """Lock the home directory, migrate the database, and start the loops.

        Tests pass a `cluster` instead of Ray, a `clock` instead of this machine's clock, and
        `timings`. Raises StartRefused if the home, the database or the storage can't be used, or if
        another process has locked the home.
        """
        if loops and settings.mlflow_tracking_uri and importlib.util.find_spec("mlflow") is None:
            raise StartRefused(
                "DRAY_MLFLOW_TRACKING_URI is set, but MLflow's client is not installed: run pip "
                "install 'dray[mlflow]', or unset the variable"
            )
        # Only one process at a time can use a SQLite database or an embedded Ray.
        is_sqlite = normalise_url(settings.database_url).get_backend_name() == "sqlite"
        holds_home = is_sqlite or (loops and settings.ray_address == EMBEDDED)
        prices = PricesFile(settings.prices_file)
        async with contextlib.AsyncExitStack() as opened:
            home = HomeLock.acquire(settings.home) if holds_home else None
            if home is not None:
                opened.callback(home.release)
            database = Database(settings.database_url, clock=clock)
            opened.push_async_callback(asyncio.to_thread, database.close)
            damage.refuse_emptied(database.url, nonce_path(settings.storage_url))
            await asyncio.to_thread(migrate, database)
            # Store the defaults of this release, which might differ from the defaults of the
            # previous release.
            await database.write(lambda s: document_values.insert_shared(s, defaults()))
            database.listen()
            storage = _storage(settings.storage_url)
            runtime = cls(settings, database, storage, home, timings or LoopTimings(), prices)
            if is_sqlite:  # no other process has observed the cluster since the last stop
                await database.write(
                    lambda s: node_table.store(s, None, NOT_ASKED, database.time(s))
                )
            await runtime.jobs.deletions.finish()
            runtime._measuring = asyncio.create_task(runtime.metering.run(), name="metering")
            opened.callback(runtime._measuring.cancel)
            if loops:
                await runtime.start_loops(cluster)
            opened.pop_all()
        return runtime

    async def start_loops(self, cluster: Cluster | None, *, alone: bool | None = None) -> None:
        """Run the loops while this process is the leader. `alone` is used by tests in which several
        runtimes share a SQLite database."""
        deployment_id = await self.database.write(
            lambda s: repository.ensure_deployment(s, self.database.time(s))
        )
        self.cluster = port = cluster or GatewayCluster(ray_target(self.settings, deployment_id))
        now = await self.database.read(self.database.time)
        await self.jobs.storage_watch.look(now)  # the limits might have changed
        await port.start()
        self.leader = Leader(
            self.database,
            lambda fenced: self._loops(fenced, port, deployment_id),
            self._timings,
            alone=alone,
        )
        self._leading = asyncio.create_task(self.leader.run(), name="leader")

    def _loops(self, database: LoopDatabase, cluster: Cluster, deployment_id: str) -> Loops:
        """Build the loops of one term, which share no state with the loops of other terms."""
        signals, settings, timings = self.signals, self.settings, self._timings
        context = LoopContext(
            *(database, cluster, signals, settings, timings),
            *(self.prices, self.jobs.models, deployment_id, self._halted),
        )
        self._launches = context.launches
        self.watch = watch = ClusterWatcher(context)
        self._autoscaler = Autoscaler(database, cluster, settings, timings)
        forecaster = Forecaster(database, signals, timings)
        recorder = DecisionRecorder(database, timings)
        scheduler = Scheduler(context, watch, self._autoscaler, forecaster, recorder)
        reconciler = Reconciler(context, self.storage)
        retention = Retention(
            *(self.database, self.storage, self.jobs.storage_watch, self.jobs, settings, timings)
        )
        webhooks = WebhookSender(database, signals, settings, timings)
        schedules = ScheduleRunner(database, signals, self.jobs, settings, timings)
        return [
            ("cluster watch", watch.run()),
            ("scheduler", scheduler.run()),
            ("reconciler", reconciler.run()),
            ("autoscaler", self._autoscaler.run()),
            ("forecaster", forecaster.run()),
            ("decision recorder", recorder.run()),
            ("webhook sender", webhooks.run()),
            ("schedules", schedules.run()),
            ("retention", retention.run()),
            ("node checks", NodeChecker(context, watch).run()),
            *self._exports(database),
        ]

    def _exports(self, database: LoopDatabase) -> Loops:
        uri = self.settings.mlflow_tracking_uri
        if uri is None:
            return []
        process = MlflowProcess(uri, self.settings.storage_url)
        self._exporter = MlflowExporter(database, process, self._timings)
        return [("export to MLflow", self._exporter.run())]

    async def clear_cluster(self, hurry: asyncio.Event, report: Callable[[str], None]) -> None:
        """Let every attempt save its state and release its slots. Called before a shutdown that
        also stops the cluster.

        Returns when no attempt is left, when the grace period is over, or when `hurry` is set. Does
        nothing if Ray is not embedded, or if this process doesn't run the loops.
        """
        leads = self.leader is not None and self.leader.leads
        if self.settings.ray_address != EMBEDDED or not leads or self._watched() is None:
            return
        self._halted.set()
        grace_s = self.settings.preempt_grace_s
        try:
            if not await self._leave():
                return
        except DomainError:  # the database does not respond
            return
        report(
            f"jobs have up to {grace_s:g} s to save before Ray stops; send a second signal to stop "
            "Ray immediately"
        )
        gone = asyncio.create_task(self._nothing_lives())
        hurried = asyncio.create_task(hurry.wait())
        await asyncio.wait(
            [gone, hurried],
            timeout=grace_s + preemption.RESERVE_S,
            return_when=asyncio.FIRST_COMPLETED,
        )
        for task in (gone, hurried):
            task.cancel()
        await asyncio.gather(gone, hurried, return_exceptions=True)

    async def _nothing_lives(self) -> None:
        with self.signals.subscribe(QUEUE) as woken:
            while await self._leave():  # ask again, for attempts that were just being started
                await woken.wait(1.0)

    async def _leave(self) -> int:
        """Ask every live attempt to save its state and release its slots. Returns the number of
        live attempts."""

        def work(session: Session) -> int:
            now = self.database.time(session)
            preemption.leave_all(session, self.settings.preempt_grace_s, now)
            return len(attempts_repository.live_columns(session))

        return await self.database.write(work)

    def _watched(self) -> ClusterSnapshot | None:
        return self.watch.latest if self.watch else None

    async def stop(self) -> None:
        """Stop the loops, and then the resources that they use. An embedded Ray cluster ends
        together with its jobs."""
        if self._leading is not None and self.leader is not None:
            leads = self.leader.leads
            if leads:
                await self._finish_launches()
            self._leading.cancel()
            await asyncio.gather(self._leading, return_exceptions=True)
            if leads and self._autoscaler is not None:
                await self._autoscaler.withdraw()
            with contextlib.suppress(DomainError):  # the lease will expire
                await self.leader.release()
        if self.cluster is not None:
            await self.cluster.stop()
        if self._measuring is not None:
            self._measuring.cancel()
            await asyncio.gather(self._measuring, return_exceptions=True)
            await self.metering.flush()
        await asyncio.to_thread(self.database.close)
        if self._home is not None:
            self._home.release()

    async def _finish_launches(self) -> None:
        """Start no more attempts, and wait for launches in progress, up to a time limit."""
        self._halted.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._timings.last_launches_s):
                await self._launches.until_all_answered()

    async def ready(self) -> Readiness:
        """Query the database, for at most `READY_LIMIT_S`, and return its state together with the
        latest states of the cluster and the loops."""
        checks = {"database": "ok"}
        full = None
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                full = await self._storage_state()
        except Exception as error:
            logger.warning("the database does not respond: %r", error)
            checks["database"] = "does not answer"
        if self.database.damage is not None:
            checks["database"] = self.database.damage
        leader = self.leader
        if leader is not None and leader.leads:
            checks["cluster"] = (self.watch.problem if self.watch else None) or "ok"
            ended = [loop.get_name() for loop in leader.tasks if loop.done()]
            checks["loops"] = f"ended: {', '.join(ended)}" if ended else "ok"
        elif leader is not None and leader.other is None:
            checks["loops"] = "not started yet"
        ok = all(value == "ok" for value in checks.values())
        if leader is not None and leader.other is not None:
            checks["loops"] = f"standby: {leader.other.holder} runs the loops"
        seen = self._watched()
        nodes = seen.nodes if seen is not None else ()
        if seen is not None:
            checks["nodes"] = "; ".join(refused_nodes(seen)) or "ok"
            if any(n.is_starting for n in nodes) and not any(n.accepted for n in nodes):
                ok = False  # no job can run until a node has started
        if leader is not None and leader.leads and self._exporter is not None:
            checks["mlflow"] = "does not answer" if self._exporter.is_away else "ok"
        problem = (full.problem if full else None) or await self.jobs.storage_watch.full_folders()
        problems = [problem, *(node.full and f"{node.hostname}: {node.full}" for node in nodes)]
        full_parts = "; ".join(filter(None, problems))
        checks["storage"] = f"full: {full_parts}" if full_parts else "ok"
        return Readiness(ok, checks)

    def _storage_state(self) -> Awaitable[StorageStateRow | None]:
        """Query the state of the storage. Only one query runs at a time, because each query blocks
        a thread if the database is suspended."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(self.database.read(storage_repository.state))
        return asyncio.shield(self._asking)


def refused_nodes(cluster: ClusterSnapshot) -> list[str]:
    """Return the nodes on which ranks currently can't run, each with the reason."""
    refused = (node for node in cluster.nodes if not node.accepted and not node.is_released)
    return [f"{node.hostname}: {node.problem}" for node in refused]


def ray_target(settings: Settings, deployment_id: str) -> RayTarget:
    """Return the Ray cluster that the settings specify."""
    embedded = None
    if settings.ray_address == EMBEDDED:
        slots = settings.local_slots or os.cpu_count() or 1
        embedded = EmbeddedRay(settings.home, slots, deployment_id, settings.rank_env)
    return RayTarget(
        deployment_id=deployment_id,
        storage_url=settings.storage_url,
        storage_nonce=_storage_nonce(settings.storage_url),
        embedded=embedded,
        silence_limit_s=settings.silence_limit_s,
        log_format=settings.log_format,
        address=settings.ray_address,
        token_file=settings.ray_token_file,
    )


def _storage(url: str) -> Storage:
    """Open the storage. Raises StartRefused if the storage is a folder that can't be created."""
    try:
        return Storage(url)
    except OSError as error:
        raise _unusable_storage(url, error) from error


def _unusable_storage(url: str, error: OSError) -> StartRefused:
    return StartRefused(
        f"the storage {url} {reason_of(error)}: fix this, or set DRAY_STORAGE_URL to another "
        "location"
    )


def _storage_nonce(storage_url: str) -> str:
    """Return the random string in the shared storage that every node must be able to read in order
    to join."""
    path = nonce_path(storage_url)
    if path is None:
        return ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), path.open("x") as file:
            file.write(secrets.token_hex(16))
        return path.read_text()
    except OSError as error:
        raise _unusable_storage(storage_url, error) from error


def tune_interpreter() -> None:
    """Reduce the time for which HTTP responses wait for the loops, which run in the same process.

    A thread that is computing holds the GIL for `SWITCH_S` while other threads wait for it. A
    request releases the GIL at each database statement. With Python's default, the request would
    wait 5 ms each time to get the GIL back. The garbage collector is configured to skip existing
    objects, most of which belong to modules. Without this setting, the collector would traverse
    these objects whenever the loops have read many jobs.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()


async def serve_loops(settings: Settings, stop: asyncio.Event) -> None:
    """Run only the loops, until `stop` is set, for `python -m service`. If `stop` is set a second
    time, attempts are not given time to save."""
    runtime = await Runtime.open(settings)
    tune_interpreter()
    try:
        await stop.wait()
        stop.clear()
        await runtime.clear_cluster(stop, logger.info)
    finally:
        await runtime.stop()
