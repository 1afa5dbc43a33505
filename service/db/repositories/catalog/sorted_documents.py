"""SQL for pages of jobs in the order of a field of their documents, or of a parameter.

A value is stored either for a job itself or as a value that several jobs share. Numbers of single
jobs are read in the order of an index. For each shared number between them, the jobs that share it
are searched. Strings are searched one after another. Numbers come before strings, and `true` and
`false` count as strings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, false, literal_column, not_, or_, select, tuple_
from sqlalchemy.orm import Session

from service.db.models import DocumentValueRow, JobRow
from service.db.repositories.bulk import CHUNK, in_chunks
from service.db.repositories.catalog import search
from service.db.repositories.catalog.document_values import SHARES
from service.db.repositories.catalog.sort_stages import (
    Chosen,
    Ids,
    SortPosition,
    SortStage,
    Value,
    directed,
)
from service.domain.errors import BadCursor
from service.domain.tracking.columns import ParameterField
from service.domain.tracking.document_values import (
    ABSENT,
    PARAMETERS,
    StoredValue,
    escaped,
)
from service.domain.tracking.search_tree import DocumentField, Exists

_RECIPE = "/recipe"
_FIRST_JOB: ColumnElement[str] = literal_column("'job-'")
"""A literal instead of a parameter, so that the database can use the index of shared values."""

Found = Sequence[tuple[Value, str]]


@dataclass(frozen=True)
class _Source:
    """A place in documents where a value can be."""

    pointer: str
    of_recipes: bool = False
    """Whether only the documents of recipes count. A script's document also has fields such as
    `train.optimizer.lr`, but they don't affect the script."""


def _sources(field: DocumentField | ParameterField) -> list[_Source]:
    if isinstance(field, DocumentField):
        return [_Source(field.pointer)]
    named = [_Source(f"/{PARAMETERS}/{escaped(field.name)}")]
    return named if field.pointer is None else [*named, _Source(field.pointer, of_recipes=True)]


def stages(field: DocumentField | ParameterField, descending: bool) -> Iterator[SortStage]:
    sources = _sources(field)
    yield _Numbers(sources, descending)
    yield _Strings(sources, descending)
    yield _Missing(sources, descending)


def values(
    session: Session, field: DocumentField | ParameterField, job_ids: Sequence[str]
) -> dict[str, StoredValue]:
    """Return the value of each of these jobs, keyed by job id. Jobs without the value are
    omitted."""
    return _values(session, _sources(field), job_ids)


def _values(
    session: Session, sources: Sequence[_Source], job_ids: Sequence[str]
) -> dict[str, StoredValue]:
    wanted = [SHARES, _RECIPE, *(source.pointer for source in sources)]
    own = _read(session, job_ids, wanted)
    holders = {
        holder: value.text or "" for (holder, pointer), value in own.items() if pointer == SHARES
    }
    shared = _read(session, sorted(set(holders.values())), wanted)

    def value(job_id: str, pointer: str) -> StoredValue:
        inherited = shared.get((holders.get(job_id, ""), pointer), ABSENT)
        return own.get((job_id, pointer), inherited)

    found = {}
    for job_id in job_ids:
        for source in sources:
            stored = value(job_id, source.pointer)
            counts = not source.of_recipes or value(job_id, _RECIPE) != ABSENT
            if stored != ABSENT and counts:
                found[job_id] = stored
                break
    return found


def _read(
    session: Session, holders: Sequence[str], pointers: Sequence[str]
) -> dict[tuple[str, str], StoredValue]:
    c = DocumentValueRow
    found = {}
    for some in in_chunks(holders, CHUNK):
        query = select(c.holder, c.pointer, c.number, c.text).where(
            c.holder.in_(some), c.pointer.in_(pointers)
        )
        for holder, pointer, number, text in session.execute(query):
            found[holder, pointer] = StoredValue(number, text)
    return found


@dataclass(frozen=True)
class _DocumentStage:
    sources: Sequence[_Source]
    descending: bool

    def _sorted(self, found: dict[str, Any], after: SortPosition | None, limit: int) -> Found:
        """Return the first of these jobs behind the position `after`. `found` maps ids to
        values."""
        rows = sorted(((value, job_id) for job_id, value in found.items()), reverse=self.descending)
        if after is not None:
            last = after.value, after.job_id
            rows = [row for row in rows if (row < last if self.descending else row > last)]
        return rows[:limit]

    def _where(
        self, session: Session, holds: Callable[[Any], ColumnElement[bool]]
    ) -> ColumnElement[bool]:
        """Return a condition on `JobRow` that is true if `holds` is true for the job's value."""
        found = []
        for source in self.sources:
            inside = search.in_document(session, source.pointer, holds)
            found.append(and_(inside, *_guards(session, source)))
        return or_(false(), *found)


def _guards(session: Session, source: _Source) -> list[ColumnElement[bool]]:
    if not source.of_recipes:
        return []
    return [search.condition(session, Exists(DocumentField(_RECIPE)))]


def _is_number(row: Any) -> ColumnElement[bool]:
    return and_(row.text.is_(None), row.number.is_not(None))


