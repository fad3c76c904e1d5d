"""The numbers of the chosen experts are integers, from the router to whoever reads them."""

import json
import shutil
from itertools import product

import jax
import numpy as np
import pytest
from command_line import main, records_of
from conftest import Reference, make_reference
from datasets import load_from_disk
from extractions import change_shard, load
from pods import first_documents
from safetensors import safe_open
from tiny_models import SHARED

from activation_extraction import ActivationDataset, ActivationStorage
from activation_extraction.inspect.verify import OTHER_NUMBERS
from activation_extraction.store.commit import unseal

CHOICES = ["blocks.1.mlp.hook_expert_indices", "blocks.3.mlp.hook_expert_indices"]
ALIKE, STREAM = "blocks.1.mlp.shared_expert.hook_pre", "blocks.3.hook_resid_post"
HOOKS = [CHOICES[0], ALIKE, CHOICES[1], STREAM]  # in their order; ALIKE is as wide as the choices
MESHES = {
    "one": ["--no_data_parallel"],
    "several": ["--mesh_shape", "2,2,2", "--mesh_axes", "data,expert,model"],
    "pipeline": ["--mesh_shape", "2,4", "--mesh_axes", "pipeline,data"],
}
KEPT = ["--positions", "every:3"]
SIZES = dict(num_experts=300, num_experts_per_tok=8, moe_intermediate_size=8)  # 257 needs 9 bits
SIZES |= dict(shared_expert_intermediate_size=8, decoder_sparse_step=2)


@pytest.fixture(scope="module")
def reference(demo_inputs, tmp_path_factory):
    """A model whose every second layer has more experts than bfloat16 can count."""
    folder = tmp_path_factory.mktemp("experts")
    for path in (demo_inputs / "model").glob("*token*"):
        shutil.copy(path, folder)
    return make_reference(folder, **SHARED | SIZES, num_key_value_heads=2, vocab_size=2048)


@pytest.fixture(scope="module")
def extract(reference, demo_inputs, tmp_path_factory):
    """A function that runs an extraction into a folder and returns the exit status."""
    few = first_documents(demo_inputs, tmp_path_factory.mktemp("few") / "few.parquet", 24)

    def run(out, *flags, hooks=HOOKS):
        usual = ["--model_path", reference.folder, "--dataset_path", few, "--max_seq_length", 64]
        return main(*usual, "--batch_size", 4, "--output_dir", out, "--hook_names", *hooks, *flags)

    return run


@pytest.fixture(scope="module")
def stored(extract, tmp_path_factory):
    """A function that returns an extraction with a dtype, which tests must not change."""
    made = {}

    def get(dtype="bfloat16"):
        if dtype not in made:
            made[dtype] = tmp_path_factory.mktemp(dtype) / "out"
            flags = ["--dtype", dtype, "--shard_size_gb", 1e-4, *MESHES["one"]]
            assert extract(made[dtype], *flags) == 0
        return made[dtype]

    return get


def chosen_by(reference: Reference, token_ids):
    """Returns what Hugging Face chooses for a sample: hook -> (tokens, experts of a token)."""
    found = reference.hooked(np.array(token_ids)[None])
    return {name: found[name][0].astype(np.int64) for name in CHOICES}


def assert_chosen(found, expected, dtype):
    """Checks that the numbers agree; in bfloat16 some may differ, where two are nearly tied."""
    assert found.dtype == np.int32
    others = (found != expected).mean()
    assert others <= (OTHER_NUMBERS[dtype] if dtype == "bfloat16" else 0), others


