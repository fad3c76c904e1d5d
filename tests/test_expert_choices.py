"""The numbers of the chosen experts are integers, from the router to whoever reads them."""

import json
import shutil

import numpy as np
import pytest
from command_line import main, records_of
from conftest import make_reference
from extractions import change_shard, load
from pods import first_documents
from safetensors import safe_open
from tiny_models import SHARED

from activation_extraction import ActivationDataset, ActivationStorage
from activation_extraction.inspect.verify import OTHER_NUMBERS
from activation_extraction.store.commit import unseal

pytestmark = pytest.mark.xdist_group("qwen2_moe")
CHOICES = ["blocks.1.mlp.hook_expert_indices", "blocks.3.mlp.hook_expert_indices"]
ALIKE, STREAM = "blocks.1.mlp.shared_expert.hook_pre", "blocks.3.hook_resid_post"
HOOKS = [CHOICES[0], ALIKE, CHOICES[1], STREAM]  # in their order; ALIKE is as wide as the choices
ONE = ["--no_data_parallel"]
SEVERAL = ["--mesh_shape", "2,2,2", "--mesh_axes", "data,expert,model"]
PIPELINE = ["--mesh_shape", "2,4", "--mesh_axes", "pipeline,data"]
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
    """A run in bfloat16, which tests must not change."""
    out = tmp_path_factory.mktemp("stored") / "out"
    assert extract(out, "--dtype", "bfloat16", "--shard_size_gb", 1e-4, *ONE) == 0
    return out


@pytest.mark.parametrize(
    "form,dtype,flags",
    [
        ("pickle", "float32", SEVERAL),
        pytest.param("pickle", "float32", PIPELINE, marks=pytest.mark.long),
        pytest.param(
            *("safetensors", "bfloat16", [*SEVERAL, "--positions", "every:3"]),
            marks=pytest.mark.long,
        ),
    ],
)
def test_choices_are_stored_as_integers(reference, extract, tmp_path, form, dtype, flags):
    """Transformers makes the same choices; in bfloat16 some may differ, where two nearly tie."""
    out, whole, step = tmp_path / "out", tmp_path / "whole", 3 if "every:3" in flags else 1
    assert extract(out, "--shard_format", form, "--dtype", dtype, *flags) == 0
    dataset = ActivationDataset(out)
    assert dataset.dtypes == {name: "int32" if name in CHOICES else dtype for name in HOOKS}
    assert dataset.dtype == dtype and len(dataset) == 24
    assert extract(whole, *ONE, hooks=["hook_embed"]) == 0  # for all token ids
    for sample, every in zip(dataset, ActivationDataset(whole), strict=True):
        assert sample.position.tolist() == [*range(0, len(every.position), step)]
        expected = reference.hooked(np.array(every.token_ids)[None])
        for name in CHOICES:
            assert sample[name].dtype == np.int32
            others = (sample[name] != expected[name][0][sample.position]).mean()
            assert others <= (OTHER_NUMBERS[dtype] if dtype == "bfloat16" else 0), others
    every = np.concatenate([sample[name] for sample in dataset for name in CHOICES])
    assert every.min() >= 0 and 257 in every[every % 2 == 1] and every.max() < 300
    if form == "pickle":
        assert records_of(out)[CHOICES[0]][0]["activation"].dtype == np.int32
    else:
        with safe_open(out / "shard_0001.safetensors", "numpy") as file:
            assert file.get_slice(CHOICES[0]).get_dtype() == "I32"


