"""Every kind of file gives the same rows: all of them once, and exactly from any of them on."""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc

import fsspec
import pyarrow
import pyarrow.ipc
import pytest
import row_files
from small_runs import stream_of

from activation_extraction.text.batch import Worker


def rows_of(numbers):
    """Rows whose texts have what CSV has to quote."""
    return [{"text": f'a "text",\r\nnumber {n}: é\n', "id": f"id {n}"} for n in numbers]


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_zstd(rows):
    """Two frames, as of files that were put together."""
    parts = as_lines(rows[:3]), as_lines(rows[3:])
    return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in parts)


def as_csv(rows):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["other", *rows[0]], restval="x")
    writer.writeheader()
    writer.writerows(rows)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def as_arrow(rows, new=pyarrow.ipc.new_file):
    rows = [{"other": {"a": [b"\xff"]}, **row} for row in rows]
    return row_files.as_arrow(pyarrow.Table.from_pylist(rows), new, max_chunksize=4)


def as_parquet(rows):
    return row_files.as_parquet(pyarrow.Table.from_pylist(rows), 4)


# How a file's name ends, how its content is made, and how the last of nine rows is counted.
KINDS = [
    (".jsonl", as_lines, {"line": 9}),
    (".NDJSON", as_lines, {"line": 9}),
    (".json", as_lines, {"line": 9}),
    (".json", lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode(), {"row": 8}),
    (".jsonl.gz", lambda rows: gzip.compress(as_lines(rows)), {"line": 9}),
    (".json.gz", lambda rows: gzip.compress(as_lines(rows)), {"line": 9}),
    (".Jsonl.bz2", lambda rows: bz2.compress(as_lines(rows)), {"line": 9}),
    (".json.xz", lambda rows: lzma.compress(json.dumps(rows).encode()), {"row": 8}),
    (".jsonl.zst", as_zstd, {"line": 9}),
    (".zst", as_zstd, {"line": 9}),
    (".csv", as_csv, {"row": 8}),
    (".csv.gz", lambda rows: gzip.compress(as_csv(rows)), {"row": 8}),
    (".parquet", as_parquet, {"row_group": 2, "row": 0}),
    (".arrow", as_arrow, {"row": 8}),
    (".arrow", lambda rows: as_arrow(rows, pyarrow.ipc.new_stream), {"row": 8}),
]


@pytest.mark.parametrize("place", ["here", "url"])
@pytest.mark.parametrize("end,content_of,last", KINDS)
def test_every_row_once_and_from_any_of_them_on(tmp_path, place, end, content_of, last):
    place = f"memory://{tmp_path.name}" if place == "url" else tmp_path
    for number, rows in enumerate((rows_of(range(9)), rows_of(range(9, 14)))):
        with fsspec.open(f"{place}/{number}{end}", "wb", auto_mkdir=True) as file:
            file.write(content_of(rows))
    shares = [Worker(machine, 2, host, 2) for machine in range(2) for host in range(2)]
    found = {}
    for worker in (Worker(), *shares):
        stream = stream_of(place, worker)
        states, every = [], []
        for document in stream:
            every.append((document.content.text, document.doc_id, document.row))
            states.append(json.loads(json.dumps(stream.state())))
        for number, state in enumerate(states, start=1):
            again = stream_of(place, worker)
            again.restore(state)
            assert [(d.content.text, d.doc_id, d.row) for d in again] == every[number:]
        found[worker] = every
    alone = found.pop(Worker())
    assert [(text, own) for text, own, _ in alone] == [
        (r["text"], r["id"]) for r in rows_of(range(14))
    ]
    assert alone[8][-1] == {"file": f"0{end}", **last}
    assert len({str(row) for *_, row in alone}) == 14
    assert sorted(map(str, sum(found.values(), []))) == sorted(map(str, alone))


def test_memory_does_not_grow_with_the_file(tmp_path):
    """tracemalloc sees what Python holds of lines and fields."""
    rows = [{"text": "x" * 5000, "id": str(n)} for n in range(1000)]
    for name, content in (("a.jsonl.zst", as_zstd(rows)), ("a.csv", as_csv(rows))):
        (tmp_path / name).write_bytes(content)
        documents = iter(stream_of(tmp_path / name))
        next(documents)
        tracemalloc.start()
        assert sum(1 for _ in documents) == 999
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1e6  # the file has 5 MB