@pytest.mark.parametrize(
    "shard_format,dtype,mesh",
    [
        pytest.param(*each, marks=() if each[2] == "several" else pytest.mark.long)
        for each in product(("pickle", "safetensors"), ("float32", "bfloat16"), MESHES)
        if each[::2] != ("safetensors", "pipeline")
    ],
)
def test_choices_are_stored_as_integers(reference, extract, tmp_path, shard_format, dtype, mesh):
    out, keeps_some = tmp_path / "out", (shard_format, mesh) != ("pickle", "one")
    flags = ["--shard_format", shard_format, "--dtype", dtype, *MESHES[mesh]]
    assert extract(out, *flags, *(KEPT if keeps_some else ())) == 0
    whole, dataset = tmp_path / "whole", ActivationDataset(out)
    assert dataset.dtypes == {name: "int32" if name in CHOICES else dtype for name in HOOKS}
    assert dataset.dtype == dtype and len(dataset) == 24
    assert extract(whole, *MESHES["one"], hooks=["hook_embed"]) == 0  # for all token ids
    for sample, every in zip(dataset, ActivationDataset(whole), strict=True):
        assert sample.position.tolist() == [*range(0, len(every.position), 3 if keeps_some else 1)]
        assert sample[ALIKE].dtype == dtype and sample[ALIKE].shape == sample[CHOICES[0]].shape
        expected = chosen_by(reference, every.token_ids)
        for name in CHOICES:
            assert_chosen(sample[name], expected[name][sample.position], dtype)
    every = np.concatenate([sample[name] for sample in dataset for name in CHOICES])
    assert every.min() >= 0 and 257 in every[every % 2 == 1] and every.max() < 300
    if shard_format == "pickle":
        assert records_of(out)[CHOICES[0]][0]["activation"].dtype == np.int32
    else:
        with safe_open(out / "shard_0001.safetensors", "numpy") as file:
            assert file.get_slice(CHOICES[0]).get_dtype() == "I32"
    assert main("--verify", "--output_dir", out) == 0


def test_shards_say_that_they_are_integers_and_have_no_statistics(stored):
    content = unseal((stored() / "shard_0001.json").read_bytes(), "")
    described = {hook["name"]: hook for hook in content["hooks"]}
    nothing = ("tokens", "values", "mean", "variance", "mean_norm", "max_norm")
    for name in CHOICES:
        assert (described[name]["dtype"], described[name]["width"]) == ("int32", 8)
        assert not any(described[name][field] for field in nothing)
    assert described[STREAM]["dtype"] == "bfloat16" and described[STREAM]["tokens"] > 0
    metadata = json.loads((stored() / "metadata.json").read_text())
    assert [hook.get("dtype") for hook in metadata["hooks"]] == ["int32", None, "int32", None]
    assert metadata["identity"]["integer_hooks"] == CHOICES
    dataset = ActivationDataset(stored())
    statistics = dataset.statistics
    assert statistics[CHOICES[0]].all_tokens.tokens == statistics[CHOICES[0]].tokens == 0
    assert statistics[STREAM].all_tokens.tokens == statistics[STREAM].tokens == dataset.tokens


def test_batches_have_every_hook_in_its_own_dtype(stored):
    import torch

    dataset = ActivationDataset(stored())
    usual = next(dataset.batches(50))
    assert [usual[name].dtype for name in HOOKS] == ["int32", "bfloat16", "int32", "bfloat16"]
    wide = next(dataset.batches(50, dtype="float32", max_norm=1e9))
    assert [wide[name].dtype for name in HOOKS] == ["int32", "float32", "int32", "float32"]
    np.testing.assert_array_equal(wide[CHOICES[1]], usual[CHOICES[1]])
    shuffled = next(dataset.batches(dataset.tokens, [CHOICES[1]], shuffle=0, dtype="float32"))
    order = np.lexsort((shuffled.position, shuffled.sample_idx))
    np.testing.assert_array_equal(shuffled[CHOICES[1]][order][:50], usual[CHOICES[1]])
    assert usual.torch()[CHOICES[0]].dtype == torch.int32
    assert usual.jax()[CHOICES[0]].dtype == jax.numpy.int32
    assert ActivationDataset(stored(), [CHOICES[0]]).dtype == "int32"
    with pytest.raises(ValueError, match="has no activations, and no norm"):
        dataset.batches(50, max_norm={CHOICES[0]: 1.0})


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_other_choices_are_found_by_recomputing(stored, reference, tmp_path, capsys, dtype):
    """The mesh may be another, and two experts may change places."""
    out = shutil.copytree(stored(dtype), tmp_path / "out")
    again = ["--verify", "--output_dir", out, "--model_path", reference.folder]
    again += ["--verify_samples", 24, "--batch_size", 8, *MESHES["several"]]
    assert main(*again) == 0
    assert "24 samples recomputed; 0 problems" in capsys.readouterr().out
    number = len(list(out.glob("shard_*.json")))

    def swap(shard):
        values = shard[CHOICES[1]][-1]["activation"]
        values[-1, :2] = values[-1, 1::-1].copy()

    change_shard(out, number, swap)
    assert main(*again) == 0
    capsys.readouterr()

    def count_on(shard):
        values = shard[CHOICES[1]][-1]["activation"]
        values[...] = (values + 1) % 300

    change_shard(out, number, count_on)
    assert main("--verify", "--output_dir", out) == 0
    capsys.readouterr()
    assert main(*again) == 1
    problem, summary = capsys.readouterr().out.splitlines()
    last = load(out, number)[CHOICES[1]][-1]["activation"]
    assert f"sample 23, {CHOICES[1]}: recomputed, {last.size} of its {last.size} numbers" in problem
    assert f"(allowed: {int(OTHER_NUMBERS[dtype] * last.size)})" in problem
    assert "24 samples recomputed; 1 problem" in summary


