"""Signals that wake waiting tasks, in this process and, through PostgreSQL, in others.

A signal says only that something about a topic may have changed; the woken task asks SQL. So a
lost signal costs a little time (every task asks again after its own wait) and never the truth. A
signal is sent after the transaction that it is about is committed: within it, NOTIFY would be one
more round trip, and PostgreSQL commits transactions that notify one after the other.
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
"""The topic of the loops that plan: they go by something that changed, such as a job that was
submitted, or that has ended."""

ATTEMPTS = "attempts"
"""The topic of the reconciler: an attempt was launched, or something is asked of one."""

WEBHOOKS = "webhooks"
"""The topic of the sender of webhooks: a message is to be sent."""


def events_of(job_id: str) -> str:
    """The topic of a job's events.

    The topic of everything about the job, also metrics and log lines, is the id itself: a task
    that waits for an event need not wake whenever a step is stored.
    """
    return f"{job_id}/events"


def rounds_of(job_id: str) -> str:
    """The topic of a federated job's rounds, of which its clients are told."""
    return f"{job_id}/rounds"


CHANNEL = "dray"
LISTEN_WAIT_S = 1.0
RECONNECT_S = 1.0
LAST_WORDS_S = 5.0
"""How long the end of a process waits for each thread, such as for its last NOTIFY."""
ANNOUNCE_REST_S = 0.02
"""Between two NOTIFY statements: the topics of what is committed meanwhile share the next one."""
MAX_PAYLOAD = 7999
"""Bytes of a NOTIFY message (PostgreSQL)."""
LOOK_AGAIN_S = 5.0
"""How long a task that somebody waits for trusts in signals: those of a process that was killed
just after a commit are lost."""


class Subscription:
    """Nothing that is published after the subscription is opened is missed."""

    def __init__(self, signals: Signals, topics: tuple[str, ...]) -> None:
        self._signals = signals
        self.topics = topics
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self._is_woken = False
        """Whether the event is set, or is about to be: to wake a loop takes a system call."""

    async def wait(self, timeout_s: float | None) -> bool:
        """True as soon as a topic was published since the last wait; False when the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return False
        self._is_woken = False  # before it is cleared: who wakes in between sets it after that
        self._event.clear()
        return True

    def wake(self) -> None:
        """From any thread."""
        if self._is_woken:
            return
        self._is_woken = True
        with contextlib.suppress(RuntimeError):  # its loop was closed: no task waits there
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
    """Topics of one process. Publishing is allowed from any thread, waiting in event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._subscribers: dict[str, dict[Subscription, None]] = {}
        """Subscriptions by topic, in the order in which they came."""

    def subscribe(self, *topics: str) -> Subscription:
        """`with signals.subscribe(a, b) as woken: ...; await woken.wait(timeout_s)`.

        Read the state after subscribing and before waiting.
        """
        return Subscription(self, topics)

    def publish(self, topic: str) -> None:
        with self._lock:
            woken = list(self._subscribers.get(topic, ()))
        for subscription in woken:
            subscription.wake()

    def publish_all(self) -> None:
        """Wake every subscriber: a signal may have been missed."""
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
    """A thread that tells other processes, by NOTIFY, which topics this one has published.

    It starts with the first topic. While the database does not answer, topics wait.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._topics: dict[str, None] = {}
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dray-announce", daemon=True)
        self.mark = f"from:{secrets.token_hex(8)}"
        """In each of its messages. The number of the server's process, which comes with them, soon
        belongs to another one, after a restart also to that of another sender."""

    def announce(self, topics: Collection[str]) -> None:
        """From any thread."""
        if not topics:
            return
        with self._lock:
            self._topics.update(dict.fromkeys(topics))
            if self._thread.ident is None:
                self._thread.start()
        self._woken.set()

    def stop(self) -> None:
        """Send what is left, unless the database does not answer."""
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
                logger.warning("can't notify other processes, will try again: %s", error)
                if is_last:
                    return
                self._stop.wait(RECONNECT_S)

    def _send_all(self, connection: psycopg.Connection) -> None:
        """Until stopped, and nothing is left."""
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
    """Topics after the mark, with spaces between them, in messages that PostgreSQL takes."""
    payload = mark
    for topic in topics:
        if len(payload) + 1 + len(topic) > MAX_PAYLOAD:
            yield payload
            payload = mark
        payload = f"{payload} {topic}"
    if payload != mark:
        yield payload


class PostgresListener:
    """A thread that passes on the NOTIFY messages of other processes, and not those of `own`.

    A lost connection is opened again, and then every subscriber is woken, since signals may have
    been missed meanwhile.
    """

    def __init__(self, conninfo: str, signals: Signals, own: PostgresAnnouncer) -> None:
        self._conninfo = conninfo
        self._signals = signals
        self._own = own
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dray-listen", daemon=True)
        self.listening = threading.Event()
        """Set while LISTEN is in force."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, unless it waits for a database that does not answer."""
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
                logger.warning("lost the database's notifications, will listen again: %s", error)
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
