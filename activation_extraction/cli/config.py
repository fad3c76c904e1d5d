"""The configuration of a run: flags and environment variables, checked against one another.

Nothing outside this folder sees argparse's result, and only the script, run and inspect/look.py see
the whole `Config`. `python -m activation_extraction.cli.config FLAGS` checks flags and starts
nothing.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.util import find_spec
from typing import Any

from activation_extraction.cli.defaults import (
    DATASET,
    DEFAULTS,
    DEMO_MAX_SEQ_LENGTH,
    ENVIRONMENT,
    ONLY_MULTIHOST,
)
from activation_extraction.cli.engines import SLURM_COUNT, check_array, machine_variables
from activation_extraction.cli.flags import build_parser
from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.positions import parse_positions
from activation_extraction.common.visible import counted, plain_url, say_error

HOST_AND_PORT = r"(\[[0-9a-fA-F:]+\]|[\w-]+(?:\.[\w-]+)*):(\d+)"


@dataclass(frozen=True)
class Config:
    """One run, as the user asked for it. Fields are named after flags.

    layers_to_extract: may be "all". machine_from: the flag or variable that says which machine this
    is; None if nothing does.
    bucket_url: the folder in the bucket that gets the folders of machines and hosts; None without
    upload. compilation_cache: a folder, a URL or "off"; None means the default. mesh_type: None if
    --mesh_shape is given instead. compress_shards: false for safetensors, which are never
    compressed. verify_samples: 0 without --model_path. report: the file to write the report to, ""
    for the default one; None without --report.
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
    layers_to_extract: tuple[int, ...] | str | None
    activation_type: str
    hook_names: tuple[str, ...] | None
    list_hooks: bool
    positions: str
    drop_token_ids: tuple[int, ...]
    batch_size: int
    max_seq_length: int
    machine_id: int
    total_machines: int
    machine_from: str | None
    mesh_type: str | None
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
    output_dir: str
    min_free_gb: float
    activation_dtype: str
    shard_size_gb: float
    shard_format: str
    compress_shards: bool
    overwrite: bool
    repair: bool
    bucket_url: str | None
    writer_threads: int | None
    waiting_shards_gb: float | None
    delete_local_after_upload: bool
    upload_timeout: int
    status: bool
    aggregate: bool
    json: bool
    verify: bool
    verify_samples: int
    report: str | None
    export: str | None
    export_dir: str | None
    log_every: int
    verbose: bool
    demo: bool

    @property
    def looking(self) -> bool:
        """Whether to look at what is stored instead of extracting."""
        return _looking(self)

    @property
    def location(self) -> str:
        """Where the output of all machines and hosts is, for flags that look at it."""
        return self.bucket_url or self.output_dir

    def to_json(self) -> dict[str, Any]:
        """The configuration as recorded in metadata.json: URLs are without secrets."""
        return {
            name: plain_url(value) if isinstance(value, str) else value
            for name, value in asdict(self).items()
        }


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """The command line as a Config. Raises InputError for flags that are wrong or conflict."""
    flags = build_parser().parse_args(argv)
    _fill_from_environment(flags)
    _fill_from_engine(flags)
    _refuse_conflicts(flags)
    recompute = flags.verify and flags.model_path is not None
    _fill_defaults(flags)
    _refuse_values(flags)
    given = {field.name: getattr(flags, field.name, None) for field in fields(Config)}
    chosen = {
        "layers_to_extract": _layers(flags.layers_to_extract),
        "hook_names": _tuple(flags.hook_names),
        "drop_token_ids": tuple(sorted(set(flags.drop_token_ids or ()))),
        "output_dir": os.path.expanduser(flags.output_dir),
        "bucket_url": _bucket_url(flags),
        "compress_shards": flags.compress_shards is not False and flags.shard_format == "pickle",
        "verify_samples": flags.verify_samples if recompute else 0,
    }
    return Config(**{**given, **chosen})


def _fill_from_environment(flags: argparse.Namespace) -> None:
    """Takes missing flags from environment variables; those about hosts only with --multihost."""
    typed_mesh = flags.mesh_type is not None
    for flag, variables in ENVIRONMENT.items():
        # With a mesh type on the command line, the shape is not used; nor are axes without a shape.
        unused = typed_mesh or not flags.use_data_parallel
        if (flag == "mesh_shape" and unused) or (flag == "mesh_axes" and flags.mesh_shape is None):
            continue
        usable = flags.multihost or flag not in ONLY_MULTIHOST
        if getattr(flags, flag) is None and usable:
            for name in [name for name in variables if os.environ.get(name)][:1]:
                _fill(flags, flag, name)


