"""Runs with --encode: what is stored, told, continued, verified, read back and exported.

The oracle is a publisher's formula in NumPy of the activations that are stored beside the codes.
"""

import json
import shutil
from itertools import pairwise

import autoencoder_files as made
import ml_dtypes
import numpy as np
import pytest
from command_line import assert_refused, main, records_of
from extractions import agree, change_shard
from pods import Pod, first_documents
from safetensors.numpy import load_file, save_file
from small_runs import both_formats
from storages import open_storage
from test_autoencoders import assert_codes

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.codes import ARRAYS, Codes
from activation_extraction.common.errors import StorageError
from activation_extraction.inspect import latent_files
from activation_extraction.inspect.latent_files import DelphiFormat
from activation_extraction.store.identity import Identity
from activation_extraction.store.run_log import unseal
from activation_extraction.store.statistics import CodeSums, Statistics
from activation_extraction.store.statistics_lines import code_lines, code_warnings
from activation_extraction.text.packing import pack, samples_of

RESID, TRANSCODED = "blocks.1.hook_resid_post", "blocks.1.ln2.hook_out"
OUT, CODES = "blocks.1.hook_mlp_out", f"{RESID}.codes"
ONE = ["--no_data_parallel"]
BESIDE = ["--hook_names", OUT, TRANSCODED, "--keep_activations", "--encode_most", made.F]


def jump_relu(folder, norm="layer_norm"):
    """An autoencoder at RESID; the path and the formula."""
    return made.sae_lens(folder, "jumprelu", normalize_activations=norm)


@pytest.fixture(scope="module")
def autoencoders(tmp_path_factory):
    """An autoencoder and a transcoder for the demo's model: hook -> path and formula."""
    folder = tmp_path_factory.mktemp("autoencoders")
    transcoder = made.circuit_tracer(folder / "transcoder")
    return {RESID: jump_relu(folder / "sae"), TRANSCODED: transcoder}


@pytest.fixture(scope="module")
def usual(demo_inputs, tmp_path_factory):
    """All flags but --encode and the output. Some documents are split."""
    few = first_documents(demo_inputs, tmp_path_factory.mktemp("few") / "few.parquet", 6)
    given = ["--model_path", demo_inputs / "model", "--dataset_path", few, "--max_seq_length", 64]
    return [*given, "--long_documents", "split", "--batch_size", 4, "--shard_size_gb", 1e-3]


@pytest.fixture(scope="module")
def encode(autoencoders):
    return ["--encode", *(path for path, _ in autoencoders.values())]


@pytest.fixture(scope="module")
def runs(usual, encode, tmp_path_factory):
    """Runs in each format, of codes and activations; tests must not change them."""
    folder = tmp_path_factory.mktemp("runs")
    for form in SHARD_FORMATS:
        given = [*usual, *encode, *BESIDE, *ONE, "--shard_format", form]
        assert main(*given, "--output_dir", folder / form) == 0
    return {form: folder / form for form in SHARD_FORMATS}


def whole(samples, hook):
    """The values of all samples at a hook, of codes or of activations."""
    values = [sample[hook] for sample in samples]
    is_codes = isinstance(values[0], Codes)
    return Codes.concatenate(values) if is_codes else np.concatenate(values)


def dense(codes):
    return codes.to_scipy().toarray()


def assert_same_codes(run, expected):
    """Both runs have the same codes of the same tokens, but for rounding."""
    first, second = (
        {f"{s.doc_id} {s.row}": dense(s[CODES]) for s in ActivationDataset(folder, [CODES])}
        for folder in (run, expected)
    )
    assert first.keys() == second.keys() and len(first) == len(ActivationDataset(run))
    for name, values in second.items():
        np.testing.assert_allclose(first[name], values, atol=1e-4 * values.max())


def assert_statistics(found, features, result, target):
    """Requires these statistics to be those of the first tokens of samples, or of all others."""
    assert found.tokens == len(features) and (found.cut, found.cut_tokens) == (0, 0)
    assert found.features == (features != 0).sum()
    if len(features):
        error = np.square(target - result).sum() / np.square(target).sum()
        assert found.explained == pytest.approx(1 - error, rel=1e-3)


