"""Hooks with a dtype of their own, from the model to whoever reads them: the numbers of experts and
of likely tokens are integers, losses and entropies float32. test_model.py compares all of them with
transformers.
"""

import shutil

import numpy as np
import pytest
from command_line import main, records_of
from conftest import make_reference
from datasets import load_from_disk
from extractions import change_shard, load
from pods import first_documents
from safetensors import safe_open
from storages import open_storage
from test_model import PREDICTIONS
from tiny_models import SHARED

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import StorageError
from activation_extraction.inspect.verify import DIFFERENT_NUMBERS
from activation_extraction.store.identity import Identity
from activation_extraction.store.run_log import unseal

pytestmark = pytest.mark.xdist_group("qwen2_moe")
CHOICES = ["blocks.1.mlp.hook_expert_indices", "blocks.3.mlp.hook_expert_indices"]
ALIKE, STREAM = "blocks.1.mlp.shared_expert.hook_pre", "blocks.3.hook_resid_post"
HOOKS = [CHOICES[0], ALIKE, CHOICES[1], STREAM]  # in their order; ALIKE is as wide as the choices
LOSS, ENTROPY, TOP_IDS, TOP_LOGPROBS, _ = PREDICTIONS
ONE = ["--no_data_parallel"]
SEVERAL = ["--mesh_shape", "2,2,2", "--mesh_axes", "data,expert,model"]
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


IN_BFLOAT16 = ["--dtype", "bfloat16", "--shard_size_gb", 1e-4, *ONE]
STORED = [*HOOKS, LOSS, ENTROPY, TOP_IDS, TOP_LOGPROBS, "--top_logits"]


@pytest.fixture(scope="module")
def stored(extract, tmp_path_factory):
    """A run in bfloat16, which tests must not change."""
    out = tmp_path_factory.mktemp("stored") / "out"
    assert extract(out, *IN_BFLOAT16, hooks=[*STORED, 4]) == 0
    return out


def test_choices_are_stored_as_integers(stored, reference):
    """Transformers makes the same choices, but for some of which two nearly tie."""
    for sample in ActivationDataset(stored):
        expected = reference.hooked(np.array(sample.token_ids)[None])
        for name in CHOICES:
            assert sample[name].dtype == np.int32
            assert (sample[name] != expected[name][0]).mean() <= DIFFERENT_NUMBERS["bfloat16"]
    records = records_of(stored)
    every = np.concatenate([each["activation"] for name in CHOICES for each in records[name]])
    assert every.dtype == np.int32
    assert every.min() >= 0 and 257 in every[every % 2 == 1] and every.max() < 300


def test_batches_and_statistics_know_the_dtypes(stored):
    """Integers stay integers and have no statistics; of a first token, there is no loss."""
    content = unseal((stored / "shard_0001.json").read_bytes(), "")
    described = {hook["name"]: hook for hook in content["hooks"]}
    nothing = ("tokens", "values", "mean", "variance", "mean_norm", "max_norm")
    for name, width in (*((choice, 8) for choice in CHOICES), (TOP_IDS, 4)):
        assert (described[name]["dtype"], described[name]["width"]) == ("int32", width)
        assert not any(described[name][field] for field in nothing)
    dataset = ActivationDataset(stored)
    own = dict.fromkeys([*CHOICES, TOP_IDS], "int32")
    own |= dict.fromkeys([LOSS, ENTROPY, TOP_LOGPROBS], "float32")
    for dtype in ("bfloat16", "float16"):
        batch = next(dataset.batches(10**6, dtype=None if dtype == "bfloat16" else dtype))
        expected = dict.fromkeys([ALIKE, STREAM], dtype) | own
        assert {name: str(batch[name].dtype) for name in dataset.hooks} == expected
    assert str(batch.torch()[CHOICES[0]].dtype) == "torch.int32"
    assert ActivationDataset(stored, [CHOICES[0]]).dtype == "int32"

    first, logprobs = batch.position == 0, batch[TOP_LOGPROBS]
    assert np.isnan(batch[LOSS][first]).all() and (batch[LOSS][~first] > 0).all()
    assert (np.diff(logprobs) <= 0).all() and (logprobs < 0).all()
    statistics = dataset.statistics
    tokens = {LOSS: (~first).sum(), **dict.fromkeys([ENTROPY, STREAM], len(first))}
    tokens |= dict.fromkeys([CHOICES[0], TOP_IDS], 0)
    assert {name: statistics[name].tokens for name in tokens} == tokens
    assert 5 < statistics[LOSS].overall_mean < 20  # ln(2048) is 7.6
    assert sum(map(len, dataset.batches(256, max_norm=1e9))) == dataset.tokens == len(first)


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
    assert f"(allowed: {int(DIFFERENT_NUMBERS['bfloat16'] * last.size)})" in problem
    assert "24 samples recomputed; 1 problem" in summary


def test_what_is_shown_and_exported_are_integers_without_norms(stored, extract, tmp_path):
    target = tmp_path / "export"
    assert main("--export", "sae_lens", "--export_dir", target, "--output_dir", stored) == 0
    expected = np.concatenate([sample[CHOICES[1]] for sample in ActivationDataset(stored)])
    rows = load_from_disk(str(target / CHOICES[1]))
    assert rows.features[CHOICES[1]].dtype == "int32"
    in_rows = rows.with_format("numpy")[:][CHOICES[1]]
    found = in_rows.reshape(-1, expected.shape[1])
    assert 0 <= len(expected) - len(found) < in_rows.shape[1]
    np.testing.assert_array_equal(found, expected[: len(found)])

    few = "--max_samples", 6, "--activation_dtype", "bfloat16", "--shard_format", "safetensors"
    assert extract(tmp_path / "few", *few, *ONE) == 0
    with safe_open(tmp_path / "few/shard_0001.safetensors", "numpy") as file:
        assert file.get_slice(CHOICES[0]).get_dtype() == "I32"
    out = shutil.copytree(stored, tmp_path / "out")
    assert main("--status", "--output_dir", out) == main("--report", "--output_dir", out) == 0
    page = (out / "report.html").read_text()
    assert f"hold integers, which have no norms: {', '.join([*CHOICES, TOP_IDS])}." in page


def test_another_number_of_likely_tokens_is_another_run(stored, extract, capsys):
    assert extract(stored, *IN_BFLOAT16, hooks=[*STORED, 5]) == 2
    assert "differs in top_logits: 4, now 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name,undefined,refused", [("loss", 0, None), ("loss", 1, "NaN"), ("entropy", 0, "NaN or inf")]
)
def test_only_a_loss_is_undefined_for_first_tokens(name, undefined, refused, tmp_path):
    """Any other NaN stops the run, whatever its position."""
    values = np.ones((2, 1), np.float32)
    values[undefined] = np.nan
    identity = Identity(float32_hooks=(name,), keyed_by="hook name")
    storage = open_storage(tmp_path, {name: name}, identity=identity)
    storage.add_activation(name, values, 0, "", np.arange(2, dtype=np.int32))
    if refused:
        with pytest.raises(StorageError, match=f"sample 0, hook {name}: {refused}"):
            storage.finalize()
    else:
        storage.finalize()
        assert ActivationDataset(tmp_path).statistics[name].overall_mean == 1
