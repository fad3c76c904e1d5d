"""Opens a data set as a stream of rows: files of one kind, or a data set on the hub.

file_list.py lists the files, and file_rows.py reads them, here or at a URL. Each row of a file
comes with its position, for messages about it; documents.py gives a row of a hub data set its
number.
"""

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
from huggingface_hub import HfApi, constants

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.retries import (
    hub_requests,
    hub_unreachable,
    name_unknown,
    unwritable_cache,
)
from activation_extraction.text.file_forms import FORM_BYTES, check_form, open_file
from activation_extraction.text.file_list import (
    FILES_AT_ONCE,
    TextFile,
    kind_of,
    list_files,
    refusing,
)
from activation_extraction.text.file_rows import file_rows
from activation_extraction.text.rows import Columns


def open_files(
    path: str, columns: Columns, files: Sequence[TextFile] | None = None
) -> datasets.IterableDataset:
    """Opens the files of `path`. files: in the order in which they are read; None: as listed.

    Of local files of text, which may grow, no more is read than their size in `files`. Only the
    needed columns of Parquet and Arrow files are read. Raises InputError if a Parquet file is not
    what its name says.
    """
    files = list_files(path) if files is None else files
    with refusing(path), _scratch_cache():
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            counts = zip(files, pool.map(_row_groups, files), strict=True)
            pieces = [(file, number) for file, count in counts for number in range(count)]
        if not pieces:
            raise InputError(f"--dataset_path {path}: is empty; expected rows with text")
        kwargs = {"pieces": pieces, "wanted": columns}
        return datasets.IterableDataset.from_generator(file_rows, gen_kwargs=kwargs)


def _row_groups(file: TextFile) -> int:
    """Returns how many row groups a Parquet file has; 1 for any other file."""
    if kind_of(file.url) != "Parquet":
        return 1
    with refusing(file.url), open_file(file.url) as opened:
        try:
            return pyarrow.parquet.ParquetFile(opened).num_row_groups
        except pyarrow.ArrowException:
            opened.seek(0)
            check_form(opened.read(FORM_BYTES))
            raise


@contextmanager
def _scratch_cache() -> Iterator[None]:
    """Gives `datasets` a temporary cache, for which it asks whatever it opens: its own may not be
    writable, and streams keep nothing there."""
    own = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as scratch:
        datasets.config.HF_DATASETS_CACHE = Path(scratch)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = own


def open_hub_dataset(
    name: str, config: str | None, split: str, revision: str | None = None
) -> tuple[datasets.IterableDataset, str]:
    """Opens a hub data set; returns its stream and its revision, by default the newest one.

    Raises InputError with the hub's reason if it cannot be opened.
    """
    wanted = " ".join(filter(None, (name, config, split)))
    try:
        if unreachable := hub_unreachable(constants.ENDPOINT):
            raise unreachable
        with hub_requests(f"--dataset_name {wanted}"), _scratch_cache():
            revision = revision or str(HfApi().dataset_info(name).sha)
            rows = datasets.load_dataset(
                name, config, split=split, revision=revision, streaming=True
            )
        return rows, revision
    except Exception as error:  # whatever the hub, the network or a file format may raise
        reason = unwritable_cache(error) or one_line(error)
        if name_unknown(error):
            reason = "the hub's name does not resolve: offline? --dataset_path reads local files"
        raise InputError(f"--dataset_name {wanted}: {reason}") from error
