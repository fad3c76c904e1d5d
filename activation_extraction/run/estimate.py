"""This module estimates what a run would take on a machine that is not rented yet (--plan).

Memory and times follow from the formula by which `--mesh_type auto` chooses (automatic_mesh.py).
For TPUs, the compiler also says what the very program takes; that needs libtpu, but no TPU. Of the
model, only config.json and tokenizer.json are read. Nothing runs.
"""

import json
import math
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from statistics import NormalDist
from typing import Any

import jax
import numpy as np

from activation_extraction.cli.flags import DATASET, Config
from activation_extraction.common.encodings import FLOAT8, token_bytes
from activation_extraction.common.errors import InputError, install_extra, one_line
from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, say
from activation_extraction.model.automatic_mesh import StepSizes
from activation_extraction.model.checkpoint import Checkpoint, check_adapter
from activation_extraction.model.devices import USABLE, memory_of
from activation_extraction.model.family import Families, read_json
from activation_extraction.model.forward import (
    ModelRequest,
    Program,
    build_model,
    bytes_of_step,
    choose_hooks,
)
from activation_extraction.model.mesh import in_words
from activation_extraction.model.released import released_config
from activation_extraction.run.demo import MODEL_CONFIG
from activation_extraction.run.host_text import known_special_tokens
from activation_extraction.run.prepare import model_request
from activation_extraction.run.topologies import PRICES_OF, Topology, topology_of
from activation_extraction.store.formats import chosen_format
from activation_extraction.store.shard import SampleRow, Shard, encode_shard
from activation_extraction.store.statistics import sums_of

Range = tuple[float, float]
MOST_SECONDS = 900  # seconds that the compiler may take
FILLED = 0.99  # the share of a batch that is not padding
# What takes the time of a step, and the shares of the peak speeds that a run reaches, at worst and
# at best. Of products, 0.35 to 0.71 are published for training with MaxText on v4 to v6e; of a
# host's network, 0.18 for uploads to Cloud Storage (gcsfuse's benchmarks). The others are assumed.
BINDS: dict[str, tuple[str, Range]] = {
    "products": ("matrix products", (0.4, 0.7)),
    "hbm": ("memory bandwidth", (0.6, 0.9)),
    "gathers": ("gathers of weights", (0.6, 0.9)),
    "exchanges": ("exchanges between chips", (0.6, 0.9)),
    "host": ("packing on the host", (0.6, 1.0)),
    "upload": ("uploads", (0.15, 0.5)),
}
# (data set, configuration) -> its documents, as others have counted them.
KNOWN = {(DATASET[0], "sample-10BT"): 9_672_101, (DATASET[0], "sample-350BT"): 339_347_842}
# Tokens of documents that stand for all: FineWeb-Edu's are about log-normal, with a median of 620.
LENGTHS = [round(620 * math.exp(NormalDist().inv_cdf((n + 0.5) / 1000))) for n in range(1000)]


@dataclass(frozen=True)
class PlannedRun:
    """A run and the machine that it is planned for.

    raw: the contents of config.json. token_bytes: of a stored token, before compression. tokens,
    kept: see `data_size`. speeds: key of BINDS -> bytes of activations that a host can pack or
    upload per second, where that is known. prices: dollars of a chip for an hour.
    """

    families: Families
    raw: Mapping[str, Any]
    topology: Topology
    request: ModelRequest
    token_bytes: int
    tokens: float | None
    kept: float
    speeds: Mapping[str, float]
    prices: Sequence[float]


