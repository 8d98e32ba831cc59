"""The manifests in deploy/ say what pods need; `make manifests` holds them to the schemas, too."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[1] / "deploy"
JOB, JOBSET = DEPLOY / "kubernetes" / "job.yaml", DEPLOY / "kubernetes" / "jobset.yaml"

# Every key that a manifest of ours has, by the kind of object: a misspelt one has no effect on a
# cluster that is not strict.
KEYS = {
    "job": {"completionMode", "completions", "parallelism", "backoffLimit", "template"}
    | {"ttlSecondsAfterFinished"},
    "pod": {"subdomain", "restartPolicy", "terminationGracePeriodSeconds", "securityContext"}
    | {"automountServiceAccountToken", "containers", "volumes"},
    "container": {"name", "image", "command", "env", "ports", "resources", "securityContext"}
    | {"volumeMounts"},
}


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"twice in {node.start_mark}: {keys}"
        return super().construct_mapping(node, deep)


def documents(path: Path) -> dict[str, Any]:
    """The objects of a file by their kind."""
    return {each["kind"]: each for each in yaml.load_all(path.read_text(), StrictLoader)}


def jobs() -> dict[str, dict[str, Any]]:
    """The specs of all Jobs, also those that a JobSet makes."""
    found = {"job": documents(JOB)["Job"]["spec"]}
    for each in documents(JOBSET)["JobSet"]["spec"]["replicatedJobs"]:
        found[f"jobset {each['name']}"] = each["template"]["spec"]
    return found


def misses(spec: dict[str, Any]) -> list[str]:
    """What a Job of ours lacks."""
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {each["name"]: each["value"] for each in container["env"]}
    secrets = [each for each in pod["volumes"] if "secret" in each]
    mounts = {each["name"]: each for each in container["volumeMounts"]}
    requests = container["resources"].get("requests", {})
    mount = mounts.get(secrets[0]["name"], {}) if secrets else {}
    rules = {
        "unknown keys": spec.keys() <= KEYS["job"]
        and pod.keys() <= KEYS["pod"]
        and container.keys() <= KEYS["container"],
        "completionMode": spec["completionMode"] == "Indexed",
        "parallelism": spec["parallelism"] == spec["completions"],
        "restartPolicy": pod["restartPolicy"] in ("Never", "OnFailure"),
        "grace": pod["terminationGracePeriodSeconds"] >= 5 + 2,  # Options.grace, and the exit
        "not root": pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"],
        "seccomp": pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"},
        "no privileges": container["securityContext"]
        == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "no token": pod["automountServiceAccountToken"] is False,
        "requests": {"cpu", "memory"} <= requests.keys(),
        # 0o440: readable by the group of the pod alone; workers refuse the default, 0644.
        "secret is a private file": len(secrets) == 1
        and secrets[0]["secret"]["defaultMode"] == 0o440
        and bool(pod["securityContext"].get("fsGroup")),
        "secret is mounted": environment.get("AIOGRAD_SECRET_FILE", "").rpartition("/")[0]
        == mount.get("mountPath")
        and mount.get("readOnly") is True,
        "secret is in no variable": not any(
            "SECRET" in name and name != "AIOGRAD_SECRET_FILE" for name in environment
        ),
        "room for sockets": any(each["mountPath"] == "/tmp" for each in mounts.values()),
    }
    return [name for name, holds in rules.items() if not holds]


@pytest.mark.parametrize("name", ["job", "jobset driver", "jobset worker"])
def test_every_job_has_what_its_pods_need(name):
    assert misses(jobs()[name]) == []


@pytest.mark.parametrize(
    ("path", "value", "miss"),
    [
        (["completionMode"], "NonIndexed", "completionMode"),
        (["parallelism"], 3, "parallelism"),
        (["complettions"], 4, "unknown keys"),
        (["template", "spec", "volumes", 0, "secret", "defaultMode"], 0o644, "secret is a private"),
        (["template", "spec", "securityContext", "runAsNonRoot"], False, "not root"),
        (["template", "spec", "containers", 0, "resources"], {}, "requests"),
        (["template", "spec", "terminationGracePeriodSeconds"], 5, "grace"),
        (["template", "spec", "containers", 0, "volumeMounts", 0, "mountPath"], "/x", "mounted"),
    ],
)
def test_what_is_missing_is_noticed(path, value, miss):
    spec = copy.deepcopy(jobs()["job"])
    *outer, last = path
    place = spec
    for key in outer:
        place = place[key]
    place[last] = value
    (found,) = misses(spec)
    assert miss in found


def test_a_key_that_is_there_twice_is_noticed():
    with pytest.raises(AssertionError, match="twice"):
        yaml.load("a: 1\na: 2", StrictLoader)


def test_the_service_of_the_job_gives_every_pod_a_name_before_it_is_ready():
    found = documents(JOB)
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["metadata"]["name"] == pod["subdomain"]
    # A label that Kubernetes gives the pods of a Job.
    selector = {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert service["spec"]["selector"] == selector
    environment = {each["name"]: each["value"] for each in container["env"]}
    assert environment["AIOGRAD_WORLD_SIZE"] == str(job["spec"]["completions"])
    # Not by the service's name in a variable: the pod knows its own full name.
    assert "AIOGRAD_SERVICE" not in environment


def test_the_workers_of_the_jobset_join_the_driver_by_its_name_in_the_service():
    spec = documents(JOBSET)["JobSet"]["spec"]
    name = documents(JOBSET)["JobSet"]["metadata"]["name"]
    assert spec["network"]["enableDNSHostnames"] is True
    assert spec["network"]["publishNotReadyAddresses"] is True
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["driver"]}
    for job in jobs().keys() - {"job"}:
        (container,) = jobs()[job]["template"]["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container["env"]}
        # <jobset>-<replicated job>-<its number>-<index>.<subdomain>
        place = f"{name}-driver-0-0.{spec['network']['subdomain']}:29500"
        assert environment["CLUSTER"] == place
        # A world of fixed size could not take workers in that come later.
        assert "AIOGRAD_WORLD_SIZE" not in environment
    (worker,) = jobs()["jobset worker"]["template"]["spec"]["containers"]
    assert worker["command"][:4] == ["aiograd", "worker", "--join", "$(CLUSTER)"]


def test_the_words_of_the_worker_are_those_that_the_command_knows():
    from aiograd.__main__ import _parser

    (worker,) = jobs()["jobset worker"]["template"]["spec"]["containers"]
    given = _parser().parse_args(worker["command"][1:])
    assert given.rejoin
    assert given.patience == 300


@pytest.mark.parametrize("name", ["job", "service", "jobset driver", "jobset worker"])
def test_manifests_hold_to_the_schemas_of_kubernetes(name):
    validator = pytest.importorskip("kubernetes_validate", reason="`make manifests` installs it")
    if name == "service":
        found = documents(JOB)["Service"]
    else:  # those of the JobSet as the Jobs that it makes
        found = {**documents(JOB)["Job"], "spec": jobs()[name]}
    for version in ("1.33", "1.37"):
        validator.validate(found, version, strict=True)


def test_the_scripts_of_slurm_are_shell():
    for script in (DEPLOY / "slurm").glob("*.sbatch"):
        done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        lines = script.read_text().splitlines()
        assert lines[0] == "#!/bin/bash"
        # sbatch stops reading its options at the first command.
        options = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
        commands = [i for i, line in enumerate(lines) if line and not line.startswith("#")]
        assert max(options) < min(commands)
