"""Every kind of input: each row once, on any machines and hosts, in any number of starts. Budgets,
masks, repairs and verification; and the thread that reads ahead."""

import json
import queue
import random
import threading
from dataclasses import asdict

import numpy as np
import pytest
from chat_templates import QWEN3, VOCABULARY, chat_model, conversation
from command_line import main
from row_files import write_lines, write_parquet, write_rows
from small_runs import drained, stream_of

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import RunError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.host_text import Text
from activation_extraction.run.prefetch import Prefetch
from activation_extraction.text import packing, sources
from activation_extraction.text import samples as text_samples
from activation_extraction.text.batch import Worker
from activation_extraction.text.mark import Mark
from activation_extraction.text.packing import pack
from activation_extraction.text.sample_facts import SampleFacts, StoredSample
from activation_extraction.text.samples import ChangedDataError, SampleSettings, samples

LENGTH = 24
STREAM = "blocks.1.hook_resid_post"
CHAT = "--dataset_path {}/chat.jsonl --messages_column messages --long_documents split"
SPLIT = "--dataset_path {}/long.jsonl --long_documents split"
SEEDS = "--shuffle_documents 3", "--shuffle_documents 4"
# Each file has its own rows: their names begin with it.
CASES = {
    "text": "--dataset_path {}/texts",
    "roles": f"{CHAT} --roles assistant tool --keep_columns label",
    "token ids": "--dataset_path {}/ids.parquet --ids_column input_ids --mask_column loss_mask",
    "overlap": f"{SPLIT} --overlap 5",
    "few tokens": "--dataset_path {}/texts --positions 9:10",
    "shuffled": "--dataset_path {}/texts --shuffle_documents 3",
    "row groups": "--dataset_path {}/ids.parquet --ids_column input_ids --shuffle_documents 1",
    "mixture": "--mix {0}/texts=0.7 {0}/long.jsonl=.3 --long_documents split "
    "--shuffle_documents 5 --keep_columns id",
}
EVERYTHING = (
    f"{CHAT} --shard_format safetensors --roles user assistant --keep_columns label "
    "--activation_dtype float8 --top_logits 3 "
    f"--hook_names {STREAM} loss entropy logits.top_ids logits.top_logprobs"
)


@pytest.fixture(scope="module")
def data(demo_inputs, tmp_path_factory):
    """A model whose tokenizer knows the markers, and small files of every kind. Some texts are
    empty, and some rows cannot be used."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    chat_model(demo_inputs, folder, QWEN3)

    def words(least, most):
        return " ".join(f"word{chance.randint(0, 9)}" for _ in range(chance.randint(least, most)))

    for name, count in (("a", 13), ("b", 1), ("c", 20)):
        texts = [json.dumps({"text": words(0, 9), "id": f"{name}{n}"}) for n in range(count)]
        write_lines(folder / f"texts/{name}.jsonl", [*texts[:9], "{", *texts[9:]])
    write_rows(folder / "long.jsonl", ({"text": words(1, 60), "id": f"l{n}"} for n in range(12)))
    chats = [{**conversation(chance), "label": n % 3, "id": f"chat{n}"} for n in range(15)]
    write_rows(folder / "chat.jsonl", chats)
    sizes = [chance.randint(1, 40) for _ in range(30)]
    table = {
        "input_ids": [[chance.randrange(VOCABULARY) for _ in range(n)] for n in sizes],
        "loss_mask": [[chance.randint(0, 1) for _ in range(n)] for n in sizes],
        "id": [f"ids{n}" for n in range(30)],
    }
    write_parquet(folder / "ids.parquet", 9, **table)
    return folder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Small data has several chunks, blocks and groups of rows."""
    monkeypatch.setattr(text_samples, "CHUNK_ROWS", 5)
    monkeypatch.setattr(sources, "BLOCK_ROWS", 4)
    monkeypatch.setattr(packing, "MIN_GROUP_ROWS", 4)
    monkeypatch.setattr(packing, "MAX_GROUP_ROWS", 4)


def flags_of(case, data):
    usual = "--model_path", data / "model", "--max_seq_length", LENGTH, "--skip_bad_rows"
    return [*case.format(data).split(), *usual]


def text_of(case, data):
    config = parse_args([str(flag) for flag in flags_of(case, data)])
    return Text(config.text_options, Checkpoint(config.model_options.model_path), VOCABULARY)


def read(text, worker=None, **limits):
    """The samples that a run makes of a text, and the counts of its other rows."""
    documents = text.documents(worker or Worker())
    found, end = drained(samples(documents, text.tokenizer, text.sample_settings, **limits))
    return found, (end.skipped_rows, end.empty_rows)


