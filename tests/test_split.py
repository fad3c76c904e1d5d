"""Folders of machines and hosts: their names, and machines with other numbers of hosts."""

import pytest
from extractions import extract

from activation_extraction.inspect.status import host_states
from activation_extraction.store.folder import Folder
from activation_extraction.store.host_folders import HostFolder, expected_names, read_folders


@pytest.fixture
def mixture(tmp_path):
    """Machines of two, one and three hosts."""
    for machine, hosts in enumerate((2, 1, 3)):
        for host in range(hosts):
            extract(tmp_path, machine, host, 3, hosts, count=5 + host)
    return tmp_path


def folders(root):
    return read_folders(Folder(str(root)))


NAMES = {  # (machine, host, hosts)
    "machine_000": (0, 0, 1),
    "machine_003_host_01": (3, 1, 2),
    "machine_1234_host_100": (1234, 100, 128),
}
OTHERS = (
    "|machine|machine_|machine_x|machine_000_host|machine_000 |xmachine_000|machine_0001"
    "|machine_٠٠١|machine_000_host_001"
)


def test_names_of_folders_are_read_back_and_others_are_none():
    for name, numbers in NAMES.items():
        folder = HostFolder.of(*numbers)
        assert folder.name == name and HostFolder.parse(name) == folder
    assert not any(HostFolder.parse(name) for name in OTHERS.split("|"))


def test_each_machine_is_read_with_its_own_number_of_hosts(mixture, check):
    assert check(mixture) == []
    hosts = [(each.machine, each.host, each.state) for each in host_states(folders(mixture))]
    numbers = [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (2, 2)]
    assert hosts == [(*each, "complete") for each in numbers]


@pytest.mark.parametrize(
    "missing,told",
    [
        (["machine_002_host_01"], "machine_002_host_01"),
        (["machine_001"], "machine_001"),
        (["machine_000_host_00", "machine_000_host_01"], "machine_000"),
    ],
)
def test_a_missing_host_or_machine_is_told(mixture, check, missing, told):
    for name in missing:
        (mixture / name).rename(mixture / f"was {name}")
    assert check(mixture) == [f"{told}: is missing"]


def test_hosts_of_one_machine_agree_on_their_number(tmp_path, check):
    for host, hosts in enumerate((3, 2, 3)):
        extract(tmp_path, 0, host, 1, hosts, count=5)
    assert check(tmp_path) == [
        "machine_000_host_01: belongs to another run: its num_hosts differs",
        "3 sample numbers stored more than once, such as 3",
    ]


def test_folders_without_metadata_tell_how_many_hosts_there_are(mixture):
    for path in mixture.glob("machine_002_*/metadata.json"):
        path.unlink()
    (mixture / "machine_002_host_01").rename(mixture / "machine_002_host_01 (copy)")
    expected = expected_names(folders(mixture))
    assert expected[3:] == [f"machine_002_host_{host:02d}" for host in range(3)]
