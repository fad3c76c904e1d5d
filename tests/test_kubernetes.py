"""deploy/job.yaml and deploy/jobset.yaml, filled in, against the API's own types and hardware.

The types are those of Kubernetes and JobSet as Kubeflow's client has them, made from their OpenAPI.
"""

import re
import shlex
import string

import pytest
import yaml
from cloud import REPOSITORY
from kubeflow_trainer_api import models

from activation_extraction.cli.config import parse_args

pytestmark = pytest.mark.rare
JOB, JOBSET = REPOSITORY / "deploy/job.yaml", REPOSITORY / "deploy/jobset.yaml"
KINDS = {"Job": models.IoK8sApiBatchV1Job, "JobSet": models.JobsetV1alpha2JobSet}


def render(path, **variables):
    """As envsubst does, but no variable may be left out and no other dollar be there. The values to
    change, with those of the example, are in the comment at the top."""
    comment, apiVersion, manifest = path.read_text().partition("apiVersion")
    lines = re.findall(r"^# +export (.*=.*)$", comment, flags=re.M)
    values = dict(word.split("=", 1) for line in lines for word in shlex.split(line))
    used = set(re.findall(r"\$\{(\w+)\}", path.read_text()))
    assert used - {"MACHINE"} == set(values)  # MACHINE counts in the loop
    values |= {name: str(value) for name, value in variables.items()}
    return yaml.safe_load(string.Template(apiVersion + manifest).substitute(values))


@pytest.mark.parametrize(
    ("accelerator", "topology", "hosts", "chips"),  # chips of each host
    [("tpu-v5-lite-podslice", "2x4", 1, 8), ("tpu-v4-podslice", "2x2x4", 4, 4)],
)
def test_machines_of_one_host_and_of_several(monkeypatch, accelerator, topology, hosts, chips):
    """No field is missing, of another type, or unknown, and only bad input ends a machine."""
    shape = {"TOPOLOGY": topology, "HOSTS": hosts, "CHIPS": chips, "ACCELERATOR": accelerator}
    manifest = render(JOB if hosts == 1 else JOBSET, MACHINE=3, MACHINES=256, **shape)
    assert KINDS[manifest["kind"]].from_dict(manifest).to_dict() == manifest  # the unknown is lost
    spec = manifest["spec"]
    if hosts == 1:  # machines are the indices of the job; those that were preempted start again
        assert spec["completionMode"] == "Indexed" and spec["completions"] == 256
        ignore, fail = spec["podFailurePolicy"]["rules"]
        assert ignore["action"] == "Ignore" and fail["action"] == "FailIndex"
        assert ignore["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
        assert spec["podReplacementPolicy"] == "Failed"
    else:  # a machine is one slice, all of whose hosts start again together
        (slices,), (final,) = spec["replicatedJobs"], spec["failurePolicy"]["rules"]
        assert slices["replicas"] == 1  # several would become one run of all slices
        assert final["action"] == "FailJobSet"
        assert final["onJobFailureReasons"] == ["PodFailurePolicy"]
        spec = slices["template"]["spec"]
        assert spec["parallelism"] == spec["completions"] == hosts and spec["backoffLimit"] == 0
        topology_key = "alpha.jobset.sigs.k8s.io/exclusive-topology"
        assert topology_key in manifest["metadata"]["annotations"]
    assert spec["podFailurePolicy"]["rules"][-1]["onExitCodes"]["values"] == [2]
    pod = spec["template"]["spec"]
    assert pod.get("hostNetwork", False) == (hosts > 1)
    (container,) = pod["containers"]
    assert container["name"] == "extraction"  # as podFailurePolicy calls it
    assert container["resources"]["limits"] == {"google.com/tpu": chips}
    assert {accelerator, topology, "true"} == set(pod["nodeSelector"].values())
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")  # of the machine, or of the host of a slice
    for variable in container.get("env", []):
        index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        source = variable.get("valueFrom", {"fieldRef": {"fieldPath": None}})
        is_index = source["fieldRef"]["fieldPath"] == index
        monkeypatch.setenv(variable["name"], "3" if is_index else variable["value"])
    config = parse_args(container["args"])
    assert config.host_options.multihost == (hosts > 1)
    assert (config.host_options.machine_id, config.host_options.total_machines) == (3, 256)
    assert config.output_options.bucket_url == "gs://my-bucket/run-1"
