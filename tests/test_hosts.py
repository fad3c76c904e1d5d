"""Several real processes as one run, as on a TPU pod."""

import json
import re

import pytest
from command_line import main
from pods import Pod, check_union, flags_for

pytestmark = pytest.mark.long


MESHES = {  # devices of each host, flags, and the mesh
    "1d": (4, ["--mesh_type", "1d"], {"model": 16}),
    "2d": (4, ["--mesh_type", "2d"], {"data": 4, "model": 4}),
    "3d": (16, ["--mesh_type", "3d"], {"pipeline": 4, "data": 4, "model": 4}),
    "fsdp": (
        *(4, ["--mesh_shape", "2,4,2", "--mesh_axes", "data,fsdp,model"]),
        {"data": 2, "fsdp": 4, "model": 2},
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_of_four_hosts(demo_inputs, alone_with_few, tmp_path, name):
    """Few steps: collectives of 64 devices take seconds on a few cores."""
    few, alone = alone_with_few
    devices, mesh, sizes = MESHES[name]
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--dataset_path", few, "--batch_size", 16, *mesh)
    pod = Pod(tmp_path, 4, devices, *flags)
    assert pod.wait() == [0] * 4, [pod.text(i) for i in range(4)]
    check_union(out, alone, {f"machine_000_host_{i:02d}" for i in range(4)})
    metadata = json.loads((out / "machine_000_host_00/metadata.json").read_text())
    assert metadata["mesh"] == sizes


ENDS = {  # rows of text, flags, samples of each of two hosts, and what all say of the second one
    "a host without data": ("x", [], [1, 0], None),
    "a limit that is shared": ("x" * 40, ["--max_samples", 7], [4, 3], None),
    "every second row is empty": (
        *("x " * 6, ["--max_samples", 6, "--max_tokens", 60], [3, 0]),
        "0 of at most 3 samples (its share of --max_samples) and 0 of at most 30 tokens (its share "
        "of --max_tokens)",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_uneven_ends(demo_inputs, texts, tmp_path, name):
    rows, flags, expected, short = ENDS[name]
    path, out = texts([{"text": row.strip() * 9} for row in rows]), tmp_path / "out"
    for _ in range(1 if short is None else 2):  # also when all has been computed before
        pod = Pod(tmp_path, 2, 2, *flags_for(demo_inputs, out, "--dataset_path", path, *flags))
        assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
        for host in range(2):
            told = [] if short is None else [f"short: the data of host 1 ended after {short}"]
            assert re.findall("^short: .*$", pod.text(host), re.M) == told
            metadata = json.loads((out / f"machine_000_host_{host:02d}/metadata.json").read_text())
            assert metadata["samples"] == expected[host]


def test_folders_of_another_number_of_hosts_are_refused_and_named(demo_inputs, tmp_path, capsys):
    """Also with --overwrite, and where host 1 of 2 finds them on its own disk."""
    disks = [flags_for(demo_inputs, tmp_path / f"disk_{i}", "--max_samples", 6) for i in range(2)]
    assert Pod(tmp_path, 3, 2, disks[0], disks[1], disks[1]).wait() == [0] * 3
    stored = sorted(tmp_path.glob("disk_*/*/shard_*"))
    assert Pod(tmp_path, 2, 2, *([*flags, "--overwrite"] for flags in disks)).wait() == [2, 2]
    for more, remedy in (("", "give the same number, or delete it"), ("--overwrite", "delete it")):
        assert main(*disks[0], *filter(None, [more])) == 2
        folder, told = f"{tmp_path}/disk_0/machine_000_host_00", capsys.readouterr().err
        assert told.endswith(
            f"{folder}: holds an extraction with another number of hosts or machines; {remedy}\n"
        )
    assert sorted(tmp_path.glob("disk_*/*/shard_*")) == stored
