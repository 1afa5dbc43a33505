"""Signals that wake waiting tasks in this process and, through PostgreSQL, in other processes.

A signal means only that something about a topic might have changed. A task that is woken by a
signal reads the database. Every task also reads the database when its wait times out, so a lost
signal causes a short delay but no error. A signal is sent after its transaction has been committed.
Within the transaction, NOTIFY would need another round trip, and PostgreSQL serialises the commits
of transactions that use NOTIFY.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from collections.abc import Collection, Iterable, Iterator
from types import TracebackType
from typing import Self

import psycopg

logger = logging.getLogger(__name__)

QUEUE = "queue"
"""The topic of the planning loops: a change that affects plans, such as a new or ended job."""

ATTEMPTS = "attempts"
"""The topic of the reconciler: an attempt was launched, or a command for an attempt is due."""

WEBHOOKS = "webhooks"
"""The topic of the webhook sender: a message is due."""

SCHEDULES = "schedules"
"""The topic of the loop that submits the runs of schedules: the times of a schedule changed."""

NODE_CHECKS = "node_checks"
"""The topic of the loop that tests nodes: a test was requested."""


def events_of(job_id: str) -> str:
    """Return the topic of a job's events.

    The job id itself is the topic for everything about the job, including metrics and log lines.
    The separate topic for events prevents tasks that wait for an event from being woken for each
    stored step.
    """
    return f"{job_id}/events"


def rounds_of(job_id: str) -> str:
    """Return the topic of a federated job's rounds, on which its clients wait."""
    return f"{job_id}/rounds"


CHANNEL = "dray"
LISTEN_WAIT_S = 1.0
RECONNECT_S = 1.0
LAST_WORDS_S = 5.0
"""Maximum time in seconds that an exiting process waits for each of these threads to finish, for
example to send a last NOTIFY."""
ANNOUNCE_REST_S = 0.02
"""Pause between NOTIFY statements, in seconds. The topics of all transactions that commit during a
pause are sent together in the next NOTIFY statement."""
MAX_PAYLOAD = 7999
"""Maximum size of a NOTIFY message in PostgreSQL, in bytes."""
LOOK_AGAIN_S = 5.0
"""Maximum time in seconds to wait for a signal on behalf of a caller. The database is then read
anyway, because a process might have been killed before it sent the signal."""


