"""What becomes of every row: a sample that knows its row and what was cut off, or it is counted."""

import json
from types import SimpleNamespace

import datasets
import pytest
from command_line import main
from pods import flags_for
from row_files import write_lines, write_parquet, write_rows
from small_runs import TEXT, documents_in, stream_of

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import RunError
from activation_extraction.text import sources
from activation_extraction.text.batch import Worker
from activation_extraction.text.documents import DocumentStream
from activation_extraction.text.file_rows import file_rows
from activation_extraction.text.samples import SampleSettings, samples

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


def test_a_sample_knows_its_row_and_rows_without_text_are_counted(extract, tmp_path, capsys):
    """Labels can be joined by row, whatever is left out. Empty rows count once, also at the
    end."""
    every = [*lines(30), *EMPTY]
    every[5:5] = EMPTY
    write_lines(tmp_path / "rows.jsonl", every)
    small = "--shard_size_gb", 1e-4
    assert extract("out", *small, "--max_samples", 12) == 0
    for _ in range(2):  # goes on, and is complete
        assert extract("out", *small) == 0
        told = "\nempty: 6 rows without text, which gave no sample\n"
        assert told in capsys.readouterr().out
        dataset = ActivationDataset(tmp_path / "out")
        assert dataset.metadata["empty_rows"] == 6 and dataset.metadata["skipped_rows"] == 0
    assert sorted(s.row["line"] for s in dataset) == [*range(1, 6), *range(9, 34)]
    assert all(json.loads(every[s.row["line"] - 1])["id"] == s.doc_id for s in dataset)
    assert {s.row["file"] for s in dataset} == {"rows.jsonl"}


def test_rows_of_hub_data_sets(tmp_path, monkeypatch):
    for name in "ab":
        write_parquet(tmp_path / f"{name}.parquet", 2, text=[f"{name}{n}" for n in range(5)])
    hub = datasets.load_dataset(
        "parquet", data_files=str(tmp_path / "*.parquet"), split="train", streaming=True
    )
    rows = [document.row_position_fields for document in documents_in(DocumentStream(hub, TEXT))]
    assert rows == [{"row": n} for n in range(10)]
    monkeypatch.setattr(sources, "BLOCK_ROWS", 2)
    stream = DocumentStream(hub, TEXT, shuffle=1)
    shuffled = {
        document.content.text: document.row_position_fields for document in documents_in(stream)
    }
    assert list(shuffled) != sorted(shuffled)
    numbers = [(shard, n) for shard in range(2) for n in range(5)]
    assert shuffled == {f"{'ab'[shard]}{n}": {"shard": shard, "row": n} for shard, n in numbers}
    for workers in (2, 3, 7):
        every = [
            (document.content.text, json.dumps(document.row_position_fields))
            for host in range(workers)
            for document in documents_in(DocumentStream(hub, TEXT, Worker(0, 1, host, workers)))
        ]
        assert len(every) == len({row for _, row in every}) == 10
        assert all('"share": ' in row for _, row in every)


def test_files_are_divided_and_continued_as_stored_runs_have_it(tmp_path):
    """Their marks and shares were those of `datasets`, on which they no longer depend."""
    for name, count in {"a": 7, "b": 1, "c": 4}.items():  # in row groups of two
        write_parquet(tmp_path / f"{name}.parquet", 2, text=[f"{name}{n}" for n in range(count)])
    files = sources.open_files(str(tmp_path), TEXT)

    def rows_of_partitions(partitions):
        for file, row_group in partitions:
            yield from file_rows(file, row_group, TEXT)

    kwargs = {"partitions": [*files._partitions]}
    before = datasets.IterableDataset.from_generator(rows_of_partitions, gen_kwargs=kwargs)
    assert files.num_shards == before.num_shards == 7 and len([*files]) == 12

    def rows_and_marks(rows):
        return [(row.location_phrase, rows.state_dict()["examples_iterable"]) for row in rows]

    for count in range(1, 8):
        for index in range(count):
            share, old = (each.shard(num_shards=count, index=index) for each in (files, before))
            expected = [
                (where, {name: value for name, value in mark.items() if name != "type"})
                for where, mark in rows_and_marks(old)
            ]
            assert rows_and_marks(share) == expected
            assert rows_and_marks(share) == expected  # again from the beginning
            for number in range(len(expected)):
                position = iter(old)
                for _ in range(number + 1):
                    next(position)
                share.load_state_dict(old.state_dict())
                assert share.state_dict()["examples_iterable"] == expected[number][1]
                assert rows_and_marks(share) == expected[number + 1 :]
                share = files.shard(num_shards=count, index=index)


def test_what_is_cut_is_counted_and_said(extract, tmp_path, capsys, tokenizer):
    """Of a corpus of long documents, most may be left out."""
    texts = [f"word {n} and more " * count for n, count in enumerate((1, 500, 2, 3000, 3))]
    write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])
    assert extract("out", "--positions", "last") == 0
    dataset = ActivationDataset(tmp_path / "out")
    expected = [max(len(tokenizer.encode(text).ids) - 64, 0) for text in texts]
    assert [sample.cut for sample in dataset] == expected
    told = f"\ncut: 2 samples at 64 tokens (--max_seq_length); left out: {sum(expected):,} tokens"
    assert told in capsys.readouterr().out
    known = dataset.metadata
    assert (known["cut_samples"], known["cut_tokens"]) == (2, sum(expected))


def test_a_run_that_keeps_no_token_fails(extract, tmp_path, capsys):
    """It fails again when the same command is given again, and yet all is in order."""
    write_rows(tmp_path / "rows.jsonl", [{"text": "short"}] * 3)
    for _ in range(2):
        assert extract("out", "--positions", "60:") == 2
        told = "error: no token was stored: no sample has a token that is kept (positions 60:)"
        assert told in capsys.readouterr().err
    assert main("--verify", "--output_dir", tmp_path / "out") == 0
    dataset = ActivationDataset(tmp_path / "out")
    assert (len(dataset), dataset.tokens) == (3, 0) and dataset[1].token_ids.shape == (0,)
    assert extract("new", "--drop_token_ids", *range(2048)) == 2
    assert "--drop_token_ids: names every token of the model" in capsys.readouterr().err


def test_a_text_that_the_tokenizer_cannot_take_is_a_bad_row(tmp_path, tokenizer):
    def encode_batch(texts, **options):
        if any("panic" in text for text in texts):
            raise BaseException("Regex search error")  # what panics in Rust raises is no Exception
        return tokenizer.encode_batch(texts, **options)

    panicking = SimpleNamespace(
        encode_batch=encode_batch,
        encode_batch_fast=encode_batch,
        normalizer=tokenizer.normalizer,
        pre_tokenizer=tokenizer.pre_tokenizer,
        get_added_tokens_decoder=tokenizer.get_added_tokens_decoder,
    )
    path = write_rows(tmp_path / "a.jsonl", [{"text": text} for text in ("a", "panic", "", "b")])
    why = f"a row cannot be used: {path} line 2: the tokenizer cannot take it: Regex"
    with pytest.raises(RunError, match=why) as caught:
        list(samples(stream_of(path), panicking, SampleSettings(8)))
    assert "--skip_bad_rows" in caught.value.remedy
    first, last = samples(stream_of(path, skip=True), panicking, SampleSettings(8))
    assert (first.facts.row["line"], last.facts.row["line"]) == (1, 4)
    assert (last.mark.skipped_rows, last.mark.empty_rows) == (1, 1)
