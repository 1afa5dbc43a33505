"""Output on a terminal: tables that fit, colours if requested, and no control
characters."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import redirect_stdout

import pytest

from dray.cli.completion import STATES
from dray.cli.display import terminal
from dray.cli.display.output import duration, write, write_data, write_text
from dray.cli.display.tables import shortened, shortest_prefixes, table
from dray.cli.display.terminal import display_width
from dray.cli.exits import Exit
from tests.unit.cli.running import OnTerminal


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal with 80 columns, which tests can use as standard output."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("tab\there, ünï, 漢字, 🚚", "tab\there, ünï, 漢字, 🚚"),
        ("[bold]no markup[/bold]", "[bold]no markup[/bold]"),
        ("\x1b[2J\x1b[Hcleared", "cleared"),
        ("\x1b]0;a title\x07rest", "rest"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;Y29weQ", ""),
        ("\x1bP1$r\x1b\\x", "x"),
        ("\x1bc\x1b(0reset", "reset"),
        ("half\x1b[", "half"),
        ("\x1b[3", "3"),
        ("10%\r20%\bc\x00\x7f\x9b31md", "10% 20%c31md"),
        ("txt.\u202efdp.exe", "txt.\\u202efdp.exe"),
        ("right\u200fto left\u061c\u200e", "right\\u200fto left\\u061c\\u200e"),
        ("\u2066if admin\u2069 \x1b[2J\u2067", "\\u2066if admin\\u2069 \\u2067"),
        ("one\u2028two", "one two"),
        ("two\nlines", "two lines"),
    ],
)
def test_what_would_steer_the_terminal_is_left_out_or_escaped(text: str, shown: str) -> None:
    assert terminal.clean(text) == shown
    assert "\x1b" not in terminal.clean(text, colours=True)


def test_colours_of_a_log_line_stay_if_wanted_and_end_with_it() -> None:
    line = "\x1b[1;31mred\x1b[2J\x1b[38;5;9m more"
    assert terminal.clean(line, colours=True) == "\x1b[1;31mred\x1b[38;5;9m more\x1b[0m"
    assert terminal.clean(line) == "red more"


def test_lines_keep_their_colours_on_a_terminal_alone(screen: Terminal) -> None:
    with redirect_stdout(screen):
        write("\x1b[31mred\x1b[0m", colours=True)
    assert "\x1b[31mred" in screen.getvalue()
    with redirect_stdout(io.StringIO()) as pipe:
        write("\x1b[31mred\x1b[0m", colours=True)
    assert pipe.getvalue() == "red\n"


def test_json_means_the_same_and_steers_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    unsafe = "\x9b\u202e\x1b\u061c\u200e\u200f\u2066\u2069\u2028"
    data = {"name": f"a{unsafe}[2J ü"}
    write_data(data)
    out = capsys.readouterr().out
    assert json.loads(out) == data
    assert not set(unsafe) & set(out)
    assert "ü" in out


ROWS = [
    ("job-01m7ynws26fa88b15mb01s94m3", "short", "SUCCEEDED", "200/200", 1, "2m49s", "succeeded"),
    ("job-01m7ynws26fa88b15mb01s94m4", "long " * 30, "FAILED", "-", 1, "43.5 s", "user_error"),
    ("job-01m7ynws26fa88b15mb01s94m5", "漢字" * 30, "RUNNING", "5/50", 10, "3d02h", "running"),
]
HEADINGS = ("ID", "NAME", "STATE", "STEP", "ATTEMPT", "CREATED", "REASON")


def drawn(screen: Terminal, rows: Sequence[Sequence[object]]) -> list[str]:
    with redirect_stdout(screen):
        table(HEADINGS, rows, flexible=("NAME",), optional=("ATTEMPT", "REASON"))
    return screen.getvalue().splitlines()


def test_a_table_fits_the_terminal_and_keeps_its_ids_whole(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    lines = drawn(screen, ROWS)
    assert all(display_width(line) <= 80 for line in lines)
    assert [line.split()[0] for line in lines[1:]] == [row[0] for row in ROWS]
    assert lines[0].split() == ["ID", "NAME", "STATE", "STEP", "CREATED"]
    assert "…" in lines[2]
    assert "\x1b" not in screen.getvalue()


def test_a_wide_terminal_shows_every_column(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    lines = drawn(screen, ROWS)
    assert "REASON" in lines[0]
    assert ("long " * 30).strip() in lines[2]


def test_states_have_colours_that_light_and_dark_both_show(screen: Terminal) -> None:
    text = "\n".join(drawn(screen, ROWS))
    assert "\x1b[32mSUCCEEDED\x1b[0m" in text
    assert "\x1b[31mFAILED\x1b[0m" in text
    for code in (30, 33, 37, 2):  # black, yellow, white, faint
        assert f"\x1b[{code}m" not in text


def test_columns_stand_under_each_other_in_a_pipe_too(capsys: pytest.CaptureFixture[str]) -> None:
    table(("NAME", "N"), [("漢字", 1), ("ab", 22)])
    assert capsys.readouterr().out == "NAME  N\n漢字  1\nab    22\n"


@pytest.mark.parametrize(
    ("text", "width", "short"),
    [
        ("abc", 3, "abc"),
        ("abcd", 3, "ab…"),
        ("漢字漢", 4, "漢…"),
        ("sweep-of-rates-17", 12, "sweep-of…-17"),
    ],
)
def test_what_is_too_long_is_cut_by_columns_not_characters(
    screen: Terminal, text: str, width: int, short: str
) -> None:
    with redirect_stdout(screen):
        assert shortened(text, width) == short


def test_an_encoding_without_a_character_gets_it_spelt_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)
    terminal.prepare()
    assert not terminal.has_unicode()
    write("Größe 🚚")
    stream.flush()
    assert raw.getvalue() == b"Gr\\xf6\\xdfe \\U0001f69a\n"


def test_days_read_easily() -> None:
    assert duration(3 * 86400 + 7 * 3600 + 59) == "3d07h"


@pytest.mark.parametrize("columns", [30, 40, 80])
def test_sentences_break_between_words(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    text = "  needs 2 workers of 1 CPU; 0 are free, job-01m7ynws26fa88b15mb01s94m3 holds 2 漢字漢字"
    with redirect_stdout(screen):
        write_text(text, indent="  ")
    lines = screen.getvalue().splitlines()
    assert [word for line in lines for word in line.split()] == text.split()
    assert all(display_width(line) <= columns or len(line.split()) == 1 for line in lines)
    assert all(line.startswith("    ") for line in lines[1:])


def test_a_sentence_in_a_pipe_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    write_text("word " * 30 + "end")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_table_that_is_too_wide_is_a_line_for_each_value(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with redirect_stdout(screen):
        table(HEADINGS, ROWS)
    lines = screen.getvalue().splitlines()
    assert lines[0] == f"ID       {ROWS[0][0]}"
    assert lines.count("") == len(ROWS) - 1
    assert "WHAT" not in lines
    assert all(display_width(line) <= 40 for line in lines if "漢" not in line)


def test_ids_are_cut_to_what_tells_them_apart(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with redirect_stdout(screen):
        table(
            HEADINGS,
            ROWS,
            flexible=("NAME", "REASON"),
            optional=("ATTEMPT", "STEP"),
            shorter={"ID": shortest_prefixes},
        )
    lines = screen.getvalue().splitlines()
    assert [line.split()[0] for line in lines[1:]] == [row[0] for row in ROWS]  # differ at the end
    assert shortest_prefixes([str(row[0]) for row in ROWS[:1]]) == ["job-01m7ynws26"]
    assert shortest_prefixes(["job-01m7ynws26fa", "job-01m7ynws26fb"]) == [
        "job-01m7ynws26fa",
        "job-01m7ynws26fb",
    ]


def test_the_widest_of_several_flexible_columns_is_cut_first(
    screen: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    name = "digits-with-a-long-name"
    with redirect_stdout(screen):
        table(("NAME", "REASON"), [(name, "waits for slots " * 9)], flexible=("NAME", "REASON"))
    assert screen.getvalue().splitlines()[1] == f"{name}  waits for slots waits for slots…"


def test_columns_without_any_value_are_left_out(screen: Terminal) -> None:
    with redirect_stdout(screen):
        table(("A", "B", "C"), [("x" * 90, None, "y")], optional=("B", "C"))
    assert "B" not in screen.getvalue()
    assert "C" not in screen.getvalue()


def test_what_is_cut_is_cut_between_words(screen: Terminal) -> None:
    with redirect_stdout(screen):
        assert shortened("waits for workers", 12) == "waits for…"
        assert shortened("waits for workers", 10) == "waits for…"


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_an_error_of_usage_breaks_between_words(columns: int) -> None:
    command = OnTerminal("ls", "--state", "nope", columns=columns)
    assert command.end() == Exit.USAGE
    lines = command.shown.replace("\r", "").split("\n")
    told = " ".join(lines[lines.index("") :]).split()
    assert told[:2] == ["Error:", "Invalid"]
    assert {f"{state}," for state in STATES[:-1]} < set(told)
    assert max(map(len, lines)) <= columns
