"""Arguments and environment become a plan, or a clear error."""

from __future__ import annotations

import pytest

from aiograd.cluster.config import (
    Launch,
    WorkerPlan,
    expand_hosts,
    plan_worker,
    read_launch,
    worker_names,
)
from aiograd.cluster.joining.rendezvous import Rendezvous
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


def test_a_late_joiner_inside_a_job_is_no_rank_of_that_job():
    environment = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_NODELIST": "n1"}
    found = plan("late", rank=5, rendezvous="h:5", env=environment)
    assert (found.rank, found.world_size, found.name) == (5, None, "late")
    # The same place as the launcher's is the launcher's.
    assert plan("first", rank=0, rendezvous="h:5", env=environment).world_size == 1


POD = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-1.workers"}


def test_a_world_size_that_is_missing_in_a_pod_is_an_error_and_no_open_cluster():
    with pytest.raises(ValueError, match=r"AIOGRAD_WORLD_SIZE to its spec\.completions"):
        plan(env=POD)
    assert plan(env={**POD, "AIOGRAD_WORLD_SIZE": "2"}).world_size == 2
    assert plan(world_size=2, env=POD).rendezvous == Rendezvous("tcp", "train-0.workers:29500")
    # A place that the program chooses is not that of the Job.
    assert plan(rank=0, rendezvous="h:1", env=POD).world_size is None


def test_a_pod_without_a_name_that_others_could_dial_says_what_is_missing():
    environment = {**POD, "HOSTNAME": "train-1", "AIOGRAD_WORLD_SIZE": "2"}
    with pytest.raises(ValueError, match="subdomain and a headless Service"):
        plan(env=environment)


def test_rank_0_at_a_file_listens_for_other_hosts_if_slurm_has_some():
    environment = {
        "SLURM_PROCID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "2",
        "AIOGRAD_RENDEZVOUS": "file:/shared/meet",
    }
    assert plan(env=environment).options.listen == "0.0.0.0:0"
    assert plan(options=Options(listen="eth1"), env=environment).options.listen == "eth1"
    assert plan(env={**environment, "SLURM_NNODES": "1"}).options.listen is None
    assert plan(env={**environment, "SLURM_PROCID": "1"}).options.listen is None


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


@pytest.mark.parametrize("names", [["a", "A"], ["x", "Driver"], ["x", "x"], ["a1", "aI"]])
def test_workers_of_a_local_cluster_differ_in_more_than_case(names):
    with pytest.raises(RpcError, match="differ"):
        worker_names(2, names)


# ── the environment of launchers ──────────────────────────────────────────────────────────────────


