"""Exports a run to files that trainers of autoencoders read, in chunks of tokens.

trainer_files.py writes the files of each trainer. `export.json` in the folder records which chunks
are complete and where the export continues. At the end, the statistics of what was exported are
compared with those of the run.
"""

import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import counted, say
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.inspect.trainer_files import FORMATS, Contents
from activation_extraction.store.commit import METADATA
from activation_extraction.store.local_files import write_bytes
from activation_extraction.store.metadata import identity_of
from activation_extraction.store.sealed_json import seal, unseal
from activation_extraction.store.statistics import Statistics, defined_tokens

STATE = "export.json"
FOLDER_NAME = re.compile(r"(?!\.)[\w .:+@-]{1,200}")  # a hook of a stranger's run may be any text
CHUNK_BYTES = 256 * 2**20  # of all hooks together; four times as much is in memory
# Statistics of what was exported, and what they are called in those of a hook.
COMPARED = {
    "mean": "overall_mean",
    "variance": "overall_variance",
    "mean_norm": "mean_norm",
    "max_norm": "max_norm",
}


class TokenExport:
    """An export of tokens to a folder, which may have been begun already. size: in tokens."""

    unit = " tokens"

    def __init__(
        self,
        dataset: ActivationDataset,
        form: str,
        source: str,
        hooks: dict[str, int],
        folder: Path,
    ) -> None:
        """Prepares an export. source, hooks: see Contents. Raises InputError if there are too few
        tokens."""
        for hook in hooks:
            if not FOLDER_NAME.fullmatch(hook):
                raise InputError(f"--export {form}: hook {hook!r:.80} cannot name a folder")
        trainer_files = FORMATS[form]
        together = trainer_files.TOGETHER
        if dataset.tokens < together:
            raise InputError(
                f"--export {form}: {dataset.url} holds {counted(dataset.tokens, 'token')}; "
                f"expected at least {together}"
            )
        self.folder, self.size, self._dataset = folder, dataset.tokens, dataset
        self._identity = identity_of(dataset.metadata, METADATA)
        dtype, *own_dtypes = (
            trainer_files.WRITTEN_AS.get(each.name, each.name)
            for each in (dataset.dtype, *map(dataset.dtypes.__getitem__, hooks))
        )
        own = {name: own for name, own in zip(hooks, own_dtypes, strict=True) if own != dtype}
        one_by_one = Contents(form, source, hooks, dtype, self.size, 1, own)
        pieces = CHUNK_BYTES // sum(map(one_by_one.row_bytes, hooks)) // together
        self._contents = replace(one_by_one, per_chunk=max(1, pieces) * together)
        self._files = trainer_files(folder, self._contents)
        # How many chunks are complete; whether the whole export is; the state of the batches; the
        # statistics of the exported activations, by hook.
        self._progress: dict[str, Any] = {
            "chunks": 0,
            "finished": False,
            "reading": None,
            "statistics": {},
        }

    def resume(self) -> bool:
        """Finds out what was exported already, and returns whether that is everything.

        Raises InputError if the folder holds anything else.
        """
        path, remedy = self.folder / STATE, f"delete {self.folder} and export again"
        if not path.exists():
            if any(name != f".{STATE}.tmp" for name in os.listdir(self.folder)):
                raise InputError(
                    f"--export_dir {self.folder}: holds other files; expected an empty folder"
                )
            self._record()
            return False
        try:
            state = unseal(path.read_bytes(), str(path))
        except RunError as error:
            raise InputError(f"{path}: is damaged; {remedy}") from error
        for name, expected in asdict(self._contents).items():
            if (value := {"own_dtypes": {}, **state["contents"]}.get(name)) != expected:
                content = f"{name} {value}, not {expected}" if name != "source" else "other shards"
                raise InputError(
                    f"--export_dir {self.folder}: holds another export, with {content:.200}"
                )
        self._progress = state["progress"]
        for chunk in range(self._progress["chunks"]):
            for hook in self._contents.hooks:
                path = self._files.path(hook, chunk)
                if not path.exists() or path.stat().st_size != self._files.size(hook, chunk):
                    raise InputError(f"{path}: is missing or has another size; {remedy}")
        if self._progress["finished"]:
            self._files.clean_up()
        return self._progress["finished"]

    @property
    def left(self) -> int:
        """How many tokens are left to export."""
        return max(self.size - self._progress["chunks"] * self._contents.per_chunk, 0)

    @property
    def bytes_needed(self) -> int:
        """The most bytes that the files that are left can have."""
        token_bytes = sum(map(self._contents.row_bytes, self._contents.hooks))
        return self.left * (token_bytes + 16 * len(self._contents.hooks))

    def write(self) -> Iterator[int]:
        """Writes the chunks that are left, and yields the number of tokens after each."""
        contents, progress, per_chunk = self._contents, self._progress, self._contents.per_chunk
        statistics = progress["statistics"]
        batches = self._dataset.batches(per_chunk, list(contents.hooks), buffer=2 * per_chunk)
        if progress["reading"] is not None:
            batches.restore(progress["reading"])
        try:
            for chunk in range(progress["chunks"], contents.chunks):
                batch = next(batches)
                self._files.write(chunk, batch)
                for hook, values in batch.activations.items():
                    if self._identity.leaves_out_firsts(hook):
                        values = values[defined_tokens(values, batch.position)]
                    merged = Statistics.from_array(values)
                    if hook in statistics:
                        merged = Statistics.from_json(statistics[hook]).merge(merged)
                    statistics[hook] = merged.to_json()
                progress |= {"chunks": chunk + 1, "reading": batches.state()}
                self._record()
                yield len(batch)
        finally:
            batches.close()
        self._compare()
        self._files.finish(self._dataset.statistics)
        progress["finished"] = True
        self._record()
        self._files.clean_up()

    def _record(self) -> None:
        state = {"contents": asdict(self._contents), "progress": self._progress}
        write_bytes(self.folder / STATE, seal(state))

    def _compare(self) -> None:
        """Raises RunError unless the exported activations have the statistics of the run."""
        for hook in self._contents.hooks:
            exported = Statistics.from_json(self._progress["statistics"][hook])
            recorded = self._dataset.statistics[hook]
            # Integers have no statistics.
            for name, of_hook in COMPARED.items() if recorded.tokens else ():
                value, expected = getattr(exported, name), getattr(recorded, of_hook)
                if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9):
                    raise RunError(
                        f"{self.folder}: {hook}: the {name} of what was exported is {value}, the "
                        f"run's is {expected}",
                        remedy="run --verify on the run",
                    )

    def say_summary(self) -> None:
        """Prints what was exported, and how to read it."""
        contents, hook = self._contents, next(iter(self._contents.hooks))
        left_out = contents.tokens % self._files.TOGETHER
        tokens = contents.tokens - left_out
        size = tokens * sum(map(contents.row_bytes, contents.hooks))
        say(
            f"exported: {counted(tokens, 'token')}, {counted(len(contents.hooks), 'hook')}"
            f", {counted(contents.chunks, 'chunk')}, {size / 1e9:,.3f} GB of activations in "
            f"{self.folder}",
        )
        if left_out:
            say(
                f"left out: the last {counted(left_out, 'token')} of the run, too few for a row of "
                f"{self._files.TOGETHER}"
            )
        say("read it with:", f"  {self._files.how_to_read(hook)}")