def assert_codes_of_the_activations(folder, autoencoders):
    """The codes of a run, and their statistics, are the formulas of its activations."""
    dataset = ActivationDataset(folder)
    assert [*dataset.hooks] == [TRANSCODED, OUT, RESID, f"{TRANSCODED}.codes", CODES]
    assert dataset.hooks[CODES] == made.F
    samples = [*dataset]
    first = np.concatenate([sample.position for sample in samples]) == 0
    for hook, (_, formula) in autoencoders.items():
        features, result = formula(whole(samples, hook).astype(np.float64))
        codes = whole(samples, f"{hook}.codes")
        if dataset.dtypes[hook] != np.float32:
            np.testing.assert_allclose(dense(codes), features, atol=1e-2 * features.max())
            continue
        target = whole(samples, OUT if hook == TRANSCODED else RESID).astype(np.float64)
        assert_codes(codes, features, result, target)
        for kind, chosen in (("sinks", first), ("others", ~first)):
            found = dataset.statistics[f"{hook}.codes"].codes[kind]
            assert_statistics(found, features[chosen], result[chosen], target[chosen])


@both_formats
def test_codes_are_the_formula_of_the_activations_beside_them(
    shard_format, runs, autoencoders, capsys
):
    folder = runs[shard_format]
    assert_codes_of_the_activations(folder, autoencoders)
    dataset = ActivationDataset(folder)
    codes, found = whole(dataset, CODES), dataset.statistics[CODES].codes["others"]
    assert dataset[0]["model.layers.1.output.codes"].shape == dataset[0][CODES].shape
    assert main("--status", "--output_dir", folder) == 0
    printed = capsys.readouterr().out.splitlines()
    (line,) = (line for line in printed if line.startswith(CODES))
    assert f"{len(codes.data) / len(codes):.1f} features per token" in line
    # These weights are random, and explain nothing.
    assert found.explained < 0 and "other tokens" not in line
    told = f"warning: {CODES}: the features explain nothing of other tokens: what they leave has "
    (line,) = (line for line in printed if line.startswith(told))
    assert line.startswith(f"{told}{found.error / found.square:.3g} times the squared norm")


def test_a_share_that_is_explained_is_a_statistic_and_another_one_a_warning():
    some = CodeSums(tokens=10, features=30, error=1.0, square=4.0)
    none = CodeSums(tokens=2, features=6, error=10.0, square=4.0)
    statistics = {CODES: Statistics(codes={"sinks": none, "others": some})}
    explained = "3.0 features per token; the share of squared norms that they explain: 75.0% of"
    assert [*code_lines(statistics)] == [f"{CODES}: {explained} other tokens"]
    (warning,) = code_warnings(statistics)
    assert "of first tokens of samples" in warning and "2.5 times" in warning
    empty = {CODES: Statistics(codes={"sinks": CodeSums(), "others": CodeSums()})}
    assert [*code_lines(empty)] == [f"{CODES}: 0.0 features per token"]
    assert not [*code_warnings(empty)]


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        "--mesh_shape 2,4 --mesh_axes pipeline,data",
        pytest.param("--mesh_type 2d --dtype bfloat16", marks=pytest.mark.rare),
    ],
)
def test_codes_on_a_mesh_of_some_tokens(more, usual, encode, autoencoders, tmp_path):
    given = [*usual, *encode, *BESIDE, *more.split(), "--positions", "every:3"]
    assert main(*given, "--output_dir", tmp_path) == 0
    assert_codes_of_the_activations(tmp_path, autoencoders)


def of_safetensors(folder):
    """Yields a record for each sample; ids and values of a token lie between its offsets."""
    for path in sorted(folder.glob("shard_*.safetensors")):
        found = load_file(path)
        assert all(len(found[f"{CODES}.{name}"]) == len(found["token_ids"]) for name in PER_TOKEN)
        for start, stop in pairwise(found["sample_offsets"]):
            offsets = found[f"{CODES}.offsets"][start : stop + 1]
            own = slice(offsets[0], offsets[-1])
            record = {name: found[f"{CODES}.{name}"][own] for name in ("ids", "values")}
            record |= {name: found[f"{CODES}.{name}"][start:stop] for name in PER_TOKEN}
            yield record | {"offsets": offsets - offsets[0]}