class Subscription:
    """A subscription to topics, which receives every signal that is published after the
    subscription was opened."""

    def __init__(self, signals: Signals, topics: tuple[str, ...]) -> None:
        self._signals = signals
        self.topics = topics
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_woken = False
        """Whether the event is set or about to be set. The flag avoids unnecessary system calls to
        wake the loop."""

    async def wait(self, timeout_s: float | None) -> bool:
        """Wait until a topic is published. Returns True if a topic was published since the last
        call, or False after `timeout_s` seconds."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        # Assign `_is_woken` before calling `clear`. Otherwise, a `wake` between the two statements
        # would be lost.
        self._is_woken = False
        self._event.clear()
        return True

    def wake(self) -> None:
        """Wake the waiting task. Can be called from any thread."""
        if self._is_woken:
            return
        self._is_woken = True
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no task is waiting
            self._loop.call_soon_threadsafe(self._event.set)

    def __enter__(self) -> Self:
        self._signals.attach(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._signals.detach(self)


class Signals:
    """The topics of one process. Any thread can publish to the topics; tasks of event loops wait
    for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscribers: dict[str, dict[Subscription, None]] = {}
        """Subscriptions by topic, in the order in which they were opened."""

    def subscribe(self, *topics: str) -> Subscription:
        """Subscribe to topics: `with signals.subscribe(a, b) as woken: ...; await
        woken.wait(timeout_s)`.

        Callers must read the database after subscribing and before waiting.
        """
        return Subscription(self, topics)

    def publish(self, topic: str) -> None:
        with self._lock:
            woken = list(self._subscribers.get(topic, ()))
        for subscription in woken:
            subscription.wake()

    def publish_all(self) -> None:
        """Wake all subscribers, because signals might have been missed."""
        with self._lock:
            topics = list(self._subscribers)
        for topic in topics:
            self.publish(topic)

    def attach(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                self._subscribers.setdefault(topic, {})[subscription] = None

    def detach(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                remaining = self._subscribers.get(topic, {})
                remaining.pop(subscription, None)
                if not remaining:
                    self._subscribers.pop(topic, None)


class PostgresAnnouncer:
    """A thread that uses NOTIFY to send the topics published in this process to other processes.

    The thread is started when the first topic is queued. While the database does not respond,
    topics are queued.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._topics: dict[str, None] = {}
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dray-announce", daemon=True)
        self.mark = f"from:{secrets.token_hex(8)}"
        """A word in each message that identifies the sender. The backend process id that PostgreSQL
        adds to messages can't identify the sender, because such ids are reused and change with each
        connection."""

    def announce(self, topics: Collection[str]) -> None:
        """Queue topics to be sent. Can be called from any thread."""
        if not topics:
            return
        with self._lock:
            self._topics.update(dict.fromkeys(topics))
            if self._thread.ident is None:
                self._thread.start()
        self._woken.set()

    def stop(self) -> None:
        """Send the queued topics if the database responds, and stop the thread."""
        self._stop.set()
        self._woken.set()
        if self._thread.ident is not None:
            self._thread.join(LAST_WORDS_S)

    def _run(self) -> None:
        while not self._stop.is_set() or self._topics:
            is_last = self._stop.is_set()
            try:
                with psycopg.connect(self._conninfo, autocommit=True) as connection:
                    self._send_all(connection)
            except psycopg.Error as error:
                logger.warning("can't notify other processes; retrying: %s", error)
                if is_last:
                    return
                self._stop.wait(RECONNECT_S)

    def _send_all(self, connection: psycopg.Connection) -> None:
        """Send topics until the thread is stopped and no topics are queued."""
        while True:
            self._woken.wait()
            self._woken.clear()
            with self._lock:
                topics, self._topics = self._topics, {}
            try:
                for payload in _payloads(topics, self.mark):
                    connection.execute("SELECT pg_notify(%s, %s)", (CHANNEL, payload))
            except psycopg.Error:
                self.announce(topics)
                raise
            if self._stop.wait(ANNOUNCE_REST_S) and not self._topics:
                return


def _payloads(topics: Iterable[str], mark: str) -> Iterator[str]:
    """Yield messages of at most MAX_PAYLOAD bytes. A message consists of the mark and topics,
    separated by spaces."""
    payload = mark
    for topic in topics:
        if len(payload) + 1 + len(topic) > MAX_PAYLOAD:
            yield payload
            payload = mark
        payload = f"{payload} {topic}"
    if payload != mark:
        yield payload


class PostgresListener:
    """A thread that receives NOTIFY messages from other processes and publishes their topics.
    Messages that `own` has sent are ignored.

    After reconnecting, the thread wakes all subscribers, because signals might have been missed.
    """

    def __init__(self, conninfo: str, signals: Signals, own: PostgresAnnouncer) -> None:
        self._conninfo = conninfo
        self._signals = signals
        self._own = own
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dray-listen", daemon=True)
        self.listening = threading.Event()
        """Set while LISTEN is active."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, unless it is blocked by a database that does not respond."""
        self._stop.set()
        self._thread.join(LAST_WORDS_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True) as connection:
                    connection.execute(f"LISTEN {CHANNEL}")
                    self.listening.set()
                    self._signals.publish_all()
                    for topic in self._topics(connection):
                        self._signals.publish(topic)
            except psycopg.Error as error:
                logger.warning("lost the connection for notifications; reconnecting: %s", error)
                self._stop.wait(RECONNECT_S)
            finally:
                self.listening.clear()

    def _topics(self, connection: psycopg.Connection) -> Iterator[str]:
        while not self._stop.is_set():
            for notice in connection.notifies(timeout=LISTEN_WAIT_S):
                topics = notice.payload.split()
                if self._own.mark not in topics:
                    yield from topics
                if self._stop.is_set():
                    return