def print_estimate(config: Config, families: Families) -> int:
    """Prints what the run would take, in words or as the JSON that --help describes.

    Returns the exit status. Raises InputError for what the run would refuse, as far as config.json
    says it.
    """
    check_adapter(config.lora)
    run = planned_run(config, families)
    auto = replace(run.request, mesh_type="auto", mesh_shape=None, mesh_axes=None)
    programs = [(each, program_of(families, each, run.raw)) for each in (auto, run.request)]
    same = programs[0][1].layout.shape == programs[1][1].layout.shape
    meshes = [estimate_mesh(run, *each) for each in programs[: 1 if same else 2]]
    fitting = [mesh for mesh in meshes if mesh["fits"]]
    best = max(fitting, key=lambda mesh: mesh["tokens_per_second"][1], default=None)
    amounts: dict[str, Any] = dict.fromkeys(("hours", "dollars", "terabytes"))
    if run.tokens is not None:
        amounts["terabytes"] = run.tokens * run.kept * run.token_bytes / 1e12
        if best is not None:
            amounts["hours"] = [run.tokens / x / 3600 for x in reversed(best["tokens_per_second"])]
            if run.prices:
                spent = zip(amounts["hours"], (min(run.prices), max(run.prices)), strict=True)
                amounts["dollars"] = [run.topology.chips * time * price for time, price in spent]
    if config.json:
        say(json.dumps({"meshes": meshes, "best": best} | amounts))
    else:
        say(*lines_of(run, meshes, amounts))
    return 0


def planned_run(config: Config, families: Families) -> PlannedRun:
    topology = topology_of(config.plan or "", config.chips_per_host)
    jax.config.update("jax_platforms", "cpu")  # this machine's accelerators are left alone
    raw, request = read_config(config), model_request(config, topology.described())
    if config.batch_size == "auto":
        log.info("--batch_size auto: a run may take more than these %d rows", request.batch_size)
    program = program_of(families, request, raw)
    pack, ratio = pack_rate(config, program.model.activation_dtype)
    kind, chips, speeds = topology.kind, topology.chips / topology.hosts, dict[str, float]()
    if kind.cores is not None:
        speeds["host"] = pack * min(chips * kind.cores, config.writer_threads or math.inf)
    if kind.network is not None and config.upload_to_gcs:
        speeds["upload"] = chips * kind.network / ratio
    of_token = sum(program.token_bytes.values())
    prices = config.chip_hour_dollars or kind.dollars
    tokens, kept = data_size(config, len(known_special_tokens(config)))
    return PlannedRun(families, raw, topology, request, of_token, tokens, kept, speeds, prices)


def read_config(config: Config) -> Mapping[str, Any]:
    """Returns the contents of the model's config.json, or the released model's known sizes."""
    if config.demo:
        return MODEL_CONFIG
    known = None if os.path.exists(config.model_path) else released_config(config.model_path)
    try:
        checkpoint = Checkpoint(config.model_path, config.model_revision)
        return read_json(checkpoint.file("config.json"))
    except InputError as error:
        if known is None:
            raise
        log.info("%s; the estimate uses the known sizes of this model", error)
        return known


def program_of(families: Families, request: ModelRequest, raw: Mapping[str, Any]) -> Program:
    """Returns the program of a step. raw: the contents of config.json. Raises InputError."""
    family, config = families.parse_config(raw, request.model_path)
    model, rows = build_model(family, request, config)
    if model.layout.size("pipeline") > 1:
        raise InputError("--mesh_type, --mesh_axes: --plan has no formula for a pipeline")
    asked = choose_hooks(request, config)
    return Program(model, family.weight_table(model), rows, request.shape, *asked)


