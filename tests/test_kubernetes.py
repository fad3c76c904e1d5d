"""deploy/job.yaml and deploy/jobset.yaml, filled in, against the API's own types and hardware.

The types are those of Kubernetes and JobSet as Kubeflow's client has them, made from their OpenAPI.
"""

import math
import re
import shlex
import string

import pytest
import yaml
from cloud import REPOSITORY
from kubeflow_trainer_api import models

from activation_extraction.cli.config import parse_args

JOB, JOBSET = REPOSITORY / "deploy/job.yaml", REPOSITORY / "deploy/jobset.yaml"
KINDS = {"Job": models.IoK8sApiBatchV1Job, "JobSet": models.JobsetV1alpha2JobSet}
SLICES = [  # accelerator, topology, hosts, chips of each
    ("tpu-v5-lite-podslice", "8x8", 16, 4),
    ("tpu-v6e-slice", "4x4", 4, 4),
    ("tpu-v4-podslice", "2x2x4", 4, 4),
]
SINGLE = [
    ("tpu-v5-lite-podslice", "2x4", 8),
    ("tpu-v6e-slice", "2x4", 8),
    ("tpu-v5-lite-podslice", "1x1", 1),
]


def exports(path):
    """The variables in the comment at the top, with the values of the example."""
    lines = re.findall(r"^# +export (.*=.*)$", path.read_text(), flags=re.M)
    return dict(word.split("=", 1) for line in lines for word in shlex.split(line))


def render(path, **variables):
    """As envsubst does, but no variable may be left out and no other dollar be there."""
    values = exports(path) | {name: str(value) for name, value in variables.items()}
    manifest = path.read_text()[path.read_text().index("apiVersion") :]
    return yaml.safe_load(string.Template(manifest).substitute(values))


def check_types(manifest):
    """Nothing is missing, of another type, or unknown: what is unknown would not come back."""
    read = KINDS[manifest["kind"]].from_dict(manifest)
    assert read.to_dict() == manifest


def flags_of(pod):
    (container,) = pod["containers"]
    assert container["name"] == "extraction"  # as podFailurePolicy calls it
    return container["args"]


@pytest.mark.parametrize(("accelerator", "topology", "chips"), SINGLE)
def test_machines_of_one_host(monkeypatch, accelerator, topology, chips):
    job = render(JOB, MACHINES=256, ACCELERATOR=accelerator, TOPOLOGY=topology, CHIPS=chips)
    check_types(job)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert math.prod(map(int, topology.split("x"))) == chips
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
        "cloud.google.com/gke-spot": "true",
    }
    assert spec["completionMode"] == "Indexed" and spec["completions"] == 256
    assert spec["podReplacementPolicy"] == "Failed" and pod["restartPolicy"] == "Never"
    assert spec["backoffLimitPerIndex"] > 0 and spec["maxFailedIndexes"] == 256
    ignore, fail = spec["podFailurePolicy"]["rules"]
    assert ignore["action"] == "Ignore"
    assert ignore["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert fail["action"] == "FailIndex" and fail["onExitCodes"]["values"] == [2]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "255")
    config = parse_args(flags_of(pod))
    assert (config.machine_id, config.total_machines) == (255, 256)
    assert config.bucket_url == "gs://my-bucket/run-1" and not config.multihost


@pytest.mark.parametrize(("accelerator", "topology", "hosts", "chips"), SLICES)
def test_machines_of_several_hosts(monkeypatch, accelerator, topology, hosts, chips):
    shape = {"TOPOLOGY": topology, "HOSTS": hosts, "CHIPS": chips}
    jobset = render(JOBSET, MACHINE=3, MACHINES=4, ACCELERATOR=accelerator, **shape)
    check_types(jobset)
    (slices,) = jobset["spec"]["replicatedJobs"]
    job, pod = slices["template"]["spec"], slices["template"]["spec"]["template"]["spec"]
    assert slices["replicas"] == 1  # several would become one run of all slices
    assert math.prod(map(int, topology.split("x"))) == hosts * chips
    assert job["parallelism"] == job["completions"] == hosts and job["backoffLimit"] == 0
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == accelerator
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == topology
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert jobset["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    policy = jobset["spec"]["failurePolicy"]
    (final,) = policy["rules"]
    assert policy["maxRestarts"] == 100 and final["action"] == "FailJobSet"
    assert final["onJobFailureReasons"] == ["PodFailurePolicy"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", str(hosts - 1))  # here the host's number
    config = parse_args(flags_of(pod))
    assert config.multihost and (config.machine_id, config.total_machines) == (3, 4)
    assert config.bucket_url == "gs://my-bucket/run-1"


@pytest.mark.parametrize("path", [JOB, JOBSET], ids=["job", "jobset"])
def test_the_values_to_change_are_at_the_top(path):
    text = path.read_text()
    used = set(re.findall(r"\$\{(\w+)\}", text))
    assert used - {"MACHINE"} == set(exports(path))  # MACHINE counts in the loop
    assert text.index("apiVersion") > text.rindex("export ")
