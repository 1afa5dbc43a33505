"""The pictures of the documentation: `python -m tests.page.pictures` writes them anew."""

from __future__ import annotations

import io
import shutil
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

from tests.page.site import PRICES, Site
from tests.unit.api.serving import serving

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
LARGE, PHONE = (1280, 860), (390, 760)
COLOURS = 128
SETTLED_MS = 2500


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        home = Path(folder)
        (home / "prices.yaml").write_text(PRICES)
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        with serving(home / "home", prices_file=home / "prices.yaml") as server:
            site = Site(server)
            job_id = site.everything(12)
            reading = server.ask("GET", "/v1/jobs?text=baseline").json()["items"]
            chosen = ",".join(job["id"] for job in reading)
            places = {
                "jobs": ("jobs", LARGE, "light"),
                "job": (f"jobs/{job_id}?ranks=1&smooth=0.9", LARGE, "light"),
                "logs": (f"jobs/{job_id}?tab=logs&attempt=1", LARGE, "dark"),
                "cluster": ("cluster", LARGE, "dark"),
                "submit": ("submit", LARGE, "light"),
                "compare": (f"compare?jobs={chosen}&smooth=0.95", LARGE, "dark"),
                "phone": ("jobs", PHONE, "dark"),
            }
            for name, (place, (width, height), scheme) in places.items():
                context = browser.new_context(
                    viewport={"width": width, "height": height}, color_scheme=scheme
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