def _fill(flags: argparse.Namespace, flag: str, variable: str) -> None:
    """Sets a flag to the value of an environment variable, which must exist."""
    try:
        build_parser().parse_args([f"--{flag}", os.environ[variable]], flags)
    except InputError as error:
        raise InputError(f"environment variable {variable}: {error}") from error


def _fill_from_engine(flags: argparse.Namespace) -> None:
    """Takes --machine_id and --total_machines from the scheduler, if they are not given."""
    number, count = (
        (None, None) if _looking(flags) else machine_variables(os.environ, flags.multihost)
    )
    flags.machine_from = "--machine_id" if flags.machine_id is not None else number
    if count is not None and flags.total_machines is None:
        if count == SLURM_COUNT:
            check_array(os.environ)
        _fill(flags, "total_machines", count)
    if number is not None and flags.machine_id is None:
        if flags.total_machines is None:
            raise InputError(
                f"--total_machines: is missing; {number} says which machine this is, but not how "
                "many there are"
            )
        _fill(flags, "machine_id", number)


def _looking(flags: argparse.Namespace | Config) -> bool:
    """Whether a flag asks to look at what is stored instead of extracting."""
    looks = (flags.status, flags.verify, flags.report is not None, flags.export is not None)
    return any(looks)


def _fill_defaults(flags: argparse.Namespace) -> None:
    """Fills in defaults for what is still missing; some depend on the flags that were given."""
    if flags.dataset_path is None and not flags.demo:
        own = flags.dataset_name is not None  # the default configuration is the default data set's
        flags.dataset_name = flags.dataset_name or DATASET[0]
        flags.dataset_config = flags.dataset_config or (None if own else DATASET[1])
    flags.dataset_split = flags.dataset_split or DATASET[2]
    depending = {
        "max_seq_length": DEMO_MAX_SEQ_LENGTH if flags.demo else DEFAULTS["max_seq_length"],
        "mesh_type": None if flags.mesh_shape is not None else DEFAULTS["mesh_type"],
    }
    for name, value in {**DEFAULTS, **depending}.items():
        if getattr(flags, name) is None:
            setattr(flags, name, value)


def _layers(given: list[tuple[int, ...] | str] | None) -> tuple[int, ...] | str | None:
    """Every layer once, in the order in which they were given, or "all"."""
    if given is None:
        return None
    if "all" in given:
        return "all"
    return tuple(dict.fromkeys(layer for each in given for layer in each if type(layer) is int))


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _bucket_url(flags: argparse.Namespace) -> str | None:
    if not flags.upload_to_gcs:
        return None
    bucket, prefix = flags.gcs_bucket.rstrip("/"), flags.gcs_prefix.strip("/")
    return f"{bucket if '://' in bucket else f'gs://{bucket}'}/{prefix}"


def _check_places(flags: argparse.Namespace) -> None:
    """Checks the flags about the bucket and those that look at an extraction."""
    bucket, prefix = flags.gcs_bucket, flags.gcs_prefix
    if flags.upload_to_gcs and bucket is None:
        raise InputError("--upload_to_gcs: needs --gcs_bucket")
    for flag, value in (("gcs_bucket", bucket), ("gcs_prefix", prefix)):
        if value is not None and not flags.upload_to_gcs:
            raise InputError(f"--{flag}: needs --upload_to_gcs")
        if value is not None and re.search(r"[*?\[\]#\s]", value):
            raise InputError(
                f"--{flag} {value!r}: contains a space, a wildcard or '#'; choose another name"
            )
    if bucket is not None and (bucket.startswith("memory:") or bucket.endswith("://")):
        raise InputError(
            f"--gcs_bucket {bucket}: is not a bucket that lasts; give its name, or a URL such as "
            "s3://bucket"
        )
    if bucket is not None and "://" not in bucket and "/" in bucket.rstrip("/"):
        raise InputError(
            f"--gcs_bucket {bucket}: is a path; give only the bucket's name here, and the folder "
            "in it as --gcs_prefix"
        )
    needs = {"aggregate": "status", "json": "status", "verify_samples": "verify"}
    needs |= {"export": "export_dir", "export_dir": "export"}
    for flag, needed in needs.items():
        if getattr(flags, flag) and not getattr(flags, needed):
            raise InputError(f"--{flag}: needs --{needed}")
    if flags.verify_samples and flags.model_path is None:
        raise InputError("--verify_samples: needs --model_path")
    if _looking(flags) and flags.model_revision is not None and flags.model_path is None:
        raise InputError("--model_revision: needs --model_path here")
    modes = ("status", "verify", "report", "export", "repair", "overwrite", "list_hooks")
    given = [f"--{mode}" for mode in modes if getattr(flags, mode) not in (None, False)]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} cannot be used together")


