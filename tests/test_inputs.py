"""Every kind of input: each row once, exact continuation, budgets, repair and verification."""

import json
import random
from dataclasses import replace

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from chat_templates import QWEN2_5, QWEN3, add_markers
from command_line import assert_refused, main
from conftest import inputs_with
from pods import Pod
from small_runs import Source, activations, content, set_status
from test_chat import VOCABULARY, conversation
from test_killed import forget, killed_at

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import StorageError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import demo
from activation_extraction.run import inputs as run_inputs
from activation_extraction.run.host_text import HostText, load_text_files, row_form
from activation_extraction.run.open_data import TextRequest, open_dataset
from activation_extraction.store.identity import Identity
from activation_extraction.text import rows as text_rows
from activation_extraction.text import samples as text_samples
from activation_extraction.text import shuffle
from activation_extraction.text.batch import Worker
from activation_extraction.text.samples import samples

LENGTH = 24  # as of small_runs
STREAM = "blocks.1.hook_resid_post"
# Each file has its own rows: their names begin with it.
CASES = {
    "text": ["--dataset_path", "{}/texts"],
    "chat": ["--dataset_path", "{}/chat.jsonl", "--messages_column", "messages"],
    "roles": [
        *("--dataset_path", "{}/chat.jsonl", "--messages_column", "messages"),
        *("--roles", "assistant", "tool", "--keep_columns", "label", "--long_documents", "split"),
    ],
    "turns": [
        *("--dataset_path", "{}/chat.jsonl", "--messages_column", "messages"),
        *("--long_documents", "split", "--positions", "last_of_turn"),
    ],
    "token ids": [
        *("--dataset_path", "{}/ids.parquet", "--ids_column", "input_ids"),
        *("--mask_column", "loss_mask"),
    ],
    "split": ["--dataset_path", "{}/long.jsonl", "--long_documents", "split"],
    "overlap": [
        *("--dataset_path", "{}/long.jsonl", "--long_documents", "split", "--overlap", "5"),
    ],
    "shuffled": ["--dataset_path", "{}/texts", "--shuffle_documents", "3"],
    "shuffled row groups": ["--dataset_path", "{}/ids.parquet", "--shuffle_documents", "1"]
    + ["--ids_column", "input_ids"],
    "mixture": [
        *("--mix", "{}/texts=0.7", "{}/long.jsonl=.3", "--long_documents", "split"),
        *("--shuffle_documents", "5", "--keep_columns", "id"),
    ],
    "budget": ["--dataset_path", "{}/long.jsonl", "--max_tokens", "209"],
    "budget of roles": [
        *("--dataset_path", "{}/chat.jsonl", "--messages_column", "messages"),
        *("--roles", "user", "--max_tokens", "101", "--long_documents", "split"),
    ],
    "everything": [
        *("--dataset_path", "{}/chat.jsonl", "--messages_column", "messages"),
        *("--roles", "user", "assistant", "--keep_columns", "label", "--long_documents", "split"),
        *("--activation_dtype", "float8", "--top_logits", "3", "--hook_names", STREAM),
        *("loss", "entropy", "logits.top_ids", "logits.top_logprobs"),
    ],
}


