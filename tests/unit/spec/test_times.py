"""Times in the job document and on the command line, with offsets and in local time."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from dray.input.times import SystemZone, from_words, localised
from dray.spec import JobSpec

BERLIN = ZoneInfo("Europe/Berlin")
MINUTE = timedelta(minutes=1)
ZONES = (
    *("Europe/Berlin", "America/New_York", "America/St_Johns", "Australia/Lord_Howe", "UTC"),
    *("Asia/Kathmandu", "Pacific/Apia", "Africa/Casablanca", "America/Sao_Paulo"),
)
NEAR_CHANGES = (
    *(datetime(2026, 3, 29), datetime(2026, 10, 25), datetime(2026, 3, 8), datetime(2026, 11, 1)),
    *(datetime(2026, 4, 5), datetime(2026, 10, 4), datetime(2011, 12, 30), datetime(2017, 10, 15)),
    datetime(2026, 2, 15),
)


def document(**fields: object) -> JobSpec:
    return JobSpec.model_validate({"recipe": "image_classification", **fields})


def refusal(**fields: object) -> str:
    with pytest.raises(ValidationError) as told:
        document(**fields)
    (error,) = told.value.errors()
    pointer = error.get("ctx", {}).get("pointer") or "/" + "/".join(map(str, error["loc"]))
    return f"{pointer} {error['msg']}"


def moments_of(local: datetime, zone: ZoneInfo) -> list[datetime]:
    """Return every whole minute in UTC at which clocks in the zone show this time."""
    first = local.replace(tzinfo=UTC) - timedelta(hours=26)
    minutes = (first + number * MINUTE for number in range(52 * 60))
    return [at for at in minutes if at.astimezone(zone).replace(tzinfo=None) == local]


@given(
    st.sampled_from(ZONES),
    st.sampled_from(NEAR_CHANGES),
    st.integers(-26 * 60, 26 * 60),
)
def test_a_local_time_is_the_one_moment_at_which_clocks_show_it(
    name: str, day: datetime, minutes: int
) -> None:
    zone, local = ZoneInfo(name), day + minutes * MINUTE
    moments = moments_of(local, zone)
    if len(moments) == 1:
        assert localised(local, zone, name) == moments[0]
        return
    with pytest.raises(ValueError, match=name) as told:
        localised(local, zone, name)
    named = re.findall(r"[0-9T:-]{19}[+-][0-9]{2}:[0-9]{2}", str(told.value))
    times = [datetime.fromisoformat(each) for each in named]
    if moments:
        assert times == moments
    else:
        # The two times are valid, successive, and on both sides of the skipped time.
        last, first = times
        assert first - last == timedelta(seconds=1)
        assert last.replace(tzinfo=None) < local < first.replace(tzinfo=None)
        for each in times:
            assert each.astimezone(zone).replace(tzinfo=None) == each.replace(tzinfo=None)


def test_a_time_with_an_offset_is_kept() -> None:
    spec = document(begin_at="2026-12-01T08:00:00+01:00")
    assert spec.begin_at == datetime(2026, 12, 1, 7, tzinfo=UTC)
    assert spec.model_dump(mode="json")["begin_at"] == "2026-12-01T08:00:00+01:00"


def test_a_local_time_is_stored_with_its_offset_and_read_again_without_the_zone() -> None:
    spec = document(begin_at="2026-07-01 08:00", time_zone="Europe/Berlin")
    stored = spec.model_dump(mode="json")
    assert (stored["begin_at"], stored["time_zone"]) == ("2026-07-01T08:00:00+02:00", None)
    assert JobSpec.model_validate(stored) == spec


def test_an_offset_decides_which_of_two_equal_local_times_is_meant() -> None:
    twice = refusal(begin_at="2026-10-25T02:30:00", time_zone="Europe/Berlin")
    assert twice == (
        "/begin_at 2026-10-25T02:30:00 occurs twice in Europe/Berlin, because clocks are set back: "
        "write 2026-10-25T02:30:00+02:00 or 2026-10-25T02:30:00+01:00"
    )
    spec = document(begin_at="2026-10-25T02:30:00+01:00", time_zone="Europe/Berlin")
    assert spec.begin_at == datetime(2026, 10, 25, 1, 30, tzinfo=UTC)


def test_a_skipped_local_time_is_refused_with_the_nearest_times() -> None:
    assert refusal(deadline="2027-03-28T02:30:00", time_zone="Europe/Berlin") == (
        "/deadline 2027-03-28T02:30:00 does not exist in Europe/Berlin, because clocks are set "
        "forward from 2027-03-28T02:00:00 to 2027-03-28T03:00:00: the nearest times are "
        "2027-03-28T01:59:59+01:00 and 2027-03-28T03:00:00+02:00"
    )


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({"begin_at": "2026-12-01T08:00:00"}, "/begin_at"),
        ({"begin_at": "tomorrow"}, "/begin_at"),
        ({"begin_at": "2026-02-30T08:00:00Z"}, "/begin_at"),
        ({"begin_at": "9999-12-31T23:59:59-12:00"}, "/begin_at"),
        ({"begin_at": "2026-12-01T08:00:00+24:00"}, "/begin_at"),
        ({"begin_at": 1_764_547_200}, "/begin_at"),
        ({"begin_at": "2026-02-30T08:00:00", "time_zone": "UTC"}, "/begin_at"),
        ({"begin_at": "2026-12-01T08:00:00", "time_zone": "Europe"}, "/time_zone"),
        ({"begin_at": "2026-12-01T08:00:00", "time_zone": "../etc/passwd"}, "/time_zone"),
        ({"begin_at": "2026-12-01T08:00:00", "time_zone": "/".join("a" * 2000)}, "/time_zone"),
        ({"begin_at": "2026-12-01T08:00:00Z", "time_zone": "Mars/Base"}, "/time_zone"),
        *(
            ({"begin_at": "2026-12-01T08:00:00Z", "time_zone": name}, "/time_zone")
            for name in ("localtime", "posixrules", "Factory", "right/UTC", "posix/Factory")
        ),
        ({"begin_at": "2026-12-01T08:00Z", "deadline": "2026-12-01T09:00+01:00"}, "/deadline"),
    ],
)
def test_bad_times_are_refused_where_they_are(fields: dict[str, object], pointer: str) -> None:
    assert refusal(**fields).startswith(f"{pointer} ")


def test_an_unknown_zone_is_refused_with_the_nearest_name() -> None:
    told = refusal(begin_at="2026-12-01T08:00:00", time_zone="Europe/Berln")
    assert told.endswith("is not a known time zone: did you mean 'Europe/Berlin'?")


NOW = datetime(2026, 11, 29, 12, 0, tzinfo=timezone(timedelta(hours=1)))
"""A Sunday at noon in Berlin."""


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("now", "2026-11-29T12:00:00+01:00"),
        ("now+2hours", "2026-11-29T14:00:00+01:00"),
        ("now + 90 minutes", "2026-11-29T13:30:00+01:00"),
        ("now+60", "2026-11-29T12:01:00+01:00"),
        ("now+1h30m", "2026-11-29T13:30:00+01:00"),
        ("now+2d", "2026-12-01T12:00:00+01:00"),
        ("tomorrow 08:00", "2026-11-30T08:00:00+01:00"),
        ("Tomorrow 8:00 PM", "2026-11-30T20:00:00+01:00"),
        ("tomorrow noon", "2026-11-30T12:00:00+01:00"),
        ("tomorrow", "2026-11-30T00:00:00+01:00"),
        ("today 11:00", "2026-11-29T11:00:00+01:00"),
        ("16:30", "2026-11-29T16:30:00+01:00"),
        ("11:59:59", "2026-11-30T11:59:59+01:00"),
        ("12:00", "2026-11-30T12:00:00+01:00"),
        ("midnight", "2026-11-30T00:00:00+01:00"),
        ("2027-07-01", "2027-07-01T00:00:00+02:00"),
        ("2027-07-01 08:00", "2027-07-01T08:00:00+02:00"),
        ("2027-07-01T08:00:00Z", "2027-07-01T08:00:00+00:00"),
    ],
)
def test_words_are_times(words: str, expected: str) -> None:
    assert from_words(words, NOW, BERLIN, "Europe/Berlin").isoformat() == expected


@pytest.mark.parametrize(
    "words",
    [
        *("", "later", "now+", "now+2parsecs", "now-1hour", "today tomorrow", "2026-02-30"),
        *("25:00", "08:60", "tomorrow 8", "13:00 pm", "0:30 am"),
        *("2027-03-28 02:30", "2026-10-25 02:30"),
    ],
)
def test_other_words_are_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r".{5}"):
        from_words(words, NOW, BERLIN, "Europe/Berlin")


def test_the_zone_of_the_machine_changes_with_daylight_saving_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import time

    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        for local in (datetime(2026, 7, 1, 8), datetime(2026, 12, 1, 8)):
            assert localised(local, SystemZone(), "here") == localised(local, BERLIN, "there")
        for local in (datetime(2027, 3, 28, 2, 30), datetime(2026, 10, 25, 2, 30)):
            told = []
            for zone in (SystemZone(), BERLIN):
                with pytest.raises(ValueError, match="in here") as refused:
                    localised(local, zone, "here")
                told.append(str(refused.value))
            assert told[0] == told[1]
    finally:
        monkeypatch.undo()
        time.tzset()
