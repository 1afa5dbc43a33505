"""The log has one state per second, and the last state, of lines that a program redraws."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ray_workers.shared.secret_files import Masker
from ray_workers.supervision.rules.redraws import LINE_CHARS, MAX_ROWS, PERIOD_S, Line, Redraws

NOW = 1000.0
UP, DOWN, CLEAR, CLEAR_LINE = "\x1b[A", "\x1b[B", "\x1b[K", "\x1b[2K"


def logged(parts: Iterable[str], *, every_s: float = 0.0) -> list[Line]:
    """The log of a program that writes a part each `every_s` seconds."""
    redraws, lines, now = Redraws(), list[Line](), NOW
    for part in parts:
        lines += redraws.feed(part.encode(), now)
        now += every_s
    return lines + redraws.finish()


def texts(parts: Iterable[str], *, every_s: float = 0.0) -> list[str]:
    return [line.text for line in logged(parts, every_s=every_s)]


def bar(name: str, at: int) -> str:
    """A state of a bar, drawn as tqdm draws it."""
    return f"\r{name}: {at:5d}/10000 [00:01<00:09, loss={at / 7:.3f}]"


def below(text: str) -> str:
    """Text in the row below, after which the cursor returns, as tqdm draws a nested bar."""
    return f"\n{text}{UP}"


def test_a_bar_of_ten_thousand_states_in_three_seconds_is_a_handful_of_lines() -> None:
    parts = [bar("train", at) for at in range(10_001)]
    lines = logged([*parts, "\ndone\n"], every_s=3.0 / len(parts))
    assert 4 <= len(lines) <= 6
    assert [line.text for line in lines[-2:]] == [parts[-1].strip(), "done"]
    steps = [int(line.text.split()[1].split("/")[0]) for line in lines[:-1]]
    assert steps == sorted(steps)
    for line, step in zip(lines, steps, strict=False):
        assert line.at - NOW == pytest.approx(step * 3.0 / len(parts), abs=0.01)


def test_nested_bars_are_a_handful_of_lines() -> None:
    parts = []
    for outer in range(100):
        parts += [below(bar("inner", inner)) for inner in range(100)]
        parts += [below("\r" + " " * 60 + "\r"), bar("outer", outer + 1)]
    found = texts([*parts, "\ndone\n"], every_s=3.0 / len(parts))
    assert len(found) <= 10
    assert found[-2:] == [bar("outer", 100).strip(), "done"]


def test_lines_that_are_written_between_the_states_of_a_bar_are_all_there() -> None:
    parts = []
    for at in range(200):
        parts += [bar("train", at), "\r" + " " * 60 + "\r", f"epoch {at} loss {at}\n"]
    found = texts([*parts, bar("train", 200)])
    assert found.pop() == bar("train", 200).strip()
    assert found == [f"epoch {at} loss {at}" for at in range(200)]


def test_ordinary_output_is_logged_as_it_is() -> None:
    plain = ["a\n", "  b  \n", "\n", "\ttab\x1b[32mgreen\x1b[0m\n", "dos\r\n", "ü🙂\n", "no end"]
    expected = ["a", "  b  ", "", "\ttab\x1b[32mgreen\x1b[0m", "dos", "ü🙂", "no end"]
    assert texts(plain) == expected
    whole = "".join(plain).encode()
    redraws = Redraws()
    found = [line for one in whole for line in redraws.feed(bytes([one]), NOW)]
    assert [line.text for line in found + redraws.finish()] == expected


def test_a_shorter_state_has_nothing_of_a_longer_one() -> None:
    assert texts(["loss 0.123456\rloss 0.5\n"]) == ["loss 0.5"]
    assert texts(["loss 0.12", "\b\b\b\b", "0.5\n"]) == ["loss 0.5"]
    assert texts(["Working |", "\b/", "\b-", "\bdone\n"]) == ["Working done"]
    assert texts([f"a long line\r{CLEAR}x\n", f"another{CLEAR_LINE}\n", "z\n"]) == ["x", "z"]


def test_a_state_that_stands_for_a_second_is_logged_though_nothing_follows() -> None:
    redraws = Redraws()
    assert redraws.feed(b"\r 10%|#   | 1/10", NOW) == []
    assert redraws.due(NOW + PERIOD_S / 2) == []
    assert [line[:2] for line in redraws.due(NOW + PERIOD_S)] == [(NOW, " 10%|#   | 1/10")]
    assert redraws.due(NOW + 9.0) == []
    assert redraws.feed(b"\r 20%|##  | 2/10\n", NOW + 9.5) == []
    assert [line[:2] for line in redraws.feed(b"next\n", NOW + 9.6)] == [
        (NOW + 9.5, " 20%|##  | 2/10"),
        (NOW + 9.6, "next"),
    ]


def test_a_state_that_is_half_drawn_is_not_logged_while_it_grows() -> None:
    redraws = Redraws()
    assert redraws.feed(b"\rstep 1 of 9\rste", NOW) == []
    assert [line[:2] for line in redraws.feed(b"p", NOW + 1.5)] == [(NOW, "step 1 of 9")]
    assert redraws.due(NOW + 1.6) == []


def test_rows_far_up_keep_their_text() -> None:
    first = [bar("old", 1), bar("old", 2), "\n"]
    rows = [f"row {at}\n" for at in range(2 * MAX_ROWS)]
    found = texts([*first, *rows, f"\x1b[{5 * MAX_ROWS}A", "\rtop\n"])
    assert found[0] == bar("old", 2).strip()
    assert found[1:-1] == [row.strip() for row in rows]
    assert found[-1] == "top"


def test_a_long_line_is_split_and_control_sequences_without_end_hold_nothing_back() -> None:
    assert texts(["x" * (3 * LINE_CHARS + 5)]) == ["x" * LINE_CHARS] * 3 + ["x" * 5]
    assert texts(["\r" + "y" * (LINE_CHARS + 5)]) == ["y" * LINE_CHARS, "y" * 5]
    assert texts(["\x1b[" + "1" * 100 + "\n", "a\x1b", "[", "K\n", "end\x1b["]) == [
        "\x1b[" + "1" * 100,
        "a",
        "end\x1b[",
    ]


def test_no_state_has_a_secret_wherever_it_is_cut() -> None:
    canary = "canary-5f1d"
    for cut in range(1, len(canary)):
        redraws = Redraws()
        redraws.masker = Masker({"TOKEN": canary})
        found = redraws.feed(f"\rold\rkey {canary[:cut]}".encode(), NOW)
        found += redraws.due(NOW + 5.0) + redraws.due(NOW + 10.0)
        found += redraws.feed(f"{canary[cut:]} end".encode(), NOW + 10.1)
        found += redraws.due(NOW + 20.0) + redraws.finish()
        assert [line.text for line in found] == ["old", "key *** end"]
        assert canary[:4] not in "".join(redraws.drawn)


def test_every_state_is_shown_to_those_who_look_for_metrics() -> None:
    redraws = Redraws()
    redraws.feed(b"a\n\n\r1%\r2%\b\b3%\x1b[A{'x': 1}\n\r4%\r", NOW)
    redraws.feed(b"5%", NOW)
    redraws.finish()
    assert redraws.drawn == ["a", "", "1%", "2%", "3%", "{'x': 1}", "4%", "5%"]


class Terminal:
    """A slow terminal of endless height. Text that is written into a row ends there."""

    def __init__(self) -> None:
        self.rows = [""]
        self.row = self.column = 0
        self.states = Counter[str]()

    def write(self, text: str) -> None:
        at = 0
        while at < len(text):
            length = 1
            if text[at] == "\x1b":
                length = 1 + next(n for n, one in enumerate(text[at + 1 :], 1) if one.isalpha())
                self._sequence(text[at + 2 : at + length - 1], text[at + length - 1])
            else:
                self._character(text[at])
            at += length
            self.states.update(row.rstrip() for row in self.rows)

    def _character(self, one: str) -> None:
        match one:
            case "\n":
                self.row, self.column = self.row + 1, 0
                if self.row == len(self.rows):
                    self.rows.append("")
            case "\r":
                self.column = 0
            case "\b":
                self.column -= self.column > 0
            case _:
                self.rows[self.row] = self.rows[self.row][: self.column] + one
                self.column += 1

    def _sequence(self, number: str, kind: str) -> None:
        by = int(number or 1)
        match kind:
            case "A":
                self.row, self.column = max(0, self.row - by), 0
            case "B":
                self.row, self.column = min(len(self.rows) - 1, self.row + by), 0
            case "D":
                self.column = max(0, self.column - by)
            case "G":
                self.column = min(by - 1, len(self.rows[self.row]))
            case "K" if number == "2":
                self.rows[self.row], self.column = "", 0
            case "K":
                self.rows[self.row] = self.rows[self.row][: self.column]
            case "J":
                self.rows[self.row] = self.rows[self.row][: self.column]
                del self.rows[self.row + 1 :]


CONTROLS = [
    "\n",
    "\r",
    "\b",
    UP,
    "\x1b[2A",
    DOWN,
    CLEAR,
    CLEAR_LINE,
    "\x1b[3D",
    "\x1b[2G",
    "\x1b[J",
]
SOUP = st.lists(
    st.one_of(
        st.sampled_from(["\n", "\r", UP]), st.sampled_from(CONTROLS), st.text("ab1 ü", max_size=6)
    ),
    max_size=50,
)


@given(SOUP, st.data())
def test_the_log_of_any_output_ends_with_what_a_terminal_shows(
    soup: Sequence[str], data: st.DataObject
) -> None:
    terminal, whole = Terminal(), "".join(soup)
    terminal.write(whole)
    found = [text.rstrip() for text in texts([whole])]
    shown = Counter(row.rstrip() for row in terminal.rows if row.strip())
    assert not shown - Counter(found), "a row that stands at the end is missing"
    assert not set(found) - set(terminal.states) - {""}, "a line was never to be seen"
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=5).map(sorted))
    pieces = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    assert [text.rstrip() for text in texts(pieces)] == found


@given(SOUP, st.floats(0.0, 0.9))
def test_no_output_has_more_than_a_line_a_second_for_a_row_and_those_that_end(
    soup: Sequence[str], every_s: float
) -> None:
    found = logged(soup, every_s=every_s)
    ends = sum(part == "\n" for part in soup)
    rows, seconds = ends + 1, len(soup) * every_s / PERIOD_S
    assert len(found) <= ends + 1 + rows * (1 + seconds)
    terminal = Terminal()
    terminal.write("".join(soup))
    shown = Counter(row.rstrip() for row in terminal.rows if row.strip())
    assert not shown - Counter(line.text.rstrip() for line in found)
    # A viewer that shows only the latest state of each named row hides no row of the terminal.
    latest = {line.row or f"line {n}": line.text.rstrip() for n, line in enumerate(found)}
    assert not shown - Counter(latest.values())


def test_a_bar_is_one_row_and_nested_bars_are_two() -> None:
    lines = logged([bar("outer", at) for at in range(0, 9000, 1000)] + ["\ndone\n"], every_s=1.0)
    *states, done = lines
    assert len(states) > 3
    assert len({line.row for line in states}) == 1
    assert states[0].row
    assert done.row == ""
    nested = [bar("outer", at) + below(bar("inner", at)) for at in range(0, 9000, 1000)]
    rows = {line.row: line.text for line in logged(nested, every_s=1.0)}
    assert sorted(text.split(":")[0] for text in rows.values()) == ["inner", "outer"]


Program = Callable[[int], list[str]]


def _plain(number: int) -> list[str]:
    return [f"line {number}\n"]


def _alone(number: int) -> list[str]:
    return [*(bar(f"alone{number}", at) for at in range(5)), "\n"]


def _nested(number: int) -> list[str]:
    inner = [below(bar(f"inner{number}", at)) for at in range(4)]
    cleared = below("\r" + " " * 60 + "\r")
    return [bar(f"outer{number}", 0), *inner, cleared, bar(f"outer{number}", 1), "\n"]


def _keras(number: int) -> list[str]:
    return [
        f"Epoch {number}\n",
        *(f"{chr(8) * 30}\r{at}/9 - loss: 0.{at}{number}" for at in (1, 9)),
        "\n",
    ]


@given(st.lists(st.sampled_from([_plain, _alone, _nested, _keras]), max_size=12))
def test_of_programs_that_draw_bars_the_log_is_the_terminals_last_state(
    programs: Sequence[Program],
) -> None:
    parts = [part for number, program in enumerate(programs) for part in program(number)]
    terminal = Terminal()
    terminal.write("".join(parts))
    assert texts(parts) == [row.rstrip() for row in terminal.rows if row.strip()]
