"""Folders that split a set of images into training, validation and test images.

`set/{train,val,test}/{dark,light}/*` is a split, and so is `set/{dark,light}/{train,val}/*`.
`set/{train,car,bus}/*` is not a split, because these are classes. Ambiguous layouts are rejected.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from ray_workers.datasets.core.errors import broken, listed
from ray_workers.datasets.formats.prepared import ArrayWriter, Prepared, Workshop
from ray_workers.datasets.sources.source import SourceFile

MAX_SUBFOLDERS = 6
"""Maximum number of subfolders shown in an error."""


class SplitName(StrEnum):
    TRAINING = "training"
    VALIDATION = "validation"
    TEST = "test"
    """Ignored: used neither for training nor for metrics."""


_ROLES = {
    **dict.fromkeys(("train", "training"), SplitName.TRAINING),
    **dict.fromkeys(("val", "valid", "validation", "dev"), SplitName.VALIDATION),
    **dict.fromkeys(("test", "testing", "holdout", "hold-out", "hold_out"), SplitName.TEST),
}
_EVALUATION = ("eval", "evaluation")
"""Names of folders that contain the test split if another folder contains the validation split, and
the validation split otherwise."""

NONE: Mapping[str, Any] = {"is_divided": False, "num_left_out": 0}
"""The metadata that `read` expects for a set that is not split by folders."""

Parts = tuple[str, ...]


@dataclass(frozen=True)
class SplitFile:
    """A file of the data set."""

    file: SourceFile
    parts: Parts
    """Components of the path, without the folder that defines the split."""
    role: SplitName | None
    """None if the set is not split."""


def members(files: Iterable[tuple[SourceFile, Parts]], location: str) -> list[SplitFile]:
    """Return the files with their roles, in the same order. Raises DataError if the folders could
    be either classes or a split, or if a split has no training folder."""
    every = list(files)
    paths = [parts for _, parts in every]
    for level in (0, 1):
        roles = _roles_at(level, paths, location)
        if roles:
            return [
                SplitFile(file, (*parts[:level], *parts[level + 1 :]), roles[parts[level]])
                for file, parts in every
            ]
    return [SplitFile(file, parts, None) for file, parts in every]


def kept(every: Sequence[SplitFile]) -> list[SplitFile]:
    """Return the files that are not in test folders."""
    return [member for member in every if member.role is not SplitName.TEST]


def write(every: Sequence[SplitFile], shop: Workshop) -> Mapping[str, Any]:
    """Record which of the kept files are for validation, if folders define the split. Returns the
    split as JSON data for `read`."""
    flags = np.array([member.role is SplitName.VALIDATION for member in kept(every)])
    if flags.any():
        with ArrayWriter(shop.output, "is_validation", (), np.bool_, shop.budget) as written:
            written.append(flags)
    return {"is_divided": bool(flags.any()), "num_left_out": len(every) - len(kept(every))}


def read(prepared: Prepared) -> tuple[npt.NDArray[np.bool_] | None, int]:
    """Return two values: whether each image is for validation (None without a split), and the
    number of ignored images."""
    division = prepared.meta.get("division", NONE)
    flags = np.array(prepared.array("is_validation")) if division["is_divided"] else None
    return flags, division["num_left_out"]


def lines(num_left_out: int, is_validation: npt.NDArray[np.bool_] | None) -> list[str]:
    """Return sentences about the split by folders, for the job's log."""
    found = []
    if is_validation is not None:
        count = int(np.count_nonzero(is_validation))
        found.append(
            f"the images are split by folder: {len(is_validation) - count:,} for training and "
            f"{count:,} for validation; data.validation_fraction is not used"
        )
    if num_left_out:
        found.append(f"the {num_left_out:,} images in the test folder are ignored")
    return found


def refuse_like_names(names: Iterable[str], location: str) -> None:
    """Raise DataError if class names differ only in case, except for single letters."""
    found: dict[str, str] = {}
    for name in names:
        other = found.setdefault(name.casefold(), name)
        if other != name and len(name) > 1:
            raise broken(
                location, f"has folders {listed([other, name])}, which are probably the same class"
            )