CASES = {
    "nothing": ({}, Launch()),
    "our own variables": (
        {
            "AIOGRAD_RANK": "1",
            "AIOGRAD_WORLD_SIZE": "4",
            "AIOGRAD_NAME": "left",
            "AIOGRAD_RENDEZVOUS": "unix:/run/meet",
            "AIOGRAD_SECRET_FILE": "/run/secret",
        },
        Launch("left", 1, 4, "unix:/run/meet", "/run/secret", "aiograd"),
    ),
    "our own variables, without a world size: an open cluster": (
        {"AIOGRAD_RANK": "1", "AIOGRAD_RENDEZVOUS": "h:1", "WORLD_SIZE": "9", "RANK": "3"},
        Launch(None, 1, None, "h:1", None, "aiograd"),
    ),
    "torchrun": (
        {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node7", "MASTER_PORT": "1234"},
        Launch(None, 3, 8, "node7:1234", None, "torchrun"),
    ),
    "torchrun with its customary port": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"},
        Launch(None, 0, 2, "node7:29500", None, "torchrun"),
    ),
    "torchrun over IPv6": (
        {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "fe80::1", "MASTER_PORT": "5"},
        Launch(None, 0, 2, "[fe80::1]:5", None, "torchrun"),
    ),
    "slurm": (
        {
            "SLURM_PROCID": "2",
            "SLURM_NTASKS": "4",
            "SLURM_NODELIST": "gpu[07-09]",
            "MASTER_ADDR": "",
        },
        Launch(None, 2, 4, "gpu07:27202", None, "slurm"),
    ),
    "a slurm step counts its own tasks": (
        {
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "b1",
            "SLURM_NODELIST": "a1,b1",
            "AIOGRAD_RENDEZVOUS": "b1:7",
        },
        Launch(None, 0, 2, "b1:7", None, "slurm"),
    ),
    "open mpi on one host": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "PMIX_NAMESPACE": "job-1",
            "MASTER_ADDR": "localhost",
        },
        Launch(None, 1, 2, "localhost:29500", None, "open-mpi"),
    ),
    "open mpi on many hosts cannot say where": (
        {
            "OMPI_COMM_WORLD_RANK": "1",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        Launch(None, 1, 4, None, None, "open-mpi"),
    ),
    "pmi": (
        {"PMI_RANK": "5", "PMI_SIZE": "6", "AIOGRAD_RENDEZVOUS": "file:/shared/meet"},
        Launch(None, 5, 6, "file:/shared/meet", None, "pmi"),
    ),
    "kubernetes": (
        {
            "JOB_COMPLETION_INDEX": "12",
            "HOSTNAME": "train-12",
            "AIOGRAD_SERVICE": "train-svc",
            "AIOGRAD_WORLD_SIZE": "16",
        },
        Launch(None, 12, 16, "train-0.train-svc:29500", None, "kubernetes"),
    ),
    "kubernetes, where the pod knows its own full name": (
        {"JOB_COMPLETION_INDEX": "12", "HOSTNAME": "train-12", "AIOGRAD_WORLD_SIZE": "16"},
        Launch(None, 12, 16, "train-0.workers.ns.svc.cluster.local:29500", None, "kubernetes"),
    ),
    "kubernetes, where the host name is the full name": (
        {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "set-a-0-1.set", "AIOGRAD_WORLD_SIZE": "2"},
        Launch(None, 1, 2, "set-a-0-0.set:29500", None, "kubernetes"),
    ),
    "kubernetes without a service": (
        {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "other-3", "AIOGRAD_WORLD_SIZE": "4"},
        Launch(None, 3, 4, None, None, "kubernetes"),
    ),
    "a task of srun inside a batch script": (
        {
            "ENVIRONMENT": "BATCH",
            "SLURM_PROCID": "1",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NUM_NODES": "2",
            "SLURM_NNODES": "4",
            "AIOGRAD_RENDEZVOUS": "file:/shared/meet",
        },
        Launch(None, 1, 2, "file:/shared/meet", None, "slurm", 2),
    ),
    "a batch script itself is no rank": (
        {"ENVIRONMENT": "BATCH", "SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NODELIST": "a"},
        Launch(),
    ),
    "mpirun inside slurm": (
        {
            "OMPI_COMM_WORLD_RANK": "3",
            "OMPI_COMM_WORLD_SIZE": "4",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "4",
            "SLURM_STEP_NODELIST": "b2",
            "SLURM_JOB_NODELIST": "b[1-2]",
            "SLURM_JOB_ID": "7",
        },
        Launch(None, 3, 4, "b1:21346", None, "open-mpi"),
    ),
    "kubernetes under a host name of its own": (
        {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "elsewhere"},
        Launch(None, 1, None, None, None, "kubernetes"),
    ),
    "torchrun comes before slurm": (
        {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "9"},
        Launch(None, 0, 2, None, None, "torchrun"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_environment_says_who_we_are(case):
    environment, expected = CASES[case]
    own = "train-12.workers.ns.svc.cluster.local"  # of another pod, where it does not fit
    assert read_launch(environment, lambda: own) == expected


def test_jobs_that_share_a_host_get_ports_of_their_own_and_all_ranks_the_same():
    def meet(job: str, rank: int) -> str | None:
        return read_launch(
            {
                "OMPI_COMM_WORLD_RANK": str(rank),
                "OMPI_COMM_WORLD_SIZE": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
                "PMIX_NAMESPACE": job,
            }
        ).rendezvous

    assert meet("job-1", 0) == meet("job-1", 1)
    assert meet("job-1", 0) != meet("job-2", 0)


@pytest.mark.parametrize("text", ["two", "-1", "1.5"])
def test_a_rank_that_is_no_number_is_an_error_that_names_the_variable(text):
    with pytest.raises(ValueError, match="SLURM_PROCID"):
        read_launch({"SLURM_PROCID": text})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", ["a"]),
        ("a,b", ["a", "b"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-11,3],login", ["gpu08", "gpu09", "gpu10", "gpu11", "gpu3", "login"]),
        ("r[1-2]n[1,2]-ib", ["r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib"]),
    ],
)
def test_slurms_host_lists_expand(text, hosts):
    assert list(expand_hosts(text)) == hosts


def test_a_huge_host_list_is_expanded_only_as_far_as_it_is_read():
    assert next(expand_hosts("n[0-999999999]")) == "n0"


def test_a_broken_host_range_is_an_error():
    with pytest.raises(ValueError, match="range"):
        list(expand_hosts("n[a-b]"))
