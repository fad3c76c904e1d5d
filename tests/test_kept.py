"""Runs that keep some tokens: what leaves the devices, is stored, verified, continued and read."""

import shutil
from operator import itemgetter

import jax
import numpy as np
import pytest
from command_line import main, records_of
from extractions import change_shard
from pods import rounding_of_run

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.inspect.trainer_files import EXPORT_FORMS
from activation_extraction.model import kept as kept_module
from activation_extraction.model.hooks import Form
from activation_extraction.model.kept import take_kept
from activation_extraction.model.mesh import build_layout, host_rows
from activation_extraction.text.token_choice import TokenChoice

HOOKS = ["blocks.0.attn.hook_k", "blocks.1.hook_resid_post", "blocks.2.mlp.hook_post"]
SHARES = {
    "last": ["--positions", "last"],
    "random": ["--positions", "random:0.1:3"],
    "many": ["--drop_token_ids", "12", "14", "20"],
    "few": ["--positions", "last", "--drop_token_ids", *map(str, range(300))],  # often none
}
MESHES = {
    "one device": ["--no_data_parallel"],
    "2d": [],
    "pipeline": ["--mesh_shape", "2,2,2", "--mesh_axes", "pipeline,data,model"],
    "rows that do not divide": ["--max_seq_length", "84"],
}


def long(name, quick):
    """A parameter that `make test-quick` leaves out unless it is the quick one."""
    return pytest.param(name, marks=[] if name == quick else pytest.mark.long)


@pytest.fixture(scope="module")
def flags(demo_inputs):
    return [
        *("--model_path", demo_inputs / "model", "--hook_names", *HOOKS),
        *("--dataset_path", demo_inputs / "documents.parquet", "--max_samples", 60),
        *("--max_seq_length", 96, "--shard_size_gb", 0.0004),
    ]