PER_TOKEN = "error", "norm"


@both_formats
def test_files_are_read_without_this_program(shard_format, runs):
    folder = runs[shard_format]
    pickled = shard_format == "pickle"
    records = records_of(folder)[CODES] if pickled else of_safetensors(folder)
    for record, sample in zip(records, ActivationDataset(folder), strict=True):
        for name, field in ARRAYS.items():
            np.testing.assert_array_equal(record[name], getattr(sample[CODES], field))
        if pickled:
            assert record["shape"] == (len(record["token_ids"]), made.F)


@pytest.mark.parametrize(
    "change,problem",
    [
        (lambda values: None, "lacks the tensor "),
        (lambda values: values[:-1], r"the tensor \S+ has [\d,]+ rows, expected "),
    ],
)
@pytest.mark.parametrize("array", ["ids", "values"])
def test_a_shard_that_lacks_features_is_named(array, change, problem, runs, tmp_path):
    """How many rows these tensors have does not follow from the number of tokens."""
    copy = shutil.copytree(runs["safetensors"], tmp_path / "copy")
    path = copy / "shard_0001.safetensors"
    tensors = load_file(path)
    values = change(tensors.pop(f"{CODES}.{array}"))
    if values is not None:
        tensors[f"{CODES}.{array}"] = values
    save_file(tensors, path, metadata={"format": "2"})
    agree(path)
    last = unseal((copy / "shard_0001.json").read_bytes(), "")["samples"]["count"] - 1
    dataset = ActivationDataset(copy)
    with pytest.raises(OSError, match=f"{path.name}: {problem}"):
        dataset[last]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # says torch
@both_formats
def test_batches_have_sparse_rows(shard_format, runs):
    """torch and scipy take them, in any order, beside other hooks, and of joined runs."""
    import torch

    dataset, seen = ActivationDataset(runs[shard_format], [CODES]), 0
    stored = {sample.sample_idx: sample[CODES] for sample in dataset}
    features = {number: dense(codes) for number, codes in stored.items()}
    for batch in dataset.batches(100, shuffle=3, skip_first=1, dtype="float16"):
        found = batch[CODES]
        rows = dense(found)
        assert rows.shape == found.shape == (len(batch), made.F)
        tensors = batch.torch()
        csr = tensors[CODES].to_torch()
        assert csr.layout == torch.sparse_csr and (csr.to_dense().numpy() == rows).all()
        assert (batch.jax()[CODES].data == found.data).all()
        assert isinstance(tensors.to("cpu")[CODES].error, torch.Tensor)
        for row, (number, at) in enumerate(zip(batch.sample_idx, batch.position, strict=True)):
            assert (rows[row] == features[number][at]).all()
            assert found.error[row] == stored[number].error[at]
            assert found.norm[row] == stored[number].norm[at]
        seen += len(batch)
    assert seen == dataset.tokens - len(dataset)
    joined = dataset.join(ActivationDataset(runs["pickle"], [RESID]))
    for batch in joined.batches(64, shuffle=0):
        assert isinstance(batch[CODES], Codes) and batch[RESID].shape == (len(batch), made.D)
        norms = np.linalg.norm(batch[RESID], axis=1)
        np.testing.assert_allclose(norms, batch[CODES].norm, rtol=1e-5)
    assert len(joined[3][CODES]) == len(joined[3][RESID])
    for wrong in (lambda: dataset.grain([CODES]), lambda: dataset.batches(9, max_norm={CODES: 1})):
        with pytest.raises(ValueError, match="holds codes|has no activations|needs --shard_format"):
            wrong()


