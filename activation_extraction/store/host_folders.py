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
from dataclasses import dataclass, replace
from pathlib import Path

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.store.commit import REPAIRS
from activation_extraction.store.folder import Folder, local_path
from activation_extraction.store.local_files import is_locked, running_system
from activation_extraction.store.metadata import Stored, own_files, read_stored
from activation_extraction.store.resume import shown

NAME = re.compile(r"machine_([0-9]{3}|[1-9][0-9]{3,})(?:_host_([0-9]{2}|[1-9][0-9]{2,}))?")
FOLDERS = 16  # read at the same time


@dataclass(frozen=True, order=True)
class HostFolder:
    """The folder of one host; `host` is None if the machine has a single host."""

    machine: int
    host: int | None = None

    @classmethod
    def of(cls, machine: int, host: int, hosts: int) -> "HostFolder":
        """Returns the folder of host `host` of a machine with `hosts` hosts."""
        return cls(machine, host if hosts > 1 else None)

    @classmethod
    def parse(cls, name: str) -> "HostFolder | None":
        """Returns the host whose folder has this name; None if it is not the name of such a
        folder."""
        found = NAME.fullmatch(name)
        return found and cls(int(found[1]), None if found[2] is None else int(found[2]))

    @property
    def name(self) -> str:
        host = "" if self.host is None else f"_host_{self.host:02d}"
        return f"machine_{self.machine:03d}{host}"


def host_folders(names: Iterable[str]) -> dict[str, HostFolder]:
    """Returns those of `names` that name the folder of a host, in the same order."""
    parsed = {name: HostFolder.parse(name) for name in names}
    return {name: folder for name, folder in parsed.items() if folder is not None}


def read_folders(root: Folder) -> dict[str, Stored]:
    """Returns what is stored in each folder, by the folder's name ("" for the output itself).

    Raises InputError when there is no extraction at all.
    """
    here = root.listing()
    names = list(host_folders(here))
    if own_files(here):
        names.insert(0, "")
    with ThreadPoolExecutor(FOLDERS) as pool:
        stored = list(pool.map(lambda name: _read(root.child(name)), names))
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
            raise OSError(problem if stored.damaged else f"{problem}; {REPAIRS}")
        if stored.moved_to and not all(map(stored.has, stored.in_order)):
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
        own = HostFolder.of(identity.machine, identity.host, identity.num_hosts).name
        first, shared = known[0]
        if difference := shared.compare(identity, shared_only=True):
            before, now = shown(difference.before), shown(difference.now)
            other = (
                f"its {difference.name} is {before}, but {now} in {first or 'the output itself'}"
            )
            yield f"{where}: belongs to another run: {other}"
        elif hosts.setdefault(identity.machine, identity.num_hosts) != identity.num_hosts:
            yield f"{where}: belongs to another run: its num_hosts differs"
        elif name not in ("", own):
            yield f"{where}: holds the shards of {own}"


def _read(folder: Folder) -> Stored:
    """What is stored in a folder, and whether a process holds it.

    Reads again when files are missing or the run seems dead: it may have written in between.
    """
    stored = read_stored(folder)
    locked = _locked(stored)
    if locked is not False and not any(stored.missing()):
        return replace(stored, locked=locked)
    again = read_stored(folder)
    return replace(again, locked=locked if again.metadata == stored.metadata else None)


def _locked(stored: Stored) -> bool | None:
    """Whether a process of this machine holds the folder; None where that cannot be seen."""
    metadata = stored.metadata or {}
    runs_here = metadata.get("status") == "running" and metadata.get("system") == running_system()
    if stored.in_bucket or not runs_here:
        return None
    return is_locked(Path(local_path(stored.url)))


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
    return [HostFolder.of(m, host, hosts[m]).name for m in machines for host in range(hosts[m])]
