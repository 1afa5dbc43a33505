"""The format of log lines in a chunk, and the storage key of a chunk."""

from __future__ import annotations

import json

from ray_workers.shared.names import attempt_prefix
from service.db.models import LogChunkRow

Line = tuple[float, str]
"""The Unix time according to the node's clock, and the text."""
MAX_TIME_S = 253_402_300_799
"""The last second of the year 9999, the latest time that a response can contain."""


def encode_line(seconds: float, text: str, *lost: int) -> str:
    """Encode a line. For a note, `lost` is the number of lines that were lost."""
    return json.dumps([seconds, text, *lost], ensure_ascii=False, separators=(",", ":")) + "\n"


def decode_lines(text: str) -> list[Line]:
    """Decode the lines of a chunk. The text is split only at newlines, because a line can contain
    other separators."""
    return [(entry[0], entry[1]) for entry in map(json.loads, text.split("\n")[:-1])]


def chunk_key(chunk: LogChunkRow) -> str:
    prefix = attempt_prefix(chunk.job_id, chunk.attempt)
    return f"{prefix}/logs/rank-{chunk.rank:05d}/{chunk.first_line:012d}.jsonl"
