"""Media that a training process reports, sent through a spool of its own, so that pictures never
delay or displace metrics."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import Any, TypedDict

from dray.media.kinds import MediaKind
from dray.media.values import convert
from dray.train import reporting
from dray.train.storage_faults import log

STREAM = ".media"
_KINDS = frozenset(MediaKind)
MAX_NOTES = 20
"""Maximum number of lines in the log about media that are left out."""


class Media(TypedDict, total=False):
    """The media of one step, each by key."""

    histogram: Mapping[str, Any]
    """The distribution of all elements of an array or tensor, or `(counts, edges)` as
    numpy.histogram returns them."""
    image: Mapping[str, Any]
    """An array or tensor, a picture of Pillow, a figure of matplotlib, or the path or bytes of a
    PNG, JPEG or WebP file."""
    audio: Mapping[str, Any]
    """`(samples, samples per second)`, or the path or bytes of a WAV file."""
    text: Mapping[str, Any]
    table: Mapping[str, Any]
    """A data frame of pandas, a mapping from column names to lists, or a list of rows as
    mappings."""
    confusion_matrix: Mapping[str, Any]
    """`(labels, predictions)` or `(labels, predictions, names)`, or a square array of counts whose
    rows are the true classes."""
    pr_curve: Mapping[str, Any]
    """`(labels, scores)`, with labels 0 and 1."""
    roc_curve: Mapping[str, Any]
    """`(labels, scores)`, with labels 0 and 1."""


class _LeftOut:
    """Counts media that are left out, and logs the reasons."""

    def __init__(self) -> None:
        self.unsent = 0
        """Number of media left out since a record was last sent."""
        self._num_notes = 0
        self._noted: set[tuple[str, ...]] = set()

    def note(self, kind: MediaKind, key: str, step: int, why: str, about: str = "") -> None:
        """Count a record, and log why it is left out, once for each key, or for each `about`."""
        self.unsent += 1
        name = (about,) if about else (kind, key)
        if name in self._noted or self._num_notes > MAX_NOTES:
            return
        self._noted.add(name)
        self._num_notes += 1
        more = "; further reasons are not logged" if self._num_notes > MAX_NOTES else ""
        log(f"the {kind} {key!r} of step {step} is left out: {why}{more}")


_left_out = _LeftOut()


def check(media: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for an unknown kind or an invalid key."""
    for kind, values in media.items():
        if kind not in _KINDS:
            raise TypeError(
                f"report() got an unexpected argument {kind!r}; the kinds of media are "
                f"{', '.join(MediaKind)}"
            )
        if not isinstance(values, Mapping):
            raise TypeError(
                f"{kind} must be a mapping from keys to values, such as "
                f"{kind}={{'name': value}}, not {type(values).__name__}"
            )
        for key in values:
            reporting.checked_key(key)


def send(step: int, media: Mapping[str, Any]) -> None:
    """Send the checked media of a step. A value that can't be stored is left out, which the log
    states. Raises TypeError for an object that can't be a value of its kind."""
    for name, values in media.items():
        kind = MediaKind(name)
        for key, given in values.items():
            try:
                converted = convert(kind, given)
            except ValueError as error:
                _left_out.note(kind, key, step, str(error))
                continue
            body: dict[str, Any] = {
                "step": step,
                "key": key,
                "kind": kind,
                "value": converted.value,
                "left_out": _left_out.unsent,
            }
            if converted.content is not None:
                body["file"] = base64.b64encode(converted.content).decode()
            if math.isinf(reporting.append("media", body, stream=STREAM)):
                _left_out.note(
                    *(kind, key, step, "the service has not received earlier media yet"),
                    about="spool",
                )
            else:
                _left_out.unsent = 0
