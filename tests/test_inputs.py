"""Every kind of input: each row once, exact continuation, budgets, repair and verification."""

import json
import random

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import QWEN3, VOCABULARY, chat_model
from command_line import assert_refused, main
from row_files import write_rows
from small_runs import set_status
from test_chat import conversation

from activation_extraction.cli.config import parse_args
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.host_text import HostText, load_text_files, row_form
from activation_extraction.run.open_data import TextRequest, open_dataset
from activation_extraction.text import samples as text_samples
from activation_extraction.text import shuffle
from activation_extraction.text.batch import Worker
from activation_extraction.text.samples import samples

LENGTH = 24
STREAM = "blocks.1.hook_resid_post"
CHAT = "--dataset_path {}/chat.jsonl --messages_column messages"
SPLIT = "--dataset_path {}/long.jsonl --long_documents split"
# Each file has its own rows: their names begin with it.
CASES = {
    "text": "--dataset_path {}/texts",
    "chat": CHAT,
    "roles": f"{CHAT} --roles assistant tool --keep_columns label --long_documents split",
    "turns": f"{CHAT} --long_documents split --positions last_of_turn",
    "token ids": "--dataset_path {}/ids.parquet --ids_column input_ids --mask_column loss_mask",
    "split": SPLIT,
    "overlap": f"{SPLIT} --overlap 5",
    "shuffled": "--dataset_path {}/texts --shuffle_documents 3",
    "shuffled row groups": "--dataset_path {}/ids.parquet --ids_column input_ids "
    "--shuffle_documents 1",
    "mixture": "--mix {0}/texts=0.7 {0}/long.jsonl=.3 --long_documents split "
    "--shuffle_documents 5 --keep_columns id",
    "budget": "--dataset_path {}/long.jsonl --max_tokens 209",
    "budget of roles": f"{CHAT} --roles user --max_tokens 101 --long_documents split",
    "everything": f"{CHAT} --roles user assistant --keep_columns label --long_documents split "
    f"--activation_dtype float8 --top_logits 3 --hook_names {STREAM} "
    "loss entropy logits.top_ids logits.top_logprobs",
}


@pytest.fixture(scope="module")
def data(demo_inputs, tmp_path_factory):
    """A model whose tokenizer knows the markers, and small files of every kind."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    chat_model(demo_inputs, folder, QWEN3)

    def words(least, most):
        return " ".join(f"word{chance.randint(0, 9)}" for _ in range(chance.randint(least, most)))

    for name, count in (("a", 13), ("b", 1), ("c", 20)):
        rows = [{"text": words(0, 9), "id": f"{name}{n}"} for n in range(count)]
        write_rows(folder / f"texts/{name}.jsonl", rows)
    rows = [{"text": words(1, 60), "id": f"long{n}"} for n in range(12)]
    write_rows(folder / "long.jsonl", rows)
    chats = [{**conversation(chance), "label": n % 3, "id": f"chat{n}"} for n in range(15)]
    write_rows(folder / "chat.jsonl", chats)
    sizes = [chance.randint(1, 40) for _ in range(30)]
    table = {
        "input_ids": [[chance.randrange(VOCABULARY) for _ in range(n)] for n in sizes],
        "loss_mask": [[chance.randint(0, 1) for _ in range(n)] for n in sizes],
        "id": [f"ids{n}" for n in range(30)],
    }
    pyarrow.parquet.write_table(pyarrow.table(table), folder / "ids.parquet", row_group_size=9)
    return folder


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that small data has several chunks, and several blocks."""
    monkeypatch.setattr(text_samples, "CHUNK_ROWS", 5)
    monkeypatch.setattr(shuffle, "BLOCK_ROWS", 4)


def flags_of(case, data):
    return [
        *CASES[case].format(data).split(),
        "--model_path",
        str(data / "model"),
        "--max_seq_length",
        str(LENGTH),
    ]


def text_of(case, data, worker=None, **changes):
    """What a run with these flags reads."""
    config = parse_args([*flags_of(case, data), *(f"--{k}={v}" for k, v in changes.items())])
    request, checkpoint = config.part(TextRequest), Checkpoint(config.model_path)
    tokenizer, template = load_text_files(request, checkpoint, VOCABULARY)
    rows = row_form(request, template, VOCABULARY)
    dataset = open_dataset(request, rows.columns, [])
    return HostText(request, dataset, rows, tokenizer, worker or Worker(), (8, LENGTH))


def read(text):
    limits = {"max_samples": text.max_samples, "max_tokens": text.max_tokens}
    request = text.request
    documents = text.dataset.documents(
        text.rows, text.worker, request.skip_bad_rows, request.shuffle_documents
    )
    return list(samples(documents, text.tokenizer, text.form, **limits))


