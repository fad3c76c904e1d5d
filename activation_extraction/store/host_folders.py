"""The folders of a run: what they are called, which ones there are, and which there should be.

`machine_003` belongs to a machine with one host, `machine_003_host_01` to one of several hosts; a
single machine with one host writes to the output itself. `read_folders` reads the folders' JSON
files and lists their other files, whatever state they are in; `read_run` requires that they are in
order.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.store.commit import OTHER_VERSION
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import Stored, own_files, read_stored
from activation_extraction.store.resume import shown

NAME = re.compile(r"machine_([0-9]{3}|[1-9][0-9]{3,})(?:_host_([0-9]{2}|[1-9][0-9]{2,}))?")
FOLDERS = 16  # read at the same time


class HostFolder(NamedTuple):
    """The folder of one host; `host` is None if the machine has a single host."""

    machine: int
    host: int | None = None


def host_folders(names: Iterable[str]) -> dict[str, HostFolder]:
    """Returns those of `names` that name the folder of a host, in the same order."""
    found = {name: match for name in names if (match := NAME.fullmatch(name))}
    return {
        name: HostFolder(int(match[1]), int(match[2]) if match[2] else None)
        for name, match in found.items()
    }


def host_name(machine: int, host: int, hosts: int) -> str:
    """Returns the name of the folder of host `host` of a machine with `hosts` hosts."""
    return f"machine_{machine:03d}" + (f"_host_{host:02d}" if hosts > 1 else "")


def read_folders(root: Folder) -> dict[str, Stored]:
    """Returns what is stored in each folder, by the folder's name ("" for the output itself).

    Raises InputError when there is no extraction at all.
    """
    here = root.listing()
    names = list(host_folders(here))
    if own_files(here):
        names.insert(0, "")
    with ThreadPoolExecutor(FOLDERS) as pool:
        stored = list(pool.map(lambda name: read_stored(root.child(name)), names))
    found = {name: s for name, s in zip(names, stored, strict=True) if own_files(s.files)}
    if not found:
        raise InputError(f"{root.url}: holds no extraction")
    return found


def read_run(url: str) -> tuple[Folder, dict[str, Stored]]:
    """Returns a run and its folders, which have everything that their JSON files promise.

    Raises ValueError if there is no run or if its folders do not belong together, and OSError if
    files are missing, cut short or damaged.
    """
    try:
        root = Folder(url)
        folders = read_folders(root)
    except InputError as error:
        raise ValueError(str(error)) from error
    except RunError as error:
        raise OSError(str(error)) from error
    for stored in folders.values():
        for problem in stored.problems:
            option = "--repair" if stored.identity is None else stored.identity.repair_option
            remedy = "" if OTHER_VERSION in problem else f"; {option} repairs it"
            raise OSError(f"{problem}{remedy}")
        if stored.moved_to and stored.lacking:
            raise OSError(f"{stored.url}: the shards were uploaded to {stored.moved_to}")
    for stranger in strangers(folders):
        raise ValueError(f"{root.url}: {stranger}")
    return root, folders


def strangers(folders: dict[str, Stored]) -> Iterator[str]:
    """Yields which folders are not part of the same run as the first one that is readable."""
    expected = expected_names(folders)
    hosts: dict[int, int] = {}  # of every machine
    known = [(name, stored.identity) for name, stored in folders.items() if stored.identity]
    for name, stored in folders.items():
        where = name or "the output itself"
        if name not in expected:
            yield f"{where}: holds shards that are not part of this run"
        if (identity := stored.identity) is None:
            continue
        own = host_name(identity.machine, identity.host, identity.num_hosts)
        first, shared = known[0]
        if difference := shared.compare(identity, shared_only=True):
            field, found, there = difference
            elsewhere = f"{shown(there, found)} in {first or 'the output itself'}"
            other = f"its {field} is {shown(found, there)}, but {elsewhere}"
            yield f"{where}: belongs to another run: {other}"
        elif hosts.setdefault(identity.machine, identity.num_hosts) != identity.num_hosts:
            yield f"{where}: belongs to another run: its num_hosts differs"
        elif name not in ("", own):
            yield f"{where}: holds the shards of {own}"


def expected_names(folders: dict[str, Stored]) -> list[str]:
    """Returns the folders that the run has once it is finished, as far as those found tell.

    Each machine has its own number of hosts.
    """
    known = {name: s.identity for name, s in folders.items() if s.identity is not None}
    if not known:
        return list(folders)
    if "" in known:
        return [""]
    hosts: defaultdict[int, int] = defaultdict(lambda: 1)  # by machine, as far as names tell
    for folder in host_folders(folders).values():
        if folder.host is not None:
            hosts[folder.machine] = max(hosts[folder.machine], folder.host + 1, 2)
    for identity in reversed(known.values()):
        hosts[identity.machine] = identity.num_hosts
    machines = range(next(iter(known.values())).total_machines)
    return [host_name(m, host, hosts[m]) for m in machines for host in range(hosts[m])]
