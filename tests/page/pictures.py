"""Writes the pictures of the documentation: `python -m tests.page.pictures`."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.page import usage_days
from tests.page.site import PRICES, Site
from tests.page.test_media import all_kinds
from tests.unit.api.serving import serving

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
WIDTH, HEIGHT = 1280, 860
COLOURS = 128
SETTLED_MS = 2500
COLUMNS = "state,best:val/accuracy,train/loss,train.optimizer.lr,labels.team,duration,cost"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        home = Path(folder)
        (home / "prices.yaml").write_text(PRICES)
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with serving(home / "home", prices_file=home / "prices.yaml") as server:
            site = Site(server)
            job_id = site.everything(12)
            usage_days.fill(server.hands)
            trials = server.ask("GET", "/v1/jobs?text=digits-sweep").json()["items"]
            ended = server.ask("GET", "/v1/jobs?text=baseline").json()["items"]
            compared = [job["id"] for job in ended]
            places = {
                "jobs": ("jobs", "light"),
                "job": (f"jobs/{job_id}?ranks=1&smooth=0.9&more=1", "light"),
                "cluster": ("cluster", "dark"),
                "usage": ("cluster?tab=usage&by=user", "light"),
                "table": (f"jobs?columns={COLUMNS}&sort=-best:val/accuracy", "light"),
                "groups": ("jobs?group=user&sort=-best:val/accuracy", "light"),
                "compare": (f"compare?jobs={','.join(compared)}&smooth=0.6", "light"),
                "experiment": ("experiments/rates?metric=val/loss", "light"),
                "media": (f"jobs/{all_kinds(site)}?tab=media", "light"),
                "sweep": (f"compare?sweep={trials[0]['array_id']}", "light"),
            }
            for name, (place, scheme) in places.items():
                context = browser.new_context(
                    viewport={"width": WIDTH, "height": HEIGHT}, color_scheme=scheme
                )
                page = context.new_page()
                page.goto(f"{server.url}/#/{place}")
                page.wait_for_selector("h1")
                page.wait_for_timeout(SETTLED_MS)
                picture = Image.open(io.BytesIO(page.screenshot()))
                small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
                small.save(FOLDER / f"page-{name}.png", optimize=True)
                context.close()
        browser.close()


if __name__ == "__main__":
    main()
