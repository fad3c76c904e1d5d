"""Shards and JSON files that somebody wrote to exhaust their readers. A child process reads each,
with a limit on its memory: what ends it, or takes more, is seen here and ends no other test."""

import gzip
import json
import re
import shutil
import struct
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from command_line import main
from extractions import HOOKS, edit, extract
from runs_to_read import FORMATS
from storages import open_storage
from test_shards import ARRAY, EMPTY, FLOAT32

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.family import complete
from activation_extraction.run.repair import RepairPlanner
from activation_extraction.store.folder import Folder
from activation_extraction.store.safetensors_file import SafetensorsFile, Tensor
from activation_extraction.store.sealed_json import seal, unseal
from activation_extraction.store.statistics import Sums, pack_sums, unpack_sums

MEMORY = 2**30  # bytes of address space beyond what the imports take
READ = """
import resource, sys
from pathlib import Path
from activation_extraction.common.errors import RunError
from activation_extraction.store.pickle_file import read_records
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[2]),) * 2)
try:
    read_records(Path(sys.argv[1]), 2**60)
except RunError as error:
    print(f"{type(error).__name__}: {error}")
"""


def array(shape, data):
    """An array in a list, in a dict."""
    state = b"(K\x01" + shape + FLOAT32 + b"\x89C" + bytes([len(data)]) + data + b"tb"
    return b"\x80\x04" + EMPTY + state + b"."


def long(number):
    return b"\x8a\x08" + struct.pack("<q", number)


