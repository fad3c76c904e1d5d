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


def test_uneven_ends_and_a_host_without_data(demo_inputs, texts, tmp_path):
    """One row for host 0, none for host 1; then a limit that the two hosts share."""
    one, many = texts([{"text": "alone"}], "a.jsonl"), texts([{"text": "x"}] * 40, "b.jsonl")
    for path, flags, expected in ((one, [], [1, 0]), (many, ["--max_samples", 7], [4, 3])):
        out = tmp_path / path.stem
        options = flags_for(demo_inputs, out, "--dataset_path", path, *flags)
        pod = Pod(tmp_path, 2, 4, *options)
        assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
        assert not any("short: " in pod.text(i) for i in range(2))
        found = [
            json.loads((out / f"machine_000_host_{i:02d}/metadata.json").read_text())["samples"]
            for i in range(2)
        ]
        assert found == expected


def test_a_host_that_cannot_fill_its_share_is_named_on_all(demo_inputs, texts, tmp_path):
    """Every second row is without text, so the second of two hosts has none."""
    path = texts([{"text": "word " * 9 if n % 2 == 0 else ""} for n in range(12)])
    samples, tokens = "0 of at most 3 samples", "0 of at most 30 tokens"
    cases = {
        ("--max_samples", "6"): f"{samples} (its share of --max_samples)",
        ("--max_tokens", "60", "--max_samples", "6"): f"{samples} (its share of --max_samples) and "
        f"{tokens} (its share of --max_tokens)",
    }
    for number, (flags, told) in enumerate(cases.items()):
        options = flags_for(demo_inputs, tmp_path / str(number), "--dataset_path", path, *flags)
        for _ in range(2):  # also when all has been computed before
            pod = Pod(tmp_path, 2, 2, *options)
            assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
            for host in range(2):
                (line,) = re.findall("^short: .*$", pod.text(host), re.M)
                assert line == f"short: the data of host 1 ended after {told}"


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
