"""Arguments and environment become a plan, or a clear error."""

from __future__ import annotations

import pytest

from aiograd.cluster.config import WorkerPlan, plan_worker, worker_names
from aiograd.cluster.rendezvous import Rendezvous
from aiograd.errors import RpcError
from aiograd.rpc.options import Options


def plan(
    name="me", rank=None, world_size=None, rendezvous=None, options=None, env=None
) -> WorkerPlan:
    return plan_worker(name, rank, world_size, rendezvous, options, env or {})


def test_a_world_of_one_needs_nothing():
    assert plan() == plan(rank=0, world_size=1) == WorkerPlan(name="me", rank=0, world_size=1)
    assert plan().leads


def test_what_is_not_given_comes_from_the_environment():
    environment = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "5"}
    found = plan(env=environment)
    assert (found.rank, found.world_size, found.rendezvous) == (1, 2, Rendezvous("tcp", "h:5"))
    assert not found.leads
    found = plan(rank=0, env=environment)
    assert (found.rank, found.world_size, found.leads) == (0, 2, True)


def test_a_rank_can_be_a_name():
    assert plan(name=None, env={"AIOGRAD_RANK": "0"}).name == "worker0"
    assert plan(name=None, env={"AIOGRAD_RANK": "0", "AIOGRAD_NAME": "boss"}).name == "boss"


def test_the_secret_file_of_the_environment_yields_to_the_options():
    environment = {"AIOGRAD_SECRET_FILE": "/a"}
    assert plan(env=environment).options.secret_file == "/a"
    assert plan(options=Options(secret_file="/b"), env=environment).options.secret_file == "/b"
    assert plan(options=Options(secret=b"x" * 16), env=environment).options.secret_file is None


@pytest.mark.parametrize("rendezvous", ["file:/tmp/x", "127.0.0.1:1", "unix:/tmp/x"])
def test_init_dynamic_no_rank_a_rendezvous_without_a_rank_is_a_value_error(rendezvous):
    with pytest.raises(ValueError, match="AIOGRAD_RANK"):
        plan(rendezvous=rendezvous)
    with pytest.raises(ValueError, match="AIOGRAD_RANK"):
        plan(env={"AIOGRAD_RENDEZVOUS": rendezvous})


@pytest.mark.parametrize("given", [{"world_size": 2}, {"rank": 1}, {"rank": 1, "world_size": 3}])
def test_several_workers_need_a_place_to_meet(given):
    with pytest.raises(ValueError, match="rendezvous"):
        plan(**given)


@pytest.mark.parametrize(
    "given", [{"rank": 2, "world_size": 2}, {"rank": -1}, {"world_size": 0}, {"rendezvous": "here"}]
)
def test_numbers_and_places_that_make_no_sense_are_value_errors(given):
    with pytest.raises(ValueError, match=r"rank|world_size|rendezvous"):
        plan(**given)


@pytest.mark.parametrize(
    "given", [{"rank": "0"}, {"rank": True}, {"world_size": 1.0}, {"options": {}}, {"name": 3}]
)
def test_init_wrong_types_are_type_errors(given):
    with pytest.raises(TypeError):
        plan(**given)


def test_a_rendezvous_that_is_no_string_is_a_type_error():
    with pytest.raises(TypeError, match="rendezvous"):
        plan(rank=0, rendezvous=5)


def test_a_worker_needs_a_name():
    with pytest.raises(TypeError, match="name"):
        plan(name=None)


@pytest.mark.parametrize("name", ["", "a*b", "a b", "x" * 128, "ü"])
def test_worker_name_rules_hold_before_anything_is_opened(name):
    with pytest.raises(ValueError, match="name"):
        plan(name=name)


@pytest.mark.parametrize("names", [["a", "A"], ["x", "Driver"], ["x", "x"]])
def test_workers_of_a_local_cluster_differ_in_more_than_case(names):
    with pytest.raises(RpcError, match="differ"):
        worker_names(2, names)