@pytest.mark.parametrize("form", ["memmap", "llamascopium", "sae_lens"])
def test_exports_hold_integers(stored, tmp_path, form):
    target = tmp_path / "export"
    assert main("--export", form, "--export_dir", target, "--output_dir", stored()) == 0
    expected = np.concatenate([sample[CHOICES[1]] for sample in ActivationDataset(stored())])
    if form == "memmap":
        folder = target / CHOICES[1]
        meta = json.loads((folder / "shard_0.meta").read_text())
        assert meta == {"shape": list(expected.shape), "dtype": "torch.int32"}
        found = np.fromfile(folder / "shard_0.memmap", np.int32).reshape(expected.shape)
        assert not (folder / "mean.pt").exists() and (target / STREAM / "mean.pt").exists()
    elif form == "sae_lens":
        rows = load_from_disk(str(target / CHOICES[1])).with_format("numpy", dtype=np.int32)
        found = rows[:][CHOICES[1]].reshape(-1, expected.shape[1])
        expected = expected[: len(found)]
    else:
        with safe_open(target / CHOICES[1] / "chunk-00000000.safetensors", "numpy") as file:
            found = file.get_tensor("activation")
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("hooks", [HOOKS, CHOICES])
def test_the_report_names_integers_and_has_no_norms_of_them(extract, tmp_path, hooks):
    assert extract(tmp_path / "out", "--max_samples", 6, *MESHES["one"], hooks=hooks) == 0
    assert main("--report", "--output_dir", tmp_path / "out") == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert f"hold integers, which have no norms: {', '.join(CHOICES)}." in page
    assert page.count("<h3>mlp.hook_expert_indices</h3>") == 0
    assert (page.count("<h3>hook_resid_post</h3>") > 0) == (STREAM in hooks)


def test_bytes_are_those_of_integers(reference, extract, tmp_path, capsys):
    flags = ["--model_path", reference.folder, "--list_hooks", "--activation_dtype", "float16"]
    assert main(*flags) == 0
    rows = capsys.readouterr().out.splitlines()
    row = next(row.split() for row in rows if "expert_indices" in row)
    assert row[0] == "blocks.K.mlp.hook_expert_indices" and row[-3:] == ["8", "int32", "32"]
    capsys.readouterr()
    assert extract(tmp_path, "--max_samples", 2, "--activation_dtype", "bfloat16") == 0
    told = capsys.readouterr().err
    assert "widths [8, 8, 8, 64], in int32 and bfloat16: 208 bytes per token" in told


def test_integers_of_other_programs_are_activations_as_before(tmp_path):
    with ActivationStorage(tmp_path, {"third": "my.layers.3.output"}) as storage:
        storage.add_activation("third", np.full((3, 2), 4, np.int8), 0, "", np.arange(3))
    dataset = ActivationDataset(tmp_path)
    found = next(dataset.batches(3, dtype="float32", max_norm=6.0))["third"]
    assert dataset.dtype == np.int8 and found.dtype == np.float32 and (found == 4).all()
    found = dataset.statistics["third"]
    assert (found.tokens, found.overall_mean) == (3, 4.0)
