"""Names, ranks and who is meant."""

from __future__ import annotations

import pickle

import pytest

from aiograd.errors import UnknownWorker
from aiograd.rpc.directory import Directory, PeerInfo, WorkerInfo, forget_one


def peer(name, rank, mark=b"x"):
    return PeerInfo(name, rank, mark * 16, ("memory:" + name,))


@pytest.mark.parametrize("name", ["a*b", "a b", "", "x" * 500, "ä", "a/b", "a\n"])
def test_worker_name_rules(name):
    with pytest.raises(ValueError, match="no name for a worker"):
        WorkerInfo(name, 0)


def test_good_names_are_taken():
    for name in ("worker0", "a-b_c:d", "X" * 127):
        assert WorkerInfo(name, 0).name == name
    with pytest.raises(TypeError):
        WorkerInfo(5, 0)


def test_worker_infos_are_values():
    info = WorkerInfo("a", 1)
    assert info == WorkerInfo("a", 1)
    assert hash(info) == hash(WorkerInfo("a", 1))
    assert pickle.loads(pickle.dumps(info)) == info


def test_worker_infos_are_sorted_by_rank():
    first, second = WorkerInfo("b", 0), WorkerInfo("a", 1, suspect=True)
    assert sorted([second, first]) == [first, second]
    assert first < second
    assert second >= first
    with pytest.raises(TypeError):
        sorted([first, "b"])


def test_members_are_found_by_name_rank_and_info():
    directory = Directory()
    a, b = peer("a", 0), peer("b", 1)
    directory.add(b)
    directory.add(a)
    for to in ("b", 1, b, b.info, WorkerInfo("b", 1)):
        assert directory.find(to) is b
    assert list(directory) == [a, b]
    assert len(directory) == 2
    assert "a" in directory


def test_who_is_not_there_is_unknown():
    directory = Directory()
    directory.add(peer("a", 0))
    for to in ("b", 7, -1, WorkerInfo("a", 3)):
        with pytest.raises(UnknownWorker):
            directory.find(to)
    for to in ("a b", "", "ä"):  # such a worker cannot exist at all
        with pytest.raises(UnknownWorker, match="known: a") as caught:
            directory.find(to)
        assert isinstance(caught.value, ValueError)
        assert type(pickle.loads(pickle.dumps(caught.value))) is type(caught.value)
    for to in (0.5, -0.5, True):
        with pytest.raises(ValueError, match="rank"):
            directory.find(to)
    for to in (None, [], b"a"):
        with pytest.raises(TypeError):
            directory.find(to)


def test_a_restart_replaces_the_one_before():
    changes = []
    directory = Directory()
    directory.changed = lambda: changes.append(1)
    directory.add(peer("a", 0))
    again = peer("a", 2, b"y")
    directory.add(again)
    assert directory.find("a") is again
    assert directory.get(0) is None
    directory.remove("a")
    directory.remove("a")
    assert len(directory) == 0
    assert changes


def test_the_name_with_the_most_entries_forgets_its_oldest():
    table = {("clinic", n): None for n in range(3)} | {("lab", 0): None}
    assert forget_one(table, lambda key: key[0]) == ("clinic", 0)
    assert list(table) == [("clinic", 1), ("clinic", 2), ("lab", 0)]