@pytest.fixture(scope="module")
def data(demo_inputs, tmp_path_factory):
    """A model whose tokenizer knows the markers, and small files of every kind."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    inputs_with({**demo.MODEL_CONFIG, "vocab_size": VOCABULARY}, demo_inputs, folder)
    add_markers(folder / "model", QWEN3)

    def write(name, rows):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def words(least, most):
        return " ".join(f"word{chance.randint(0, 9)}" for _ in range(chance.randint(least, most)))

    for name, count in (("a", 13), ("b", 1), ("c", 20)):
        rows = [{"text": words(0, 9), "id": f"{name}{n}"} for n in range(count)]
        write(f"texts/{name}.jsonl", rows)
    write("long.jsonl", [{"text": words(1, 60), "id": f"long{n}"} for n in range(12)])
    chats = [{**conversation(chance), "label": n % 3, "id": f"chat{n}"} for n in range(15)]
    write("chat.jsonl", chats)
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
    own = [flag.format(data) for flag in CASES[case]]
    return [*own, "--model_path", str(data / "model"), "--max_seq_length", str(LENGTH)]


def text_of(case, data, worker=None, **changes):
    """What a run with these flags reads."""
    config = parse_args([*flags_of(case, data), *(f"--{k}={v}" for k, v in changes.items())])
    request, checkpoint = config.part(TextRequest), Checkpoint(config.model_path)
    tokenizer, template = load_text_files(request, checkpoint, VOCABULARY)
    rows = row_form(request, template, VOCABULARY)
    dataset = open_dataset(request, rows.columns, [])
    return HostText(request, dataset, rows, tokenizer, worker or Worker(), (8, LENGTH))


def read(text, start=None):
    limits = {"max_samples": text.max_samples, "max_tokens": text.max_tokens}
    return list(samples(text._documents(), text.tokenizer, text.form, start=start, **limits))


def plain(sample):
    """All that is known of a sample, to compare."""
    arrays = sample.token_ids, sample.kept_positions, *sample.labels.values()
    others = sample.sample_idx, sample.text_preview, sample.doc_id, sample.row, sample.cut
    cursors = sample.cursor.to_json(), sample.next_cursor.to_json()
    return *(array.tolist() for array in arrays), *others, sample.columns, *cursors


@pytest.mark.parametrize("case", CASES)
def test_the_samples_continue_at_every_cursor(case, data):
    text = text_of(case, data)
    every = read(text)
    whole = [plain(sample) for sample in every]
    assert len(whole) > 5
    for number, sample in enumerate(every):
        for start, at in ((sample.cursor, number), (sample.next_cursor, number + 1)):
            start = type(start).from_json(json.loads(json.dumps(start.to_json())))
            assert [plain(each) for each in read(text, start)] == whole[at:]


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


@pytest.fixture
def case():
    return "text"


@pytest.fixture
def source(case, data):
    """What `run` of small_runs reads."""
    text = text_of(case, data)
    request = text.request
    identity = Identity(
        "tiny",
        positions=str(request.positions),
        roles=request.roles,
        mask_column=request.mask_column or "",
        overlap=request.overlap,
    )
    source = Source(text._documents, text.tokenizer, text.form, identity)
    return with_predictions(source) if case == "everything" else source


def with_predictions(source):
    """The same with an encoded hook, one that is NaN for first tokens, and one of integers."""
    names = STREAM, "loss", "logits.top_ids"
    dtypes = dict(activation_dtype="float8", float32_hooks=names[1:2], integer_hooks=names[2:])

    def values(batch):
        first, second = activations(batch).values()
        position = batch.positions if batch.kept is None else batch.positions[batch.kept]
        loss = np.where(position[..., None] == 0, np.nan, second[..., :1]).astype(np.float32)
        return dict(zip(names, (first, loss, second[..., :3].astype(np.int32)), strict=True))

    identity = replace(source.identity, keyed_by="hook name", **dtypes)
    hooks = {name: name for name in names}
    return source._replace(identity=identity, hooks=hooks, values=values)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_killed_before_every_change(case, data, run, tmp_path, monkeypatch, capsys):
    """Exhaustive, as in test_killed: the same command continues, and the bytes are the same."""
    limits = {"max_tokens": text_of(case, data).max_tokens, "shard_size_gb": 8e-6}
    run(tmp_path / "whole", **limits)
    whole = content(tmp_path / "whole")
    event, finished = 0, False
    while not finished:
        event += 1
        folder = tmp_path / f"{event}"
        with killed_at(event, folder, monkeypatch):
            try:
                run(folder, **limits)
                finished = True
            except (BaseException, StorageError) as error:
                assert type(error).__name__ in ("Killed", "StorageError"), error
        run(folder, **limits)
        assert content(folder) == whole, event
        forget(folder)
    assert event > 10


@pytest.mark.long
@pytest.mark.parametrize(
    "case,shard_format",
    [(case, ("pickle", "safetensors")[n % 2]) for n, case in enumerate(CASES)]
    + [("everything", "safetensors")],
)
def test_a_run_is_continued_repaired_and_verified(case, shard_format, data, tmp_path, capsys):
    """The bytes are the same each time, and recomputed activations agree."""
    flags = [*flags_of(case, data), "--batch_size", 2, "--dtype", "float32"]
    flags += ["--shard_size_gb", 3e-5, "--no_data_parallel"]
    if "--hook_names" not in flags:
        flags += ["--layers_to_extract", 1]
    flags += ["--shard_format", shard_format, "--output_dir", tmp_path / "out"]
    assert main(*flags) == 0
    whole = content(tmp_path / "out")
    cursors = [whole[name]["cursor"] for name in sorted(whole) if name.endswith(".json")]
    kept = next((n for n, cursor in enumerate(cursors, 1) if "taken" in cursor), 1)
    assert kept < len(cursors)
    for path in (tmp_path / "out").glob("shard_*"):  # as if killed after these
        if int(path.name[6:10]) > kept:
            path.unlink()
    set_status(tmp_path / "out", "running")
    assert main(*flags) == 0
    assert content(tmp_path / "out") == whole
    for number in (1, kept + 1):
        (path,) = (tmp_path / "out").glob(f"shard_{number:04d}.[ps][ka][lf]*")
        path.write_bytes(path.read_bytes()[:-9])
    (tmp_path / "out" / f"shard_{kept + 1:04d}.json").unlink()
    assert main(*flags, "--repair") == 0
    assert content(tmp_path / "out") == whole
    capsys.readouterr()
    verify = "--verify", "--output_dir", tmp_path / "out", "--model_path", data / "model"
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


@pytest.mark.parametrize("shard_format", ["pickle", "safetensors"])
def test_a_budget_is_exact_and_may_grow(shard_format, data, tmp_path, capsys):
    """Over two hosts that do not share it evenly, too. More than there is ends short, and says
    so; --status shows how much is done."""
    flags = [*flags_of("budget", data)[:2], *flags_of("budget", data)[4:]]
    flags += ["--layers_to_extract", 1, "--shard_size_gb", 3e-5, "--shard_format", shard_format]
    flags += ["--batch_size", 2, "--no_data_parallel"]

    def run(folder, most, *more):
        assert main(*flags, "--max_tokens", most, "--output_dir", tmp_path / folder, *more) == 0
        return ActivationDataset(tmp_path / folder)

    for most in (1, 24, 101, 202, 203):
        assert run("grown", most).tokens == most
        assert main("--status", "--output_dir", tmp_path / "grown") == 0
        assert "100.0%" in capsys.readouterr().out
    run("at once", 203)
    found = [content(tmp_path / name) for name in ("grown", "at once")]
    for described in (each for contents in found for each in contents.values()):
        if isinstance(described, dict):
            del described["cursor"]  # in front of a former end, other samples share batches
    assert found[0] == found[1]
    assert main(*flags, "--max_tokens", 50, "--output_dir", tmp_path / "grown") == 2
    assert "already holds 203 tokens, more than the 50" in capsys.readouterr().err
    total = run("all", 10**6).tokens
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


def test_bad_flags_are_refused(data, tmp_path, capsys):
    for flags, why in (
        (["--mix", f"{data}/texts"], "is not SOURCE=WEIGHT with a positive weight"),
        (["--mix", f"{data}/texts=0"], "is not SOURCE=WEIGHT with a positive weight"),
        (["--mix", f"{data}/texts=1", f"{data}/texts=2"], f"--mix: names {data}/texts twice"),
        (["--mix", "name:config:split:more=1"], "no such path, and not NAME:CONFIG:SPLIT"),
        (
            ["--mix", f"{data}/none.jsonl=1", f"{data}/texts=2"],
            f"--mix {data}/none.jsonl: no such file or folder",
        ),
        (["--mix", f"{data}/texts=1", "--dataset_path", "x"], "cannot be used together"),
        (["--overlap", "3"], "--overlap: needs --long_documents"),
        (["--long_documents", "split", "--overlap", "2048"], "expected less than --max_seq_length"),
        (["--keep_columns", *map(str, range(65))], "names 65 columns, there is room for 64"),
        (["--keep_columns", "tokens"], "the table of samples has a column of this name"),
    ):
        assert_refused(capsys, tmp_path, ["--model_path", str(data / "model"), *flags], why)


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


@pytest.mark.long
@pytest.mark.parametrize("case", ["roles", "mixture", "budget of roles"])
def test_two_hosts_store_what_one_stores(case, data, tmp_path, capsys):
    """Each sample with the same tokens; a budget is shared, and exact in all."""
    flags = [*flags_of(case, data), "--batch_size", 2, "--layers_to_extract", 1]
    assert main(*flags, "--output_dir", tmp_path / "one") == 0
    pod = Pod(tmp_path, 2, 1, *flags, "--output_dir", tmp_path / "two")
    assert pod.wait() == [0, 0], [pod.text(host) for host in range(2)]
    one, two = (ActivationDataset(tmp_path / name) for name in ("one", "two"))
    if "budget" in case:
        assert one.tokens == two.tokens == 101
        return
    tokens = [
        {str(sample.row | {"share": 0}): sample.token_ids.tolist() for sample in each}
        for each in (one, two)
    ]
    assert tokens[0] == tokens[1]
    assert main("--verify", "--output_dir", tmp_path / "two") == 0


def test_token_ids_need_no_tokenizer_and_what_keeps_nothing_is_counted(data, tmp_path, capsys):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors"):
        (model / name).symlink_to(data / "model" / name)
    rows = [{"ids": [5, 6, 7], "mask": [0, 1, 1]}, {"ids": [8], "mask": [0]}, {"ids": []}]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
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
        path = tmp_path / f"{output}.jsonl"
        lines = (json.dumps({"ids": ids, name: mask}) for ids, mask in rows)
        path.write_text("".join(f"{line}\n" for line in lines))
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
    assert status == 2
    told = "out.jsonl line 2: --mask_column attention_mask: each of its 3 values is 0"
    assert told in said
    status, said = masked("out", "attention_mask", rows, "--skip_bad_rows")
    assert status == 0 and told in said and "skipped: 1 row that could not be used" in said
    status, said = masked("out2", "attention_mask", rows[1:], "--skip_bad_rows")
    assert status == 2 and told.replace("out", "out2").replace("line 2", "line 1") in said


def test_a_run_whose_model_read_the_padding_is_not_continued(
    masked, data, tmp_path, monkeypatch, capsys
):
    """As an earlier version stored it."""
    rows = [([0, 5, 6, 7], [0, 1, 1, 1])] * 3
    with monkeypatch.context() as before:
        for module in (run_inputs, text_rows):
            before.setattr(module, "ATTENTION_MASK", "")
        assert masked("out", "attention_mask", rows, "--max_samples", 2)[0] == 0
    status, said = masked("out", "attention_mask", rows)
    assert status == 2 and "by another version, whose model read the tokens with 0 in" in said
    verify = "--verify", "--output_dir", tmp_path / "out"
    assert main(*verify) == 0
    assert main(*verify, "--model_path", data / "model") == 2
    assert "zeros in attention_mask were context, which the model read" in capsys.readouterr().err


def test_a_template_may_lie_beside_the_tokenizer(data, tmp_path):
    """As in new checkpoints; it goes before the one in tokenizer_config.json."""
    model = tmp_path / "model"
    model.mkdir()
    for path in (data / "model").iterdir():
        (model / path.name).symlink_to(path)
    (model / "chat_template.jinja").write_text(QWEN2_5)
    flags = ["--dataset_path", data / "chat.jsonl", "--messages_column", "messages"]
    flags += ["--layers_to_extract", 1, "--max_samples", 3, "--max_seq_length", 64]
    assert main("--model_path", model, *flags, "--output_dir", tmp_path / "own") == 0
    named = "--chat_template", model / "chat_template.jinja"
    assert main("--model_path", data / "model", *flags, *named, "--output_dir", tmp_path / "b") == 0
    assert main("--model_path", data / "model", *flags, "--output_dir", tmp_path / "c") == 0
    own, given, other = (content(tmp_path / name) for name in ("own", "b", "c"))
    assert own["shard_0001.pkl.gz"] == given["shard_0001.pkl.gz"] != other["shard_0001.pkl.gz"]
