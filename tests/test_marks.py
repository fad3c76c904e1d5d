"""Continuing from a mark: every sample once, whatever was stored and however it was packed."""

import json
import random
from types import SimpleNamespace

import pytest
from test_inputs import plain

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.positions import Positions
from activation_extraction.run.host_text import HostText
from activation_extraction.run.hosts import Watchdog
from activation_extraction.run.open_data import TextRequest
from activation_extraction.text import packing
from activation_extraction.text import samples as text_samples
from activation_extraction.text.batch import Cursor, StoredSample, Worker
from activation_extraction.text.documents import DocumentStream, RowCounts
from activation_extraction.text.mixture import Mixture
from activation_extraction.text.packing import pack
from activation_extraction.text.rows import IdsColumn, RowForm, TextColumn
from activation_extraction.text.samples import ChangedDataError, SampleForm, samples
from activation_extraction.text.sources import open_files
from activation_extraction.text.token_choice import TokenChoice

LENGTH = 24
TEXT = RowForm(TextColumn("text"))
IDS = RowForm(IdsColumn("ids", "mask", 2048))
SPLIT = SampleForm(LENGTH, split=True)
FEW = TokenChoice(Positions(-1), dropped=tuple(range(0, 2048, 2)))  # one token, or none
FORMS = {
    "text": (TEXT, SampleForm(LENGTH)),
    "split": (TEXT, SPLIT),
    "overlap": (TEXT, SampleForm(LENGTH, split=True, overlap=5)),
    "token ids": (IDS, SampleForm(LENGTH)),
    "few kept": (TEXT, SampleForm(LENGTH, choice=FEW)),
    "shuffled": (TEXT, SPLIT),
    "mixture": (TEXT, SPLIT),
    "host": (TEXT, SPLIT),
}


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Groups of four rows, and small chunks to read."""
    monkeypatch.setattr(packing, "LEAST_ROWS", 4)
    monkeypatch.setattr(packing, "GROUP_ROWS", 4)
    monkeypatch.setattr(text_samples, "CHUNK_ROWS", 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Two files of 60 rows; some have no text, and some cannot be used."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    for name in "ab":
        lines = []
        for n in range(60):
            words = " ".join(f"w{chance.randint(0, 99)}" for _ in range(chance.randint(0, 22)))
            ids = [chance.randrange(2048) for _ in range(chance.randint(1, 40))]
            mask = [int(chance.random() < 0.3) for _ in ids]
            row = {"text": words, "ids": ids, "mask": mask, "id": f"{name}{n}"}
            lines.append("{" if n % 17 == 9 else json.dumps(row))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def source(data, tokenizer):
    """Gives the documents of a case from the beginning, and reads samples of them."""
    return lambda case: Source(case, data, tokenizer)


class Source:
    def __init__(self, case, data, tokenizer):
        self.rows, self.form = FORMS[case]
        self._case, self._data, self._tokenizer = case, data, tokenizer

    def documents(self):
        counts = RowCounts(skip_bad_rows=True)

        def stream(path, **options):
            dataset = open_files(str(path), self.rows.columns)
            return DocumentStream(dataset, self.rows, counts=counts, **options)

        if self._case == "mixture":
            names = ["a.jsonl", "b.jsonl"]
            both = [stream(self._data / name, shuffle=1, source=name) for name in names]
            return Mixture(both, names, [0.7, 0.3])
        worker = Worker(1, 2, 2, 3) if self._case == "host" else Worker()
        seed = 3 if self._case == "shuffled" else None
        return stream(self._data, worker=worker, shuffle=seed)

    def placed(self, start=None, stored=(), rows=3, **limits):
        """All placed samples that are not stored, and the counts of rows at the end."""
        documents = self.documents()
        read = samples(
            documents,
            None if self.rows is IDS else self._tokenizer,
            self.form,
            start=start,
            stored=in_tables(stored),
            **limits,
        )
        found = [placed for batch in pack(read, rows, LENGTH) for placed in batch.samples]
        return found, (documents.counts.skipped, documents.counts.empty)


def in_tables(placed):
    """What the tables of samples say of them, through JSON."""
    stored = [each.sample for each in placed]
    return {
        sample.sample_idx: StoredSample(sample.num_kept, json.loads(json.dumps(sample.row)))
        for sample in stored
    }


def again(cursor):
    return Cursor(**json.loads(json.dumps(cursor.to_json())))


def by_number(placed):
    """Number -> what is known of each sample; each is there once."""
    found = {each.sample.number: plain(each.sample) for each in placed}
    assert len(found) == len(placed)
    return found


@pytest.mark.parametrize("case", FORMS)
def test_the_rest_follows_from_every_mark(case, source):
    """The samples before a mark are stored. Batches may have other sizes."""
    place = source(case)
    whole, counts = place.placed()
    every = by_number(whole)
    assert [*sorted(every)] == [*range(len(every))] and len({p.mark.samples for p in whole}) > 2
    for count in range(1, len(whole) + 1):
        stored, mark = whole[:count], whole[count - 1].mark
        assert {*range(mark.samples)} <= {each.sample.number for each in stored}
        rest, found = place.placed(again(mark), stored, rows=1 + count % 4)
        assert by_number(rest) == by_number(whole[count:]) and found == counts


@pytest.mark.parametrize("limit", ["max_tokens", "max_samples"])
@pytest.mark.parametrize("case", FORMS)
def test_limits_that_are_raised_between_the_starts(case, limit, source):
    """Each is met exactly. What a budget cuts stays cut, and the next sample follows."""
    chance, place = random.Random(case), source(case)
    whole = {each.sample.number: each.sample for each in place.placed()[0]}
    size = {"max_tokens": lambda sample: sample.num_kept, "max_samples": lambda _: 1}[limit]
    total, most, lost = sum(map(size, whole.values())), 0, {}
    stored, mark = [], None
    while most < total:
        most += chance.randint(1, total // 5)
        for stop in (chance.randint(1, 9), None):  # stopped once, and then not
            found, _ = place.placed(mark, stored, rows=chance.randint(1, 3), **{limit: most})
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
    assert bool(lost) == (limit == "max_tokens" and case != "few kept")


def test_a_sample_that_keeps_no_token_takes_no_room(source):
    """It has its number and its row, and says what was cut off, as if its tokens were there."""
    few, every = (source(case).placed()[0] for case in ("few kept", "text"))
    known = {each.sample.number: each.sample for each in every}
    sizes = set()
    for sample in (each.sample for each in few):
        whole = known[sample.number]
        assert (sample.row, sample.cut) == (whole.row, whole.cut)
        assert len(sample.token_ids) == sample.num_kept * len(whole.token_ids)
        sizes.add((sample.num_kept, len(sample.token_ids) > 0))
    assert sizes == {(0, False), (1, True)} and len(few) == len(every)


def test_the_rest_of_a_piece_that_a_budget_cut_is_not_read(texts, tokenizer):
    """The next piece follows; the table says what was cut off when it was stored."""
    path, form = texts([{"text": "w1 " * 99}]), SampleForm(LENGTH, split=True, overlap=2)

    def read(**options):
        stream = DocumentStream(open_files(str(path), TEXT.columns), TEXT)
        return list(samples(stream, tokenizer, form, **options))

    whole = read()
    first, second = read(max_tokens=LENGTH + 9)
    assert first.num_kept == LENGTH and (second.num_kept, second.row["piece"]) == (9, 1)
    known = {second.sample_idx: StoredSample(9, second.row)}
    third, *_ = read(max_tokens=LENGTH + 12, start=second.cursor, stored=known)
    assert third.row == whole[2].row and third.num_kept == 3
    assert third.cursor.tokens == LENGTH + 9 and third.next_cursor.tokens == LENGTH + 12


def test_other_rows_than_those_of_the_table_end_the_run(texts, tokenizer):
    """Before anything is made of the data set, however much of it comes before."""
    path = texts([{"text": f"w{n}"} for n in range(30)])
    stream = DocumentStream(open_files(str(path), TEXT.columns), TEXT)
    found = [*samples(stream, tokenizer, SampleForm(LENGTH))]
    known = {20: StoredSample(found[20].num_kept, found[21].row)}
    stream = DocumentStream(open_files(str(path), TEXT.columns), TEXT)
    batches = pack(samples(stream, tokenizer, SampleForm(LENGTH), stored=known), 1, LENGTH)
    why = (
        r'^sample 20: was stored from row {"file": "texts.jsonl", "line": 22}, but the data set '
        r'now gives it row {"file": "texts.jsonl", "line": 21}$'
    )
    with pytest.raises(ChangedDataError, match=why) as caught:
        next(batches)
    assert "restore it, or give another --output_dir" in caught.value.remedy


class Storage(SimpleNamespace):
    """What the text asks of the storage of a host."""

    def __init__(self, stored=(), **changes):
        mark = stored[-1].mark if stored else None
        limits = {"max_samples": None, "max_tokens": None}
        usual = dict(mark=mark, stored_after_mark=in_tables(stored), until=None, limits=limits)
        totals = SimpleNamespace(samples=len(stored))
        super().__init__(**(dict(complete=False, totals=totals) | usual | changes))


@pytest.fixture
def host_text(source, tokenizer):
    """The text of a host, as a run opens it."""

    def make(place=None, documents=None):
        place = place or source("split")
        asked = ["--max_seq_length", str(LENGTH), "--long_documents", "split"]
        dataset = SimpleNamespace(documents=lambda *_: documents or place.documents())
        request = parse_args(asked).part(TextRequest)
        return HostText(request, dataset, TEXT, tokenizer, Worker(), (2, LENGTH))

    return make


def opened(text, storage):
    documents, batches = text.open(storage, Watchdog(600))
    return documents, [placed for batch in batches for placed in batch.samples]


def test_a_host_computes_what_is_not_stored(source, host_text):
    whole, counts = source("split").placed()
    for count in (0, 1, 10, len(whole) - 1, len(whole)):
        documents, found = opened(host_text(), Storage(whole[:count]))
        assert by_number(found) == by_number(whole[count:])
        assert (documents.counts.skipped, documents.counts.empty) == counts
    assert opened(host_text(), Storage(complete=True))[1] == []
    limited = Storage(whole[:10], limits={"max_samples": 30, "max_tokens": None})
    numbers = {each.sample.number for each in (*opened(host_text(), limited)[1], *whole[:10])}
    assert numbers == {*range(30)}


@pytest.mark.parametrize("until", [1, 7, 33, 60])
def test_a_repair_reads_no_sample_at_or_after_the_end_of_its_range(until, source, host_text):
    """What it has missing is as in the run. Here, reading on would fail."""
    whole, _ = source("split").placed()
    every = by_number(whole)
    stored = [each for each in whole if each.sample.number % 3]
    (last,) = (each.sample.row for each in whole if each.sample.number == until - 1)

    class Ending:
        def __init__(self, documents):
            self.worker, self.counts = documents.worker, documents.counts
            self.state, self._documents = documents.state, documents

        def __iter__(self):
            for document in self._documents:
                yield document
                if document is not None and document.row.items() <= last.items():
                    raise RunError("nothing more may be read")

    ending = Ending(source("split").documents())
    storage = Storage(stored, mark=None, until=until)
    _, found = opened(host_text(documents=ending), storage)
    assert by_number(found) == {number: every[number] for number in range(0, until, 3)}


def test_the_first_group_is_read_before_a_run_begins(texts, host_text, tokenizer):
    """What ends the data before the first batch, or is no text at all, is bad input."""
    broken = texts([{"text": "one"}])
    broken.write_text("{")
    empty = texts([{"text": ""}], "empty.jsonl")
    for path, why in ((broken, "line 1: not JSON"), (empty, "the data set is empty")):
        stream = DocumentStream(open_files(str(path), TEXT.columns), TEXT)
        with pytest.raises(InputError, match=why):
            host_text(documents=stream).open(Storage(), Watchdog(600))
