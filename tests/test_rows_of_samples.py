"""What becomes of every row: a sample that knows its row and what was cut off, or it is counted."""

import json
import threading

import datasets
import numpy as np
import pytest
from command_line import assert_refused, main
from pods import flags_for
from small_runs import TEXT, byte_tokenizer, stream_of  # noqa: F401
from test_bad_rows import write_lines, write_parquet

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import RunError
from activation_extraction.run.host_text import Prefetch
from activation_extraction.run.hosts import Watchdog
from activation_extraction.text import samples as text_samples
from activation_extraction.text.batch import Worker
from activation_extraction.text.documents import DocumentStream
from activation_extraction.text.rows import Content
from activation_extraction.text.samples import SampleForm, samples

EMPTY = ['{"text": ""}', '{"text": null}', r'{"text": " \n　"}']


def lines(count):
    return [json.dumps({"text": f"text number {n} " * (n + 1), "id": n}) for n in range(count)]


@pytest.fixture
def extract(demo_inputs, tmp_path):
    def run(output, *more, path=tmp_path / "rows.jsonl"):
        few = "--layers_to_extract", 1, "--batch_size", 2, "--no_data_parallel"
        flags = flags_for(demo_inputs, tmp_path / output, *more, hooks=few)
        return main(*flags, "--dataset_path", path)

    return run


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_a_sample_knows_its_row_and_rows_without_text_are_counted(
    extract, tmp_path, capsys, shard_format
):
    """So labels can be joined by row, whatever is left out."""
    every = lines(30)
    every[5:5] = EMPTY
    write_lines(tmp_path / "rows.jsonl", every)
    small = "--shard_format", shard_format, "--shard_size_gb", 1e-4
    assert extract("out", *small, "--max_samples", 12) == 0
    assert extract("out", *small) == 0  # goes on
    assert "\nempty: 3 rows without text, which gave no sample\n" in capsys.readouterr().out
    dataset = ActivationDataset(tmp_path / "out")
    assert sorted(s.row["line"] for s in dataset) == [*range(1, 6), *range(9, 34)]
    assert all(json.loads(every[s.row["line"] - 1])["id"] == s.doc_id for s in dataset)
    assert {s.row["file"] for s in dataset} == {"rows.jsonl"}
    assert dataset.metadata["empty_rows"] == 3 and dataset.metadata["skipped_rows"] == 0


def test_empty_rows_at_the_end_count_too_and_once(extract, tmp_path):
    write_lines(tmp_path / "rows.jsonl", [*lines(4), *EMPTY])
    for _ in range(2):
        assert extract("out") == 0
        metadata = json.loads((tmp_path / "out/metadata.json").read_text())
        assert (metadata["samples"], metadata["empty_rows"]) == (4, 3)


def test_rows_of_parquet_and_of_hub_data_sets(tmp_path):
    for name in "ab":
        write_parquet(tmp_path / f"{name}.parquet", 2, text=[f"{name}{n}" for n in range(5)])
    stream = stream_of(tmp_path)
    rows = {document.content.text: document.row for document in stream}
    assert rows["a3"] == {"file": "a.parquet", "row_group": 1, "row": 1}
    assert rows["b4"] == {"file": "b.parquet", "row_group": 2, "row": 0}
    hub = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), split="train", streaming=True
    )
    assert [d.row for d in DocumentStream(hub, TEXT)] == [{"row": n} for n in range(10)]
    for workers in (2, 3, 7):
        every = [
            (document.content.text, json.dumps(document.row))
            for host in range(workers)
            for document in DocumentStream(hub, TEXT, Worker(0, 1, host, workers))
        ]
        assert len(every) == len({row for _, row in every}) == 10
        assert all('"share": ' in row for _, row in every)


def test_what_is_cut_is_counted_and_said(extract, tmp_path, capsys, tokenizer):
    """Of a corpus of long documents, most may be left out."""
    texts = [f"word {n} and more " * count for n, count in enumerate((1, 500, 2, 3000, 3))]
    write_lines(tmp_path / "rows.jsonl", [json.dumps({"text": text}) for text in texts])
    assert extract("out", "--positions", "last") == 0
    dataset = ActivationDataset(tmp_path / "out")
    sizes = [len(tokenizer.encode(text).ids) for text in texts]
    expected = [max(size - 64, 0) for size in sizes]
    assert [sample.cut for sample in dataset] == expected
    told = f"\ncut: 2 samples at 64 tokens (--max_seq_length); left out: {sum(expected):,} tokens"
    assert told in capsys.readouterr().out
    metadata = json.loads((tmp_path / "out/metadata.json").read_text())
    assert (metadata["cut_samples"], metadata["cut_tokens"]) == (2, sum(expected))


def test_tokens_of_a_long_text_are_counted_in_pieces(tokenizer, monkeypatch):
    monkeypatch.setattr(text_samples, "PIECE_CHARACTERS", 100)
    text = "".join(f"line {n}: some words, and 12 more\n" * (n % 3 + 1) for n in range(300))
    expected = len(tokenizer.encode(text).ids)
    assert text_samples._count(tokenizer, text) == expected
    assert text_samples._tokenise(tokenizer, [Content(text)], 5)[0].total == expected


@pytest.mark.parametrize("rule", ["5:2", "-2:-5", "64:", "3:3", "random:1e-300"])
def test_positions_that_keep_nothing_are_refused(capsys, tmp_path, rule):
    flags = [f"--positions={rule}", "--max_seq_length", "64"]
    assert_refused(capsys, tmp_path, flags, "keeps no token of any sample; samples have at most 64")


