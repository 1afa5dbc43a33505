"""Messages are sent at least once and retried after a pause, and receivers do not delay each
other."""

from __future__ import annotations

import asyncio
import json
import random
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest

from dray.views import WebhookFormat
from service.domain import webhooks as rules
from service.domain.webhooks import Answer, body_of, headers, pause_s
from service.loops import webhook_sender
from service.loops.shared.timings import LoopTimings
from tests.unit.service.helpers import START, events_of, metrics
from tests.unit.service.webhooks.hooked import BUSY, GONE, TAKEN, Hooked

A = "http://127.0.0.1/a"


async def cancelled(hooked: Hooked) -> str:
    """Return a job that has just ended."""
    job_id = await hooked.submit()
    await hooked.jobs.cancel(job_id)
    return job_id


async def test_messages_are_sent_in_order_and_once_when_they_are_taken(hooked: Hooked) -> None:
    hook = await hooked.hook()
    ended = [await cancelled(hooked) for _ in range(12)]
    await hooked.round()
    assert len(hooked.sent) == webhook_sender.MAX_PER_BATCH, "the others have their turn"
    await hooked.round()
    await hooked.round()
    assert [sent.data["id"] for sent in hooked.sent] == ended
    first = await hooked.webhooks.deliveries(hook.id, owner="ann", limit=5)
    assert [each.job_id for each in first.items] == ended[:-6:-1]
    assert {(each.status, each.tries) for each in first.items} == {("delivered", 1)}
    answer = first.items[0].answer
    assert answer is not None
    assert (answer.status, answer.body, answer.error) == (200, "ok", None)
    page = await hooked.webhooks.deliveries(
        hook.id, owner="ann", limit=50, cursor=first.next_cursor
    )
    assert [each.job_id for each in page.items] == ended[-6::-1]


async def test_a_message_that_is_not_taken_comes_again_the_same_with_a_new_time(
    timed: Hooked,
) -> None:
    hook = await timed.hook()
    timed.answers[A] = BUSY
    await cancelled(timed)
    tried: list[float] = []
    for _ in range(4):
        await timed.round()
        tried.append((timed.now - START).total_seconds())
        next_s = await timed.round()
        timed.advance(next_s)
    assert tried == [0, 5, 15, 35], "5 s, and twice as long each time"
    failing = await timed.webhooks.get(hook.id, owner="ann")
    assert (failing.failing_since, failing.num_waiting) == (START, 1)
    timed.answers[A] = TAKEN
    await timed.round()
    assert len({sent.headers["webhook-id"] for sent in timed.sent}) == 1
    assert len({sent.body for sent in timed.sent}) == 1
    assert len({sent.headers["webhook-signature"] for sent in timed.sent}) == 5
    done = await timed.delivery(hook)
    assert (done.status, done.tries) == ("delivered", 5)
    healed = await timed.webhooks.get(hook.id, owner="ann")
    assert (healed.failing_since, healed.paused_until, healed.num_waiting) == (None, None, 0)


async def test_a_failing_receiver_gets_one_try_in_each_pause_and_newer_messages_first(
    timed: Hooked,
) -> None:
    await timed.hook()
    timed.answers[A] = BUSY
    first, second, third = [await cancelled(timed) for _ in range(3)]
    for _ in range(3):
        await timed.round()
        timed.advance(await timed.round())
    assert [sent.data["id"] for sent in timed.sent] == [first, second, third]
    timed.answers[A] = TAKEN
    await timed.round()
    assert [sent.data["id"] for sent in timed.sent[3:]] == [first, second, third]


async def test_a_receiver_that_hangs_holds_up_no_other(hooked: Hooked) -> None:
    hang = asyncio.Event()

    async def hangs() -> Answer:
        await hang.wait()
        return TAKEN

    await hooked.hook("a")
    await hooked.hook("b")
    hooked.answers[A] = hangs
    job_id = await cancelled(hooked)
    sending = asyncio.create_task(hooked.sender.run())
    while len(hooked.sent) < 2:
        await asyncio.sleep(0.001)
    later = await cancelled(hooked)
    while len(hooked.sent) < 3:
        await asyncio.sleep(0.001)
    assert [sent.data["id"] for sent in hooked.sent if sent.url != A] == [job_id, later]
    assert [sent.data["id"] for sent in hooked.sent if sent.url == A] == [job_id]
    hang.set()
    while len(hooked.sent) < 4:
        await asyncio.sleep(0.001)
    assert hooked.sent[-1].data["id"] == later
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)


