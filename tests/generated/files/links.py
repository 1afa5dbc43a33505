"""Generated folders with links to files, to folders, out of the set, in a circle, or to nothing."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from dray.spec import Data
from ray_workers.datasets import open_text
from ray_workers.shared.node_needs import DataPolicy
from tests.generated.files.cases import Refusal, outcome, without

FILES = ("a.txt", "b.txt", "sub/c.txt", "sub/deep/d.txt")
OUTSIDE = "elsewhere.txt"
TARGETS = (
    *("a.txt", "sub/c.txt", "notes.md", ".hidden.txt", "../outside/elsewhere.txt"),
    *("sub", "../outside", ".", "missing.txt", "itself", "to the pipe"),
)
LINKS = ("x.txt", "sub/y.txt", "z.TXT", ".link.txt", "w.md", "v", "sub/u")


@dataclass(frozen=True)
class LinkCase:
    links: tuple[tuple[str, str], ...]
    """(name, target), both within the set."""
    is_linked: bool
    """Whether the source itself is a link to the folder."""
    has_roots: bool
    """Whether reading files outside of the set is forbidden."""

    def fault(self, folder: Path, policy: DataPolicy) -> str | None:
        top = folder / "set"
        for name in (*FILES, "notes.md", ".hidden.txt", f"../outside/{OUTSIDE}"):
            (top / name).parent.mkdir(parents=True, exist_ok=True)
            (top / name).write_text(f"this is {name}\n")
        os.mkfifo(top / "to the pipe")
        for name, target in self.links:
            place = top / name if target == "itself" else top / target
            (top / name).symlink_to(os.path.relpath(place, (top / name).parent))
        source = top
        if self.is_linked:
            source = folder / "link to the set"
            source.symlink_to("set")
        if self.has_roots:
            policy = replace(policy, file_roots=(str(top),))
        found, fault = outcome(
            lambda: open_text(Data(source=source.as_uri(), format="text"), policy, None),
            self.refusals(),
        )
        if found is None:
            return fault
        expected = "".join(self.texts())
        read = found.ids.tobytes().decode()
        return None if read == expected else f"{read!r}, expected {expected!r}"

    def texts(self) -> list[str]:
        """Return the files and the links to files, sorted by name."""
        found = {name: f"this is {name}\n" for name in FILES}
        found |= {name: f"this is {to}\n" for name, to in self.links if _counts(name)}
        return [found[name] for name in sorted(found)]

    def refusals(self) -> list[Refusal]:
        found = []
        for name, to in self.links:
            is_hidden = name.startswith(".")
            if to in ("sub", "../outside", ".") and not is_hidden:
                found.append(Refusal(f"set/{name}", "is a link to a folder"))
            elif not _counts(name):
                continue
            elif to == "missing.txt":
                found.append(Refusal(f"set/{name}", "is a broken link"))
            elif to == "itself":
                found.append(Refusal(f"set/{name}", "can't be followed"))
            elif to == "to the pipe":
                found.append(Refusal(f"set/{name}", "is not a regular file"))
            elif to.startswith("..") and self.has_roots:
                found.append(Refusal(f"set/{name}", "DRAY_DATA_ROOTS"))
        return found

    def smaller(self) -> Iterator[Self]:
        for at in range(len(self.links)):
            yield replace(self, links=without(self.links, at))
        if self.is_linked:
            yield replace(self, is_linked=False)


def _counts(name: str) -> bool:
    return name.lower().endswith(".txt") and not name.startswith(".")


def draw(seed: int) -> LinkCase:
    dice = random.Random(f"links {seed}")
    targets = TARGETS if dice.random() < 0.5 else TARGETS[:5]
    names = dice.sample(LINKS, dice.randint(0, 4))
    links = tuple((name, dice.choice(targets)) for name in names)
    return LinkCase(links, dice.random() < 0.3, dice.random() < 0.3)