def plain(sample):
    """All that is known of a sample, to compare."""
    arrays = sample.token_ids, sample.kept_positions, *sample.labels.values()
    others = sample.sample_idx, sample.text_preview, sample.doc_id, sample.row, sample.cut
    cursors = sample.cursor.to_json(), sample.next_cursor.to_json()
    return *(array.tolist() for array in arrays), *others, sample.columns, *cursors


@pytest.mark.parametrize("case", [case for case in CASES if "budget" not in case])
def test_every_row_and_index_is_there_once_on_any_machines_and_hosts(case, data):
    """A machine's rows are those that it has with one host."""
    alone = sorted(str(sample.row | {"share": 0}) for sample in read(text_of(case, data)))
    for machines, hosts in ((1, [3]), (3, [1, 2, 4]), (2, [5, 1])):
        found, indices = [], []
        for machine, count in enumerate(hosts[:machines]):
            workers = [Worker(machine, machines, host, count) for host in range(count)]
            every = [sample for w in workers for sample in read(text_of(case, data, w))]
            one = read(text_of(case, data, Worker(machine, machines)))
            rows = [sorted(str(s.row | {"share": 0}) for s in each) for each in (every, one)]
            assert rows[0] == rows[1]
            found += rows[0]
            if len(set(hosts)) == 1:
                indices += [sample.sample_idx for sample in every]
        assert sorted(found) == alone and len(set(indices)) == len(indices)


def stored_in(folder):
    """Returns by sample number its row, what was cut, and the bytes that are stored of it."""
    found = {}
    for sample in ActivationDataset(folder):
        arrays = sample.position, sample.token_ids, *sample.activations.values()
        found[sample.sample_idx] = sample.row, sample.cut, *(array.tobytes() for array in arrays)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "case,shard_format",
    [(case, ("pickle", "safetensors")[n % 2]) for n, case in enumerate(CASES)]
    + [("everything", "safetensors")],
)
def test_a_run_is_continued_repaired_and_verified(case, shard_format, data, tmp_path, capsys):
    """Every sample has its values each time, and recomputed activations agree."""
    flags = [*flags_of(case, data), "--batch_size", 2, "--dtype", "float32"]
    flags += ["--shard_size_gb", 3e-5, "--no_data_parallel"]
    if "--hook_names" not in flags:
        flags += ["--layers_to_extract", 1]
    out = tmp_path / "out"
    flags += ["--shard_format", shard_format, "--output_dir", out]
    assert main(*flags) == 0
    whole, kept = stored_in(out), len(list(out.glob("shard_*.json"))) // 2
    assert kept > 0
    for path in out.glob("shard_*"):  # as if killed after these
        if int(path.name[6:10]) > kept:
            path.unlink()
    set_status(out, "running")
    assert main(*flags) == 0
    assert stored_in(out) == whole
    for number in (1, kept + 1):
        (path,) = out.glob(f"shard_{number:04d}.[ps][ka][lf]*")
        path.write_bytes(path.read_bytes()[:-9])
    (out / f"shard_{kept + 1:04d}.json").unlink()
    assert main(*flags, "--repair") == 0
    assert stored_in(out) == whole
    capsys.readouterr()
    verify = "--verify", "--output_dir", out, "--model_path", data / "model"
    assert main(*verify, "--verify_samples", 20) == 0
    assert "recomputed; 0 problems\n" in capsys.readouterr().out


def test_what_a_budget_cuts_is_counted(data):
    """The last sample ends with the budget; all others are as without one."""
    text = text_of("budget", data)
    *others, last = read(text)
    whole = read(text_of("budget", data, max_tokens=10**6))
    assert sum(sample.num_kept for sample in [*others, last]) == 209
    lengths = [len(sample.token_ids) + sample.cut for sample in whole]
    assert [len(each.token_ids) + each.cut for each in [*others, last]] == lengths[
        : len(others) + 1
    ]
    assert last.cut > whole[len(others)].cut
    assert [plain(sample) for sample in others] == [plain(each) for each in whole[: len(others)]]


@pytest.mark.parametrize("limit", [{"max_samples": 2}, {"max_tokens": 40, "overlap": 5}])
def test_what_a_limit_leaves_out_of_a_split_document_is_counted(data, limit):
    *_, last = every = read(text := text_of("split", data, **limit))
    rows = map(json.loads, (data / "long.jsonl").read_text().splitlines())
    (whole,) = (row["text"] for row in rows if row["id"] == last.doc_id)
    stored = sum(sample.num_kept for sample in every if sample.doc_id == last.doc_id)
    total = len(text.tokenizer.encode(whole, add_special_tokens=False).ids)
    assert last.cut == total - stored > LENGTH
    assert not any(sample.cut for sample in every[:-1])


