"""SQL for pages of jobs in the order of a field of their documents, or of a parameter.

A value is stored either for a job itself or as a value that several jobs share. Numbers of single
jobs are read in the order of an index. For each shared number between them, the jobs that share it
are read. Jobs with a string are read for one string after another. Numbers come before strings, and
`true` and `false` count as strings.

Jobs with equal values are in the order of their ids. They are read from the index of the jobs that
have this value themselves, and from the index of the jobs that share each holder of this value.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, false, literal_column, not_, or_, select, tuple_
from sqlalchemy.orm import Session, aliased

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
    PARTS,
    StoredValue,
    escaped,
    stored,
)
from service.domain.tracking.search_tree import DocumentField, Exists

_RECIPE = "/recipe"
MAX_HOLDERS = 20
"""Maximum number of holders that share a value for which the jobs of each holder are read. If there
are more, the value is searched like a condition of a search."""
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

    def _having(
        self,
        session: Session,
        chosen: Chosen,
        value: StoredValue,
        after: str | None,
        limit: int,
    ) -> Sequence[str]:
        """Return the ids of the first jobs behind the job `after` whose value is `value`."""
        streams: list[Sequence[str]] = []
        for source in self.sources:
            query = _holders_of(DocumentValueRow, source.pointer, value)
            shared = query.where(DocumentValueRow.holder < _FIRST_JOB).limit(MAX_HOLDERS + 1)
            holders = session.scalars(shared).all()
            if len(holders) > MAX_HOLDERS:
                return self._searched(session, chosen, value, after, limit)
            own = query.where(DocumentValueRow.holder >= _FIRST_JOB)
            streams.append(self._own_ids(session, chosen, own, source, after, limit))
            for holder in holders:
                sharing = _sharing(session, holder, source)
                streams.append(self._ids(session, chosen, sharing, after, limit))
        return list(islice(heapq.merge(*streams, reverse=self.descending), limit))

    def _own_ids(
        self,
        session: Session,
        chosen: Chosen,
        query: Select[str],
        source: _Source,
        after: str | None,
        limit: int,
    ) -> Sequence[str]:
        found: list[str] = []
        while True:
            ids = self._ids(session, chosen, query, after, limit)
            found += _counting(session, source, ids)
            if len(found) >= limit or len(ids) < limit:
                return found
            after, limit = ids[-1], 2 * limit

    def _ids(
        self,
        session: Session,
        chosen: Chosen,
        query: Select[str],
        after: str | None,
        limit: int,
    ) -> Sequence[str]:
        """Return the first ids after the id `after`. The query selects the column `holder` of
        rows with the same pointer, text and number."""
        row = query.selected_columns.holder
        order = directed(self.descending, JobRow.id)
        if chosen.is_filtered:
            # Fewer jobs match the filter than have the value, in most cases.
            query = select(JobRow.id).where(query.where(row == JobRow.id).exists())
            row = JobRow.id.expression
        else:
            # The text and the number are equal in all rows. They are part of the order because the
            # database otherwise does not use the order of the index if one of them is NULL.
            order = directed(self.descending, row.table.c.text, row.table.c.number, row)
        if after is not None:
            query = query.where(row < after if self.descending else row > after)
        job_id = JobRow.id if chosen.is_filtered else row
        return session.scalars(chosen.of(query, job_id).order_by(*order).limit(limit)).all()

    def _searched(
        self,
        session: Session,
        chosen: Chosen,
        value: StoredValue,
        after: str | None,
        limit: int,
    ) -> Sequence[str]:
        is_equal = self._where(session, lambda row: and_(*_is_stored(row, value)))
        begin = None if after is None else SortPosition(0, None, after)
        rows = Ids(JobRow.id, self.descending, (is_equal,)).page(session, chosen, begin, limit)
        return [job_id for _, job_id in rows]


def _is_stored(row: Any, value: StoredValue) -> list[ColumnElement[bool]]:
    return [
        column.is_(None) if part is None else column == part
        for column, part in ((row.text, value.text), (row.number, value.number))
    ]


def _holders_of(row: Any, pointer: str, value: StoredValue) -> Select[str]:
    return select(row.holder).where(row.pointer == pointer, *_is_stored(row, value))


def _sharing(session: Session, holder: str, source: _Source) -> Select[str]:
    """Return a query for the jobs that share the values of this holder and have no value of their
    own at the source."""
    shares, own = aliased(DocumentValueRow), aliased(DocumentValueRow)
    mine = select(own.holder).where(own.holder == shares.holder)
    query = _holders_of(shares, SHARES, StoredValue(None, holder))
    query = query.where(~mine.where(own.pointer == source.pointer).exists())
    if not source.of_recipes:
        return query
    recipe = mine.where(own.pointer == _RECIPE)
    if _read(session, [holder], [_RECIPE]):
        return query.where(~recipe.where(*_is_stored(own, ABSENT)).exists())
    return query.where(recipe.where(own.text.is_not(None)).exists())


def _guards(session: Session, source: _Source) -> list[ColumnElement[bool]]:
    if not source.of_recipes:
        return []
    return [search.condition(session, Exists(DocumentField(_RECIPE)))]


def _counting(session: Session, source: _Source, job_ids: Sequence[str]) -> list[str]:
    """Return the jobs whose value at the source counts."""
    if not source.of_recipes:
        return list(job_ids)
    recipes = _values(session, [_Source(_RECIPE)], job_ids)
    return [job_id for job_id in job_ids if job_id in recipes]


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
        numbers = select(c.number, c.holder).where(
            c.pointer == source.pointer, _is_number(c), c.holder >= _FIRST_JOB
        )
        # The text is NULL in all rows, as in `_ids`.
        order = directed(self.descending, c.text, c.number, c.holder)
        found: dict[str, Any] = {}
        while True:
            query = numbers
            if after is not None:
                here, last = tuple_(c.number, c.holder), (after.value, after.job_id)
                query = query.where(here < last if self.descending else here > last)
            rows = session.execute(chosen.of(query, c.holder).order_by(*order).limit(limit)).all()
            by_id = {row.holder: row.number for row in rows}
            counting = _counting(session, source, list(by_id))
            found |= {job_id: by_id[job_id] for job_id in counting}
            if len(found) >= limit or len(rows) < limit:
                return found
            after, limit = SortPosition(0, rows[-1].number, rows[-1].holder), 2 * limit

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
        begin = after.job_id if after is not None and after.value == number else None
        ids = self._having(session, chosen, StoredValue(number, None), begin, limit)
        return dict.fromkeys(ids, number)


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
            begin = after.job_id if after is not None and after.value == text else None
            left = limit - len(found)
            ids = [self._having(session, chosen, each, begin, left) for each in _with_text(text)]
            merged = islice(heapq.merge(*ids, reverse=self.descending), left)
            found += [(text, job_id) for job_id in merged]
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


def _with_text(text: str) -> list[StoredValue]:
    """Return the stored values that have this text."""
    others = (PARTS, stored(True), stored(False))
    return [StoredValue(None, text), *(each for each in others if each.text == text)]


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
