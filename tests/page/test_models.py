"""Registered models in a real Chromium."""

from __future__ import annotations

import json
from typing import Any

from tests.marks import IN_BROWSER
from tests.page.conftest import TOKEN, Watched
from tests.page.site import EVIL, Site
from tests.unit.api.routes.reports.test_checkpoints import saved
from tests.unit.api.serving import LiveServer
from tests.unit.service.helpers import metrics

pytestmark = IN_BROWSER

HEADERS = {"Authorization": f"Bearer {TOKEN}"}


def registered(server: LiveServer, model: str, **fields: Any) -> str:
    """Register the result of a new job, and return the id of the job."""
    body = {"recipe": "image_classification", "data": {"source": "sklearn://digits"}, **fields}
    job_id: str = server.ask("POST", "/v1/jobs", json=body, headers=HEADERS).json()["id"]
    server.train(
        job_id,
        metrics(10, {"val/accuracy": 0.9}, total_steps=10),
        saved(server, job_id, 10),
        server.artifact(job_id, "model.safetensors", b"weights"),
    )
    server.succeed(job_id)
    wanted = {"name": model, "job": job_id, "card": f"# A card\n\n{EVIL}", "aliases": ["best"]}
    answer = server.ask("POST", "/v1/models", json=wanted, headers=HEADERS)
    assert answer.status_code == 201, answer.text
    return job_id


def test_a_model_is_found_and_used_for_a_job(site: Site, server: LiveServer, tab: Watched) -> None:
    page = tab.open("models")
    page.get_by_text("No models are registered").wait_for()
    first = registered(server, "Zahl'n", name="first")
    second = registered(
        server, "Zahl'n", name="second", init_from="model://zahl'n@best", train={"epochs": 7}
    )
    page = tab.open("models")
    row = page.locator("tbody tr").first
    assert "best 2" in row.inner_text()
    row.get_by_role("link", name="Zahl'n").click()
    page.get_by_role("heading", name="Version 2").wait_for()
    assert page.title() == "Zahl'n - dray"
    assert EVIL in page.get_by_role("region", name="Card").inner_text()
    started = page.locator("ol li")
    started.get_by_role("link", name="first", exact=True).wait_for()
    assert first not in started.inner_text()
    started.get_by_role("link", name="Zahl'n@1").click()
    page.get_by_role("heading", name="Version 1").wait_for()
    assert page.locator("ol li").count() == 0
    page.get_by_role("link", name="2", exact=True).click()
    page.get_by_role("heading", name="Version 2").wait_for()
    page.get_by_role("button", name="Use this").click()
    page.locator(".verdict.right").wait_for()
    document = json.loads(page.locator("textarea").input_value())
    assert document["init_from"] == "model://Zahl'n@2"
    assert document["train"] == {"epochs": 7}
    assert second not in json.dumps(document)


def test_aliases_are_moved_by_those_who_may(server: LiveServer, tab: Watched) -> None:
    for n in range(3):
        registered(server, "moved", name=f"job-{n}")
    url = "/v1/models/moved/aliases/best"
    page = tab.open("models/moved?version=1")
    page.get_by_role("heading", name="Version 1").wait_for()
    aliases = page.get_by_role("group", name="Aliases")
    field = aliases.get_by_label("An alias for version 1; Enter moves it here")
    remove = aliases.get_by_role("button", name="Remove the alias best")
    field.fill("best")
    field.press("Enter")
    remove.wait_for()
    moves = page.locator(".card", has=page.get_by_role("heading", name="Changes of aliases"))
    moves.get_by_role("cell", name="ann").nth(3).wait_for()
    assert aliases_of(server) == {"best": 1}

    tab.statuses.add(409)
    seen = {"aliases": {"best": 2}}
    page.route("**/v1/models/moved", lambda route: route.fulfill(json=model_of(server) | seen))
    server.ask("PUT", url, json={"version": 3}, headers=HEADERS)
    remove.wait_for(state="detached")
    field.fill("best")
    field.press("Enter")  # the page has seen version 2, and the alias refers to version 3
    page.get_by_text("refers to version 3").wait_for()
    assert aliases_of(server) == {"best": 3}
    page.unroute("**/v1/models/moved")
    server.ask("PUT", url, json={"version": 1}, headers=HEADERS)
    remove.wait_for()

    remove.click()
    remove.wait_for(state="detached")
    assert aliases_of(server) == {}

    page.route("**/caller", lambda route: route.fulfill(json={"name": "bob", "is_admin": False}))
    page.reload()
    page.get_by_text("Only ann, the owner, and admins can move aliases.").wait_for()
    assert aliases.get_by_role("textbox").count() == 0


def model_of(server: LiveServer) -> dict[str, Any]:
    answer: dict[str, Any] = server.ask("GET", "/v1/models/moved", headers=HEADERS).json()
    return answer


def aliases_of(server: LiveServer) -> dict[str, int]:
    found: dict[str, int] = model_of(server)["aliases"]
    return found


def test_models_are_read_on_a_phone(server: LiveServer, tab: Watched) -> None:
    registered(server, "phone")
    tab.page.set_viewport_size({"width": 390, "height": 800})
    page = tab.open("models/phone")
    page.get_by_role("heading", name="Version 1").wait_for()
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= 390, "only tables scroll sideways"