def test_what_is_cut_is_said_before_and_after(usual, autoencoders, tmp_path, capsys):
    """Values are stored as the activations are, here in half the bytes."""
    hook, (path, _) = "blocks.2.hook_resid_post", autoencoders[RESID]
    given = [*usual, "--encode", f"{hook}={path}", "--encode_most", 5]
    given += ["--activation_dtype", "bfloat16", "--shard_format", "safetensors"]
    told = "a token has at most 5 of 200 features, 46 bytes per token"
    assert main(*given, "--list_hooks") == 0
    assert f"{hook}.codes: {told} (the activations take 256)" in capsys.readouterr().out
    assert main(*given, *ONE, "--output_dir", tmp_path) == 0
    printed, logged = capsys.readouterr()
    assert f"its files name {RESID}, and it is used at {hook}" in logged and told in logged
    assert f"WARNING machine 0 host 0: {hook}.codes: the features explain nothing of" in logged
    dataset = ActivationDataset(tmp_path)
    found = dataset.statistics[f"{hook}.codes"].codes
    both = found["sinks"].merge(found["others"])
    assert 0 < both.cut_tokens <= both.tokens and both.cut >= both.cut_tokens
    line = f"5.0 features per token, {both.cut:,} cut from {both.cut_tokens:,} tokens"
    assert f"{line} (--encode_most)" in printed
    (stored,) = {load_file(file)[f"{hook}.codes.values"].dtype for file in tmp_path.glob("*rs")}
    assert stored == ml_dtypes.bfloat16 and dataset.dtypes[f"{hook}.codes"] == np.float32


def test_no_default_layers_are_named_where_the_autoencoder_names_the_layer(
    usual, autoencoders, tmp_path, capsys
):
    given = [*usual, *ONE, "--max_samples", 1, "--output_dir"]
    alone = ["--encode", autoencoders[RESID][0], "--keep_activations"]
    assert main(*given, tmp_path / "alone", *alone) == 0
    logged = capsys.readouterr().err
    assert f"hooks: {RESID}; width 128 each" in logged and "default layers" not in logged
    assert main(*given, tmp_path / "default") == 0
    assert "the default layers, 10 to 23, are clipped" in capsys.readouterr().err


def test_an_autoencoder_is_an_input_of_the_run(usual, encode, autoencoders, runs, tmp_path, capsys):
    """Another one, or another K, cannot continue a run; a copy elsewhere can."""
    out, transcoder = tmp_path / "out", autoencoders[TRANSCODED][0]
    same, other = jump_relu(tmp_path / "b")[0], jump_relu(tmp_path / "c", norm="none")[0]
    given = [*usual, *ONE, "--output_dir", out]
    assert main(*given, *encode, "--max_samples", 5) == 0
    for more, field in (
        ([same, "--encode_most", 4], "encode_most"),
        ([other], "autoencoder_digest"),
    ):
        assert main(*given, "--encode", transcoder, *more) == 2
        assert field in capsys.readouterr().err
    assert main(*given, "--encode", transcoder, same) == 0
    assert "its files name" not in capsys.readouterr().err
    assert_same_codes(out, runs["pickle"])


@pytest.mark.long
def test_verify_finds_other_codes_and_repair_makes_them_again(
    usual, encode, runs, tmp_path, capsys
):
    out = shutil.copytree(runs["pickle"], tmp_path / "out")
    look = ["--verify", "--output_dir", out, "--model_path", usual[1]]
    assert main(*look, "--encode", *encode[:0:-1]) == 0
    assert "8 samples recomputed; 0 problems" in capsys.readouterr().out
    assert main(*look) == 2
    assert "--encode: the autoencoder is missing, the one that" in capsys.readouterr().err

    def shift(shard):
        for record in shard[CODES]:
            record["ids"] = np.maximum(record["ids"] - 1, 0)

    change_shard(out, 1, shift)
    assert main(*look, *encode, "--verify_samples", 99) == 1
    told = capsys.readouterr().out
    assert "features differ (allowed: " in told and "FAILED" in told
    (out / "shard_0001.pkl.gz").write_bytes(b"damaged")
    assert main(*usual, *encode, *BESIDE, *ONE, "--output_dir", out, "--repair") == 0
    assert_same_codes(out, runs["pickle"])