def test_a_budget_is_exact_and_may_grow(data, tmp_path, capsys):
    """More than there is ends short, and says so; --status shows how much is done."""
    flags = ["--model_path", data / "model", "--dataset_path", data / "long.jsonl"]
    flags += ["--max_seq_length", LENGTH, "--batch_size", 2, "--no_data_parallel"]
    flags += ["--layers_to_extract", 1, "--shard_size_gb", 3e-5, "--output_dir", tmp_path]
    for most in (1, 24, 101, 149, 150):
        assert main(*flags, "--max_tokens", most) == 0
        assert ActivationDataset(tmp_path).tokens == most
        assert main("--status", "--output_dir", tmp_path) == 0
        assert "100.0%" in capsys.readouterr().out
    assert main(*flags, "--max_tokens", 50) == 2
    assert "already holds 150 tokens, more than the 50" in capsys.readouterr().err
    assert main(*flags, "--max_tokens", 10**6) == 0
    total = ActivationDataset(tmp_path).tokens
    told = f"short: the data ended after {total:,} of at most 1,000,000 tokens (--max_tokens)\n"
    assert told in capsys.readouterr().out


def test_a_mixture_keeps_its_proportions_and_knows_its_sources(data):
    """At every moment; a source that is used up ends, and the other goes on."""
    found = read(text_of("mixture", data))
    sources = [sample.row["source"] for sample in found if sample.row["piece"] == 0]
    names = f"{data}/texts", f"{data}/long.jsonl"
    ends = max(n for n, each in enumerate(sources) if each == names[0])
    for count in range(1, ends):
        assert abs(sources[:count].count(names[0]) - 0.7 * count) <= 1
    assert sources.count(names[1]) == 12


BAD_FLAGS = [
    ("--mix {}/texts", "is not SOURCE=WEIGHT with a positive weight"),
    ("--mix {}/texts=0", "is not SOURCE=WEIGHT with a positive weight"),
    ("--mix {0}/texts=1 {0}/texts=2", "--mix: names {}/texts twice"),
    ("--mix name:config:split:more=1", "no such path, and not NAME:CONFIG:SPLIT"),
    ("--mix {0}/none.jsonl=1 {0}/texts=2", "--mix {}/none.jsonl: no such file or folder"),
    ("--mix {}/texts=1 --dataset_path x", "cannot be used together"),
    ("--overlap 3", "--overlap: needs --long_documents"),
    ("--long_documents split --overlap 2048", "expected less than --max_seq_length"),
    ("--keep_columns " + " ".join(map(str, range(65))), "names 65 columns, there is room for 64"),
    ("--keep_columns tokens", "the table of samples has a column of this name"),
]


@pytest.mark.parametrize("typed,why", BAD_FLAGS)
def test_bad_flags_are_refused(typed, why, data, tmp_path, capsys):
    flags = ["--model_path", data / "model", *typed.format(data).split()]
    assert_refused(capsys, tmp_path, flags, why.format(data))


def test_other_data_is_refused_by_its_name(data, tmp_path, capsys):
    """A weight counts with all of its digits."""
    flags = ["--model_path", data / "model", "--max_seq_length", LENGTH, "--max_samples", 3]
    flags += ["--layers_to_extract", 1, "--output_dir"]
    mixture, files = ["--mix", f"{data}/texts=1"], ["--dataset_path", f"{data}/texts"]
    assert main(*mixture, *flags, tmp_path / "mixture") == 0
    assert main(*files, *flags, tmp_path / "files") == 0
    for name, source in (
        ("mixture", ["--mix", f"{data}/texts=1.0000001"]),
        ("mixture", files),
        ("files", mixture),
    ):
        assert main(*source, *flags, tmp_path / name) == 2
        assert "already holds an extraction that differs in data: " in capsys.readouterr().err
    assert main("--mix", f"{data}/texts=1.0", *flags, tmp_path / "mixture") == 0


def test_another_order_of_the_documents_has_the_same_documents(data):
    """A seed decides it; other seeds give other ones."""
    orders = []
    for seed in (3, 4):
        every = read(text_of("shuffled", data, shuffle_documents=seed))
        orders.append([sample.doc_id for sample in every])
    plain_order = [sample.doc_id for sample in read(text_of("text", data))]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(plain_order)
    assert len({tuple(order) for order in (*orders, plain_order)}) == 3


