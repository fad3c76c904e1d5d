"""Opens an ActivationStorage with everything as keywords, and leaves one as SIGKILL does."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from activation_extraction.cli.flags import StorageOptions
from activation_extraction.store.identity import RunFacts
from activation_extraction.store.storage import ActivationStorage

OPTIONS = {field.name for field in fields(StorageOptions)}
FACTS = {"metadata": "metadata", "hook_facts": "hooks", "sources": "sources"}


def open_storage(folder: str | Path, hooks: dict[Any, str], **given: Any) -> ActivationStorage:
    """given: arguments of ActivationStorage, fields of StorageOptions, and `metadata`,
    `hook_facts` and `sources` for RunFacts."""
    options = StorageOptions(**{name: given.pop(name) for name in OPTIONS & set(given)})
    facts = RunFacts(**{FACTS[name]: given.pop(name) for name in FACTS.keys() & set(given)})
    return ActivationStorage(folder, hooks, options, facts=facts, **given)


def kill(storage: ActivationStorage) -> None:
    """Leaves what SIGKILL leaves: what is committed, and the status that it had."""
    storage._writer.queue.wait()
    storage.close()