@pytest.fixture(scope="module")
def whole(flags, tmp_path_factory):
    """All tokens of the same samples, from one device."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(*flags, "--no_data_parallel", "--output_dir", folder) == 0
    return folder


@pytest.fixture(scope="module")
def allowed(whole, demo_inputs):
    """Hook -> how far values may be from the whole by rounding."""
    return rounding_of_run(whole, demo_inputs / "model")


@pytest.fixture(scope="module")
def few(flags, tmp_path_factory):
    """The run of which random tokens are kept."""
    folder = tmp_path_factory.mktemp("few")
    assert main(*flags, *SHARES["random"], "--output_dir", folder) == 0
    assert len(list(folder.glob("*.pkl.gz"))) > 3
    return folder


def chosen(flags):
    config = parse_args(flags)
    return TokenChoice(config.positions, config.drop_token_ids)


def check(folder, whole, allowed, choice, length=96):
    """Every sample is there, with its kept tokens and the values that they have in the whole."""
    found, expected = records_of(folder), records_of(whole)
    assert list(found) == list(expected) == HOOKS
    for hook in HOOKS:
        in_order = (sorted(each[hook], key=itemgetter("sample_idx")) for each in (found, expected))
        for record, every in zip(*in_order, strict=True):
            token_ids = every["token_ids"][:length]
            positions = choice.kept(every["sample_idx"], token_ids)
            assert record["sample_idx"] == every["sample_idx"]
            assert record["positions"].dtype == record["token_ids"].dtype == np.int32
            np.testing.assert_array_equal(record["positions"], positions)
            np.testing.assert_array_equal(record["token_ids"], token_ids[positions])
            values = every["activation"]
            assert record["activation"].shape == (len(positions), values.shape[1])
            assert record["shape"] == record["activation"].shape
            error = np.abs(record["activation"] - values[positions]).max(initial=0)
            assert error <= allowed[hook]


@pytest.mark.parametrize("mesh", [long(mesh, "2d") for mesh in MESHES])
@pytest.mark.parametrize("share", [long(share, "random") for share in SHARES])
def test_kept_tokens_have_the_values_of_the_whole(
    share, mesh, flags, whole, allowed, tmp_path, capsys
):
    asked = [*flags, *SHARES[share], *MESHES[mesh], "--output_dir", tmp_path]
    assert main(*asked) == 0
    length = 84 if "84" in MESHES[mesh] else 96
    check(tmp_path, whole, allowed, chosen(SHARES[share]), length)
    assert main("--verify", "--output_dir", tmp_path) == 0
    assert "60 samples" in capsys.readouterr().out


def test_a_run_that_keeps_everything_stores_no_positions(whole):
    for records in records_of(whole).values():
        assert all("positions" not in record for record in records)


def test_only_kept_tokens_leave_the_devices(monkeypatch):
    """Counted in bytes: about as many as are kept, whatever the devices; and none of other rows."""
    monkeypatch.setattr(kept_module, "PIECES", 32)
    rows, form = host_rows(jax.devices()), Form(5, "float32")
    values = np.random.default_rng(0).standard_normal((3, 8, 64, 5), np.float32)
    split, whole = (build_layout(jax.devices(), {axis: 8}, 8) for axis in ("data", "model"))
    # 60 tokens do not divide among eight devices; rows may be theirs instead.
    for length, layout in ((64, whole), (60, whole), (60, split)):
        part = values[:, :, :length]
        array = jax.device_put(part, rows.outgoing(length, layout))
        for share in (0.0, 0.03, 0.3, 1.0):
            kept = np.random.default_rng(1).random((8, length)) < share
            sent = take_kept({form: array}, kept)
            copied = sum(piece.values[form].nbytes for piece in sent.pieces)
            assert copied <= min(2.5 * share + 0.1, 1.1) * part.nbytes, (length, share)
            np.testing.assert_array_equal(sent.receive()[form], part[:, kept])


def verify(folder, demo_inputs, *more):
    model = ["--model_path", demo_inputs / "model", "--verify_samples", 60]
    return main("--verify", *model, *more, "--output_dir", folder)


@pytest.mark.long
def test_verify_reads_the_text_again_to_recompute_kept_tokens(
    few, demo_inputs, texts, tmp_path, capsys
):
    assert verify(few, demo_inputs) == 0
    assert "60 samples recomputed; 0 problems" in capsys.readouterr().out
    other = tmp_path / "documents.parquet"
    shutil.copy(demo_inputs / "documents.parquet", other)
    assert verify(few, demo_inputs, "--dataset_path", other) == 0
    assert verify(few, demo_inputs, "--dataset_path", texts([{"text": "other"}])) == 2
    assert "documents.parquet is missing; " in capsys.readouterr().err


def edited(few, tmp_path, change):
    """A copy of the run with a record that was changed, to which everything else agrees."""
    shutil.copytree(few, tmp_path / "out")
    number = len(list(few.glob("shard_*.json")))

    def of_last(shard):
        for records in shard.values():
            record = next(r for r in reversed(records) if len(r["positions"]))
            change(record)

    change_shard(tmp_path / "out", number, of_last)
    return tmp_path / "out"


CHANGES = {
    "shifted positions": (
        lambda r: r.update(positions=r["positions"] + np.int32(1)),
        "the data set now gives other tokens than those that are stored",
    ),
    "other values": (
        lambda r: r.update(activation=r["activation"] * np.float32(1.1)),
        "recomputed, it differs by 0.0",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_recomputing_finds_what_is_wrong_with_kept_tokens(name, few, demo_inputs, tmp_path, capsys):
    change, problem = CHANGES[name]
    out = edited(few, tmp_path, change)
    assert main("--verify", "--output_dir", out) == 0
    assert verify(out, demo_inputs) == 1
    assert problem in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("share", ["few", "random"])
def test_what_is_kept_is_read_back(share, flags, few, tmp_path, capsys):
    out = few
    if share == "few":
        out = tmp_path / "out"
        assert main(*flags, *SHARES[share], "--output_dir", out) == 0
    dataset, records = ActivationDataset(out), records_of(out)
    assert len(dataset) == 60
    assert dataset.tokens == sum(len(r["token_ids"]) for r in records[HOOKS[0]])
    if share == "few":
        assert sum(not len(r["token_ids"]) for r in records[HOOKS[0]]) > 20
    for number, sample in enumerate(dataset):
        for hook in HOOKS:
            np.testing.assert_array_equal(sample[hook], records[hook][number]["activation"])
        np.testing.assert_array_equal(sample.position, records[HOOKS[0]][number]["positions"])
        np.testing.assert_array_equal(sample.token_ids, records[HOOKS[0]][number]["token_ids"])
    every = np.concatenate([r["positions"] for r in records[HOOKS[1]]])
    for shuffle in (None, 1):
        batches = list(dataset.batches(50, shuffle=shuffle))
        found = np.concatenate([batch.position for batch in batches])
        assert sorted(found.tolist()) == sorted(every.tolist())
    late = dataset.batches(50, skip_first=70)
    assert sum(map(len, late)) == (every >= 70).sum()
    assert main("--status", "--output_dir", out) == 0
    assert f"{dataset.tokens:,}" in capsys.readouterr().out
    assert main("--report", tmp_path / "report.html", "--output_dir", out) == 0
    page = (tmp_path / "report.html").read_text()
    assert str(chosen(SHARES[share]).positions) in page and "their lengths are not known" in page


@pytest.mark.parametrize("form", EXPORT_FORMS)
def test_kept_tokens_are_exported(form, few, tmp_path, capsys):
    asked = ["--export", form, "--export_dir", tmp_path / "export", "--hook_names", HOOKS[1]]
    assert main(*asked, "--output_dir", few) == 0
    tokens = ActivationDataset(few).tokens
    tokens -= tokens % EXPORT_FORMS[form].row
    assert f"exported: {tokens:,} tokens" in capsys.readouterr().out


@pytest.mark.long
def test_a_run_of_which_no_token_is_kept(flags, tmp_path, capsys):
    """It fails, since it is of no use, and yet all is in order."""
    out = tmp_path / "out"
    assert main(*flags, "--positions", "random:1e-15", "--output_dir", out) == 1
    assert main("--verify", "--output_dir", out) == 0
    dataset = ActivationDataset(out)
    assert (len(dataset), dataset.tokens) == (60, 0) and dataset[7].token_ids.shape == (0,)
    assert list(dataset.batches(10, shuffle=1)) == []
    assert main("--report", "--output_dir", out) == 2
    assert "no token is stored yet" in capsys.readouterr().err