PICKLES = {
    "a key that is an array": b"\x80\x04}" + EMPTY + b"Ns.",
    "(5e9, 0)": array(long(5 * 10**9) + b"K\x00\x86", b""),
    "(0, 5e9), again and again": b"\x80\x04]("
    + (EMPTY + b"(K\x01K\x00" + long(5 * 10**8) + b"\x86" + FLOAT32 + b"\x89C\x00tb") * 500
    + b"e.",
    "a negative size": array(long(-1) + b"\x85", b"abcd"),
    "two negative sizes": array(long(-1) + long(-1) + b"\x86", b"abcd"),
    "a product of sizes that overflows": array(long(2**62) + b"K\x08\x86", b""),
    "more values than bytes": array(long(10**9) + b"\x85", b"abcd"),
    "the same bytes in every array": b"\x80\x04](B"
    + struct.pack("<I", 1000) + bytes(1000) + b"\x94"
    + (EMPTY + b"(K\x01K\xfa\x85" + FLOAT32 + b"\x89h\x00tb") * 20_000 + b"e.",
    "a list in itself": b"\x80\x04}K\x03]\x94h\x00as.",
    "items of an array": b"\x80\x04" + EMPTY + b"K\x00K\x01s.",
    "a new array of a huge size": b"\x80\x04" + ARRAY + long(10**12) + b"\x85\x81.",
    "a call of the array type": b"\x80\x04" + ARRAY + long(10**12) + b"\x85\x85R.",
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_a_size_that_a_pickle_claims_takes_no_memory(name, tmp_path):
    path = tmp_path / "shard_0001.pkl.gz"
    path.write_bytes(gzip.compress(PICKLES[name]))
    assert path.stat().st_size < 50_000
    found = subprocess.run(
        [sys.executable, "-c", READ, str(path), str(MEMORY // 8)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(("UnsafeError: shard_0001.pkl.gz: ", "RunError: shard_0001"))
    assert "MemoryError" not in found.stdout and found.stdout.count("\n") == 1


HUGE = 10**11
JSONS = {
    "shards": ("metadata.json", lambda content: content.update(shards=HUGE)),
    "machines": ("metadata.json", lambda content: content["identity"].update(total_machines=HUGE)),
    "hosts": ("metadata.json", lambda content: content["identity"].update(num_hosts=HUGE)),
    "last": ("shard_0004.json", lambda content: content["samples"].update(last=HUGE)),
    "count": ("shard_0004.json", lambda content: content["samples"].update(count=HUGE)),
    "tokens": ("shard_0004.json", lambda content: content.update(tokens=HUGE)),
    "width": ("shard_0004.json", lambda content: content["hooks"][0].update(width=HUGE)),
    "unpacked": ("shard_0004.json", lambda content: content.update(unpacked=2**60)),
}
REFUSED = ("machines", "hosts", "count", "tokens")  # nothing is allocated by the others


LOOK = """
import resource, sys
from pathlib import Path
import extract_activations
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)
for url in sys.argv[1:]:
    for action in ("--status", "--verify"):
        status = extract_activations.main([action, "--output_dir", url])
        print(url.rpartition("/")[2], action, status)
"""


def look_at(*places):
    """What --status and --verify say of these folders, in a process with a limit."""
    child = subprocess.run(
        [sys.executable, "-c", LOOK, *map(str, places)], capture_output=True, text=True, timeout=600
    )
    assert child.returncode == 0 and "Traceback" not in child.stderr, child.stderr
    return child.stdout


def test_a_number_takes_no_memory_before_it_is_checked(tmp_path):
    extract(tmp_path / "whole", hook_facts={key: {"width": 16} for key in HOOKS})
    for name, (file, change) in JSONS.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        edit(tmp_path / name / file, change)
    told = look_at(*(tmp_path / name for name in JSONS))
    for name in JSONS:
        assert re.search(f"^{name} --status [01]$", told, re.M)
        assert f"{name} --verify 1\n" in told or name not in REFUSED
        if name in REFUSED:
            with pytest.raises(ValueError, match=r"shard_0004.json|metadata.json"):
                ActivationDataset(tmp_path / name)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_width_that_no_file_has_room_for_is_refused_before_any_is_read(shard_format, tmp_path):
    extract(tmp_path, hook_facts={key: {"width": 16} for key in HOOKS}, shard_format=shard_format)
    edit(tmp_path / "metadata.json", lambda content: content["hooks"][0].update(width=2**27))
    with pytest.raises(ValueError, match=r"shard_0001\..*: 30 tokens of \d+ bytes cannot be in"):
        ActivationDataset(tmp_path)


@pytest.mark.parametrize("skip_first", [0, 9])
@pytest.mark.parametrize("shard_format", FORMATS)
def test_batches_take_no_more_memory_than_there_are_tokens(shard_format, skip_first, tmp_path):
    extract(tmp_path, hook_facts={key: {"width": 16} for key in HOOKS}, shard_format=shard_format)
    dataset = ActivationDataset(tmp_path)
    tracemalloc.start()
    try:
        found = list(dataset.batches(10**6, shuffle=0, skip_first=skip_first))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, found)) == 10 * (10 - skip_first)
    assert peak < 10**7


OUTLINES = {
    "shards of the outline": lambda outline: outline.update(shards=HUGE),
    "bytes of the outline": lambda outline: outline.update(json_bytes=HUGE),
    "tokens of the outline": lambda outline: outline.update(tokens=HUGE),
    "recent shards of what": lambda outline: outline.update(recent=[{"file": [1]}]),
    "a partial shard of what": lambda outline: outline.update(partial={"file": "x"}),
    "metrics of what": lambda outline: outline.update(metrics={"samples": [1]}),
}


def test_nor_does_it_in_a_bucket_where_the_outline_is_read_first(bucket, tmp_path):
    facts = {key: {"width": 16} for key in HOOKS}
    place = Folder("gs://bucket/whole/machine_000")
    extract(tmp_path, hook_facts=facts, remote=place, delete_local_after_upload=False)
    found = bucket.objects()

    def put(run, file, change):
        content = unseal(found[f"whole/machine_000/{file}"], file)
        change(content)
        copies = {name.replace("whole", run): data for name, data in found.items()}
        bucket.fill({**copies, f"{run}/machine_000/{file}": seal(content)})

    for name, (file, change) in JSONS.items():
        put(name, file, change)
    for name, change in OUTLINES.items():
        put(name, "metadata.json", lambda content, c=change: c(content["outline"]))
    told = look_at(*(f"gs://bucket/{name}" for name in ("whole", *JSONS, *OUTLINES)))
    for name in ("whole", *OUTLINES):
        assert f"{name} --status 0\n" in told and f"{name} --verify 0\n" in told
    for name in JSONS:
        assert re.search(f"^{name} --status [01]$", told, re.M)
        assert f"{name} --verify 1\n" in told or name not in REFUSED


@pytest.mark.parametrize("number", ["in the metadata", "in a name"])
def test_a_repair_does_not_count_up_to_a_huge_number(number, tmp_path):
    storage = extract(tmp_path, hook_facts={key: {"width": 16} for key in HOOKS})
    many = 10**6  # before it is seen, this must take no memory that is worth mentioning
    if number == "in the metadata":
        edit(tmp_path / "metadata.json", lambda content: content.update(shards=many))
    else:
        edit(tmp_path / "shard_0004.json", lambda c: c.update(file=f"shard_{many}.pkl.gz"))
        (tmp_path / "shard_0004.json").rename(tmp_path / f"shard_{many}.json")
    (tmp_path / "shard_0002.json").write_text("{")
    planner = RepairPlanner(Folder(str(tmp_path)), None, storage._identity, True, {})
    tracemalloc.start()
    try:
        plan = planner.plan()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(each.first, each.last) for each in plan.ranges] == [
        (2, 2),
        (4 if number == "in a name" else 5, many),
    ]
    assert peak < 10**7


def test_a_shard_with_a_huge_number_in_its_name_is_no_reason_to_count(tmp_path):
    extract(tmp_path)
    content = (tmp_path / "shard_0004.json").read_bytes()
    (tmp_path / "shard_99999999999.json").write_bytes(content)
    edit(
        tmp_path / "shard_99999999999.json",
        lambda content: content.update(file="shard_99999999999.pkl.gz"),
    )
    with pytest.raises(ValueError, match="shard 5 is missing"):
        ActivationDataset(tmp_path)


@pytest.mark.parametrize(
    "name,values",
    [
        ("sample_offsets", [0, 2**63 - 1, -2, 30]),  # differences of which overflow
        ("sample_offsets", [0, 20, 10, 30]),
        ("sample_idx", [0, -(2**63), 2]),
        ("sample_idx", [0, 0, 2]),
    ],
)
def test_tables_of_safetensors_that_do_not_ascend_are_refused(name, values, tmp_path):
    extract(tmp_path, shard_format="safetensors")
    path = tmp_path / "shard_0001.safetensors"
    data = bytearray(path.read_bytes())
    file = SafetensorsFile(
        lambda start, stop: np.frombuffer(data, np.uint8)[start:stop], len(data), ""
    )
    tensor = file.tensors[name]
    data[tensor.offset : tensor.end] = np.array(values, np.int64).tobytes()
    path.write_bytes(data)
    with pytest.raises(OSError, match="shard_0001.safetensors: is damaged: its samples are not"):
        print(ActivationDataset(tmp_path)[2])


def test_tables_of_safetensors_have_the_dtypes_of_the_format(tmp_path):
    extract(tmp_path, shard_format="safetensors")
    path = tmp_path / "shard_0001.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"I64"', b'"F64"'))
    with pytest.raises(OSError, match="sample_idx is float64, expected int64"):
        print(ActivationDataset(tmp_path)[0])


def test_statistics_whose_header_claims_more_than_is_there_take_no_memory():
    hook = {"h": Sums.zeros(8)}
    data = pack_sums(hook)
    huge = data.replace(b"(2, 8), }        ", b"(2, 99999999), } ")
    assert huge != data and len(huge) == len(data)
    for width in (8, 99999999, 10**12):
        with pytest.raises(RunError, match="cannot be read"):
            unpack_sums(huge, [("h", width)], "shard_0001.npz")
    assert (unpack_sums(data, [("h", 8)], "")["h"].sums == hook["h"].sums).all()


@pytest.mark.parametrize("offsets", [[-8, 0], [0.0, 8], ["0", 8], [True, 9], [0]])
def test_the_offsets_of_a_tensor_are_whole_numbers_from_0_on(offsets):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": offsets}
    with pytest.raises((ValueError, TypeError)):
        Tensor.from_json(entry, 16)


@pytest.mark.parametrize(
    "name", ["../../x.safetensors", "/x.safetensors", "..", "a/b", "a\\b", "gs://x", "", 7, None]
)
def test_weights_lie_in_the_folder_of_their_index(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="weight_map: .* for 'lm_head.weight'"):
        _ = Checkpoint(str(tmp_path)).file_of_tensor


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
@pytest.mark.parametrize("nested", [False, True])
def test_an_absurd_size_is_refused_before_anything_is_made_of_it(field, nested):
    sizes = {field: 10**12}
    raw = {"model_type": "qwen3", **({"text_config": sizes} if nested else sizes)}
    with pytest.raises(InputError, match=f"^config.json: {field} is 1e[+]12, expected at most"):
        complete(raw, "config.json")


@pytest.mark.parametrize("form", ["memmap", "llamascopium", "sae_lens"])
@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", "a/b", "..", ""])
def test_names_of_hooks_are_no_paths(name, form, tmp_path, capsys):
    """The export writes nothing, in its folder or elsewhere."""
    with open_storage(tmp_path / "run", {1: name}) as storage:
        for number in range(10):
            values = np.zeros((20, 4), np.float32)
            storage.add_activation(1, values, number, "", np.arange(20, dtype=np.int32))
    flags = "--export_dir", tmp_path / "out/copy", "--output_dir", tmp_path / "run"
    assert main("--export", form, *flags) == 2
    assert "cannot name a folder" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "run" not in path.parts]
