"""Names of the folders of machines and hosts: made and read back by one module."""

import pytest

from activation_extraction.dataset.folders import HostFolder, host_folders


@pytest.mark.parametrize(
    "machine,host,hosts,name",
    [
        (0, 0, 1, "machine_000"),
        (3, 1, 2, "machine_003_host_01"),
        (1234, 100, 128, "machine_1234_host_100"),
    ],
)
def test_names_are_read_back(machine, host, hosts, name):
    folder = HostFolder.of(machine, host, hosts)
    assert folder.name == name
    assert HostFolder.parse(name) == folder


OTHERS = (
    "|machine|machine_|machine_x|machine_000_host|machine_000 |xmachine_000|machine_0001"
    "|machine_٠٠١|machine_000_host_001"
)


@pytest.mark.parametrize("name", OTHERS.split("|"))
def test_other_names_are_no_host_folders(name):
    assert HostFolder.parse(name) is None
    assert host_folders([name, "machine_001"]) == {"machine_001": HostFolder(1)}