def test_integers_have_no_statistics_and_stay_integers_in_batches(stored):
    content = unseal((stored / "shard_0001.json").read_bytes(), "")
    described = {hook["name"]: hook for hook in content["hooks"]}
    nothing = ("tokens", "values", "mean", "variance", "mean_norm", "max_norm")
    for name in CHOICES:
        assert (described[name]["dtype"], described[name]["width"]) == ("int32", 8)
        assert not any(described[name][field] for field in nothing)
    dataset = ActivationDataset(stored)
    for name, tokens in ((CHOICES[0], 0), (STREAM, dataset.tokens)):
        found = dataset.statistics[name]
        assert found.all_tokens.tokens == found.tokens == tokens
    usual = next(dataset.batches(50))
    assert [usual[name].dtype for name in HOOKS] == ["int32", "bfloat16", "int32", "bfloat16"]
    wide = next(dataset.batches(50, dtype="float32", max_norm=1e9))
    assert [wide[name].dtype for name in HOOKS] == ["int32", "float32", "int32", "float32"]
    np.testing.assert_array_equal(wide[CHOICES[1]], usual[CHOICES[1]])
    assert str(usual.torch()[CHOICES[0]].dtype) == "torch.int32"
    assert ActivationDataset(stored, [CHOICES[0]]).dtype == "int32"
    with pytest.raises(ValueError, match="has no activations, and no norm"):
        dataset.batches(50, max_norm={CHOICES[0]: 1.0})


def test_other_choices_are_found_by_recomputing(stored, reference, tmp_path, capsys):
    """The mesh may be another, and two experts may change places."""
    out = shutil.copytree(stored, tmp_path / "out")
    again = ["--verify", "--output_dir", out, "--model_path", reference.folder]
    again += ["--verify_samples", 24, "--batch_size", 8, *SEVERAL]
    number = len(list(out.glob("shard_*.json")))

    def swap(shard):
        values = shard[CHOICES[1]][-1]["activation"]
        values[-1, :2] = values[-1, 1::-1].copy()

    def count_on(shard):
        values = shard[CHOICES[1]][-1]["activation"]
        values[...] = (values + 1) % 300

    change_shard(out, number, swap)
    assert main(*again) == 0
    assert "24 samples recomputed; 0 problems" in capsys.readouterr().out
    change_shard(out, number, count_on)
    assert main(*again) == 1
    problem, summary = capsys.readouterr().out.splitlines()
    last = load(out, number)[CHOICES[1]][-1]["activation"]
    assert f"sample 23, {CHOICES[1]}: recomputed, {last.size} of its {last.size} numbers" in problem
    assert f"(allowed: {int(OTHER_NUMBERS['bfloat16'] * last.size)})" in problem
    assert "24 samples recomputed; 1 problem" in summary


def test_exports_hold_integers(stored, tmp_path):
    target = tmp_path / "export"
    assert main("--export", "memmap", "--export_dir", target, "--output_dir", stored) == 0
    expected = np.concatenate([sample[CHOICES[1]] for sample in ActivationDataset(stored)])
    folder = target / CHOICES[1]
    meta = json.loads((folder / "shard_0.meta").read_text())
    assert meta == {"shape": list(expected.shape), "dtype": "torch.int32"}
    found = np.fromfile(folder / "shard_0.memmap", np.int32).reshape(expected.shape)
    np.testing.assert_array_equal(found, expected)
    assert not (folder / "mean.pt").exists() and (target / STREAM / "mean.pt").exists()


def test_what_is_shown_names_integers_and_has_no_norms_of_them(extract, tmp_path, capsys):
    assert extract(tmp_path, "--max_samples", 6, "--activation_dtype", "bfloat16", *ONE) == 0
    told = capsys.readouterr().err
    assert "widths [8, 8, 8, 64], in int32 and bfloat16: 208 bytes per token" in told
    assert main("--report", "--output_dir", tmp_path) == 0
    page = (tmp_path / "report.html").read_text()
    assert f"hold integers, which have no norms: {', '.join(CHOICES)}." in page
    assert "<h3>mlp.hook_expert_indices</h3>" not in page and "<h3>hook_resid_post</h3>" in page


def test_integers_of_other_programs_are_activations_as_before(tmp_path):
    with ActivationStorage(tmp_path, {"third": "my.layers.3.output"}) as storage:
        storage.add_activation("third", np.full((3, 2), 4, np.int8), 0, "", np.arange(3))
    dataset = ActivationDataset(tmp_path)
    found = next(dataset.batches(3, dtype="float32", max_norm=6.0))["third"]
    assert dataset.dtype == np.int8 and found.dtype == np.float32 and (found == 4).all()
    assert dataset.statistics["third"].overall_mean == 4.0
