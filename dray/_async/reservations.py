"""Reservations and maintenance windows."""

from __future__ import annotations

from typing import Any

from dray import views
from dray._async.calls import Calls
from dray._http.transport import Call, params, segment


class ReservationCalls(Calls):
    async def create_reservation(self, name: str, **fields: Any) -> views.Reservation:
        """Set nodes aside. Only for admins.

        `begin_at` and `end_at` are datetimes with a time zone, or times in RFC 3339; the default of
        `begin_at` is now, and `duration_s` (seconds, or a duration such as `"2h"`) can replace
        `end_at`. Specify the nodes with one of `nodes`, `node_labels`, `num_nodes`, `num_gpus` and
        `all_nodes=True`. Specify the jobs with `users`, `queues` and `projects`, or pass
        `maintenance=True`. The other fields are `accepts_unnamed`, `flex`, `at_begin`, `at_end` and
        `comment`. Raises ReservationExists, ReservationOverlaps, InvalidReservation or
        TooManyReservations.
        """
        call = Call.with_json("POST", "/v1/reservations", {"name": name, **fields})
        return await self._read(views.Reservation, call)

    async def reservations(self, *, ended: bool = False) -> list[views.Reservation]:
        """Return the reservations that concern you, in the order in which they begin; admins get
        all reservations. With `ended`, also return reservations that have ended."""
        query = params(ended=ended or None)
        return await self._list(views.ReservationPage, "/v1/reservations", query)

    async def reservation(self, name: str) -> views.Reservation:
        """Return the reservation. Raises ReservationNotFound if it does not exist or does not
        concern you."""
        return await self._read(views.Reservation, Call("GET", f"/v1/reservations/{segment(name)}"))

    async def change_reservation(self, name: str, **fields: Any) -> views.Reservation:
        """Change the given fields of a reservation (see `create_reservation`). None restores the
        default of a field. Only for admins. Raises ReservationNotFound, and the errors of
        `create_reservation`."""
        call = Call.with_json("PATCH", f"/v1/reservations/{segment(name)}", fields)
        return await self._read(views.Reservation, call)

    async def delete_reservation(self, name: str) -> None:
        """Delete a reservation, which ends it. Only for admins. Jobs that run on its nodes
        continue."""
        await self._send(Call("DELETE", f"/v1/reservations/{segment(name)}"))
