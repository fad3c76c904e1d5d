"""--repair: damaged and missing shards get the bytes that they had, and nothing else changes."""

import shutil

import pytest
from command_line import main
from extractions import shard_file
from pods import Pod, flags_for
from test_upload import uploaded

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.store.formats import format_of
from activation_extraction.store.local_files import AtomicFile
from activation_extraction.store.sealed_json import unseal
from benchmarks.kill_and_resume import shards_in

SHARDS = 10


@pytest.fixture(scope="module", params=SHARD_FORMATS)
def flags(request, demo_inputs):
    return [
        *("--shard_format", request.param),
        *("--model_path", demo_inputs / "model", "--layers_to_extract", 1, 3),
        *("--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64),
        *("--batch_size", 4, "--max_samples", 120, "--shard_size_gb", 0.0008),
        "--no_data_parallel",
    ]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main(*flags, "--output_dir", folder) == 0
    assert len(shards_in(folder)) == SHARDS
    return folder


@pytest.fixture
def out(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "out")


def described(folder):
    """The JSONs, without times and owners."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        content = unseal(path.read_bytes(), path.name)
        passing = ("committed", "began", "written", "owner", "seconds")
        found[path.name] = {key: value for key, value in content.items() if key not in passing}
    return found


def same(folder, whole):
    return shards_in(folder) == shards_in(whole) and described(folder) == described(whole)


def name(number):
    return f"shard_{number:04d}.json"


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def lose(out, *numbers):
    for number in numbers:
        for path in out.glob(f"shard_{number:04d}.*"):
            path.unlink()


def harm(out):
    """Every kind of damage; the numbers of the shards that are damaged."""
    flip(shard_file(out, 1))
    shard_file(out, 3).write_bytes(b"\x1f\x8b")
    (out / name(4)).unlink()
    flip(out / name(6))
    lose(out, 7, SHARDS)
    return {1, 3, 4, 6, 7, SHARDS}


DAMAGE = {
    "many kinds": harm,
    "all": lambda out: lose(out, *range(1, SHARDS + 1)) or set(range(1, SHARDS + 1)),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", DAMAGE)
def test_the_bytes_are_those_of_an_undisturbed_run(kind, flags, whole, out, monkeypatch, capsys):
    damaged = DAMAGE[kind](out)
    written = []
    original = AtomicFile.publish

    def spy(file):
        written.append(file._path.name)
        original(file)

    monkeypatch.setattr(AtomicFile, "publish", spy)
    assert main("--verify", "--output_dir", out) == 1
    capsys.readouterr()
    assert main(*flags, "--output_dir", out, "--repair") == 0
    assert same(out, whole)
    shards = {name for name in written if format_of(name)}
    assert shards == {shard_file(out, n).name for n in damaged}
    *_, repaired, verdict = capsys.readouterr().out.splitlines()
    assert repaired.endswith(": " + ", ".join(map(str, sorted(damaged))))
    assert verdict.startswith(f"in order: 1 folder, {SHARDS} shards, 120 samples")
    assert main(*flags, "--output_dir", out) == 0 and same(out, whole)


@pytest.mark.long
def test_in_a_bucket(flags, whole, bucket, tmp_path, capsys):
    there = [*flags, "--upload_to_gcs", "--gcs_bucket", "bucket", "--gcs_prefix", "run"]
    local = tmp_path / "local"
    assert main(*there, "--output_dir", local) == 0
    for lost in (shard_file(whole, 2).name, name(3), name(SHARDS), shard_file(whole, SHARDS).name):
        bucket.delete(f"run/machine_000/{lost}")
    assert main("--verify", "--output_dir", "gs://bucket/run") == 1
    for output in (local, tmp_path / "fresh disk"):
        assert main(*there, "--output_dir", output, "--repair") == 0
        assert uploaded(bucket) == shards_in(whole)
        assert not shards_in(local)
        assert main("--verify", "--output_dir", "gs://bucket/run") == 0
        bucket.delete(f"run/machine_000/{shard_file(whole, 5).name}")
    assert main(*flags, "--output_dir", tmp_path / "elsewhere", "--repair") == 2
    assert "holds no extraction" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.long
def test_each_host_of_a_pod_repairs_its_own_folder(demo_inputs, tmp_path):
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--shard_size_gb", 0.0008, "--max_samples", 120)
    assert Pod(tmp_path, 2, 1, *flags).wait() == [0, 0]
    folders = [out / f"machine_000_host_{host:02d}" for host in range(2)]
    before = [(shards_in(folder), described(folder)) for folder in folders]
    assert len(before[1][0]) > 2
    for number in (1, 3):
        flip(shard_file(folders[1], number))
    pod = Pod(tmp_path, 2, 1, *flags, "--repair", "--verbose")
    assert pod.wait() == [0, 0], pod.text(1)
    assert [(shards_in(folder), described(folder)) for folder in folders] == before
    assert f"shards made again in {folders[0]}: none" in pod.text(0)
    assert f"shards made again in {folders[1]}: 1, 3" in pod.text(1)
    assert all("in order: 1 folder," in pod.text(host) for host in range(2))


@pytest.mark.parametrize("kept", ["metadata", "nothing"])
def test_what_is_lost_at_the_beginning_is_named_and_made_again(flags, whole, out, kept, capsys):
    lose(out, 1, 2, 3, 4, 5)
    if kept == "nothing":
        (out / "metadata.json").unlink()
    assert main("--verify", "--output_dir", out) == 1
    told = capsys.readouterr()
    assert "shard_0001.json to shard_0005.json: are missing" in told.out, told
    # Without metadata nothing says whether the run had reached the end of its data: it finds out.
    assert main(*flags, "--output_dir", out, "--repair") == (1 if kept == "nothing" else 0)
    if kept == "nothing":
        assert main(*flags, "--output_dir", out) == 0
    assert main("--verify", "--output_dir", out) == 0
    assert shards_in(out) == shards_in(whole)
    assert kept == "nothing" or same(out, whole)


def test_it_takes_the_rows_of_the_run_unless_others_are_asked_for(flags, whole, out):
    at = flags.index("--batch_size")
    lose(out, 3)
    assert main(*flags[:at], *flags[at + 2 :], "--output_dir", out, "--repair") == 0
    assert same(out, whole)