class _Numbers(_DocumentStage):
    def page(
        self, session: Session, chosen: Chosen, after: SortPosition | None, limit: int
    ) -> Found:
        if after is not None and not isinstance(after.value, int | float):
            raise BadCursor("the cursor does not belong to this listing")
        if chosen.ids is not None:
            return self._sorted(_of_kind(session, self, chosen.ids, is_text=False), after, limit)
        found: dict[str, Any] = {}
        for source in self.sources:
            found |= self._own(session, chosen, source, after, limit)
        own = self._sorted(found, after, limit)
        last = own[-1][0] if len(own) == limit else None
        for number in self._shared(session, after, last):
            rows = self._sorted(found, after, limit)
            if len(rows) == limit and self._is_before(rows[-1][0], number):
                break
            found |= self._equal(session, chosen, number, after, limit)
        return self._sorted(found, after, limit)

    def _is_before(self, one: Any, other: float) -> bool:
        return bool(one > other if self.descending else one < other)

    def _own(
        self,
        session: Session,
        chosen: Chosen,
        source: _Source,
        after: SortPosition | None,
        limit: int,
    ) -> dict[str, Any]:
        """Return the first jobs that have their own number at the source."""
        c = DocumentValueRow
        query = select(c.number, c.holder).where(
            c.pointer == source.pointer, _is_number(c), c.holder >= _FIRST_JOB
        )
        if after is not None:
            here, last = tuple_(c.number, c.holder), (after.value, after.job_id)
            query = query.where(here < last if self.descending else here > last)
        mine = chosen.also(*_guards(session, source)).of(query, c.holder)
        ordered = mine.order_by(*directed(self.descending, c.number, c.holder))
        return {row.holder: row.number for row in session.execute(ordered.limit(limit))}

    def _shared(self, session: Session, after: SortPosition | None, last: Value) -> Sequence[float]:
        """Return the different numbers that several jobs share, between the position `after` and
        the number `last`."""
        c = DocumentValueRow
        query = select(c.number).where(
            c.pointer.in_([source.pointer for source in self.sources]),
            _is_number(c),
            c.holder < _FIRST_JOB,
        )
        for bound, is_lower in ((after and after.value, True), (last, False)):
            if bound is not None:
                up = is_lower != self.descending
                query = query.where(c.number >= bound if up else c.number <= bound)
        query = query.distinct().order_by(*directed(self.descending, c.number))
        return session.scalars(query).all()  # type: ignore[return-value]

    def _equal(
        self,
        session: Session,
        chosen: Chosen,
        number: float,
        after: SortPosition | None,
        limit: int,
    ) -> dict[str, Any]:
        """Return the first jobs whose value is `number`."""
        is_equal = self._where(session, lambda row: and_(_is_number(row), row.number == number))
        begin = after if after is not None and after.value == number else None
        rows = Ids(JobRow.id, self.descending, (is_equal,)).page(session, chosen, begin, limit)
        return {job_id: number for _, job_id in rows}


class _Strings(_DocumentStage):
    def page(
        self, session: Session, chosen: Chosen, after: SortPosition | None, limit: int
    ) -> Found:
        if after is not None and not isinstance(after.value, str):
            raise BadCursor("the cursor does not belong to this listing")
        if chosen.ids is not None:
            return self._sorted(_of_kind(session, self, chosen.ids, is_text=True), after, limit)
        found: list[tuple[Value, str]] = []
        for text in self._texts(session, after):
            is_equal = self._where(session, _has_text(text))
            begin = after if after is not None and after.value == text else None
            rows = Ids(JobRow.id, self.descending, (is_equal,)).page(
                session, chosen, begin, limit - len(found)
            )
            found += [(text, job_id) for _, job_id in rows]
            if len(found) == limit:
                break
        return found

    def _texts(self, session: Session, after: SortPosition | None) -> Iterator[str]:
        """Yield the different strings from the position `after` on."""
        c = DocumentValueRow
        query: Select[Any] = select(c.text).where(
            c.pointer.in_([source.pointer for source in self.sources]), c.text.is_not(None)
        )
        query = query.distinct().order_by(*directed(self.descending, c.text)).limit(CHUNK)
        bound, is_open = None if after is None else after.value, False
        while True:
            some = query
            if bound is not None:
                here = c.text <= bound if self.descending else c.text >= bound
                some = query.where(here, c.text != bound) if is_open else query.where(here)
            texts = session.scalars(some).all()
            yield from texts
            if len(texts) < CHUNK:
                return
            bound, is_open = texts[-1], True


def _has_text(text: str) -> Callable[[Any], ColumnElement[bool]]:
    def holds(row: Any) -> ColumnElement[bool]:
        is_equal: ColumnElement[bool] = row.text == text
        return is_equal

    return holds


class _Missing(_DocumentStage):
    def page(
        self, session: Session, chosen: Chosen, after: SortPosition | None, limit: int
    ) -> Found:
        def is_set(row: Any) -> ColumnElement[bool]:
            return or_(row.text.is_not(None), row.number.is_not(None))

        missing = not_(self._where(session, is_set))
        return Ids(JobRow.id, self.descending, (missing,)).page(session, chosen, after, limit)


def _of_kind(
    session: Session, stage: _DocumentStage, job_ids: Sequence[str], *, is_text: bool
) -> dict[str, Any]:
    """Return the numbers, or the strings, among the values of these jobs."""
    found = _values(session, stage.sources, job_ids)
    return {
        job_id: value.text if is_text else value.number
        for job_id, value in found.items()
        if (value.text is not None) == is_text
    }