@pytest.mark.rare
def test_hosts_of_a_pod_store_what_one_process_stores(usual, encode, autoencoders, runs, tmp_path):
    """The hosts have the autoencoders at different paths."""
    elsewhere = ["--encode", jump_relu(tmp_path / "b")[0], autoencoders[TRANSCODED][0]]
    mesh = ["--mesh_shape", "2,2", "--mesh_axes", "data,model", "--output_dir", tmp_path / "out"]
    pod = Pod(tmp_path, 2, 2, *([*usual, *own, *mesh] for own in (encode, elsewhere)))
    assert pod.wait() == [0, 0], [pod.text(host) for host in range(2)]
    assert_same_codes(tmp_path / "out", runs["pickle"])


@pytest.mark.parametrize(
    "more, named",
    [
        ("--encode_most 3", "--encode_most: needs --encode"),
        (f"--encode {RESID}={{sae}} {{sae}}", "has another autoencoder already"),
        ("--encode blocks.99.hook_resid_post={sae}", "{sae}: blocks.99.hook_resid_post: matches"),
        ("--encode blocks.*.hook_resid_post={sae}", "is not one hook with activations"),
        ("--encode blocks.1.mlp.hook_post={sae}", "is for 128 numbers per token, blocks.1.mlp"),
    ],
)
def test_bad_requests_are_refused(more, named, inputs, autoencoders, capsys, tmp_path):
    sae, _ = autoencoders[RESID]
    given = [*inputs, *more.format(sae=sae).split()]
    assert_refused(capsys, tmp_path, given, named.format(sae=sae))


def test_codes_that_are_not_finite_end_the_run(tmp_path):
    """An activation that is NaN is named so although it is not stored."""
    records = np.zeros((1, 4, 3 + 2 * 2), np.int32)
    records[0, 2, 1] = np.float32(np.nan).view(np.int32)
    about = dict(identity=Identity(code_hooks=(CODES,)), hook_facts={CODES: {"width": 9}})
    with pytest.raises(StorageError, match=f"sample 0, hook {CODES}: NaN or infinite float32"):
        with open_storage(tmp_path, {CODES: CODES}, **about) as storage:
            storage.add_batch(next(pack(samples_of([[5, 6, 7]]), 1, 4)), {CODES: records})


# What features do: dataset.features and --export delphi.


def test_each_feature_has_its_numbers_and_its_strongest_tokens(runs, tokenizer, monkeypatch):
    monkeypatch.setattr("activation_extraction.dataset.features.BATCH_TOKENS", 50)
    run = ActivationDataset(runs["safetensors"])
    samples, values = [*run], dense(whole(run, CODES))
    places = [(each.sample_idx, position) for each in samples for position in each.position]
    table = run.features(CODES, contexts=3, around=4).to_pylist()
    assert [row["feature"] for row in table] == [*range(made.F)]
    by_index = {sample.sample_idx: sample.token_ids for sample in samples}
    for row, column in zip(table, values.T, strict=True):
        active = column[column != 0]
        assert row["tokens"] == len(active) and row["frequency"] == len(active) / len(values)
        expected = (active.mean(), active.max()) if len(active) else (None, None)
        assert (row["mean"], row["maximum"]) == pytest.approx(expected)
        best = np.argsort(-np.where(column != 0, column, -np.inf), kind="stable")[:3]
        best = best[column[best] != 0]
        assert [context["value"] for context in row["contexts"]] == column[best].tolist()
        for context, token in zip(row["contexts"], best, strict=True):
            assert (context["sample_idx"], context["position"]) == places[token]
            at, ids = context["position"], by_index[context["sample_idx"]]
            assert context["token_ids"] == ids[max(at - 4, 0) : at + 5].tolist()
            assert context["token_ids"][context["token"]] == ids[at]
            assert context["text"] == tokenizer.decode(context["token_ids"])
    assert run.features("model.layers.1.output.codes", 1, 0) == run.features(CODES, 1, 0)


