"""Several real processes as one run, as on a TPU pod."""

import json
import re
import shutil

import pytest
from command_line import main
from conftest import make_reference, rare_but
from pods import Pod, alone_of, check_union, first_documents, flags_for
from tiny_models import SHARED

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


@pytest.mark.parametrize("name", rare_but(["fsdp"], MESHES))
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


def test_experts_of_two_hosts_exchange_tokens(demo_inputs, tmp_path):
    """A ring of four devices crosses the hosts, and comes back."""
    model, out, alone = (tmp_path / name for name in ("model", "out", "alone"))
    model.mkdir()
    for path in (demo_inputs / "model").glob("*token*"):
        shutil.copy(path, model)
    sizes = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)
    sizes |= dict(shared_expert_intermediate_size=16, decoder_sparse_step=1)
    make_reference(model, **SHARED | sizes, num_key_value_heads=2, vocab_size=2048)
    few = first_documents(demo_inputs, tmp_path / "few.parquet", 24)
    flags = ["--model_path", model, "--dataset_path", few, "--max_seq_length", 64]
    flags += ["--batch_size", 4, "--layers_to_extract", 1, 3, "--output_dir"]
    assert main(*flags, alone, "--no_data_parallel") == 0
    pod = Pod(tmp_path, 2, 2, *flags, out, "--mesh_shape", 4, "--mesh_axes", "expert")
    assert pod.wait() == [0] * 2, [pod.text(i) for i in range(2)]
    check_union(out, alone_of(alone, model), {f"machine_000_host_{i:02d}" for i in range(2)})


ENDS = {  # rows of text, flags, samples of each of two hosts, and what all say of the second one
    "a host without data": ("x", [], [1, 0], None),
    "a limit that is shared": ("x" * 40, ["--max_samples", 7], [4, 3], None),
    "every second row is empty": (
        *("x " * 6, ["--max_samples", 6, "--max_tokens", 60], [3, 0]),
        "0 of at most 3 samples (its share of --max_samples) and 0 of at most 30 tokens (its share "
        "of --max_tokens)",
    ),
}


@pytest.mark.parametrize("name", rare_but(["every second row is empty"], ENDS))
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