def refuse_repeated(every: Sequence[SplitFile], location: str) -> None:
    """Raise DataError if the set is not split, but its folders have names that look like a split
    (such as `train2017` and `val2017`) or have the same subfolders (as the folders of two sites
    might). In these cases, either level of folders could be the classes."""
    paths = [member.parts for member in every if member.role is None]
    below: dict[str, set[str]] = {parts[0]: set() for parts in paths if len(parts) > 1}
    for parts in paths:
        if len(parts) > 2:
            below[parts[0]].add(parts[1].casefold())
    num_of = Counter(name for names in below.values() for name in names)
    shared = {name for name, num in num_of.items() if num > 1}
    like = {name for name in below if is_named(_first_word(name))}
    has_flat = len(below) == 2 and set() in below.values()
    if any(len(names) > 1 and names & shared for names in below.values()):
        lead = "has the same subfolders in several folders"
    elif any(len(below[name]) > 1 for name in like) and (
        has_flat or is_division({_first_word(name) for name in like})
    ):
        lead = "has folders named like the parts of a split"
    else:
        return
    raise broken(
        location,
        f"{lead}, so the class folders could be at either level: the folder contains "
        f"{_found(paths)}. Use one folder without subfolders for each class, or only the "
        "folders train and val, each with one subfolder for each class",
    )


def _first_word(name: str) -> str:
    """Return the letters with which a name begins, such as `train` for `Train2017`."""
    return re.split(r"[\W\d_]", name.casefold(), maxsplit=1)[0]


def _roles_at(level: int, paths: Sequence[Parts], location: str) -> Mapping[str, SplitName]:
    """Return the role of each folder at a depth, keyed by name. Empty if the folders are not a
    split."""
    folders = {parts[level] for parts in paths if len(parts) > level + 1}
    named = {name for name in folders if is_named(name)}
    roles = resolved(named)
    verdict = _verdict_above(paths, named) if level == 0 else _verdict_below(paths, named)
    num_of = Counter(roles.values())
    if verdict is False:
        return {}
    if verdict is None or not num_of[SplitName.TRAINING]:
        _refuse(paths, location)
    if max(num_of[SplitName.TRAINING], num_of[SplitName.VALIDATION]) > 1:
        _refuse(paths, location)
    return roles


def _verdict_above(paths: Sequence[Parts], named: Set[str]) -> bool | None:
    """Return whether the top-level folders are a split; None if they could also be classes. `named`
    contains the folders whose names are used for splits."""
    if not named:
        return False
    below: dict[str, set[str]] = {parts[0]: set() for parts in paths if len(parts) > 1}
    for parts in paths:
        if len(parts) > 2:
            below[parts[0]].add(parts[1])
    direct = {parts[0] for parts in paths if len(parts) == 2}
    if named != {parts[0] for parts in paths}:  # there are other folders, or files
        others: set[str] = set().union(*(below[name] for name in {*below} - named))
        shares = any(below[name] & others for name in named)
        return None if shares or is_division(named) else False
    if len(named) == 1 and named == direct:
        return False
    return None if named & direct else True


def _verdict_below(paths: Sequence[Parts], named: Set[str]) -> bool | None:
    """Return whether the folders within the class folders are a split; None if this is unclear."""
    if not is_division(named):
        return False
    owners = {parts[0] for parts in paths if len(parts) > 2 and parts[1] in named}
    is_whole = all(len(parts) > 2 and parts[1] in named for parts in paths)
    return True if is_whole and owners == {parts[0] for parts in paths} else None


def is_division(named: Set[str]) -> bool:
    """Whether folders with these names form a split."""
    return len(named) > 1 and SplitName.TRAINING in resolved(named).values()


def is_named(name: str) -> bool:
    """Whether the name denotes a part of a split, as `train` and `Val` do."""
    return name.casefold() in _ROLES or name.casefold() in _EVALUATION


def resolved(named: Iterable[str]) -> Mapping[str, SplitName]:
    """Return the role of each folder name."""
    roles = {name: _ROLES.get(name.casefold()) for name in named}
    has_validation = SplitName.VALIDATION in roles.values()
    rest = SplitName.TEST if has_validation else SplitName.VALIDATION
    return {name: role or rest for name, role in roles.items()}


def _refuse(paths: Sequence[Parts], location: str) -> NoReturn:
    raise broken(
        location,
        "has folders that are named like the parts of a split but do not form a split: the "
        f"folder contains {_found(paths)}. A split consists only of folders such as train and val, "
        "each with one folder for each class. Use other names for classes",
    )


def _found(paths: Sequence[Parts]) -> str:
    """Return a description of the top two levels of folders, with the number of images directly in
    each folder."""
    tops: dict[str, list[Parts]] = {}
    for parts in paths:
        tops.setdefault(parts[0] if len(parts) > 1 else ".", []).append(parts[1:])
    found = []
    for name, rests in list(tops.items())[: 2 * MAX_SUBFOLDERS]:
        below = sorted({rest[0] for rest in rests if len(rest) > 1})
        num_direct = sum(len(rest) <= 1 for rest in rests)
        inside = [*below[:MAX_SUBFOLDERS], *(["…"] if len(below) > MAX_SUBFOLDERS else [])]
        inside += [f"{num_direct:,} images"] if num_direct else []
        found.append(f"{name} ({', '.join(inside)})")
    return ", ".join(found)