def test_the_hosts_of_a_machine_share_its_limits():
    for limit, shares in ((8, [3, 3, 2]), (2, [1, 1, 0]), (None, [None] * 3)):
        assert [Worker(1, 2, host, 3).share_of(limit) for host in range(3)] == shares


@pytest.mark.parametrize("case", CASES)
def test_every_row_and_index_is_there_once_on_any_machines_and_hosts(case, data):
    """A machine's rows are those that it has with one host. Other rows are counted once."""
    text = text_of(CASES[case], data)

    def rows_of(found):
        return sorted(str(sample.facts.row | {"share": 0}) for sample in found)

    alone, counts = read(text)
    for machines, hosts in ((1, [3]), (5, [1, 2, 4, 2, 1]), (2, [5, 1])):
        found, others = [], np.zeros(2, int)
        for machine, count in enumerate(hosts):
            own = []
            for host in range(count):
                here, counts_here = read(text, Worker(machine, machines, host, count))
                own, others = own + here, others + counts_here
            assert rows_of(own) == rows_of(read(text, Worker(machine, machines))[0])
            found += own
        assert rows_of(found) == rows_of(alone) and tuple(others) == counts
        assert len({sample.facts.sample_idx for sample in found}) == len(found)


def known(sample):
    """All that is known of a sample but where its row was cut, to compare."""
    arrays = sample.token_ids, sample.kept_positions, *sample.token_labels_by_name.values()
    facts = sample.facts
    others = facts.text_preview, str(facts.doc_id), str(facts.row), str(facts.columns)
    return facts.sample_idx, *others, *(array.tolist() for array in arrays)


def as_stored(sample, row=None):
    """A sample as a table lists it. row: another one than its own."""
    facts = SampleFacts(sample.facts.sample_idx, json.loads(json.dumps(row or sample.facts.row)))
    return StoredSample(facts, sample.num_kept)


