"""Continuing from a mark: every sample once, whatever was stored and however it was packed."""

import json
import random

import pytest
from row_files import write_lines
from small_runs import TEXT, stream_of

from activation_extraction.common.errors import RunError
from activation_extraction.common.positions import Positions
from activation_extraction.text import packing
from activation_extraction.text import samples as text_samples
from activation_extraction.text.batch import Cursor, StoredSample, Worker
from activation_extraction.text.documents import DocumentStream, Mixture, RowCounts
from activation_extraction.text.packing import pack
from activation_extraction.text.rows import IdsColumn, RowForm
from activation_extraction.text.samples import ChangedDataError, SampleForm, samples
from activation_extraction.text.sources import open_files
from activation_extraction.text.token_choice import TokenChoice

LENGTH = 24
IDS = RowForm(IdsColumn("ids", "mask", 2048))
SPLIT = SampleForm(LENGTH, split=True)
FEW = TokenChoice(Positions(-1), dropped=tuple(range(0, 2048, 2)))  # one token, or none
FORMS = {
    "text": SampleForm(LENGTH),
    "overlap": SampleForm(LENGTH, split=True, overlap=5),
    "token ids": SampleForm(LENGTH),
    "few kept": SampleForm(LENGTH, choice=FEW),
    "shuffled": SPLIT,
    "mixture": SPLIT,
    "host": SPLIT,
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups of four rows, and small chunks to read."""
    monkeypatch.setattr(packing, "LEAST_ROWS", 4)
    monkeypatch.setattr(packing, "GROUP_ROWS", 4)
    monkeypatch.setattr(text_samples, "CHUNK_ROWS", 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two files of 30 rows; some have no text, and some cannot be used."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    for name in "ab":
        lines = []
        for n in range(30):
            words = " ".join(f"w{chance.randint(0, 99)}" for _ in range(chance.randint(0, 22)))
            ids = [chance.randrange(2048) for _ in range(chance.randint(1, 40))]
            mask = [int(chance.random() < 0.3) for _ in ids]
            row = {"text": words, "ids": ids, "mask": mask, "id": f"{name}{n}"}
            lines.append("{" if n % 17 == 9 else json.dumps(row))
        write_lines(folder / f"{name}.jsonl", lines)
    return folder


@pytest.fixture
def read(data, tokenizer):
    """Reads the samples of a case; returns them with their places, and the counts of rows."""

    def read(case, start=None, stored=(), rows=3, **limits):
        counts, form = RowCounts(skip_bad_rows=True), IDS if case == "token ids" else TEXT

        def stream(path, **options):
            return DocumentStream(
                open_files(str(path), form.columns), form, counts=counts, **options
            )

        if case == "mixture":
            names = ["a.jsonl", "b.jsonl"]
            both = [stream(data / name, shuffle=1, source=name) for name in names]
            documents = Mixture(both, names, [0.7, 0.3])
        else:
            worker = Worker(1, 2, 2, 3) if case == "host" else Worker()
            documents = stream(data, worker=worker, shuffle=3 if case == "shuffled" else None)
        own, known = None if form is IDS else tokenizer, in_tables(stored)
        found = samples(documents, own, FORMS[case], start=start, stored=known, **limits)
        placed = [placed for batch in pack(found, rows, LENGTH) for placed in batch.samples]
        return placed, (counts.skipped, counts.empty)

    return read


def in_tables(placed):
    """What the tables of samples say of them, through JSON."""
    return {
        each.sample.sample_idx: StoredSample(
            each.sample.num_kept, json.loads(json.dumps(each.sample.row))
        )
        for each in placed
    }


def again(cursor):
    return Cursor(**json.loads(json.dumps(cursor.to_json())))


def known(sample):
    """All that is known of a sample but where its row was cut, to compare."""
    arrays = sample.token_ids, sample.kept_positions, *sample.labels.values()
    others = sample.text_preview, str(sample.doc_id), str(sample.row), str(sample.columns)
    return sample.sample_idx, *others, *(array.tolist() for array in arrays)


@pytest.mark.parametrize("limit", ["max_tokens", "max_samples"])
@pytest.mark.parametrize("case", FORMS)
def test_limits_that_are_raised_between_the_starts(case, limit, read):
    """Each is met exactly. What a budget cuts stays cut, and the next sample follows. Every sample
    is the one of an undisturbed run, and so are the counts of rows."""
    chance = random.Random(case)
    placed, counts = read(case)
    whole = {each.sample.number: each.sample for each in placed}
    size = {"max_tokens": lambda sample: sample.num_kept, "max_samples": lambda _: 1}[limit]
    total, most, lost = sum(map(size, whole.values())), 0, {}
    stored, mark = [], None
    while most < total:
        most += chance.randint(1, -(-total // 5))
        for stop in (chance.randint(1, 9), None):  # stopped once, and then not
            found, _ = read(case, mark, stored, rows=chance.randint(1, 3), **{limit: most})
            stored += found[:stop]
            mark = again(stored[-1].mark)
        assert sorted(each.sample.number for each in stored) == [*range(len(stored))]
        assert sum(size(each.sample) for each in stored) == min(most, total - sum(lost.values()))
        for sample in (each.sample for each in stored):
            full, count = whole[sample.number], sample.num_kept
            assert sample.kept_positions.tolist() == full.kept_positions[:count].tolist()
            assert sample.token_ids.tolist() == full.token_ids[: len(sample.token_ids)].tolist()
            if count < full.num_kept:
                lost[sample.number] = full.num_kept - count
            elif limit == "max_samples":
                assert known(sample) == known(full)
    assert bool(lost) == (limit == "max_tokens" and case != "few kept")
    for count in range(0, len(placed), 5):  # from marks of the undisturbed run, and without limits
        mark = again(placed[count].mark)
        rest, found = read(case, mark, placed[: count + 1], rows=1 + count % 4)
        expected = sorted(known(each.sample) for each in placed[count + 1 :])
        assert sorted(known(each.sample) for each in rest) == expected and found == counts


def test_the_rest_of_a_piece_that_a_budget_cut_is_not_read(texts, tokenizer):
    """The next piece follows; the table says what was cut off when it was stored."""
    path, form = texts([{"text": "w1 " * 99}]), SampleForm(LENGTH, split=True, overlap=2)
    whole = list(samples(stream_of(path), tokenizer, form))
    first, second = samples(stream_of(path), tokenizer, form, max_tokens=LENGTH + 9)
    assert first.num_kept == LENGTH and (second.num_kept, second.row["piece"]) == (9, 1)
    rest = sum(sample.num_kept for sample in whole[1:])
    assert first.cut == 0 and second.cut == rest - 9 and not any(each.cut for each in whole)
    (only,) = samples(stream_of(path), tokenizer, form, max_samples=1)
    assert only.cut == rest
    known = {second.sample_idx: StoredSample(9, second.row)}
    more = {"max_tokens": LENGTH + 12, "start": second.cursor, "stored": known}
    third, *_ = samples(stream_of(path), tokenizer, form, **more)
    assert third.row == whole[2].row and third.num_kept == 3
    assert third.cursor.tokens == LENGTH + 9 and third.next_cursor.tokens == LENGTH + 12


def test_other_rows_than_those_of_the_table_end_the_run(texts, tokenizer):
    """Before anything is made of the data set, however much of it comes before."""
    path = texts([{"text": f"w{n}"} for n in range(30)])
    found = [*samples(stream_of(path), tokenizer, SampleForm(LENGTH))]
    known = {20: StoredSample(found[20].num_kept, found[21].row)}
    read = samples(stream_of(path), tokenizer, SampleForm(LENGTH), stored=known)
    why = (
        r'^sample 20: was stored from row {"file": "texts.jsonl", "line": 22}, but the data set '
        r'now gives it row {"file": "texts.jsonl", "line": 21}$'
    )
    with pytest.raises(ChangedDataError, match=why) as caught:
        next(pack(read, 1, LENGTH))
    assert "restore it, or give another --output_dir" in caught.value.remedy


@pytest.mark.parametrize("until", [1, 7, 20])
def test_a_repair_makes_no_sample_at_or_after_the_end_of_its_range(until, read):
    """What it has missing is as in the run."""
    whole, _ = read("text")
    stored = [each for each in whole if each.sample.number % 3]
    found, _ = read("text", stored=stored, until=until)
    due = {each.sample.number: known(each.sample) for each in whole}
    made = {each.sample.number: known(each.sample) for each in found}
    assert made == {number: due[number] for number in range(0, until, 3)}


@pytest.mark.parametrize("bad_line", [1, 2, 6, 65, 130])
def test_all_samples_before_a_bad_row_come_before_its_error(tmp_path, tokenizer, bad_line):
    lines = [json.dumps({"text": f"text {n}"}) for n in range(200)]
    path = write_lines(tmp_path / "a.jsonl", [*lines[: bad_line - 1], "{", *lines[bad_line - 1 :]])
    got = []
    with pytest.raises(RunError, match=f"line {bad_line}: not JSON"):
        for batch in pack(samples(stream_of(path), tokenizer, SampleForm(32)), 2, 32):
            got += [placed.sample.number for placed in batch.samples]
    assert sorted(got) == [*range(bad_line - 1)]