async def test_a_message_under_way_when_the_service_dies_is_sent_again(hooked: Hooked) -> None:
    hook = await hooked.hook()
    never = asyncio.Event()

    async def hangs() -> Answer:
        await never.wait()
        return TAKEN

    hooked.answers[A] = hangs
    await cancelled(hooked)
    sending = asyncio.create_task(hooked.sender.run())
    while not hooked.sent:
        await asyncio.sleep(0.001)
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    hooked.answers[A] = TAKEN
    await hooked.round(hooked.new_sender())
    first, again = hooked.sent
    assert first.headers["webhook-id"] == again.headers["webhook-id"]
    assert (await hooked.delivery(hook)).status == "delivered"


async def test_a_database_that_takes_no_answer_has_no_message_sent_again_at_once(
    hooked: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulates a full disk, because of which the receiver would get the message in each iteration
    of the loop."""
    await hooked.hook()
    await cancelled(hooked)
    monkeypatch.setattr(hooked.sender, "_settle", Mock(side_effect=OSError("the disk is full")))
    clock = asyncio.get_running_loop()
    for _ in range(3):
        await asyncio.gather(hooked.round(), return_exceptions=True)
    assert len(hooked.sent) == 1
    now = clock.time() + LoopTimings().webhook_period_s
    monkeypatch.setattr(clock, "time", lambda: now)
    await asyncio.gather(hooked.round(), return_exceptions=True)
    assert len(hooked.sent) == 2


async def test_a_limited_number_is_sent_at_once_and_each_webhook_is_served(
    timed: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_sender, "MAX_AT_ONCE", 2)
    monkeypatch.setattr(webhook_sender, "MAX_PER_BATCH", 1)
    at_once: list[int] = []
    under_way = 0

    async def slow() -> Answer:
        nonlocal under_way
        under_way += 1
        at_once.append(under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return TAKEN

    for name in "abcde":
        await timed.hook(name)
        timed.answers[f"http://127.0.0.1/{name}"] = slow
    for _ in range(2):
        await cancelled(timed)
    for _ in range(5):
        await timed.round()
    assert max(at_once) <= 2
    urls = [sent.url[-1] for sent in timed.sent]
    assert set(urls[:6]) == set("abcde"), (
        "no webhook gets a second message while others wait for a first"
    )
    assert sorted(urls) == sorted("aabbccddee")


async def test_a_webhook_that_fails_for_a_day_is_disabled_and_reports_it(timed: Hooked) -> None:
    hook = await timed.hook()
    other = await timed.hook("b")
    timed.answers[A] = BUSY
    job_id = await cancelled(timed)
    for _ in range(35):
        await timed.round()
        timed.advance(await timed.round())
    disabled = await timed.webhooks.get(hook.id, owner="ann")
    assert not disabled.enabled
    assert disabled.disabled_reason is not None
    assert disabled.disabled_reason.code == "failing"
    assert disabled.disabled_reason.message == (
        "the receiver has accepted no messages for a day; last error: the receiver answered 503"
    )
    assert timed.now - START < timedelta(hours=26)
    assert len([sent for sent in timed.sent if sent.url == A]) < 40
    assert (await timed.webhooks.get(other.id, owner="ann")).enabled
    (event,) = await events_of(timed, job_id, "webhook")
    assert event.code == "webhook_disabled"
    assert hook.id in event.message
    assert event.data["why"] == "failing"
    sent = len(timed.sent)
    timed.advance(24 * 3600)
    await timed.round()
    assert len(timed.sent) == sent


async def test_a_receiver_that_is_gone_is_believed_at_once(timed: Hooked) -> None:
    hook = await timed.hook()
    timed.answers[A] = GONE
    job_id = await cancelled(timed)
    await cancelled(timed)
    await timed.round()
    assert len(timed.sent) == 1
    view = await timed.webhooks.get(hook.id, owner="ann")
    assert view.disabled_reason is not None
    assert (view.disabled_reason.code, view.num_waiting) == ("gone", 0)
    (event,) = await events_of(timed, job_id, "webhook")
    assert event.data["dropped"] == 2


async def test_one_message_that_is_refused_holds_up_no_other_and_is_given_up(
    timed: Hooked,
) -> None:
    hook = await timed.hook()
    poison = await cancelled(timed)

    async def refuses() -> Answer:
        is_poison = timed.sent[-1].data["id"] == poison
        return Answer(400, "", "the receiver answered 400", 0.01) if is_poison else TAKEN

    timed.answers[A] = refuses
    for seconds in (10.0, 25 * 3600.0):
        await timed.round()
        await cancelled(timed)
        timed.advance(seconds)
        await timed.round()
    await timed.round()
    view = await timed.webhooks.get(hook.id, owner="ann")
    assert view.enabled, "it takes the others"
    last, first, given_up = (await timed.webhooks.deliveries(hook.id, owner="ann")).items
    assert (last.status, first.status) == ("delivered", "delivered")
    assert (given_up.status, given_up.next_try_at) == ("failed", None)


async def test_a_test_is_sent_once_before_all_that_wait_and_during_a_pause(timed: Hooked) -> None:
    hook = await timed.hook()
    timed.answers[A] = BUSY
    await cancelled(timed)
    await timed.round()
    test = await timed.webhooks.test(hook.id, owner="ann")
    assert (test.type, test.status, test.job_id) == ("webhook.test", "waiting", None)
    await timed.round()
    assert json.loads(timed.sent[-1].body)["type"] == "webhook.test"
    newest = (await timed.webhooks.deliveries(hook.id, owner="ann")).items[0]
    assert (newest.id, newest.status, newest.tries) == (test.id, "failed", 1)
    assert newest.answer is not None
    assert newest.answer.error == "the receiver answered 503"


async def test_a_webhook_that_nothing_waits_for_does_not_fail_on(timed: Hooked) -> None:
    hook = await timed.hook()
    timed.answers[A] = BUSY
    await timed.webhooks.test(hook.id, owner="ann")
    await timed.round()
    timed.advance(3 * 24 * 3600)
    await cancelled(timed)
    await timed.round()
    view = await timed.webhooks.get(hook.id, owner="ann")
    assert view.enabled, "it failed to take one test, and days later one message"
    assert (view.failing_since, view.num_waiting) == (timed.now, 1)


async def test_a_slow_receiver_is_served_for_some_seconds_and_not_for_ten_messages(
    timed: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_sender, "MAX_BATCH_S", 0.0)
    await timed.hook()
    ended = [await cancelled(timed) for _ in range(2)]
    for number in (1, 2):
        await timed.round()
        assert [sent.data["id"] for sent in timed.sent] == ended[:number]


async def test_old_messages_and_those_of_no_webhook_are_deleted(
    timed: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_sender, "KEPT_OF_A_WEBHOOK", 2)
    gone, kept = await timed.hook("a"), await timed.hook("b")
    for _ in range(3):
        await cancelled(timed)
    await timed.round()
    await timed.webhooks.delete(gone.id, owner="ann")
    timed.answers["http://127.0.0.1/b"] = BUSY
    last = await cancelled(timed)
    await timed.round(timed.new_sender())
    assert len(timed.written()) == 3, "two that were taken, and one that waits"
    timed.advance(8 * 24 * 3600)
    await timed.sender._sweep()
    assert timed.written() == [("job.cancelled", last)]
    assert (await timed.webhooks.get(kept.id, owner="ann")).num_waiting == 1


async def test_a_receiver_that_is_too_slow_for_its_messages_is_disabled(
    timed: Hooked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_sender, "MAX_WAITING", 2)
    hook = await timed.hook()
    for _ in range(3):
        await cancelled(timed)
    await timed.sender._sweep()
    view = await timed.webhooks.get(hook.id, owner="ann")
    assert view.disabled_reason is not None
    assert view.disabled_reason.code == "too_slow"


def test_pauses_double_up_to_an_hour_and_are_scattered() -> None:
    assert [pause_s(n, 0.0) for n in (1, 2, 3, 10, 11, 10_000)] == [5, 10, 20, 2560, 3600, 3600]
    chances = random.Random(0)
    drawn = {pause_s(3, chances.random()) for _ in range(100)}
    assert min(drawn) >= 10
    assert max(drawn) <= 20
    assert len(drawn) == 100


def test_the_signature_is_that_of_standard_webhooks() -> None:
    """The example comes from the specification."""
    secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
    at = datetime.fromtimestamp(1614265330, UTC)
    assert headers(secret, "msg_p5jXN8AQM9LWM0D4loKWxJek", at, b'{"test": 2432232314}') == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }
    assert rules.new_secret() != rules.new_secret()


async def test_the_text_for_slack_is_short_and_nothing_in_it_is_markup(timed: Hooked) -> None:
    await timed.hook(format="slack", states=["SUCCEEDED"])
    job_id = await timed.submit(name="<!channel> & co")
    timed.claim(job_id)
    timed.end(job_id, 1, frames=[metrics(1, {"val/accuracy": 0.9, "train/loss": 0.5})])
    await timed.round()
    assert json.loads(timed.sent[0].body) == {
        "text": "*&lt;!channel&gt; &amp; co* SUCCEEDED: it ended\nann, queue default\n"
        f"val/accuracy 0.9, train/loss 0.5\n<http://127.0.0.1:8420/#/jobs/{job_id}|{job_id}>"
    }
    test = json.loads(body_of(rules.TEST, START, {}, WebhookFormat.SLACK, "http://x"))
    assert test == {"text": "dray: this is a test"}
