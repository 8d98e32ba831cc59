"""A bar in a terminal and below a cell, nothing anywhere else."""

from __future__ import annotations

import io
import re

import pytest

from aiograd._progress import Display, Progress


class Terminal(io.StringIO):
    """Counts what is written, and shows what a person would see at the end."""

    def isatty(self) -> bool:
        return True

    def seen(self) -> list[str]:
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for piece in re.split(r"(\r\x1b\[K)", line):
                shown = "" if piece == "\r\x1b[K" else shown + piece
            lines.append(shown)
        return lines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _a_terminal_of_60_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")


def test_where_nobody_watches_only_what_is_said_is_written():
    page = io.StringIO()
    assert list(Progress(range(5), "work", to=page)) == [0, 1, 2, 3, 4]
    assert page.getvalue() == ""
    for step in (bar := Progress(range(5), "work", to=page)):
        if step % 2:
            bar.say(f"step {step}")
    assert page.getvalue() == "step 1\nstep 3\n"


def test_a_dumb_terminal_gets_no_bar(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    screen = Terminal()
    assert list(Progress(range(3), to=screen)) == [0, 1, 2]
    assert screen.getvalue() == ""


def test_the_bar_fills_and_is_gone_at_the_end():
    screen, clock, lines = Terminal(), Clock(), []
    for _ in Progress(range(4), "work", to=screen, clock=clock):
        lines.append(screen.seen()[-1])
        clock.now += 2
    assert [line.count("█") for line in lines] == [0, 7, 15, 22]
    assert [line.split()[2] for line in lines] == ["0/4", "1/4", "2/4", "3/4"]
    assert ["left" in line for line in lines] == [False, True, True, True]
    assert lines[1].endswith("6 s left")
    assert screen.seen() == [""]


def test_what_is_said_stands_in_lines_of_its_own():
    screen = Terminal()
    for step in (bar := Progress(range(3), "work", to=screen, clock=Clock())):
        bar.say(f"step {step}")
    bar.say("done")
    assert screen.seen() == ["step 0", "step 1", "step 2", "done", ""]


def test_it_draws_no_more_often_than_a_person_can_see():
    screen, clock = Terminal(), Clock()
    for _ in Progress(range(640), "work", to=screen, clock=clock):
        clock.now += 1 / 64
    assert 80 < screen.getvalue().count("/640") <= 100  # in ten seconds


def test_a_line_never_wraps(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    screen, clock = Terminal(), Clock()
    for _ in Progress(range(3), "a long title for a short line", to=screen, clock=clock):
        assert len(screen.seen()[-1]) <= 19
        clock.now += 1


@pytest.mark.parametrize("end", ["break", "raise"])
def test_the_bar_goes_when_the_work_ends_early(end):
    screen = Terminal()

    def work() -> None:
        for _ in Progress(range(9), "work", to=screen, clock=Clock()):
            if end == "raise":
                raise KeyError
            break

    if end == "raise":
        with pytest.raises(KeyError):
            work()
    else:
        work()
    assert "work" in screen.getvalue()
    assert screen.seen() == [""]


def test_without_a_length_it_counts():
    screen, clock, lines = Terminal(), Clock(), []
    for _ in Progress(iter("abc"), "work", to=screen, clock=clock):
        lines.append(screen.seen()[-1])
        clock.now += 1
    assert lines == ["work 0", "work 1", "work 2"]
    clock.now = 0
    for _ in Progress(iter("ab"), "work", total=2, to=screen, clock=clock):
        lines.append(screen.seen()[-1])
        clock.now += 300
    assert lines[-1].endswith("1/2 · 5 min 0 s left")


def test_the_screen_is_what_the_program_prints_to(capsys):
    for step in (bar := Progress(range(2))):
        bar.say(f"step {step}")
    assert capsys.readouterr().out == "step 0\nstep 1\n"


def test_a_display_adds_up_bars_of_one_title_and_shows_others_beside_them():
    screen, clock = Terminal(), Clock()
    display = Display(screen, clock)
    display.update(1, "load", 2, 10)
    display.update(2, "load", 3, 10)
    display.update(3, "count", 7, None)
    assert display.line() == "load ███████░░░░░░░░░░░░░░░░░░░░░░░ 5/20   count 7"
    display.remove(1)  # still counted: the sum must not jump back
    assert "5/20" in display.line()
    display.remove(2)
    assert display.line() == "count 7"
    display.remove(3)
    display.remove(3)
    assert display.line() == ""
    assert screen.seen() == [""]


def test_a_display_draws_ten_times_a_second_and_only_in_a_terminal():
    screen, clock, page = Terminal(), Clock(), io.StringIO()
    display, silent = Display(screen, clock), Display(page, clock)
    for done in range(100):
        display.update(1, "load", done, 100)
        silent.update(1, "load", done, 100)
        clock.now += 0.01
    assert screen.getvalue().count("/100") == 10
    assert page.getvalue() == ""


def test_what_is_said_stands_above_the_bars_of_a_display():
    screen, page = Terminal(), io.StringIO()
    display = Display(screen, Clock())
    display.update(1, "load", 1, 2)
    display.say("half")
    assert screen.seen()[0] == "half"
    assert screen.seen()[1].endswith("1/2")
    display.remove(1)
    display.say("done")
    assert screen.seen() == ["half", "done", ""]
    Display(page).say("just a line")
    assert page.getvalue() == "just a line\n"


class Cell(io.StringIO):
    """What is below a notebook's cell: it goes back to the start of a line, but erases nothing."""

    __module__ = "ipykernel.iostream"

    def seen(self) -> list[str]:
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for piece in line.split("\r"):
                shown = piece + shown[len(piece) :]
            lines.append(shown.rstrip())
        return lines


def test_a_notebook_shows_the_bars_below_its_cell():
    cell, clock = Cell(), Clock()
    display = Display(cell, clock)
    display.update("a", "loading", 1, 2)
    assert cell.seen() == [f"loading {'█' * 15}{'░' * 15} 1/2"]
    display.say("half of it")
    assert cell.seen() == ["half of it", f"loading {'█' * 15}{'░' * 15} 1/2"]
    clock.now = 1.0
    display.update("a", "b", 3, None)
    display.remove("a")
    assert cell.seen() == ["half of it", ""]
    assert "\x1b" not in cell.getvalue()
