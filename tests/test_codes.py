"""Runs with --encode: what is stored, told, continued, verified and read back.

The oracle is a publisher's formula in NumPy of the activations that are stored beside the codes.
"""

import gzip
import json
import pickle

import autoencoder_files as made
import ml_dtypes
import numpy as np
import pytest
from command_line import assert_refused, main
from conftest import rare_but
from extractions import change_shard
from pods import Pod, first_documents
from safetensors.numpy import load_file
from small_runs import both_formats
from storages import open_storage
from test_autoencoders import assert_codes

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.codes import Codes
from activation_extraction.common.errors import StorageError
from activation_extraction.store.identity import Identity
from activation_extraction.text.packing import pack, samples_of
from benchmarks.kill_and_resume import Extraction

RESID, TRANSCODED = "blocks.1.hook_resid_post", "blocks.1.ln2.hook_out"
OUT = "blocks.1.hook_mlp_out"
ONE = ["--no_data_parallel"]


@pytest.fixture(scope="module")
def autoencoders(tmp_path_factory):
    """The paths of an autoencoder and a transcoder for the demo's model, and their formulas."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "D", 128)
        folder = tmp_path_factory.mktemp("autoencoders")
        jump = made.sae_lens(folder / "sae", "jumprelu", normalize_activations="layer_norm")
        return {RESID: jump, TRANSCODED: made.circuit_tracer(folder / "transcoder")}


@pytest.fixture(scope="module")
def few(demo_inputs, tmp_path_factory):
    return first_documents(demo_inputs, tmp_path_factory.mktemp("few") / "few.parquet", 24)


@pytest.fixture(scope="module")
def flags(demo_inputs, autoencoders, few):
    paths = [path for path, _ in autoencoders.values()]
    usual = ["--model_path", demo_inputs / "model", "--dataset_path", few, "--max_seq_length", 64]
    return [*usual, "--batch_size", 4, "--shard_size_gb", 2e-4, "--encode", *paths]


def dense_of(dataset, hook):
    """The codes of all tokens, dense."""
    return np.concatenate([sample[hook].to_scipy().toarray() for sample in dataset])


@pytest.mark.parametrize(
    "more",
    [
        ["--shard_format", "safetensors", *ONE],
        [*ONE, "--positions", "every:3"],
        pytest.param(["--mesh_type", "2d", "--dtype", "bfloat16"], marks=pytest.mark.long),
        pytest.param(
            ["--mesh_shape", "2,4", "--mesh_axes", "pipeline,data"], marks=pytest.mark.long
        ),
        pytest.param(
            ["--mesh_shape", "2,2,2", "--mesh_axes", "data,fsdp,model", "--positions", "last:5"],
            marks=pytest.mark.long,
        ),
    ],
    ids=" ".join,
)
def test_codes_are_the_formula_of_the_activations_beside_them(
    more, flags, autoencoders, tmp_path, capsys
):
    out, narrow = tmp_path / "out", "bfloat16" in more
    beside = ["--hook_names", OUT, TRANSCODED, "--keep_activations", "--encode_most", made.F]
    assert main(*flags, *beside, *more, "--output_dir", out) == 0
    told = capsys.readouterr().out
    dataset = ActivationDataset(out)
    hooks = [TRANSCODED, OUT, RESID, f"{TRANSCODED}.codes", f"{RESID}.codes"]
    assert [*dataset.hooks] == hooks and dataset.hooks[f"{RESID}.codes"] == made.F
    every = {hook: np.concatenate([sample[hook] for sample in dataset]) for hook in hooks[:3]}
    first = np.concatenate([sample.position for sample in dataset]) == 0
    for hook, (_, formula) in autoencoders.items():
        x, target = every[hook], every[OUT if hook == TRANSCODED else RESID]
        features, result = formula(x.astype(np.float64))
        parts = [
            sample["model.layers.1.mlp.input.codes" if hook == TRANSCODED else f"{hook}.codes"]
            for sample in dataset
        ]
        if narrow:  # values are bfloat16
            dense = np.concatenate([part.to_scipy().toarray() for part in parts])
            np.testing.assert_allclose(dense, features, atol=1e-2 * features.max())
            continue
        for part, start in zip(parts, np.cumsum([0, *map(len, parts)]), strict=False):
            own = slice(start, start + len(part))
            assert_codes(part, features[own], result[own], target[own])
        statistics = dataset.statistics[f"{hook}.codes"].codes
        error = np.square(target.astype(np.float64) - result).sum(1)
        square = np.square(target.astype(np.float64)).sum(1)
        for kind, chosen in (("sinks", first), ("others", ~first)):
            found = statistics[kind]
            assert found.tokens == chosen.sum() and (found.cut, found.cut_tokens) == (0, 0)
            assert found.features == (features[chosen] != 0).sum()
            if chosen.any():
                explained = 1 - error[chosen].sum() / square[chosen].sum()
                assert found.explained == pytest.approx(explained, rel=1e-3)
        (line,) = (line for line in told.splitlines() if line.startswith(f"{hook}.codes: "))
        assert f"{(features != 0).sum(1).mean():.1f} features per token; the share" in line
        assert f"{statistics['others'].explained:.1%} of other tokens" in line
        for look in (["--status"], ["--status", "--json"]):
            assert main(*look, "--output_dir", out) == 0
            shown = capsys.readouterr().out
            assert (line if "--json" not in look else f'"features": {found.features}') in shown


@both_formats
def test_files_are_read_without_this_program(shard_format, flags, tmp_path):
    out = tmp_path / "out"
    assert main(*flags, *ONE, "--shard_format", shard_format, "--output_dir", out) == 0
    dataset = ActivationDataset(out)
    assert [*dataset.hooks] == [f"{TRANSCODED}.codes", f"{RESID}.codes"]
    names, number = ("ids", "values", "offsets", "error", "norm"), 0
    for path in sorted(out.glob("shard_*.pkl.gz")):
        for record in pickle.loads(gzip.open(path).read())[f"{RESID}.codes"]:
            found, ours = [record[name] for name in names], dataset[number][f"{RESID}.codes"]
            for value, field in zip(
                found, ("indices", "data", "indptr", "error", "norm"), strict=True
            ):
                np.testing.assert_array_equal(value, getattr(ours, field))
            assert record["shape"] == (len(record["token_ids"]), made.F)
            number += 1
    for path in sorted(out.glob("shard_*.safetensors")):
        tensors = load_file(path)
        ids, values, offsets, error, norm = (tensors[f"{RESID}.codes.{name}"] for name in names)
        assert len(offsets) == len(error) + 1 == len(norm) + 1 == len(tensors["token_ids"]) + 1
        for start, stop in zip(
            tensors["sample_offsets"], tensors["sample_offsets"][1:], strict=False
        ):
            ours = dataset[number][f"{RESID}.codes"]
            own = slice(offsets[start], offsets[stop])
            np.testing.assert_array_equal(ids[own], ours.indices)
            np.testing.assert_array_equal(values[own], ours.data)
            np.testing.assert_array_equal(error[start:stop], ours.error)
            number += 1
    assert number == len(dataset) == 24


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # says torch
@both_formats
def test_batches_have_sparse_rows(shard_format, flags, tmp_path):
    """In any order, as torch's and scipy's, beside other hooks, and where runs are joined."""
    import torch

    out, other = tmp_path / "out", tmp_path / "other"
    given = [*flags, *ONE, "--shard_format", shard_format]
    assert main(*given, "--encode_most", 9, "--output_dir", out) == 0
    plain = given[: given.index("--encode")] + [*ONE, "--layers_to_extract", 1]
    assert main(*plain, "--output_dir", other) == 0
    dataset, hook = ActivationDataset(out), f"{RESID}.codes"
    whole, seen = {sample.sample_idx: sample[hook] for sample in dataset}, 0
    batches = dataset.batches(100, shuffle=3, skip_first=1, dtype="float16")
    for batch in batches:
        dense = batch[hook].to_scipy().toarray()
        assert dense.shape == batch[hook].shape == (len(batch), made.F)
        tensors = batch.torch()
        csr = tensors[hook].to_torch()
        assert csr.layout == torch.sparse_csr and (csr.to_dense().numpy() == dense).all()
        assert (batch.jax()[hook].data == batch[hook].data).all()
        assert isinstance(tensors.to("cpu")[hook].error, torch.Tensor)
        for row, (number, position) in enumerate(
            zip(batch.sample_idx, batch.position, strict=True)
        ):
            expected = whole[number][int(position) : int(position) + 1]
            assert (dense[row] == expected.to_scipy().toarray()[0]).all()
            assert (batch[hook].error[row], batch[hook].norm[row]) == (
                expected.error,
                expected.norm,
            )
        seen += len(batch)
    assert seen == dataset.tokens - len(dataset)
    joined = dataset.join(other)
    for batch in joined.batches(64, shuffle=0):
        assert isinstance(batch[hook], Codes) and batch[RESID].shape == (len(batch), 128)
        np.testing.assert_allclose(
            np.linalg.norm(batch[RESID], axis=1), batch[hook].norm, rtol=1e-5
        )
    assert len(joined[3][hook]) == len(joined[3][RESID])
    for wrong in (lambda: dataset.grain([hook]), lambda: dataset.batches(9, max_norm={hook: 1})):
        with pytest.raises(ValueError, match="holds codes|has no activations|needs --shard_format"):
            wrong()


def test_documents_are_put_together_and_values_follow_the_activations(flags, tmp_path):
    given = [*flags, *ONE, "--shard_format", "safetensors", "--activation_dtype", "bfloat16"]
    assert (
        main(*given, "--long_documents", "split", "--max_samples", 30, "--output_dir", tmp_path)
        == 0
    )
    dataset, hook = ActivationDataset(tmp_path), f"{RESID}.codes"
    number = next(
        n for n, row in enumerate(dataset.samples["row"].to_pylist()) if row["piece"] == 1
    )
    document = dataset.document(number)
    pieces = [dataset[number - 1][hook], dataset[number][hook]]
    assert (document[hook].data[: len(pieces[0].data)] == pieces[0].data).all()
    assert document[hook].shape == (len(document.token_ids), made.F)
    assert len(document[hook]) >= sum(map(len, pieces))
    (stored,) = {load_file(path)[f"{hook}.values"].dtype for path in tmp_path.glob("*.safetensors")}
    assert stored == ml_dtypes.bfloat16 and dataset.dtypes[hook] == np.float32
    assert {"bfloat16"} == {
        each["dtype"]
        for path in tmp_path.glob("shard_*.json")
        for each in json.loads(path.read_text()).get("hooks", [])
    }


def test_what_is_cut_is_said_before_and_after(flags, tmp_path, capsys):
    assert main(*flags, "--list_hooks", "--encode_most", 5) == 0
    lines = capsys.readouterr().out.splitlines()
    told = "a token has at most 5 of 200 features, 56 bytes per token (the activations take 512)"
    assert f"{RESID}.codes: {told}" in lines
    plan = ["--plan", "v5litepod-4", "--encode_most", 5, "--max_samples", 9]
    assert main(*[flag for flag in flags if flag not in ("--batch_size", 4)], *plan) == 0
    assert "bytes per token: 92;" in capsys.readouterr().out  # values are bfloat16 on a TPU
    assert main(*flags, *ONE, "--encode_most", 5, "--output_dir", tmp_path) == 0
    printed, logged = capsys.readouterr()
    assert "a token has at most 5 of 200 features, 56 bytes per token" in logged
    found = ActivationDataset(tmp_path).statistics[f"{RESID}.codes"].codes
    both = found["sinks"].merge(found["others"])
    assert 0 < both.cut_tokens <= both.tokens and both.cut >= both.cut_tokens
    line = (
        f"5.0 features per token, {both.cut:,} cut from {both.cut_tokens:,} tokens (--encode_most)"
    )
    assert line in printed
    assert main("--report", tmp_path / "report.html", "--output_dir", tmp_path) == 0
    assert line in (tmp_path / "report.html").read_text()


def test_an_autoencoder_is_an_input_of_the_run(flags, autoencoders, tmp_path, capsys):
    """Another one, or another K, cannot continue a run or verify it; a copy elsewhere can."""
    first, out = (
        [*flags, *ONE, "--max_samples", 5, "--output_dir", tmp_path / "out"],
        tmp_path / "out",
    )
    assert main(*first) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "D", 128)
        same, _ = made.sae_lens(tmp_path / "b", "jumprelu", normalize_activations="layer_norm")
        other, _ = made.sae_lens(tmp_path / "c", "jumprelu", normalize_activations="none")
    paths = [autoencoders[TRANSCODED][0], same]
    assert main(*first[: first.index("--encode") + 1], *paths, *ONE, "--output_dir", out) == 0
    assert "its files name" not in capsys.readouterr().err
    elsewhere = ["--encode", f"blocks.2.hook_resid_post={same}", "--output_dir", tmp_path / "d"]
    assert main(*first[: first.index("--encode")], *elsewhere, "--max_samples", 1) == 0
    told = f"its files name {RESID}, and it is used at blocks.2.hook_resid_post"
    assert told in capsys.readouterr().err
    look = ["--verify", "--output_dir", out, "--model_path", first[1]]
    assert main(*look, "--encode", *paths[::-1]) == 0
    assert "8 samples recomputed; 0 problems" in capsys.readouterr().out
    for more, told in (
        ([], "--encode: the autoencoder is missing, the one that"),
        (["--encode", paths[0]], "--encode: the autoencoder is not the one that"),
        (["--encode", paths[0], other], "--encode: the autoencoder is not the one that"),
    ):
        assert main(*look, *more) == 2 and told in capsys.readouterr().err
    for more, field in ((["--encode_most", 4], "encode_most"), ([], "autoencoder_digest")):
        given = [*first[: first.index("--encode") + 1], paths[0], same if more else other, *ONE]
        assert main(*given, *more, "--output_dir", out) == 2
        assert field in capsys.readouterr().err


@pytest.mark.long
def test_verify_finds_other_codes_and_repair_makes_them_again(flags, tmp_path, capsys):
    out = tmp_path / "out"
    given = [*flags, *ONE, "--shard_format", "safetensors", "--output_dir", out]
    assert main(*given) == 0
    before = dense_of(ActivationDataset(out), f"{RESID}.codes")
    look = ["--verify", "--verify_samples", 24, "--output_dir", out]
    look += ["--model_path", flags[1], "--encode", *flags[-2:]]
    assert main(*look) == 0
    with pytest.MonkeyPatch.context() as patch:  # as if they had been stored so
        of = Codes.of
        patch.setattr(Codes, "of", lambda x, *more: shifted(of(x, *more)))
        assert main(*given, "--overwrite") == 0
    capsys.readouterr()
    assert main(*look) == 1
    told = capsys.readouterr().out
    assert "features differ (allowed: " in told and "FAILED" in told
    assert main(*given, "--overwrite") == 0
    shards = sorted(out.glob("shard_*.safetensors"))
    assert len(shards) > 1
    shards[0].write_bytes(b"damaged")
    assert main(*given, "--repair") == 0
    assert (dense_of(ActivationDataset(out), f"{RESID}.codes") == before).all()


def shifted(codes):
    return codes.map(lambda x: np.maximum(x - 1, 0) if x.dtype == np.int32 else x)


@pytest.mark.long
@pytest.mark.parametrize("shard_format", rare_but(["safetensors"], SHARD_FORMATS))
def test_a_run_that_is_killed_goes_on(shard_format, demo_inputs, autoencoders, tmp_path):
    paths = [path for path, _ in autoencoders.values()]
    given = [*("--model_path", demo_inputs / "model", "--max_seq_length", 64, "--batch_size", 4)]
    given += ["--dataset_path", demo_inputs / "documents.parquet", "--max_samples", 200, *ONE]
    given += ["--shard_size_gb", 2e-4, "--shard_format", shard_format, "--encode", *paths]
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert main(*given, "--output_dir", whole) == 0
    extraction = Extraction(tmp_path, [*map(str, given), "--output_dir", str(out)])
    assert extraction.kill(lambda: len([*out.glob("*.json")]), 3) == 3
    runs = ActivationDataset(whole), ActivationDataset(out)
    for hook in runs[0].hooks:
        first, second = ({s.sample_idx: s[hook] for s in dataset} for dataset in runs)
        assert first.keys() == second.keys() and len(first) == len(runs[1]) == 200
        for number, codes in first.items():
            for field in ("indptr", "indices", "data", "error", "norm"):
                np.testing.assert_array_equal(*(getattr(c, field) for c in (codes, second[number])))


@pytest.mark.long
def test_hosts_of_a_pod_store_what_one_process_stores(flags, autoencoders, few, tmp_path):
    """The hosts have the autoencoders at different paths; with another one they stop."""
    assert main(*flags, *ONE, "--output_dir", tmp_path / "alone") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(made, "D", 128)
        same, _ = made.sae_lens(tmp_path / "b", "jumprelu", normalize_activations="layer_norm")
        other, _ = made.sae_lens(tmp_path / "c", "jumprelu", normalize_activations="none")
    out, mesh = tmp_path / "out", ["--mesh_shape", "2,2", "--mesh_axes", "data,model"]
    own = [
        [*flags[:-2], *pair, *mesh, "--output_dir", out]
        for pair in (flags[-2:], [same, autoencoders[TRANSCODED][0]])
    ]
    pod = Pod(tmp_path, 2, 2, *own)
    assert pod.wait() == [0, 0], [pod.text(host) for host in range(2)]
    alone, several = ActivationDataset(tmp_path / "alone"), ActivationDataset(out)
    for hook in alone.hooks:
        by_id = [{s.doc_id: s[hook].to_scipy().toarray() for s in d} for d in (alone, several)]
        assert by_id[0].keys() == by_id[1].keys() and len(by_id[0]) == len(several)
        for doc_id, dense in by_id[0].items():
            np.testing.assert_allclose(by_id[1][doc_id], dense, atol=1e-4 * dense.max())
    own[1] = [
        *flags[:-2],
        other,
        autoencoders[TRANSCODED][0],
        *mesh,
        "--output_dir",
        tmp_path / "d",
    ]
    own[0][-1] = tmp_path / "d"
    pod = Pod(tmp_path, 2, 2, *own)
    assert pod.wait() == [2, 2] and "autoencoder_digest (--encode)" in pod.text(0)


@pytest.mark.parametrize(
    "more, named",
    [
        (["--encode_most", 3], "--encode_most: needs --encode"),
        (["--keep_activations"], "--keep_activations: needs --encode"),
        (["--encode", "none/at/all"], "--encode none/at"),
        (["--encode", "=x"], "'=x' is not [HOOK=]SAE"),
        (["--encode", "{sae}", "{sae}"], "has another autoencoder already"),
        (["--encode", "{sae}", "--encode_most", 0], "0 is not a number from 1"),
        (
            ["--encode", "blocks.99.hook_resid_post={sae}"],
            "{sae}: blocks.99.hook_resid_post: matches",
        ),
        (["--encode", "blocks.1.mlp.hook_post={sae}"], "is for 128 numbers per token"),
    ],
    ids=str,
)
def test_bad_requests_are_refused(more, named, inputs, autoencoders, capsys, tmp_path):
    sae, _ = autoencoders[RESID]
    given = [str(each).replace("{sae}", sae) for each in more]
    if given.count(sae) == 2:
        given[1] = f"{RESID}={sae}"
    assert_refused(capsys, tmp_path, [*inputs, *given], named.replace("{sae}", sae))


@pytest.mark.parametrize("change", [dict(offsets=lambda x: x[::-1]), dict(ids=lambda x: x[1:])])
def test_codes_that_do_not_fit_are_damage(change, flags, tmp_path):
    assert main(*flags, *ONE, "--max_samples", 9, "--output_dir", tmp_path) == 0
    ((name, other),) = change.items()

    def damage(shard):
        record = shard[f"{RESID}.codes"][1]
        record[name] = other(record[name]).copy()

    change_shard(tmp_path, 1, damage)
    with pytest.raises(OSError, match="sample 1: its codes do not fit their offsets"):
        ActivationDataset(tmp_path)[0]


@pytest.mark.parametrize("column", [1, 2])
def test_codes_that_are_not_finite_end_the_run(column, tmp_path):
    """So that an activation that is NaN is named although it is not stored."""
    hook, records = f"{RESID}.codes", np.zeros((1, 4, 3 + 2 * 2), np.int32)
    records[0, 2, column] = np.float32(np.nan).view(np.int32)
    about = dict(identity=Identity(code_hooks=(hook,)), hook_facts={hook: {"width": 9}})
    with pytest.raises(StorageError, match=f"sample 0, hook {hook}: NaN or infinite float32"):
        with open_storage(tmp_path, {hook: hook}, **about) as storage:
            storage.add_batch(next(pack(samples_of([[5, 6, 7]]), 1, 4)), {hook: records})


def test_exports_refuse_codes(flags, tmp_path, capsys):
    assert main(*flags, *ONE, "--max_samples", 9, "--output_dir", tmp_path / "out") == 0
    given = ["--export", "memmap", "--export_dir", tmp_path / "export"]
    assert main(*given, "--output_dir", tmp_path / "out") == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert "--export" in told and f"{TRANSCODED}.codes" in told