def test_a_long_document_is_whole_in_its_pieces(data):
    rows = [json.loads(line) for line in (data / "long.jsonl").read_text().splitlines()]
    for overlap in (0, 1, 23):
        text = text_of("split", data, overlap=overlap)
        found = {row["id"]: [] for row in rows}
        for sample in read(text):
            positions = sample.kept_positions
            stored = sample.token_ids[positions].tolist()
            found[sample.doc_id] += zip(positions + sample.row["start"], stored, strict=True)
            assert len(sample.token_ids) <= LENGTH and sample.cut == 0
        for row in rows:
            ids = text.tokenizer.encode(row["text"], add_special_tokens=False).ids
            assert found[row["id"]] == list(enumerate(ids))


def test_token_ids_need_no_tokenizer_and_what_keeps_nothing_is_counted(data, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(data / "model" / name)
    rows = [{"ids": [5, 6, 7], "mask": [0, 1, 1]}, {"ids": [8], "mask": [0]}, {"ids": []}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ["--model_path", model, "--dataset_path", path, "--layers_to_extract", 1]
    flags += ["--ids_column", "ids", "--mask_column", "mask", "--output_dir", tmp_path / "out"]
    assert main(*flags) == 0
    printed = capsys.readouterr().out
    assert "kept nothing: 1 sample (--mask_column mask, positions all)\n" in printed
    assert "empty: 1 row without text" in printed
    stored = [sample.token_ids.tolist() for sample in ActivationDataset(tmp_path / "out")]
    assert stored == [[6, 7], []]
    metadata = json.loads((tmp_path / "out/metadata.json").read_text())
    assert (metadata["empty_samples"], metadata["empty_rows"]) == (1, 1)


@pytest.fixture
def masked(data, tmp_path, capsys):
    """Runs over rows of ids with a mask of this name; the status, and what is said."""

    def run(output, name, rows, *more):
        lines = ({"ids": ids, name: mask} for ids, mask in rows)
        path = write_rows(tmp_path / f"{output}.jsonl", lines)
        flags = ["--model_path", data / "model", "--dataset_path", path, "--ids_column", "ids"]
        flags += ["--mask_column", name, "--layers_to_extract", 1, "--dtype", "float32"]
        status = main(*flags, "--output_dir", tmp_path / output, *more)
        said = capsys.readouterr()
        return status, said.out + said.err

    return run


def test_padding_does_not_exist(masked, data, tmp_path, capsys):
    """On either side; a model that reads it gives other values to the tokens behind it."""
    real = [[5, 6, 7], [8, 9, 10, 11]]
    padded = [([-100, 10**6, 5, 6, 7], [0, 0, 1, 1, 1]), ([8, 9, 0, 10, 11, 0], [1, 1, 0, 1, 1, 0])]
    for output, rows in (("padded", padded), ("real", [(ids, [1] * len(ids)) for ids in real])):
        status, said = masked(output, "attention_mask", rows)
        assert status == 0, said
        assert (
            "--mask_column attention_mask: tokens with 1 are stored; those with 0 are pad" in said
        )
    one, two = (ActivationDataset(tmp_path / output) for output in ("padded", "real"))
    assert [sample.token_ids.tolist() for sample in one] == real
    assert [sample.position.tolist() for sample in one] == [[0, 1, 2], [0, 1, 2, 3]]
    for sample, other in zip(one, two, strict=True):
        np.testing.assert_array_equal(sample[STREAM], other[STREAM])
    verify = "--verify", "--output_dir", tmp_path / "padded", "--model_path", data / "model"
    assert main(*verify) == 0
    assert "2 samples recomputed; 0 problems" in capsys.readouterr().out


def test_other_masks_say_that_zeros_are_context(masked, tmp_path):
    status, said = masked("out", "loss_mask", [([5, 6, 7], [0, 1, 1])])
    assert status == 0
    assert "--mask_column loss_mask: tokens with 1 are stored; those with 0 are context" in said
    (sample,) = ActivationDataset(tmp_path / "out")
    assert sample.position.tolist() == [1, 2]


def test_a_row_that_is_all_padding_is_a_bad_row(masked, tmp_path):
    rows = [([5, 6], [1, 1]), ([5, 6, 7], [0, 0, 0])]
    status, said = masked("out", "attention_mask", rows)
    assert status == 1  # once what is before it is stored
    told = "out.jsonl line 2: --mask_column attention_mask: each of its 3 values is 0"
    assert told in said
    status, said = masked("out", "attention_mask", rows, "--skip_bad_rows")
    assert status == 0 and told in said and "skipped: 1 row that could not be used" in said
    status, said = masked("out2", "attention_mask", rows[1:], "--skip_bad_rows")
    assert status == 2 and told.replace("out", "out2").replace("line 2", "line 1") in said