def estimate_mesh(run: PlannedRun, request: ModelRequest, program: Program) -> dict[str, Any]:
    """Estimates the run with this program, which is compiled if that is possible here.

    Returns what --json prints of a mesh. memory_gb: of each device, by formula; compiled_gb: by the
    compiler, None if it says nothing. step_ms: of the devices, at their peak speeds.
    tokens_per_second: at worst and at best; binds: the key of BINDS that takes longest, at best.
    """
    layout, devices = program.layout, [*program.rows.mesh.devices.flat]
    hosts, rows = program.rows.hosts, request.batch_size * program.rows.hosts
    sizes = rows, request.max_seq_length, program.encoders
    step = StepSizes(program.model, program.weights, *sizes)
    found, room = step.estimate(layout, devices), USABLE * (memory_of(devices[0]) or 0)
    tokens, fits, compiled = rows * request.max_seq_length, found.memory <= room, None
    if run.topology.is_tpu and find_spec("libtpu") is None:
        log.info(
            "nothing is compiled: that needs libtpu, the TPU compiler; %s", install_extra("plan")
        )
    elif run.topology.is_tpu:
        log.info("compiling the program for the mesh %s", in_words(layout.shape))
        said = compile_elsewhere(run, request)
        if isinstance(said, str):
            log.warning("mesh %s: %s", in_words(layout.shape), said)
            fits = fits and "RESOURCE_EXHAUSTED" not in said
        else:
            compiled, fits = said / 1e9, said <= room
    peak = {name: getattr(found, name) for name in ("products", "hbm", "gathers", "exchanges")}
    step_ms, of_host = 1e3 * step_time(peak), tokens / hosts * run.kept * run.token_bytes
    peak |= {name: of_host / speed for name, speed in run.speeds.items()}
    slow, fast = ({x: peak[x] / BINDS[x][1][number] for x in peak} for number in (0, 1))
    return {
        "shape": layout.shape,
        "fits": fits,
        "memory_gb": found.memory / 1e9,
        "compiled_gb": compiled,
        "step_ms": step_ms,
        "tokens_per_second": [FILLED * tokens / step_time(took) for took in (slow, fast)],
        "binds": max(fast, key=lambda name: fast[name]),
    }


def step_time(took: Mapping[str, float]) -> float:
    """Returns the seconds of a step; nothing hides exchanges. took: key of BINDS -> seconds."""
    devices = max(took["products"], took["hbm"], took["gathers"]) + took["exchanges"]
    return max(devices, took.get("host", 0), took.get("upload", 0))


def compile_elsewhere(run: PlannedRun, request: ModelRequest) -> float | str:
    """Returns the bytes that the run takes on each TPU, or why the compiler does not say.

    The compiler may crash, so it has a process of its own.
    """
    asked = pickle.dumps((run.families, replace(request, devices=None), run.raw, run.topology))
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"}
    env |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    options: Any = dict(capture_output=True, timeout=MOST_SECONDS, env=os.environ | env)
    command = [sys.executable, "-P", "-c", f"from {__name__} import answer; answer()"]
    try:
        done = subprocess.run(command, input=asked, **options)
    except subprocess.TimeoutExpired:
        return f"the compiler took more than {MOST_SECONDS} s"
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return f"the compiler failed with status {done.returncode}: {''.join(last)}"
    return json.loads(done.stdout.splitlines()[-1])


def answer() -> None:
    """Prints as JSON what `compile_elsewhere` asks for on stdin."""
    families, request, raw, topology = pickle.load(sys.stdin.buffer)
    try:
        request = replace(request, devices=topology.compilable())
        said: float | str = float(bytes_of_step(program_of(families, request, raw)))
    except (InputError, jax.errors.JaxRuntimeError) as error:
        said = one_line(error)
    print(json.dumps(said))


def pack_rate(config: Config, dtype: Any) -> Range:
    """Returns how many bytes of activations one core packs per second, as measured here, and how
    many bytes of a shard each becomes. dtype: of activations, or "float8"."""
    values = np.random.default_rng(0).standard_normal((8192, 1024), np.float32)
    values = values.astype(np.float32 if dtype == FLOAT8 else dtype)
    positions = np.arange(len(values), dtype=np.int32)
    shard = Shard([SampleRow(0, positions, positions, "", None)], {0: [values]})
    form = chosen_format(config.shard_format, config.compress_shards)
    size = len(values) * token_bytes(values.shape[1], dtype)
    encoded = [0] if dtype == FLOAT8 else []
    began = time.process_time()  # of all threads
    with ThreadPoolExecutor(1) as thread:
        shard, _ = encode_shard(shard, encoded, thread)
        sums_of([values], [positions])
        packed = form.pack(shard, {0: "hook"}, thread)
    return size / (time.process_time() - began), packed.facts.bytes / size


