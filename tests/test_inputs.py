"""Every kind of input: each row once on any machines and hosts, budgets, masks, verification."""

import random

import numpy as np
import pytest
from chat_templates import QWEN3, VOCABULARY, chat_model
from command_line import main
from row_files import write_parquet, write_rows
from test_chat import conversation

from activation_extraction.cli.config import parse_args
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.host_text import Text
from activation_extraction.text import samples as text_samples
from activation_extraction.text import sources
from activation_extraction.text.batch import Worker
from activation_extraction.text.samples import samples

LENGTH = 24
STREAM = "blocks.1.hook_resid_post"
CHAT = "--dataset_path {}/chat.jsonl --messages_column messages --long_documents split"
SPLIT = "--dataset_path {}/long.jsonl --long_documents split"
# Each file has its own rows: their names begin with it.
CASES = {
    "text": "--dataset_path {}/texts",
    "roles": f"{CHAT} --roles assistant tool --keep_columns label",
    "token ids": "--dataset_path {}/ids.parquet --ids_column input_ids --mask_column loss_mask",
    "overlap": f"{SPLIT} --overlap 5",
    "shuffled": "--dataset_path {}/texts --shuffle_documents 3",
    "shuffled row groups": "--dataset_path {}/ids.parquet --ids_column input_ids "
    "--shuffle_documents 1",
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
    """A model whose tokenizer knows the markers, and small files of every kind."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(0)
    chat_model(demo_inputs, folder, QWEN3)

    def words(least, most):
        return " ".join(f"word{chance.randint(0, 9)}" for _ in range(chance.randint(least, most)))

    for name, count in (("a", 13), ("b", 1), ("c", 20)):
        texts = ({"text": words(0, 9), "id": f"{name}{n}"} for n in range(count))
        write_rows(folder / f"texts/{name}.jsonl", texts)
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
    """So that small data has several chunks, and several blocks."""
    monkeypatch.setattr(text_samples, "CHUNK_ROWS", 5)
    monkeypatch.setattr(sources, "BLOCK_ROWS", 4)


def flags_of(case, data):
    return [*case.format(data).split(), "--model_path", data / "model", "--max_seq_length", LENGTH]


def read(case, data, worker=None):
    """The samples that a run with these flags makes, and its tokenizer."""
    config = parse_args([str(flag) for flag in flags_of(case, data)])
    text = Text(config, Checkpoint(config.model_path), VOCABULARY)
    documents = text.documents(worker or Worker())
    return list(samples(documents, text.tokenizer, text.form)), text.tokenizer


def test_the_hosts_of_a_machine_share_its_limits():
    for limit, shares in ((8, [3, 3, 2]), (2, [1, 1, 0]), (None, [None] * 3)):
        assert [Worker(1, 2, host, 3).share_of(limit) for host in range(3)] == shares


@pytest.mark.parametrize("case", CASES)
def test_every_row_and_index_is_there_once_on_any_machines_and_hosts(case, data):
    """A machine's rows are those that it has with one host."""

    def rows_and_indices(worker):
        found, _ = read(CASES[case], data, worker)
        rows = [str(sample.row | {"share": 0}) for sample in found]
        return rows, [sample.sample_idx for sample in found]

    alone = sorted(rows_and_indices(Worker())[0])
    for machines, hosts in ((1, [3]), (5, [1, 2, 4, 2, 1]), (2, [5, 1])):
        rows, indices = [], []
        for machine, count in enumerate(hosts):
            own = [rows_and_indices(Worker(machine, machines, h, count)) for h in range(count)]
            found = sorted(row for each, _ in own for row in each)
            assert found == sorted(rows_and_indices(Worker(machine, machines))[0])
            rows += found
            indices += [index for _, each in own for index in each]
        assert sorted(rows) == alone and len(set(indices)) == len(indices)


@pytest.mark.long
@pytest.mark.parametrize("flags", [CASES["mixture"], EVERYTHING])
def test_a_run_is_repaired_and_verified(flags, data, tmp_path, capsys):
    """Every sample has its values again, and recomputed activations agree."""
    flags, out = [*flags_of(flags, data), "--batch_size", 2, "--dtype", "float32"], tmp_path / "out"
    flags += ["--shard_size_gb", 3e-5, "--no_data_parallel"]
    flags += [] if "--hook_names" in flags else ["--layers_to_extract", 1]

    def stored():
        return {
            sample.sample_idx: [sample.row, sample.cut, *map(np.ndarray.tobytes, arrays)]
            for sample in ActivationDataset(out)
            for arrays in [(sample.position, sample.token_ids, *sample.activations.values())]
        }

    assert main(*flags, "--output_dir", out) == 0
    whole = stored()
    (path,) = out.glob("shard_0002.[ps][ka][lf]*")
    path.write_bytes(path.read_bytes()[:-9])
    assert main(*flags, "--output_dir", out, "--repair") == 0
    assert stored() == whole
    capsys.readouterr()
    verify = "--verify", "--output_dir", out, "--model_path", data / "model"
    assert main(*verify, "--verify_samples", 20) == 0
    assert "recomputed; 0 problems\n" in capsys.readouterr().out


def test_a_budget_is_exact_and_may_grow(data, tmp_path, capsys):
    """More than there is ends short, and says so; --status shows how much is done."""
    flags = ["--model_path", data / "model", "--dataset_path", data / "long.jsonl"]
    flags += ["--max_seq_length", LENGTH, "--batch_size", 2, "--no_data_parallel"]
    flags += ["--layers_to_extract", 1, "--shard_size_gb", 3e-5, "--output_dir", tmp_path]
    for most in (24, 101, 150):
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


def test_a_mixture_keeps_its_proportions_and_a_seed_its_order(data):
    """At every moment; a source that is used up ends, and the other goes on."""
    found, _ = read(CASES["mixture"], data)
    sources = [sample.row["source"] for sample in found if sample.row["piece"] == 0]
    names = f"{data}/texts", f"{data}/long.jsonl"
    ends = max(n for n, each in enumerate(sources) if each == names[0])
    for count in range(1, ends):
        assert abs(sources[:count].count(names[0]) - 0.7 * count) <= 1
    assert sources.count(names[1]) == 12
    orders = [
        [sample.doc_id for sample in read(f"--dataset_path {{}}/texts {more}", data)[0]]
        for more in ("", "--shuffle_documents 3", "--shuffle_documents 4")
    ]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert len(set(map(tuple, orders))) == 3


def test_other_data_is_refused_by_its_name(data, tmp_path, capsys):
    """A weight counts with all of its digits."""
    flags = ["--model_path", data / "model", "--max_seq_length", LENGTH, "--max_samples", 3]
    flags += ["--layers_to_extract", 1, "--output_dir", tmp_path / "out"]
    assert main("--mix", f"{data}/texts=1", *flags) == 0
    for other in (["--mix", f"{data}/texts=1.0000001"], ["--dataset_path", f"{data}/texts"]):
        assert main(*other, *flags) == 2
        assert "already holds an extraction that differs in data: " in capsys.readouterr().err
    assert main("--mix", f"{data}/texts=1.0", *flags) == 0


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


def test_padding_does_not_exist(masked, data, tmp_path, capsys):
    """On either side; a model that reads it gives other values to the tokens behind it. A row that
    is all padding is a bad one."""
    real, name = [[5, 6, 7], [8, 9, 10, 11]], "attention_mask"
    padded = [([-100, 10**6, 5, 6, 7], [0, 0, 1, 1, 1]), ([8, 9, 0, 10, 11, 0], [1, 1, 0, 1, 1, 0])]
    padded += [([5, 6, 7], [0, 0, 0])]
    told = f"padded.jsonl line 3: --mask_column {name}: each of its 3 values is 0"
    status, said, _ = masked("padded", name, padded)
    assert status == 1 and told in said  # once what is before it is stored
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
