"""Files that the operator writes, such as the prices. Changes take effect without a restart.

A file is YAML or JSON. If the file becomes invalid or is deleted while the service runs, its
previous content still applies.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from dray.documents import parse_yaml
from dray.errors import SpecError
from dray.input.validation import Fault, check_as, check_values
from dray.spec.fields import Document
from service.config.start_refusals import StartRefused

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 20
SETTLED_NS = 1_000_000_000
"""A file that was changed within this time is read again, because another change might not change
its timestamp."""
T = TypeVar("T")


class OperatorFile(Generic[T]):
    """The current content of a file. Thread-safe."""

    setting: ClassVar[str]
    """The setting with the path."""
    contents: ClassVar[str]
    """A plural for messages, such as `prices`."""
    expected: ClassVar[str]
    """Description of the content, for messages."""
    document: ClassVar[type[Document]]
    refusal: ClassVar[type[StartRefused]]

    def __init__(self, path: Path | None) -> None:
        """Read the file; None if the deployment has none. Raises the class `refusal`."""
        self._path = path
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._content: T | None = None if path is None else self.load(path)
        self._problem: str | None = None

    @classmethod
    def convert(cls, document: Any) -> T:
        """Return the content of a file, given its checked `document`."""
        raise NotImplementedError

    @classmethod
    def load(cls, path: Path) -> T:
        """Read a file. Raises `refusal` with a message about the invalid field."""
        source = f"{cls.setting} {path}"
        try:
            with path.open("rb") as file:
                content = file.read(MAX_BYTES + 1)
            text = content.decode()
        except OSError as error:
            raise cls.refusal(f"{source} can't be read: {error}") from None
        except UnicodeDecodeError:
            raise cls.refusal(f"{source} is not UTF-8 text") from None
        if len(content) > MAX_BYTES:
            raise cls.refusal(f"{source} is larger than {MAX_BYTES} bytes")
        return cls.parse(text, source)

    @classmethod
    def parse(cls, text: str, source: str) -> T:
        """Parse the text of a file. Raises `refusal`, whose message names `source`, if the text is
        invalid."""
        try:
            document: Any = parse_yaml(text, source=source)
        except SpecError as error:
            raise cls.refusal(str(error)) from None
        if not isinstance(document, dict):
            raise cls.refusal(f"{source}: the file must contain {cls.expected}")
        try:
            check_values(document)
            return cls.convert(check_as(cls.document, document))
        except Fault as fault:
            path = (fault.pointer or "").removeprefix("/")
            hint = f" ({fault.hint})" if fault.hint else ""
            problem = f"{path} {fault.detail}" if path else fault.detail
            raise cls.refusal(f"{source}: {problem}{hint}") from None

    def current(self) -> T | None:
        """Return the content; None if the deployment has no such file. If the file has changed, it
        is read first."""
        if self._path is not None:
            with self._lock:
                self._refresh(self._path)
        return self._content

    @property
    def problem(self) -> str | None:
        """The error in the changed file; None if there is none. While there is an error, the
        previous content still applies."""
        return self._problem

    def _refresh(self, path: Path) -> None:
        try:
            stat = path.stat()
        except OSError as error:
            self._seen = None
            return self._keep(f"{self.setting} {path} can't be read: {error}")
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        if version == self._seen:
            return None
        try:
            self._content = self.load(path)
            self._problem = None
        except StartRefused as error:
            self._keep(str(error))
        is_settled = abs(time.time_ns() - stat.st_mtime_ns) > SETTLED_NS
        self._seen = version if is_settled else None
        return None

    def _keep(self, problem: str) -> None:
        if problem != self._problem:
            logger.error(
                "the %s file can't be used, so the previous %s still apply: %s",
                *(self.contents, self.contents, problem),
            )
        self._problem = problem
