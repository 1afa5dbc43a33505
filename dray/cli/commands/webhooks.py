"""Commands that create, list, show, test, enable, disable and delete webhooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dray.cli import completion
from dray.cli.base import AsJson, app, connect
from dray.cli.choosing import label_pairs, state_names

if TYPE_CHECKING:
    from dray.views import Webhook, WebhookDelivery

group = typer.Typer(name="webhook", help="Send notifications when jobs change state.")
app.add_typer(group)

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="The webhook's id.")]


@group.command("add")
def add_webhook(
    url: Annotated[str, typer.Argument(metavar="URL", help="Address to post messages to.")],
    state: Annotated[
        list[str] | None,
        typer.Option(
            help="Notify when a job enters this state (default: when a job ends).",
            autocompletion=completion.states,
        ),
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Notify only about jobs in this queue.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Notify only about jobs with this label."),
    ] = None,
    slack: Annotated[
        bool, typer.Option("--slack", help="Send messages in the format of Slack and Mattermost.")
    ] = False,
    all_users: Annotated[
        bool,
        typer.Option(
            "--all-users", help="Notify about all users' jobs, not only yours; admins only."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Notify a URL when your jobs end or enter other states.

    The signing secret is printed only once.
    """
    from dray.cli.display.output import write, write_json

    labels = label_pairs(label)
    with connect() as client:
        hook = client.create_webhook(
            url,
            states=state_names(state) or None,
            queue=queue,
            labels=labels or None,
            format="slack" if slack else None,
            all_users=all_users,
        )
    if as_json:
        write_json(hook)
        return
    _show(hook)
    write(f"secret    {hook.secret}")


@group.command("ls")
def list_webhooks(as_json: AsJson = False) -> None:
    """List your webhooks, or all users' webhooks if you are an admin."""
    from dray.cli.display.tables import listing

    with connect() as client:
        found = client.webhooks()
    listing(
        found,
        as_json,
        ("ID", "OWNER", "STATE", "WAITING", "FILTER", "URL"),
        lambda hook: (
            hook.id,
            hook.owner,
            _state(hook),
            hook.num_waiting,
            _filter(hook),
            hook.url,
        ),
        flexible=("URL", "FILTER"),
        optional=("WAITING", "OWNER"),
    )


@group.command("show")
def show_webhook(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Show a webhook, and whether its receiver accepts messages."""
    from dray.cli.display.output import write_json

    with connect() as client:
        hook = client.webhook(webhook_id)
    write_json(hook) if as_json else _show(hook)


@group.command("deliveries")
def list_deliveries(
    webhook_id: WebhookId,
    limit: Annotated[
        int, typer.Option("--limit", "-n", help="Maximum number of messages.", min=1)
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """List the messages of a webhook with the receiver's responses, newest first."""
    from itertools import islice

    from dray.cli.display.output import age
    from dray.cli.display.tables import listing

    with connect() as client:
        found = list(islice(client.webhook_deliveries(webhook_id), limit))
    listing(
        found,
        as_json,
        ("TYPE", "JOB", "STATUS", "TRIES", "MADE", "ANSWER"),
        lambda one: (
            *(one.type, one.job_id, one.status, one.tries, age(one.created_at)),
            _answer(one),
        ),
        flexible=("ANSWER",),
        optional=("MADE", "TRIES"),
    )


@group.command("test")
def try_webhook(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Send a test message, and print the receiver's response."""
    from dray.cli.display.output import write_json, write_text
    from dray.cli.exits import Exit

    with connect() as client:
        sent = client.test_webhook(webhook_id)
    write_json(sent) if as_json else write_text(
        f"{sent.id} {sent.status}: {_answer(sent) or 'not sent'}"
    )
    if sent.status != "delivered":
        raise typer.Exit(Exit.JOB_ENDED_BADLY)


@group.command("enable")
def enable_webhook(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Enable a disabled webhook. State changes that happened while the webhook was disabled are not
    sent."""
    from dray.cli.display.output import write_json

    with connect() as client:
        hook = client.enable_webhook(webhook_id)
    write_json(hook) if as_json else _show(hook)


@group.command("disable")
def disable_webhook(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Disable a webhook, and discard its pending messages."""
    from dray.cli.display.output import write_json

    with connect() as client:
        hook = client.disable_webhook(webhook_id)
    write_json(hook) if as_json else _show(hook)


@group.command("delete")
def delete_webhook(webhook_id: WebhookId, as_json: AsJson = False) -> None:
    """Delete a webhook and its messages."""
    import json

    from dray.cli.display.output import write

    with connect() as client:
        client.delete_webhook(webhook_id)
    write(json.dumps({"deleted": webhook_id}) if as_json else f"{webhook_id} deleted")


def _show(hook: Webhook) -> None:
    from dray.cli.display.output import cell, write_text

    lines: list[tuple[str, object]] = [
        ("id", hook.id),
        ("owner", f"{hook.owner}{', notified about jobs of all users' if hook.all_users else ''}"),
        ("url", hook.url),
        ("format", hook.format),
        ("filter", _filter(hook)),
        ("state", _state(hook)),
        ("waiting", hook.num_waiting),
    ]
    for name, value in lines:
        write_text(f"{name:<9} {cell(value)}", indent=" " * 10)


def _filter(hook: Webhook) -> str:
    """Return a string such as `SUCCEEDED, FAILED in night with team=vision`."""
    queue = f" in {hook.queue}" if hook.queue else ""
    labels = ", ".join(f"{key}={value}" for key, value in hook.labels.items())
    return ", ".join(hook.states) + queue + (f" with {labels}" if labels else "")


def _state(hook: Webhook) -> str:
    from dray.cli.display.output import cell

    if hook.disabled_reason is not None:
        return f"disabled: {hook.disabled_reason.message}"
    if hook.failing_since is not None:
        return f"failing since {cell(hook.failing_since)}"
    return f"enabled by {hook.enabled_by}" if hook.enabled_by else "enabled"


def _answer(one: WebhookDelivery) -> str | None:
    if one.answer is None:
        return None
    outcome = one.answer.error or str(one.answer.status)
    return f"{outcome}: {one.answer.body}" if one.answer.body else outcome
