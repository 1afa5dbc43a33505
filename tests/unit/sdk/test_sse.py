from __future__ import annotations

import pytest

from dray import errors
from dray._http.sse import Decoder, Message

STREAM = (
    'retry: 1500\n\nevent: moved\r\nid: 1\r\ndata: {"a": "ü\u2028\x85x"}\r\n\r\n'
    ": keep-alive\n\ndata: one\ndata:two\r\rid: 3\n\nevent: reset\n\n"
)
MESSAGES = [
    Message("moved", '{"a": "ü\u2028\x85x"}'),
    Message("message", "one\ntwo"),
    Message("reset", ""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_come_out_whole_however_the_bytes_are_cut(size: int) -> None:
    decoder, raw = Decoder(), STREAM.encode()
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert [message for piece in pieces for message in decoder.feed(piece)] == MESSAGES
    assert decoder.retry_s == 1.5


def test_an_event_is_given_as_soon_as_its_blank_line_is_there() -> None:
    decoder = Decoder()
    assert list(decoder.feed(b"data: x\n")) == []
    assert list(decoder.feed(b"\n")) == [Message("message", "x")]


def test_what_breaks_off_is_no_event() -> None:
    assert list(Decoder().feed(b"data: half")) == []
    assert list(Decoder().feed(b"data: whole line\n")) == []


def test_a_byte_order_mark_and_wrong_utf_8_do_no_harm() -> None:
    assert list(Decoder().feed(b"\xef\xbb\xbfdata: \xff\n\n")) == [Message("message", "\ufffd")]


@pytest.mark.parametrize("line", ["retry: soon", "retry: -1", "retry:", "colour: blue", "data"])
def test_fields_without_sense_are_passed_over(line: str) -> None:
    decoder = Decoder()
    found = list(decoder.feed(f"{line}\ndata: x\n\n".encode()))
    assert found == [Message("message", "\nx" if line == "data" else "x")]
    assert decoder.retry_s is None


def test_a_line_without_end_is_refused_and_not_kept() -> None:
    decoder, piece = Decoder(), b"x" * (9 << 20)
    assert list(decoder.feed(piece)) == []
    with pytest.raises(errors.TransportError, match="too long"):
        list(decoder.feed(piece))
