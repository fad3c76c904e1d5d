"""What the scheduler that started this process says about its share of the data.

Slurm arrays, indexed Jobs of Kubernetes and SkyPilot's jobs number what they start, each in its own
environment variables. Only the scheduler decides where and when a machine is started again.
"""

from collections.abc import Mapping

from activation_extraction.common.errors import InputError

SLURM_ID, SLURM_COUNT = "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT"
SKYPILOT_ID, SKYPILOT_COUNT = "SKYPILOT_JOB_RANK", "SKYPILOT_NUM_JOBS"
KUBERNETES_ID = "JOB_COMPLETION_INDEX"


def machine_variables(
    environment: Mapping[str, str], multihost: bool
) -> tuple[str | None, str | None]:
    """Returns the names of the variables that hold this machine's number and how many there are.

    Kubernetes has no variable for the number of machines. If the hosts of a pod are an indexed Job,
    its index is the number of the host instead.
    """
    if environment.get(SKYPILOT_COUNT, "").isdigit():  # "None" unless there are several jobs
        return SKYPILOT_ID, SKYPILOT_COUNT
    if SLURM_ID in environment:
        return SLURM_ID, SLURM_COUNT
    if KUBERNETES_ID in environment and not multihost:
        return KUBERNETES_ID, None
    return None, None


def check_array(environment: Mapping[str, str]) -> None:
    """Raises InputError unless the indices of the Slurm array are 0 to N-1."""
    count = environment.get(SLURM_COUNT, "")
    first, last = (environment.get(f"SLURM_ARRAY_TASK_{end}") for end in ("MIN", "MAX"))
    if not (first == "0" and count.isdigit() and last == str(int(count) - 1)):
        raise InputError(
            "--total_machines: is missing and cannot be read off this Slurm array, which has "
            f"{count} indices from {first} to {last}; expected 0 to N-1 without gaps, or the flag"
        )