def data_size(config: Config, special: int = 0) -> tuple[float | None, float]:
    """Returns how many tokens the run computes in all, None if nothing says how much data there is,
    and the share of them that is stored. special: how many tokens are added to each document."""
    length, overlap, lengths = config.max_seq_length, config.overlap, [x + special for x in LENGTHS]
    step = length - overlap if config.long_documents == "split" else max(lengths)
    pieces = [(x, start) for x in lengths for start in range(0, max(x - overlap, 1), step)]
    samples = [min(document - start, length) for document, start in pieces]
    total = sum(samples)
    # A piece of a document repeats tokens of the one before, which are not stored again.
    repeated = overlap * (len(samples) - len(LENGTHS)) / total
    kept = sum(map(config.positions.expected, samples)) / total * (1 - repeated)
    documents = KNOWN.get((config.dataset_name or "", config.dataset_config or ""), math.inf)
    tokens = documents / config.total_machines * total / len(LENGTHS)
    if config.max_samples is not None:
        tokens = min(tokens, config.max_samples * total / len(samples))
    if config.max_tokens is not None and kept:
        tokens = min(tokens, config.max_tokens / kept)
    return (None if math.isinf(tokens) else tokens), kept


def lines_of(run: PlannedRun, meshes: list[dict[str, Any]], amounts: dict) -> Iterator[str]:
    """Yields the estimate in words. amounts: as in JSON."""
    machine, request = run.topology, run.request
    hosts = f"{counted(machine.chips, 'chip')} on {counted(machine.hosts, 'host')}"
    rows = f"{counted(request.batch_size, 'row')} of {counted(request.max_seq_length, 'token')}"
    yield f"{machine.name}: {hosts}, each of which feeds {rows} per step"
    for mesh in meshes:
        gigabytes = f"{short(mesh['memory_gb'])} by formula"
        if mesh["compiled_gb"] is not None:
            gigabytes += f", {short(mesh['compiled_gb'])} by the compiler"
        yield (
            f"mesh {in_words(mesh['shape'])}: {'fits' if mesh['fits'] else 'does not fit'}; GB per "
            f"device: {gigabytes}; ms per step at peak speed: {short(mesh['step_ms'])}; tokens/s: "
            f"{short(*mesh['tokens_per_second'])}, bound by {BINDS[mesh['binds']][0]}"
        )
    tokens = math.prod(request.shape) * run.kept
    made = tokens * run.token_bytes / 1e6 / meshes[0]["step_ms"]
    for name, speed in run.speeds.items():
        able = short(*(share * speed / 1e9 for share in BINDS[name][1]))
        yield f"{BINDS[name][0]}: {able} GB/s per host, which gets {short(made)} GB/s at peak speed"
    yield f"bytes per token: {run.token_bytes:,}; kept tokens: {100 * run.kept:.3g}%"
    for name, value in amounts.items():
        values = value if isinstance(value, Sequence) else [value]
        yield f"{name}: {'unknown' if value is None else short(*values)}"
    shares = ", ".join(f"{text} {low:.0%} to {high:.0%}" for text, (low, high) in BINDS.values())
    prices = short(*sorted(run.prices)) if run.prices else "unknown"
    yield (
        f"assumed: these shares of the peak speeds: {shares}; {1 - FILLED:.0%} padding; documents "
        "as long as FineWeb-Edu's; no token dropped by its role, mask or id; no time for sorting "
        "tokens by expert, which may be most of it; one of --total_machines; dollars of a chip and "
        f"an hour: {prices} (without --chip_hour_dollars, Google Cloud's of {PRICES_OF})"
    )
    yield "this is an estimate: a run with --max_samples 200 has the real numbers, see --status"


def short(*values: float) -> str:
    """Returns a number, or a range of numbers, with three significant digits."""
    return " to ".join(dict.fromkeys(f"{float(f'{value:.3g}'):,.10g}" for value in values))
