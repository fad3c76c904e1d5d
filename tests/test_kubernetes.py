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
SHAPES = [  # accelerator, topology, hosts, chips of each
    ("tpu-v5-lite-podslice", "2x4", 1, 8),
    ("tpu-v6e-slice", "2x4", 1, 8),
    ("tpu-v5-lite-podslice", "1x1", 1, 1),
    ("tpu-v5-lite-podslice", "8x8", 16, 4),
    ("tpu-v6e-slice", "4x4", 4, 4),
    ("tpu-v4-podslice", "2x2x4", 4, 4),
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


def config_of(pod):
    (container,) = pod["containers"]
    assert container["name"] == "extraction"  # as podFailurePolicy calls it
    return parse_args(container["args"])


@pytest.mark.parametrize(("accelerator", "topology", "hosts", "chips"), SHAPES)
def test_machines_of_one_host_and_of_several(monkeypatch, accelerator, topology, hosts, chips):
    """No field is missing, of another type, or unknown, and only bad input ends a machine."""
    shape = {"TOPOLOGY": topology, "HOSTS": hosts, "CHIPS": chips, "ACCELERATOR": accelerator}
    manifest = render(JOB if hosts == 1 else JOBSET, MACHINE=3, MACHINES=256, **shape)
    assert KINDS[manifest["kind"]].from_dict(manifest).to_dict() == manifest  # the unknown is lost
    spec = (check_job if hosts == 1 else check_jobset)(manifest["spec"], hosts)
    pod = spec["template"]["spec"]
    assert math.prod(map(int, topology.split("x"))) == hosts * chips
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": chips}
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": topology,
        "cloud.google.com/gke-spot": "true",
    }
    assert spec["podFailurePolicy"]["rules"][-1]["onExitCodes"]["values"] == [2]
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")  # of the machine, or of the host of a slice
    config = config_of(pod)
    assert config.multihost == (hosts > 1)
    assert (config.machine_id, config.total_machines) == (3, 256)
    assert config.bucket_url == "gs://my-bucket/run-1"
    if hosts > 1:
        topology = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
        assert manifest["metadata"]["annotations"] == topology
        assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet"


def check_job(spec, _):
    """Machines are the indices of the job; those that were preempted or failed start again."""
    assert spec["completionMode"] == "Indexed" and spec["completions"] == 256
    assert spec["podReplacementPolicy"] == "Failed" and spec["maxFailedIndexes"] == 256
    assert spec["backoffLimitPerIndex"] > 0 and spec["template"]["spec"]["restartPolicy"] == "Never"
    ignore, fail = spec["podFailurePolicy"]["rules"]
    assert ignore["action"] == "Ignore" and fail["action"] == "FailIndex"
    assert ignore["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    return spec


def check_jobset(spec, hosts):
    """A machine is one slice, all of whose hosts start again together."""
    (slices,), (final,) = spec["replicatedJobs"], spec["failurePolicy"]["rules"]
    assert slices["replicas"] == 1  # several would become one run of all slices
    assert spec["failurePolicy"]["maxRestarts"] == 100 and final["action"] == "FailJobSet"
    assert final["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = slices["template"]["spec"]
    assert job["parallelism"] == job["completions"] == hosts and job["backoffLimit"] == 0
    assert job["podFailurePolicy"]["rules"][0]["action"] == "FailJob"
    return job


@pytest.mark.parametrize("path", [JOB, JOBSET], ids=["job", "jobset"])
def test_the_values_to_change_are_at_the_top(path):
    text = path.read_text()
    used = set(re.findall(r"\$\{(\w+)\}", text))
    assert used - {"MACHINE"} == set(exports(path))  # MACHINE counts in the loop
    assert text.index("apiVersion") > text.rindex("export ")