def test_dropping_every_token_id_is_refused(extract, tmp_path, capsys):
    write_lines(tmp_path / "rows.jsonl", lines(2))
    assert extract("out", "--drop_token_ids", *range(2048)) == 2
    assert "--drop_token_ids: names every token of the model" in capsys.readouterr().err


def test_a_run_that_kept_no_token_fails(extract, tmp_path, capsys):
    """Also when the same command is given again."""
    write_lines(tmp_path / "rows.jsonl", [json.dumps({"text": "short"})] * 3)
    for _ in range(2):
        assert extract("out", "--positions", "60:") == 1
        err = capsys.readouterr().err
        assert (
            "error: no token was stored: no sample has a token that is kept (positions 60:)" in err
        )


class Panic(BaseException):
    """As pyo3_runtime.PanicException, it is no Exception."""


class Panicking:
    """A tokenizer that cannot take some texts."""

    def __init__(self, tokenizer, taken=lambda text: "panic" not in text):
        self.tokenizer, self.taken = tokenizer, taken

    def encode_batch(self, texts, **options):
        if not all(map(self.taken, texts)):
            raise Panic("Regex search error: retry-limit-in-match over")
        return self.tokenizer.encode_batch(texts, **options)


def test_a_text_that_the_tokenizer_cannot_take_is_a_bad_row(tmp_path, byte_tokenizer):  # noqa: F811
    path = write_lines(
        tmp_path / "a.jsonl",
        [json.dumps({"text": text}) for text in ("a", "b", "panic", "", "c", "panic", "d")],
    )
    found, why = [], f"a row cannot be used: {path} line 3: the tokenizer cannot take it: Regex"
    with pytest.raises(RunError, match=why) as caught:
        stream = stream_of(path)
        found.extend(samples(stream, Panicking(byte_tokenizer), SampleForm(8)))
    assert "--skip_bad_rows" in caught.value.remedy
    assert [sample.row["line"] for sample in found] == [1, 2]
    stream = stream_of(path, skip=True)
    whole = [*samples(stream, Panicking(byte_tokenizer), SampleForm(8))]
    assert [sample.row["line"] for sample in whole] == [1, 2, 5, 7]
    assert (stream.counts.skipped, stream.counts.empty) == (2, 1)
    counts = [(s.next_cursor.skipped_rows, s.next_cursor.empty_rows) for s in whole]
    assert counts == [(0, 0), (0, 0), (1, 1), (2, 1)]
    for number, sample in enumerate(whole):  # from every cursor
        stream = stream_of(path, skip=True)
        again = [*samples(stream, Panicking(byte_tokenizer), SampleForm(8), start=sample.cursor)]
        assert [s.next_cursor for s in again] == [s.next_cursor for s in whole[number:]]
        assert (stream.counts.skipped, stream.counts.empty) == (2, 1)


@pytest.mark.long
def test_ten_million_spaces(extract, tmp_path, capfd):
    """The real tokenizer gives up; the run names the row, or passes over it."""
    spaces = json.dumps({"text": "a" + " " * 10**7 + "b"})
    write_lines(tmp_path / "rows.jsonl", [*lines(3), spaces, *lines(3)])
    assert extract("out", "--max_seq_length", 512) == 1  # once what is before it is stored
    where = f"{tmp_path}/rows.jsonl line 4: the tokenizer cannot take it: "
    assert where in capfd.readouterr().err
    assert extract("out", "--max_seq_length", 512, "--skip_bad_rows") == 0
    assert "\nskipped: 1 row that could not be used" in capfd.readouterr().out


def test_whatever_ends_the_preparation_of_batches_is_raised():
    def items():
        yield 1
        raise Panic("gone")

    prefetch = Prefetch(items(), 2)
    assert next(iter(prefetch)) == 1
    with pytest.raises(RunError, match="preparing batches failed: gone"):
        next(iter(prefetch))


def test_the_watchdog_watches_one_block_after_another(monkeypatch):
    """As over the wait for the first batch, and then over the steps."""
    ended, now = threading.Event(), [0.0]
    monkeypatch.setattr("activation_extraction.run.hosts._end_process", lambda _: ended.set())
    monkeypatch.setattr("activation_extraction.run.hosts.time.monotonic", lambda: now[0])
    before, watchdog = set(threading.enumerate()), Watchdog(0.2)
    with watchdog:
        (watching,) = set(threading.enumerate()) - before
    watching.join(300)
    assert not watching.is_alive() and not ended.is_set()
    with watchdog:
        now[0] += 1
        assert ended.wait(600)


def test_the_first_row_and_the_wait_for_the_first_batch_are_watched(extract, tmp_path, monkeypatch):
    """A reader that never returns would otherwise hang the run past every timeout."""
    write_lines(tmp_path / "rows.jsonl", lines(2))
    watched = []
    enter, peek = Watchdog.__enter__, Prefetch.peek
    monkeypatch.setattr(Watchdog, "__enter__", lambda self: watched.append("on") or enter(self))
    monkeypatch.setattr(Prefetch, "peek", lambda self: watched.append("peek") or peek(self))
    assert extract("out") == 0
    assert watched[:3] == ["on", "on", "peek"]
    assert np.all([event in ("on", "peek") for event in watched])
