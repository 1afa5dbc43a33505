"""Webhooks stop if they are neither owned nor enabled by a user with a token."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dray import views
from tests.unit.service.helpers import spec
from tests.unit.service.webhooks.hooked import Hooked, set_tokens


def tokens_of(hooked: Hooked) -> Path:
    path = hooked.settings.tokens_file
    assert path is not None
    return path


async def cancelled(hooked: Hooked, owner: str = "bob") -> None:
    job, _ = await hooked.jobs.submit(spec(), owner=owner, project="vision")
    await hooked.jobs.cancel(job.id)


async def shown(hooked: Hooked, hook: views.Webhook) -> views.Webhook:
    return await hooked.webhooks.get(hook.id, owner=None)


async def disabled(hooked: Hooked) -> None:
    """Let ten minutes pass."""
    await hooked.round()
    hooked.advance(600)
    await hooked.round()


async def test_nothing_is_sent_for_a_user_whose_token_was_removed(guarded: Hooked) -> None:
    hook = await guarded.hook(owner="bob")
    set_tokens(tokens_of(guarded), "ann:admin")
    await cancelled(guarded)
    await guarded.round()
    assert guarded.sent == []
    assert (await shown(guarded, hook)).enabled, "the line may come back"
    guarded.advance(600)
    await guarded.round()
    view = await shown(guarded, hook)
    assert (view.enabled, view.num_waiting) == (False, 0)
    assert view.disabled_reason is not None
    assert view.disabled_reason.code == "no_token"
    assert view.disabled_reason.message == "bob no longer has a token"


async def test_messages_go_when_the_token_is_back(guarded: Hooked) -> None:
    hook = await guarded.hook(owner="bob")
    await cancelled(guarded)
    set_tokens(tokens_of(guarded), "ann:admin")
    await guarded.round()
    guarded.advance(300)
    set_tokens(tokens_of(guarded), "ann:admin", "bob")
    await guarded.round()
    assert len(guarded.sent) == 1
    set_tokens(tokens_of(guarded), "ann:admin")
    guarded.advance(400)
    await guarded.round()
    assert (await shown(guarded, hook)).enabled, "the ten minutes begin anew"


async def test_a_webhook_for_the_jobs_of_all_users_needs_an_admin(guarded: Hooked) -> None:
    hook = await guarded.hook(owner="ann", all_users=True)
    own = await guarded.hook("b", owner="ann")
    set_tokens(tokens_of(guarded), "ann", "bob:admin")
    await cancelled(guarded)
    await disabled(guarded)
    reason = (await shown(guarded, hook)).disabled_reason
    assert reason is not None
    assert reason.code == "no_admin"
    assert (await shown(guarded, own)).enabled
    assert guarded.sent == []


async def test_an_admin_may_stand_behind_it_instead(guarded: Hooked) -> None:
    hook = await guarded.hook(owner="bob")
    set_tokens(tokens_of(guarded), "ann:admin", "eve:admin")
    await disabled(guarded)
    view = await guarded.webhooks.set_enabled(hook.id, enabled=True, owner=None, actor="ann")
    assert (view.enabled, view.owner, view.enabled_by) == (True, "bob", "ann")
    await cancelled(guarded)
    await disabled(guarded)
    assert len(guarded.sent) == 1, "still of the jobs of bob"
    set_tokens(tokens_of(guarded), "eve:admin")
    await disabled(guarded)
    assert not (await shown(guarded, hook)).enabled


async def test_nothing_is_sent_or_disabled_while_the_file_can_not_be_read(guarded: Hooked) -> None:
    hook = await guarded.hook(owner="bob")
    await cancelled(guarded)
    path = tokens_of(guarded)
    text = path.read_text()
    path.unlink()
    await disabled(guarded)
    assert guarded.sent == []
    assert (await shown(guarded, hook)).enabled
    path.write_text(text)
    await guarded.round()
    assert len(guarded.sent) == 1


async def test_loops_without_the_file_log_this_once(
    timed: Hooked, caplog: pytest.LogCaptureFixture
) -> None:
    await timed.hook(owner="default")
    with caplog.at_level(logging.WARNING):
        await timed.round()
        assert caplog.messages == []
        await timed.hook("b", owner="bob")
        await timed.round()
        await timed.round()
    (logged,) = caplog.messages
    assert "DRAY_TOKENS_FILE is not set for the process that runs the loops" in logged
