"""Names of the folders of machines and hosts: made and read back by one module."""

import pytest

from activation_extraction.dataset.folders import HostFolder, host_folders

NAMES = {  # (machine, host, hosts)
    "machine_000": (0, 0, 1),
    "machine_003_host_01": (3, 1, 2),
    "machine_1234_host_100": (1234, 100, 128),
}
OTHERS = (
    "|machine|machine_|machine_x|machine_000_host|machine_000 |xmachine_000|machine_0001"
    "|machine_٠٠١|machine_000_host_001"
)


@pytest.mark.parametrize("name", NAMES)
def test_names_are_read_back(name):
    folder = HostFolder.of(*NAMES[name])
    assert folder.name == name and HostFolder.parse(name) == folder


def test_other_names_are_no_host_folders():
    assert not any(HostFolder.parse(name) for name in OTHERS.split("|"))
    assert host_folders([*OTHERS.split("|"), "machine_001"]) == {"machine_001": HostFolder(1)}
