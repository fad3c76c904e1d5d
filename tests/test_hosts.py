"""Several real processes as one run, as on a TPU pod."""

import json
from pathlib import Path

import pytest
from pods import Pod, check_union, flags_for, stored_alone

import extract_activations

pytestmark = pytest.mark.long
WIDTHS = "--hook_names", "blocks.1.attn.hook_k", "blocks.3.hook_resid_post", "blocks.3.mlp.hook_pre"


@pytest.mark.parametrize(
    "mesh",
    [
        ["--mesh_type", "1d"],
        ["--mesh_type", "2d"],
        ["--mesh_type", "3d"],
        ["--mesh_shape", "2,8,4", "--mesh_axes", "data,fsdp,model"],
    ],
    ids=["1d", "2d", "3d", "fsdp"],
)
def test_four_hosts_of_16_devices(demo_inputs, alone_with_few, tmp_path, mesh):
    """Two steps: collectives of 64 devices take seconds on a few cores."""
    few, alone = alone_with_few
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--dataset_path", few, "--batch_size", 16, *mesh)
    pod = Pod(tmp_path, 4, 16, *flags)
    assert pod.wait() == [0] * 4, [pod.text(i) for i in range(4)]
    check_union(out, alone, {f"machine_000_host_{i:02d}" for i in range(4)})
    metadata = json.loads((out / "machine_000_host_00/metadata.json").read_text())
    sizes = {"1d": {"model": 64}, "2d": {"data": 4, "model": 16}}
    sizes["3d"] = {"pipeline": 4, "data": 4, "model": 4}
    assert metadata["mesh"] == sizes.get(mesh[1], {"data": 2, "fsdp": 8, "model": 4})


def test_two_machines_of_two_hosts(demo_inputs, tmp_path):
    """With hooks of three widths."""
    alone = stored_alone(demo_inputs, tmp_path / "alone", WIDTHS)
    for machine in range(2):
        (tmp_path / str(machine)).mkdir()
        where = ["--machine_id", machine, "--total_machines", 2]
        flags = flags_for(demo_inputs, tmp_path / "out", *where, hooks=WIDTHS)
        pod = Pod(tmp_path / str(machine), 2, 4, *flags, through_environment=True)
        assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    names = {f"machine_{m:03d}_host_{h:02d}" for m in range(2) for h in range(2)}
    check_union(tmp_path / "out", alone, names)


def test_uneven_ends_and_a_host_without_data(demo_inputs, texts, tmp_path):
    """One row for host 0, none for host 1; then a limit that the two hosts share."""
    one, many = texts([{"text": "alone"}], "a.jsonl"), texts([{"text": "x"}] * 40, "b.jsonl")
    for path, flags, expected in ((one, [], [1, 0]), (many, ["--max_samples", 7], [4, 3])):
        out = tmp_path / path.stem
        options = flags_for(demo_inputs, out, "--dataset_path", path, *flags)
        pod = Pod(tmp_path, 2, 4, *options)
        assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
        found = [
            json.loads((out / f"machine_000_host_{i:02d}/metadata.json").read_text())["samples"]
            for i in range(2)
        ]
        assert found == expected


def test_leftovers_of_another_number_of_hosts_are_refused_or_replaced(demo_inputs, tmp_path):
    out = tmp_path / "out"
    flags = [str(flag) for flag in flags_for(demo_inputs, out, "--max_samples", 6)]
    assert Pod(tmp_path, 2, 2, *flags).wait() == [0, 0]
    assert extract_activations.main(flags) == 2
    assert len(list(out.glob("machine_*/shard_*.json"))) == 2
    assert extract_activations.main([*flags, "--overwrite"]) == 0
    assert not list(out.glob("machine_*/shard_*")) and (out / "shard_0001.json").exists()
    assert Pod(tmp_path, 2, 2, *flags).wait() == [2, 2]


def test_every_host_clears_its_own_disk_of_another_number_of_hosts(demo_inputs, tmp_path):
    """What was host 1 of 2 is host 0 now, and the other way round, as after a pod was made anew."""
    disks = [flags_for(demo_inputs, tmp_path / f"disk_{i}", "--max_samples", 6) for i in range(2)]
    assert Pod(tmp_path, 3, 2, disks[0], disks[1], disks[1]).wait() == [0] * 3
    assert Pod(tmp_path, 2, 2, *disks).wait() == [2, 2]
    anew = [[*flags, "--overwrite"] for flags in disks]
    assert Pod(tmp_path, 2, 2, *anew).wait() == [0, 0]
    left = {path.parent.relative_to(tmp_path) for path in tmp_path.glob("disk_*/*/shard_*.json")}
    assert left == {Path(f"disk_{i}/machine_000_host_0{i}") for i in range(2)}
    assert Pod(tmp_path, 2, 2, *disks).wait() == [0, 0]
