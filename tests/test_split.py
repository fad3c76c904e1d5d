"""The split of the data: first between machines, then between the hosts of each machine, of which
every machine may have another number."""

import json
import random

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from command_line import main
from extractions import extract
from pods import Pod, flags_for, stored
from small_runs import TEXT

from activation_extraction.dataset.folders import expected_names, read_folders
from activation_extraction.inspect.status import host_states
from activation_extraction.store.folder import Folder
from activation_extraction.text.batch import Worker
from activation_extraction.text.documents import DocumentStream
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.sources import open_files


def write_files(folder, chance, kind):
    """A few files of different sizes; returns the ids of their rows."""
    folder.mkdir()
    ids = []
    for number in range(chance.randint(1, 6)):
        rows = [{"text": "x", "id": f"{number}-{n}"} for n in range(chance.randint(1, 30))]
        ids += [row["id"] for row in rows]
        if kind == "jsonl":
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{number}.jsonl").write_text(lines)
        else:
            table, size = pyarrow.Table.from_pylist(rows), chance.randint(1, 12)
            path = folder / f"{number}.parquet"
            pyarrow.parquet.write_table(table, path, row_group_size=size)
    return ids


def open_rows(folder, kind):
    if kind != "hub":
        return open_files(str(folder), TEXT.columns)
    files = sorted(map(str, folder.iterdir()))
    return datasets.load_dataset("parquet", data_files=files, split="train", streaming=True)


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])
@pytest.mark.parametrize("seed", range(12))
def test_every_mixture_of_machines_and_hosts_has_every_row_once(tmp_path, tokenizer, kind, seed):
    """Every index, too. A machine's rows are those it has with one host."""
    chance = random.Random(f"{kind} {seed}")
    ids = write_files(tmp_path / "data", chance, kind)
    machines = chance.randint(1, 5)

    def part(worker):
        stream = DocumentStream(open_rows(tmp_path / "data", kind), TEXT, worker)
        return {
            sample.sample_idx: sample.doc_id for sample in samples(stream, tokenizer, SampleForm(8))
        }

    found, indices = [], []
    for machine in range(machines):
        hosts = chance.randint(1, 6)
        parts = [part(Worker(machine, machines, host, hosts)) for host in range(hosts)]
        rows = [row for host in parts for row in host.values()]
        assert sorted(rows) == sorted(part(Worker(machine, machines)).values())
        found += rows
        indices += [index for host in parts for index in host]
    assert sorted(found) == sorted(ids)
    assert len(set(indices)) == len(ids)


def mixture(root):
    """Machines of two, one and three hosts."""
    for machine, hosts in enumerate((2, 1, 3)):
        for host in range(hosts):
            extract(root, machine, host, 3, hosts, count=5 + host)


def test_each_machine_is_read_with_its_own_number_of_hosts(tmp_path, check):
    mixture(tmp_path)
    assert check(tmp_path) == []
    parts = host_states(read_folders(Folder(str(tmp_path))))
    assert [(part.machine, part.host, part.state) for part in parts] == [
        (machine, host, "complete")
        for machine, hosts in enumerate((2, 1, 3))
        for host in range(hosts)
    ]


@pytest.mark.parametrize(
    "missing,told",
    [
        (["machine_002_host_01"], ["machine_002_host_01"]),
        (["machine_001"], ["machine_001"]),
        (["machine_000_host_00", "machine_000_host_01"], ["machine_000"]),
    ],
)
def test_a_missing_host_or_machine_is_told(tmp_path, check, missing, told):
    mixture(tmp_path)
    for name in missing:
        (tmp_path / name).rename(tmp_path / f"was {name}")
    assert check(tmp_path) == [f"{name}: is missing" for name in told]


def test_hosts_of_one_machine_agree_on_their_number(tmp_path, check):
    extract(tmp_path, 0, 0, 1, 3, count=5)
    extract(tmp_path, 0, 1, 1, 2, count=5)
    extract(tmp_path, 0, 2, 1, 3, count=5)
    assert check(tmp_path) == [
        "machine_000_host_01: belongs to another run: its num_hosts differs",
        "3 sample numbers stored more than once, such as 3",
    ]


def test_folders_without_metadata_tell_how_many_hosts_there_are(tmp_path):
    mixture(tmp_path)
    for path in tmp_path.glob("machine_002_*/metadata.json"):
        path.unlink()
    (tmp_path / "machine_002_host_01").rename(tmp_path / "machine_002_host_01 (copy)")
    expected = expected_names(read_folders(Folder(str(tmp_path))))
    assert expected[3:] == [f"machine_002_host_{host:02d}" for host in range(3)]


@pytest.mark.long
def test_a_pod_of_two_hosts_beside_a_machine_of_one(demo_inputs, texts, tmp_path):
    """Three files: every document once, and either machine starts again beside the other one."""
    (tmp_path / "data").mkdir()
    for number in range(3):
        rows = [{"text": f"document {n}", "id": f"{number}-{n}"} for n in range(20)]
        texts(rows, f"data/{number}.jsonl")
    flags = flags_for(demo_inputs, tmp_path / "out", "--dataset_path", tmp_path / "data")
    flags = [*flags, "--total_machines", 2]
    pod = Pod(tmp_path, 2, 2, *flags, "--machine_id", 0)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    for _ in range(2):
        assert main(*flags, "--machine_id", "1") == 0
    records = [
        r for (_, layer), part in stored(tmp_path / "out").items() for r in part if layer == 1
    ]
    assert sorted(r["doc_id"] for r in records) == sorted(
        f"{f}-{n}" for f in range(3) for n in range(20)
    )
    assert len({r["sample_idx"] for r in records}) == 60
    for look in ("--verify", "--status"):
        assert main(look, "--output_dir", tmp_path / "out") == 0
