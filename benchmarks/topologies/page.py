"""Write the figures of the last run to docs/explanation/sync-costs.md.

python -m benchmarks.topologies.page
"""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report import table_of

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "sync-costs.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN = "<!-- figures: written by `python -m benchmarks.topologies.page` -->\n"
END = "<!-- end of figures -->\n"


def with_figures(page: str) -> str:
    """Return the page with the tables and plots in the results, if any."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    parts = []
    for name in ("topologies", "parameter_servers", "server_replicas"):
        path = RESULTS / f"{name}.json"
        if not path.exists():
            continue
        taken = json.loads(path.read_text())
        for table in taken["tables"]:
            parts.append(f"**{table['title']}**\n\n{table_of(table['columns'], table['rows'])}\n")
        for picture in taken["pictures"]:
            caption, file = picture["caption"], f"../../benchmarks/results/{picture['name']}.svg"
            parts.append(f"![{caption}]({file})\n")
    return (
        before + BEGIN + "".join(f"\n{part}" for part in parts) + "\n" * bool(parts) + END + after
    )


if __name__ == "__main__":
    PAGE.write_text(with_figures(PAGE.read_text()))