def test_features_of_hooks_without_codes_are_refused(runs):
    for hooks, wrong, told in (
        (None, OUT, f"{OUT}' has no codes .* read at .*{CODES}"),
        ([OUT], CODES, f"{CODES}' .*is not read; codes are read at no hook"),
    ):
        with pytest.raises(ValueError, match=told):
            ActivationDataset(runs["safetensors"], hooks).features(wrong)


def test_codes_are_taken_as_arrays_are(runs):
    """Slices, steps, numbers and masks take them."""
    codes = next(ActivationDataset(runs["safetensors"]).batches(60))[CODES]
    mask = np.arange(60) % 7 == 2
    for each in (slice(3, 20), slice(None, None, 2), slice(None, None, -1), [5, 3, 3], mask):
        np.testing.assert_array_equal(dense(codes[each]), dense(codes)[each])
        np.testing.assert_array_equal(codes[each].norm, codes.norm[each])


def test_delphi_finds_the_same_features(runs, tmp_path, monkeypatch, capsys):
    """The files are read as delphi's LatentDataset reads them; contexts have 5 tokens here,
    so that one more would be a whole one in a sample of 64."""
    monkeypatch.setattr(DelphiFormat, "tokens_per_row", 5)
    monkeypatch.setattr("activation_extraction.inspect.export.CHUNK_BYTES", 4096)
    run = ActivationDataset(runs["safetensors"])
    every, left_out = dense(whole(run, CODES)), 0
    least = float(np.median(every[every > 0]))  # delphi leaves out codes of at most 1e-5
    monkeypatch.setattr(latent_files, "LARGEST_LEFT_OUT_VALUE", least)
    target, rows, expected = tmp_path / "raw", [], []
    given = ["--output_dir", run.url, "--hook_names", CODES, "--export", "delphi"]
    assert main(*given, "--export_dir", target) == 0
    for sample in run:
        values = dense(sample[CODES])
        for start in range(0, len(values) - 4, 5):
            part = values[start : start + 5]
            left_out += int(((part > 0) & (part <= least)).sum())
            places = map(tuple, np.argwhere(part > least))
            expected += [(len(rows), *place, part[place]) for place in places]
            rows.append(sample.token_ids[start : start + 5])
    assert [path.name for path in target.iterdir()] == [CODES]
    found, following = [], 0
    paths = (target / CODES).glob("*.safetensors")
    for path in sorted(paths, key=lambda path: int(path.stem.split("_")[0])):
        first, last = map(int, path.stem.split("_"))
        tensors = load_file(path)
        assert first == following and (np.diff(tensors["locations"][:, 2].astype(int)) >= 0).all()
        np.testing.assert_array_equal(tensors["tokens"], rows)
        places = tensors["locations"].astype(int) + [0, 0, first]
        assert (places[:, 2] <= last).all() and tensors["activations"].dtype == np.float32
        values = tensors["activations"].tolist()
        found += [(*place, value) for place, value in zip(places.tolist(), values, strict=True)]
        following = last + 1
    assert following == made.F and sorted(found) == sorted(expected)
    config = json.loads((target / CODES / "config.json").read_text())
    assert config["model_name"] == run.tokenizer_path and config["n_tokens"] == 5 * len(rows)
    out, rest = capsys.readouterr().out, run.tokens - 5 * len(rows)
    assert f"left out: {rest} tokens, too few for a row of 5, at the ends of their samples\n" in out
    told = f"left out: {left_out:,} codes of at most {least:g} at {CODES}, as by delphi itself\n"
    assert rest and left_out and told in out
    assert main("--report", tmp_path / "report.html", "--output_dir", run.url) == 0
    card = (tmp_path / "dataset_card.md").read_text()
    assert f"| `{CODES}` | {made.F:,} | codes: the values of active features, float32 |" in card
    monkeypatch.setattr(DelphiFormat, "tokens_per_row", 65)
    assert main(*given, "--export_dir", tmp_path / "new") == 2
    assert f"no sample of {run.url} has 65 tokens" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