CONFLICTS = {
    "demo": (
        *("model_path", "model_revision"),
        *("dataset_name", "dataset_config", "dataset_split", "dataset_path"),
    ),
    "dataset_path": ("dataset_name", "dataset_config", "dataset_split"),
    "hook_names": ("layers_to_extract", "activation_type"),
}


def _refuse_conflicts(flags: argparse.Namespace) -> None:
    """Raises InputError for given flags that cannot be used together."""
    for flag, others in CONFLICTS.items():
        for other in others:
            given = getattr(flags, flag) not in (None, False)
            if given and getattr(flags, other) is not None:
                raise InputError(f"--{flag} and --{other} cannot be used together")
    _check_hosts(flags)
    _check_places(flags)
    if flags.compress_shards and "safetensors" in (flags.shard_format, flags.export):
        raise InputError(
            "--compress_shards: safetensors are never compressed, so that ranges of them can be "
            "read; leave it out, or choose pickle"
        )
    if flags.mesh_shape is not None and not flags.use_data_parallel:
        raise InputError("--mesh_shape and --no_data_parallel cannot be used together")


def _check_protocols(flags: argparse.Namespace) -> None:
    """Raises InputError for a URL whose protocol fsspec does not know, or has no library for.

    Without fsspec, as where a laptop only checks the flags, nothing is said of protocols.
    """
    if find_spec("fsspec") is None:
        return
    import fsspec

    for flag in ("model_path", "dataset_path", "output_dir", "gcs_bucket"):
        value = getattr(flags, flag) or ""
        for protocol in re.findall(r"(?:^|::)([\w+.-]+)://", value):
            try:
                fsspec.get_filesystem_class(protocol)
            except (ValueError, ImportError) as error:
                raise InputError(f"--{flag} {value}: {one_line(error)}") from error


def _refuse_values(flags: argparse.Namespace) -> None:
    """Raises InputError for values, given or default, that make no sense."""
    _check_protocols(flags)
    if "://" in flags.output_dir and not _looking(flags):
        raise InputError(
            f"--output_dir {flags.output_dir}: is a URL, expected a local folder; to store shards "
            "in a bucket, use --upload_to_gcs with --gcs_bucket and --gcs_prefix"
        )
    if not parse_positions(flags.positions).may_keep(flags.max_seq_length):
        raise InputError(
            f"--positions {flags.positions}: keeps no token of any sample; samples have at most "
            f"{counted(flags.max_seq_length, 'token')} (--max_seq_length), with positions from 0"
        )
    waiting, least = flags.waiting_shards_gb, 2 * flags.shard_size_gb
    if waiting is not None and waiting < least:
        raise InputError(
            f"--waiting_shards_gb {waiting:g}: has no room for two shards; give at least "
            f"{least:g}, or a smaller --shard_size_gb"
        )
    if flags.machine_id >= flags.total_machines:
        raise InputError(
            f"{flags.machine_from} {flags.machine_id}: out of range for --total_machines "
            f"{flags.total_machines}; machines are counted from 0"
        )


def _check_hosts(flags: argparse.Namespace) -> None:
    """Checks the flags that name the hosts of a pod: all of them must be given, or none."""
    given = {name: getattr(flags, name) for name in ONLY_MULTIHOST}
    present = [name for name, value in given.items() if value is not None]
    if present and not flags.multihost:
        raise InputError(f"--{present[0]}: needs --multihost")
    if present and len(present) < len(given):
        missing = next(name for name in given if name not in present)
        raise InputError(f"--{missing}: is missing; --{present[0]} needs it")
    if present and flags.host_id >= flags.num_hosts:
        raise InputError(
            f"--host_id {flags.host_id}: out of range for --num_hosts {flags.num_hosts}; "
            "hosts are counted from 0"
        )
    address = re.fullmatch(HOST_AND_PORT, flags.coordinator_address or "")
    if present and (address is None or not 0 < int(address[2]) < 65536):
        raise InputError(
            f"--coordinator_address {flags.coordinator_address}: expected HOST:PORT of host 0, "
            "such as 10.0.0.1:8476"
        )


def check_flags() -> int:
    """Checks the command line; returns 0 if it is good, and 2 like a run if it is not."""
    try:
        parse_args()
    except InputError as error:
        say_error(f"error: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(check_flags())
