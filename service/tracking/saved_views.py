"""Saved views: lists of jobs that users store under names."""

from __future__ import annotations

from sqlalchemy.orm import Session

from dray import views
from dray.saved_views import SavedQuery, SavedViewRequest
from service.db.models import SavedViewRow
from service.db.repositories.catalog import saved_views as repository
from service.db.session import Database, touch
from service.db.types import storable
from service.domain.cursors import decode_cursor, encode_cursor
from service.domain.errors import BadCursor, Conflict, InvalidSearch, NotFound
from service.domain.tracking.columns import parse_columns, parse_sort
from service.domain.tracking.search import parse_search
from service.jobs.listing import refuse_collapsed
from service.tracking.groups import numeric

MOST = 1000
"""Maximum number of views of one user."""
SCOPE = "views"


class ViewNotFound(NotFound, code="view_not_found"): ...


class TooManyViews(Conflict, code="too_many_views"): ...


class SavedViews:
    """Use cases for saved views. All users can read all views, but only change their own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def put(self, name: str, wanted: SavedViewRequest, *, owner: str) -> views.SavedView:
        """Store a view, or replace the owner's view with this name.

        Raises InvalidSearch if the list could not be read, and TooManyViews if the owner has too
        many views.
        """
        _check(wanted.query)
        now = self._database.clock()

        def work(session: Session) -> views.SavedView:
            touch(session)
            is_new = repository.get(session, owner, name) is None
            if is_new and repository.number(session, owner) >= MOST:
                raise TooManyViews(
                    f"{owner} already has {MOST:,} views",
                    hint="delete a view that is no longer needed: `dray views rm NAME`",
                )
            columns = {
                "owner": owner,
                "name": name,
                "project": wanted.project,
                "query": wanted.query.model_dump(mode="json", exclude_defaults=True),
                "updated_at": now,
            }
            repository.put(session, columns)
            session.expire_all()
            return _found(session, owner, name)

        return await self._database.write(work)

    async def get(self, owner: str, name: str) -> views.SavedView:
        return await self._database.read(lambda session: _found(session, owner, name))

    async def delete(self, owner: str, name: str) -> None:
        """Delete a view. Raises ViewNotFound if it does not exist."""

        def work(session: Session) -> None:
            touch(session)
            if not storable(owner) or not repository.remove(session, owner, name):
                raise _not_found(owner, name)

        await self._database.write(work)

    async def list(
        self, owner: str | None, project: str | None, *, limit: int, cursor: str | None
    ) -> views.SavedViewPage:
        """Return views, sorted by name and owner. Raises BadCursor for a cursor from another
        list."""
        after = None if cursor is None else _position(decode_cursor(SCOPE, cursor))
        if not all(storable(each) for each in (owner, project) if each is not None):
            return views.SavedViewPage(items=[], next_cursor=None)

        def work(session: Session) -> views.SavedViewPage:
            rows = repository.page(session, owner, project, after, limit + 1)
            shown = [_view(row) for row in rows[:limit]]
            last = None if len(rows) <= limit else [shown[-1].name, shown[-1].owner]
            more = None if last is None else encode_cursor(SCOPE, last)
            return views.SavedViewPage(items=shown, next_cursor=more)

        return await self._database.read(work)


def _check(query: SavedQuery) -> None:
    """Raise InvalidSearch if the list could not be read."""
    try:
        if query.where is not None:
            parse_search(query.where)
        if query.columns is not None:
            parse_columns(query.columns)
        if query.sort is not None or query.group is not None:
            refuse_collapsed(query)
        if query.sort is not None:
            parse_sort(query.sort) if query.group is None else numeric(query.sort)
    except InvalidSearch as error:
        raise InvalidSearch(
            error.message, pointer=f"/query{error.pointer or ''}", hint=error.hint
        ) from None


def _position(found: object) -> tuple[str, str]:
    match found:
        case [str(name), str(owner)] if storable(name) and storable(owner):
            return name, owner
    raise BadCursor("the cursor does not belong to this listing")


def _found(session: Session, owner: str, name: str) -> views.SavedView:
    row = repository.get(session, owner, name) if storable(owner) else None
    if row is None:
        raise _not_found(owner, name)
    return _view(row)


def _not_found(owner: str, name: str) -> ViewNotFound:
    return ViewNotFound(
        f"{owner} has no view {name}",
        hint="`dray views ls` lists all views; `owner` selects another user's view",
    )


def _view(row: SavedViewRow) -> views.SavedView:
    return views.SavedView(
        name=row.name,
        owner=row.owner,
        project=row.project,
        query=row.query,
        updated_at=row.updated_at,
    )
