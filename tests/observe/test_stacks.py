"""Where tasks and threads are, as text."""

from __future__ import annotations

import asyncio
import sys
import threading
import time

from aiograd.observe.stacks import (
    all_stacks,
    as_line,
    as_text,
    frame_places,
    task_places,
    users_line,
    users_place,
    waiting_tasks,
)


async def outer(event):
    await inner(event)


async def inner(event):
    await event.wait()  # the innermost line of ours


async def test_a_task_is_where_its_innermost_coroutine_waits():
    event = asyncio.Event()
    task = asyncio.create_task(outer(event), name="ours")
    await asyncio.sleep(0)
    places = task_places(task)
    assert [place[2] for place in places] == ["outer", "inner", "wait"]
    assert users_place(places)[2] == "inner"
    assert users_line(task) == as_line(users_place(places))
    assert as_text(places)[1].endswith("in inner: await event.wait()  # the innermost line of ours")
    assert task in waiting_tasks(asyncio.get_running_loop()).values()
    stacks = all_stacks(asyncio.get_running_loop())
    assert [each["name"] for each in stacks if each["kind"] == "task"].count("ours") == 1
    event.set()
    await task


async def test_a_task_of_the_librarys_own_has_no_line_of_a_user():
    event = asyncio.Event()
    task = asyncio.create_task(event.wait())
    await asyncio.sleep(0)
    assert users_line(task) == ""
    assert users_place(task_places(task))[2] == "wait"
    event.set()
    await task


def test_a_thread_is_where_its_innermost_frame_is():
    go = threading.Event()

    def blocked():
        go.wait(20)

    thread = threading.Thread(target=blocked)
    thread.start()
    assert thread.ident is not None
    end, places = time.monotonic() + 10, []
    while time.monotonic() < end:
        places = frame_places(sys._current_frames()[thread.ident])
        if places and places[-1][2] == "wait":
            break
    go.set()
    thread.join()
    assert places[-1][2] == "wait"
    assert users_place(places)[2] == "blocked"


def test_no_frame_is_no_place():
    assert frame_places(None) == []
    assert as_line(users_place([])) == ""
