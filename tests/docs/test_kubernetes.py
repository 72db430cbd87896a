"""The manifests of examples/kubernetes start the launcher on each machine as it takes it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit.guides import dry_run
from kit.manifests import SCHEMAS, problems

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
# What the operators set in a container: see pytorch/envvar.go of the training operator, and Indexed Jobs.
OPERATOR = {
    "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "demo-master-0",
    "PET_MASTER_PORT": "23456", "JOB_COMPLETION_INDEX": "1",
}  # fmt: skip


def pods(name: str) -> list[tuple[int, dict[str, Any]]]:
    """The number of machines and the pod of each template."""
    spec = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))["spec"]
    if name.startswith("jobset"):
        (jobs,) = spec["replicatedJobs"]
        job = jobs["template"]["spec"]
        assert job["completions"] == job["parallelism"]
        return [(jobs["replicas"] * job["completions"], job["template"]["spec"])]
    return [(each["replicas"], each["template"]["spec"]) for each in spec["pytorchReplicaSpecs"].values()]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("pytorchjob.yaml", 2), ("pytorchjob-elastic.yaml", 4), ("jobset.yaml", 2), ("jobset-elastic.yaml", 4)],
)
def test_the_launcher_takes_the_command(
    name: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machines = 0
    for number, pod in pods(name):
        machines += number
        (container,) = pod["containers"]
        environment = OPERATOR | {each["name"]: each["value"] for each in container.get("env", [])}
        if "elastic" in name:
            environment["PET_NNODES"] = "2:4"  # see pytorch/elastic.go of the training operator
        (script,) = container["args"]
        line = script.replace("exec trainer-kit", "echo trainer-kit")
        command = subprocess.run(
            [*container["command"], line], capture_output=True, text=True, timeout=30, check=True, env=environment
        ).stdout.strip()
        monkeypatch.setenv("RANK", "1")  # the training operator sets these for torchrun's sake
        monkeypatch.setenv("WORLD_SIZE", "2")
        lines = dry_run(
            command.removeprefix("trainer-kit ").replace("launch", "launch --cpu"), tmp_path, monkeypatch, capsys
        )
        assert len(lines) == container["resources"]["limits"]["nvidia.com/gpu"]
        assert all(f"WORLD_SIZE={8 * expected}" in each and re.search(r"MASTER_ADDR=demo-", each) for each in lines)
        assert {each["name"] for each in pod["volumes"]} == {each["name"] for each in container["volumeMounts"]}
        assert pod["terminationGracePeriodSeconds"] >= 60
    assert machines == expected


@pytest.mark.parametrize("path", sorted(FOLDER.iterdir()), ids=lambda path: path.name)
def test_kubernetes_takes_the_manifest(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    manifest = yaml.safe_load(text)
    assert problems(manifest) == []
    checked = SCHEMAS[manifest["apiVersion"], manifest["kind"]].checked
    assert f"\n# Checked against the schema of {checked}.\n" in text


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("backoffLimit: 100", "backOffLimit: 100", ".spec.replicatedJobs.template.spec.backOffLimit is unknown"),
        ("maxRestarts: 10", 'maxRestarts: "10"', ".spec.failurePolicy.maxRestarts is '10', of another type"),
        ("replicas: 1", "replicas: true", ".spec.replicatedJobs.replicas is True, of another type"),
        ("OnFailure", "Sometimes", "restartPolicy is 'Sometimes', not one of"),
        ('value: "4"', "value: 4", ".env.value is 4, of another type"),
        ("- name: machines", "- names: machines", ".spec.replicatedJobs.name is missing"),
        ('["sh", "-c"]', "sh", ".command is 'sh', not a list"),
        ("enableDNSHostnames: true", "[]", ".spec.network is [], not a mapping"),
        ("claimName: runs", "{}", "persistentVolumeClaim.claimName is missing"),
    ],
)
def test_a_slip_in_a_manifest_is_found(old: str, new: str, problem: str) -> None:
    text = (FOLDER / "jobset-elastic.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    assert problem in "\n".join(problems(yaml.safe_load(text.replace(old, new))))


@pytest.mark.parametrize(("file", "candidates"), [("jobset.yaml", 1), ("jobset-elastic.yaml", 3)])
def test_the_first_machines_of_the_jobset_are_the_masters(file: str, candidates: int) -> None:
    manifest = yaml.safe_load((FOLDER / file).read_text(encoding="utf-8"))
    ((_, pod),) = pods(file)
    name, job = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]["name"]
    environment = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
    expected = [f"{name}-{job}-0-{pod}.{name}" for pod in range(candidates)]
    assert environment["MASTER_ADDR"].split(",") == expected
    assert manifest["spec"]["network"]["enableDNSHostnames"]


def test_the_elastic_pytorchjob_names_its_range_and_first_workers() -> None:
    manifest = yaml.safe_load((FOLDER / "pytorchjob-elastic.yaml").read_text(encoding="utf-8"))
    policy = manifest["spec"]["elasticPolicy"]
    ((machines, pod),) = pods("pytorchjob-elastic.yaml")
    assert policy == {"minReplicas": 2, "maxReplicas": machines}
    (script,) = pod["containers"][0]["args"]
    name = manifest["metadata"]["name"]
    assert f"--master-addr {name}-worker-0,{name}-worker-1,{name}-worker-2\n" in script.replace(" train.py", "\n")