@pytest.mark.parametrize("limit", ["max_tokens", "max_samples"])
@pytest.mark.parametrize("case", CASES)
def test_limits_that_are_raised_between_the_starts(case, limit, data):
    """Each is met exactly. What a budget cuts stays cut, and the next sample follows. Every sample
    is the one of an undisturbed run, and so are the counts of rows."""
    chance, text = random.Random(case), text_of(CASES[case], data)
    worker = Worker(1, 2, 1, 2) if case == "text" else Worker()

    def packed(start, stored, rows, **limits):
        """What a run that continues makes: samples with their places; and the counts of rows."""
        table = {p.sample.facts.sample_idx: as_stored(p.sample) for p in stored}
        documents = text.documents(worker)
        start = start and Mark.from_json(json.loads(json.dumps(asdict(start))))
        found = samples(
            documents, text.tokenizer, text.sample_settings, start=start, stored=table, **limits
        )
        batches, end = drained(pack(found, rows, LENGTH))
        placed = [placed for batch in batches for placed in batch.samples]
        return placed, (end.skipped_rows, end.empty_rows)

    placed, counts = packed(None, (), 3)
    whole = {each.sample.number: each.sample for each in placed}
    size = {"max_tokens": lambda sample: sample.num_kept, "max_samples": lambda _: 1}[limit]
    total, most, lost = sum(map(size, whole.values())), 0, {}
    stored, mark = [], None
    while most < total:
        most += chance.randint(1, -(-total // 5))
        for stop in (chance.randint(1, 9), None):  # stopped once, and then not
            found, _ = packed(mark, stored, chance.randint(1, 3), **{limit: most})
            stored += found[:stop]
            mark = stored[-1].mark
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
    assert bool(lost) == (limit == "max_tokens" and case != "few tokens")
    for count in range(0, len(placed), 5):  # from marks of the undisturbed run, and without limits
        rest, found = packed(placed[count].mark, placed[: count + 1], 1 + count % 4)
        expected = sorted(known(each.sample) for each in placed[count + 1 :])
        assert sorted(known(each.sample) for each in rest) == expected and found == counts


def test_other_rows_than_those_of_the_table_end_the_run(texts, tokenizer):
    """It ends before anything is made of the data set, however much of it comes before."""
    path = texts([{"text": f"w{n}"} for n in range(30)])
    found = [*samples(stream_of(path), tokenizer, SampleSettings(LENGTH))]
    table = {20: as_stored(found[20], found[21].facts.row)}
    again = samples(stream_of(path), tokenizer, SampleSettings(LENGTH), stored=table)
    why = (
        r'^sample 20: was stored from row {"file": "texts.jsonl", "line": 22}, but the data set '
        r'now gives it row {"file": "texts.jsonl", "line": 21}$'
    )
    with pytest.raises(ChangedDataError, match=why) as caught:
        next(pack(again, 1, LENGTH))
    assert "restore it, or give another --output_dir" in caught.value.remedy


@pytest.mark.parametrize("case", ["text", "roles"])
def test_a_repair_makes_no_sample_at_or_after_the_end_of_its_range(case, data):
    """What it makes is as in the run."""
    text = text_of(CASES[case], data)
    whole, _ = read(text)
    stored = {s.number: as_stored(s) for s in whole if s.number % 3}
    for until in (7, 20):
        found, _ = read(text, stored=stored, until=until)
        due = [known(sample) for sample in whole if sample.number in range(0, until, 3)]
        assert [known(sample) for sample in found] == due


@pytest.mark.long
def test_a_run_is_repaired_and_verified(data, tmp_path, capsys):
    """Every sample has its values again, and recomputed activations agree."""
    out = tmp_path / "out"
    flags = [*flags_of(EVERYTHING, data), "--batch_size", 2, "--dtype", "float32"]
    flags += ["--shard_size_gb", 3e-5, "--no_data_parallel", "--output_dir", out]

    def stored():
        return {
            sample.sample_idx: [sample.row, sample.cut, *map(np.ndarray.tobytes, arrays)]
            for sample in ActivationDataset(out)
            for arrays in [(sample.position, sample.token_ids, *sample.activations.values())]
        }

    assert main(*flags) == 0
    whole = stored()
    (path,) = out.glob("shard_0002.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    assert main(*flags, "--repair") == 0
    assert stored() == whole
    capsys.readouterr()
    verify = "--verify", "--output_dir", out, "--model_path", data / "model"
    assert main(*verify, "--verify_samples", 20) == 0
    assert "recomputed; 0 problems\n" in capsys.readouterr().out


def test_a_budget_is_exact_and_may_grow(data, tmp_path, capsys):
    """More than there is ends short, and says so; --status shows how much is done."""
    flags = [*flags_of("--dataset_path {}/long.jsonl", data), "--batch_size", 2]
    flags += ["--layers_to_extract", 1, "--shard_size_gb", 3e-5, "--output_dir", tmp_path]
    flags += ["--no_data_parallel", "--max_tokens"]
    for most in (24, 101, 150):
        assert main(*flags, most) == 0
        assert ActivationDataset(tmp_path).tokens == most
        assert main("--status", "--output_dir", tmp_path) == 0
        assert "100.0%" in capsys.readouterr().out
    assert main(*flags, 50) == 2
    assert "already holds 150 tokens, more than the 50" in capsys.readouterr().err
    assert main(*flags, 10**6) == 0
    total = ActivationDataset(tmp_path).tokens
    told = f"short: the data ended after {total:,} of at most 1,000,000 tokens (--max_tokens)\n"
    assert told in capsys.readouterr().out


def test_a_mixture_keeps_its_proportions_and_a_seed_its_order(data):
    """It does so at every moment; a source that is used up ends, and the other goes on."""
    found, _ = read(text_of(CASES["mixture"], data))
    of_samples = [sample.facts.row for sample in found]
    rows = [row["source"] for row in of_samples if row["piece"] == 0]
    names = f"{data}/texts", f"{data}/long.jsonl"
    ends = max(n for n, each in enumerate(rows) if each == names[0])
    for count in range(1, ends):
        assert abs(rows[:count].count(names[0]) - 0.7 * count) <= 1
    assert rows.count(names[1]) == 12
    texts = [text_of(f"--dataset_path {{}}/texts {more}", data) for more in ("", *SEEDS)]
    orders = [[sample.facts.doc_id for sample in read(text)[0]] for text in texts]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len(set(map(tuple, orders))) == 3
    mixed = (text_of(f"--mix {{}}/texts={weight}", data) for weight in ("1", "1.0", "1.0000001"))
    assert len({text.dataset.description for text in mixed}) == 2  # other weights are another run


@pytest.fixture
def masked(data, tmp_path, capsys):
    """Runs over rows of ids with a mask of this name; the status, what is said, and the samples."""
    model = tmp_path / "model"  # without a tokenizer
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(data / "model" / name)

    def run(output, name, rows, *more):
        rows = ({"ids": ids, name: mask} for ids, mask in rows)
        path = write_rows(tmp_path / f"{output}.jsonl", rows)
        flags = ["--model_path", model, "--dataset_path", path, "--ids_column", "ids"]
        flags += ["--mask_column", name, "--layers_to_extract", 1, "--dtype", "float32"]
        status = main(*flags, "--output_dir", tmp_path / output, *more)
        said = capsys.readouterr()
        return status, said.out + said.err, ActivationDataset(tmp_path / output)

    return run


def test_token_ids_need_no_tokenizer_and_what_keeps_nothing_is_counted(masked):
    rows = [([5, 6, 7], [0, 1, 1]), ([8], [0]), ([], [])]
    status, said, stored = masked("out", "loss_mask", rows)
    assert status == 0
    assert "kept nothing: 1 sample (--mask_column loss_mask, positions all)\n" in said
    assert "empty: 1 row without text" in said
    assert [sample.token_ids.tolist() for sample in stored] == [[6, 7], []]
    assert stored[0].position.tolist() == [1, 2]
    assert (stored.metadata["empty_samples"], stored.metadata["empty_rows"]) == (1, 1)
    ids, mask = [*range(3, 43)], [int(n % 5 != 1) for n in range(40)]
    split = "--max_seq_length", 16, "--long_documents", "split"
    _, _, pieces = masked("pieces", "loss_mask", [(ids, mask)], *split)
    kept = [number for sample in pieces for number in sample.token_ids.tolist()]
    assert kept == [number for number, one in zip(ids, mask, strict=True) if one]


def test_padding_does_not_exist(masked, data, tmp_path, capsys):
    """It may be on either side; a model that reads it gives other values to the tokens behind it. A
    row that is all padding is a bad one."""
    real, name = [[5, 6, 7], [8, 9, 10, 11]], "attention_mask"
    padded = [([-100, 10**6, 5, 6, 7], [0, 0, 1, 1, 1]), ([8, 9, 0, 10, 11, 0], [1, 1, 0, 1, 1, 0])]
    padded += [([5, 6, 7], [0, 0, 0])]
    told = f"padded.jsonl line 3: --mask_column {name}: each of its 3 values is 0"
    status, said, found = masked("padded", name, padded, "--skip_bad_rows")
    assert status == 0 and told in said and "skipped: 1 row that could not be used" in said
    _, _, others = masked("real", name, [(ids, [1] * len(ids)) for ids in real])
    for sample, other, ids in zip(found, others, real, strict=True):
        assert sample.token_ids.tolist() == ids
        assert sample.position.tolist() == [*range(len(ids))]
        np.testing.assert_array_equal(sample[STREAM], other[STREAM])
    verify = "--verify", "--output_dir", tmp_path / "padded", "--model_path", data / "model"
    assert main(*verify) == 0
    assert "2 samples recomputed; 0 problems" in capsys.readouterr().out


def test_a_host_that_skips_stored_samples_does_not_keep_others_waiting():
    """It gives None in the place of a batch, for as long as it skips."""
    skipping, go_on = threading.Event(), threading.Event()

    def batches():
        skipping.set()
        assert go_on.wait(60)
        yield 1

    found = Prefetch(batches(), 1, skipping, patience=0).until(lambda: False)
    assert next(found) is None and not skipping.is_set()
    skipping.set()
    assert next(found) is None
    go_on.set()
    assert [*found] == [1]


def test_prefetch_has_the_result_once_all_was_taken():
    """A run that ends earlier has none, however much was prepared."""
    exhausted = threading.Event()

    def numbers():
        yield from range(3)
        exhausted.set()
        return "the end"

    items, got = Prefetch(numbers(), depth=6), []
    for item in items.until(lambda: len(got) == 3):
        got.append(item)
    assert exhausted.wait(600) and (got, items.generator_result) == ([0, 1, 2], None)
    for _ in range(2):  # at the end, and when it is asked again
        assert items.peek() is None and items.generator_result == "the end"


def test_prefetch_runs_ahead_and_raises_in_turn():
    produced, asked = queue.Queue(), threading.Event()

    def numbers():
        for n in range(6):
            produced.put(n)
            yield n
        assert asked.wait(600)
        raise BaseException("source broke")  # what panics in Rust raises is no Exception

    items = Prefetch(numbers(), depth=6)
    assert items.peek() == 0
    assert [produced.get(timeout=600) for _ in range(6)] == [*range(6)]  # though none was asked for
    got = []
    for item in items.until(lambda: len(got) == 6):  # ends while the source hangs
        got.append(item)
    assert got == [*range(6)]
    asked.set()
    with pytest.raises(RunError, match="source broke"):
        next(iter(items))
