"""The configuration of a run: flags and environment variables, checked as far as they go alone.

Everything beyond this module and flags.py receives the frozen `Config`, never argparse's result.
`python -m activation_extraction.cli.config FLAGS` checks flags, starts nothing, imports no JAX.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from activation_extraction.cli.errors import InputError
from activation_extraction.cli.flags import (
    DEFAULT_DATASET,
    DEFAULT_MODEL,
    DEFAULT_PREFIX,
    build_parser,
)
from activation_extraction.output.commits import part_folder

HOST_AND_PORT = r"(\[[0-9a-fA-F:]+\]|[\w-]+(?:\.[\w-]+)*):(\d+)"
DEFAULT_LAYERS = range(10, 24)
ENVIRONMENT = {
    "coordinator_address": ("JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS"),
    "host_id": ("JAX_PROCESS_INDEX", "HOST_ID"),
    "num_hosts": ("JAX_PROCESS_COUNT", "NUM_HOSTS"),
    "mesh_shape": ("TPU_MESH_CONFIG",),
    "mesh_axes": ("TPU_AXIS_NAMES",),
    "compilation_cache": ("JAX_COMPILATION_CACHE_DIR",),
}


@dataclass(frozen=True)
class Config:
    """One run, as asked for. Field names are the flags'.

    bucket_url: where to upload to, the folder above those of machines and hosts; None: nowhere.
    compilation_cache: a folder, a URL or "off"; None: the default.
    """

    model_path: str
    model_revision: str | None
    dtype: str
    dataset_name: str | None
    dataset_config: str | None
    dataset_split: str | None
    dataset_path: str | None
    text_column: str
    skip_bad_rows: bool
    max_samples: int | None
    layers_to_extract: tuple[int, ...] | None
    activation_type: str
    hook_names: tuple[str, ...] | None
    batch_size: int
    max_seq_length: int
    machine_id: int
    total_machines: int
    mesh_type: str
    mesh_shape: tuple[int, ...] | None
    mesh_axes: tuple[str, ...] | None
    use_data_parallel: bool
    multihost: bool
    coordinator_address: str | None
    host_id: int | None
    num_hosts: int | None
    connect_timeout: int
    heartbeat_timeout: int
    stall_timeout: int
    compilation_cache: str | None
    output_dir: Path
    output_url: str
    activation_dtype: str
    shard_size_gb: float
    compress_shards: bool
    overwrite: bool
    repair: bool
    bucket_url: str | None
    delete_local_after_upload: bool
    upload_timeout: int
    status: bool
    aggregate: bool
    verify: bool
    verify_samples: int
    export: str | None
    export_dir: str | None
    log_every: int
    verbose: bool
    demo: bool

    def folder_name(self, host_id: int, num_hosts: int, in_bucket: bool) -> str:
        """Of one host of this machine, in the output; "" is the output itself."""
        if num_hosts > 1 or in_bucket or self.total_machines > 1:
            return part_folder(self.machine_id, host_id, num_hosts)
        return ""

    @property
    def location(self) -> str:
        """The whole output, of all machines and hosts, for --status, --verify and --export."""
        return self.bucket_url or self.output_url

    def to_json(self) -> dict[str, Any]:
        """The configuration as recorded in metadata.json."""
        return {**asdict(self), "output_dir": str(self.output_dir)}


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """The command line as a Config. Raises InputError for flags that are wrong or conflict."""
    flags = build_parser().parse_args(argv)
    _fill_from_environment(flags)
    _refuse_conflicts(flags)
    given = {field.name: getattr(flags, field.name, None) for field in fields(Config)}
    output = os.path.expanduser(flags.output_dir)
    chosen = {
        "model_path": flags.model_path or DEFAULT_MODEL,
        "layers_to_extract": _tuple(flags.layers_to_extract),
        "activation_type": flags.activation_type or "residual",
        "hook_names": _tuple(flags.hook_names),
        "batch_size": flags.batch_size or 8,
        "max_seq_length": flags.max_seq_length or (256 if flags.demo else 2048),
        "mesh_type": flags.mesh_type or ("2d" if flags.mesh_shape is None else "any"),
        "output_dir": Path(output),
        "output_url": output,
        "bucket_url": _bucket_url(flags),
        "verify_samples": 0 if flags.model_path is None else flags.verify_samples or 8,
    }
    return Config(**{**given, **_dataset(flags), **chosen})


def _fill_from_environment(flags: argparse.Namespace) -> None:
    """Environment variables fill what flags leave out; those of hosts only with --multihost."""
    typed_mesh = flags.mesh_type is not None
    for flag, variables in ENVIRONMENT.items():
        # A mesh that was asked for by name, and axis names without sizes, are no use together.
        unused = typed_mesh or not flags.use_data_parallel
        if (flag == "mesh_shape" and unused) or (flag == "mesh_axes" and flags.mesh_shape is None):
            continue
        of_hosts = flag in ("coordinator_address", "host_id", "num_hosts")
        if getattr(flags, flag) is None and (flags.multihost or not of_hosts):
            values = [(name, os.environ[name]) for name in variables if os.environ.get(name)]
            for name, value in values[:1]:
                try:
                    build_parser().parse_args([f"--{flag}", value], flags)
                except InputError as error:
                    raise InputError(f"environment variable {name}: {error}") from error


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _bucket_url(flags: argparse.Namespace) -> str | None:
    if not flags.upload_to_gcs:
        return None
    bucket = flags.gcs_bucket.rstrip("/")
    prefix = (flags.gcs_prefix or DEFAULT_PREFIX).strip("/")
    return f"{bucket if '://' in bucket else f'gs://{bucket}'}/{prefix}"


def _check_places(flags: argparse.Namespace) -> None:
    """Of the flags that say where the output goes."""
    bucket, prefix = flags.gcs_bucket, flags.gcs_prefix
    if flags.upload_to_gcs and bucket is None:
        raise InputError("--upload_to_gcs: needs --gcs_bucket")
    for flag, value in (("gcs_bucket", bucket), ("gcs_prefix", prefix)):
        if value is not None and not flags.upload_to_gcs:
            raise InputError(f"--{flag}: needs --upload_to_gcs")
        if value is not None and re.search(r"[*?\[\]#\s]", value):
            raise InputError(f"--{flag} {value!r}: has a space, a wildcard or '#' in it")
    if bucket is not None and (bucket.startswith("memory:") or bucket.endswith("://")):
        raise InputError(f"--gcs_bucket {bucket}: is no place that lasts")
    if bucket is not None and "://" not in bucket and "/" in bucket.rstrip("/"):
        raise InputError(f"--gcs_bucket {bucket}: is a path; the bucket alone, and --gcs_prefix")
    looking = flags.status or flags.verify or flags.export is not None
    if "://" in flags.output_dir and not looking:
        raise InputError(
            f"--output_dir {flags.output_dir}: is a URL; shards are written to a local folder "
            "first: use --upload_to_gcs with --gcs_bucket and --gcs_prefix"
        )
    needs = {"aggregate": "status", "verify_samples": "verify"}
    needs |= {"export": "export_dir", "export_dir": "export"}
    for flag, needed in needs.items():
        if getattr(flags, flag) and not getattr(flags, needed):
            raise InputError(f"--{flag}: needs --{needed}")
    if flags.verify_samples and flags.model_path is None:
        raise InputError("--verify_samples: needs --model_path")
    if looking and flags.model_revision is not None and flags.model_path is None:
        raise InputError("--model_revision: needs --model_path here")
    exporting = flags.export is not None
    if sum((flags.status, flags.verify, exporting, flags.repair, flags.overwrite)) > 1:
        raise InputError(
            "--status, --verify, --export, --repair and --overwrite exclude each other"
        )


def _dataset(flags: argparse.Namespace) -> dict[str, str | None]:
    """The data set fields; the defaults of config and split go with the default name only."""
    name: str | None
    config: str | None
    split: str
    name, config, split = DEFAULT_DATASET
    if flags.dataset_path is not None or flags.demo:
        name = config = None
    elif flags.dataset_name:
        name, config = flags.dataset_name, None
    return {
        "dataset_name": name,
        "dataset_config": flags.dataset_config or config,
        "dataset_split": flags.dataset_split or split,
        "dataset_path": flags.dataset_path,
    }


CONFLICTS = {
    "demo": (
        *("model_path", "model_revision"),
        *("dataset_name", "dataset_config", "dataset_split", "dataset_path"),
    ),
    "dataset_path": ("dataset_name", "dataset_config", "dataset_split"),
    "hook_names": ("layers_to_extract", "activation_type"),
}


def _refuse_conflicts(flags: argparse.Namespace) -> None:
    for flag, others in CONFLICTS.items():
        for other in others:
            given = getattr(flags, flag) not in (None, False)
            if given and getattr(flags, other) is not None:
                raise InputError(f"--{flag} and --{other} exclude each other")
    _check_hosts(flags)
    _check_places(flags)
    if flags.mesh_shape is not None and not flags.use_data_parallel:
        raise InputError("--mesh_shape and --no_data_parallel exclude each other")
    if flags.machine_id >= flags.total_machines:
        raise InputError(
            f"--machine_id {flags.machine_id}: out of range for --total_machines "
            f"{flags.total_machines}; machines are counted from 0"
        )


def _check_hosts(flags: argparse.Namespace) -> None:
    given = {name: getattr(flags, name) for name in ("coordinator_address", "host_id", "num_hosts")}
    present = [name for name, value in given.items() if value is not None]
    if present and not flags.multihost:
        raise InputError(f"--{present[0]}: needs --multihost")
    if present and len(present) < len(given):
        missing = next(name for name in given if name not in present)
        raise InputError(f"--{missing}: is missing; with --{present[0]} all of it must be given")
    if present and flags.host_id >= flags.num_hosts:
        raise InputError(
            f"--host_id {flags.host_id}: out of range for --num_hosts {flags.num_hosts}; "
            "hosts are counted from 0"
        )
    address = re.fullmatch(HOST_AND_PORT, flags.coordinator_address or "")
    if present and (address is None or not 0 < int(address[2]) < 65536):
        raise InputError(
            f"--coordinator_address {flags.coordinator_address}: expected HOST:PORT of host 0"
        )


def check_flags() -> int:
    """Parses the command line; returns the exit status that a run would end with if it is bad."""
    try:
        parse_args()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(check_flags())
