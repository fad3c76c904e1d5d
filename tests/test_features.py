"""dataset.features: how often features are active, and where most; and --export delphi."""

import json

import autoencoder_files as made
import numpy as np
import pytest
from command_line import main
from safetensors.numpy import load_file

from activation_extraction import ActivationDataset

HOOK = "blocks.1.hook_resid_post"
CODES = f"{HOOK}.codes"
LENGTH = 32


@pytest.fixture(scope="module")
def run(demo_inputs, tmp_path_factory):
    """A run of codes, of 40 texts, in several shards."""
    folder = tmp_path_factory.mktemp("codes")
    path, _ = made.sae_lens(folder / "sae")
    chance = np.random.default_rng(0)
    words = ["sun", "moon", "river", "stone", "bird", "tree"]
    texts = [" ".join(chance.choice(words, 1 + number)) for number in range(40)]
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "rows.jsonl").write_text(rows)
    given = ["--model_path", demo_inputs / "model", "--dataset_path", folder / "rows.jsonl"]
    given += ["--output_dir", folder / "run", "--max_seq_length", LENGTH, "--batch_size", 2]
    given += ["--encode", f"{HOOK}={path}", "--shard_format", "safetensors"]
    assert main(*given, "--shard_size_gb", "1e-4") == 0
    return ActivationDataset(folder / "run")


def dense(run):
    """Features, sample_idx and position of all tokens."""
    samples = [*run]
    values = np.concatenate([sample[CODES].to_scipy().toarray() for sample in samples])
    indices = [sample.sample_idx for sample in samples for _ in sample.token_ids]
    return values, np.array(indices), np.concatenate([sample.position for sample in samples])


def test_each_feature_has_its_numbers_and_its_strongest_tokens(run, monkeypatch):
    monkeypatch.setattr("activation_extraction.dataset.features.SIZE", 50)
    values, indices, positions = dense(run)
    table = run.features(CODES, contexts=3, around=4).to_pylist()
    assert [row["feature"] for row in table] == [*range(values.shape[1])]
    by_index = {sample.sample_idx: sample.token_ids for sample in run}
    for row, column in zip(table, values.T, strict=True):
        active = column[column != 0]
        assert row["tokens"] == len(active) and row["frequency"] == len(active) / len(values)
        expected = (active.mean(), active.max()) if len(active) else (None, None)
        assert (row["mean"], row["maximum"]) == pytest.approx(expected)
        best = np.argsort(-np.where(column != 0, column, -np.inf), kind="stable")[:3]
        best = best[column[best] != 0]
        assert [context["value"] for context in row["contexts"]] == column[best].tolist()
        for context, token in zip(row["contexts"], best, strict=True):
            place = indices[token], positions[token]
            assert (context["sample_idx"], context["position"]) == place
            at, ids = context["position"], by_index[context["sample_idx"]]
            assert context["token_ids"] == ids[max(at - 4, 0) : at + 5].tolist()
            assert context["token_ids"][context["token"]] == ids[at]
            assert any(word in context["text"] for word in ("sun", "oon", "riv", "sto", "ir", "tr"))
    assert run.features("model.layers.1.output.codes", 1, 0) == run.features(CODES, 1, 0)


def test_codes_are_taken_as_arrays_are(run):
    """Slices, steps, numbers and masks take them."""
    codes = next(run.batches(60))[CODES]
    whole, mask = codes.to_scipy().toarray(), np.arange(60) % 7 == 2
    for each in (slice(3, 20), slice(None, None, 2), slice(None, None, -1), [5, 3, 3], mask):
        np.testing.assert_array_equal(codes[each].to_scipy().toarray(), whole[each])
        np.testing.assert_array_equal(codes[each].norm, codes.norm[each])


def test_what_has_no_codes_is_refused(run):
    with pytest.raises(ValueError, match=f"'{HOOK}' has no codes; {CODES} have"):
        run.features(HOOK)
    with pytest.raises(ValueError, match="contexts 0"):
        run.features(CODES, contexts=0)


def test_delphi_finds_the_same_features(run, tmp_path, monkeypatch, capsys):
    """The files are read as delphi's LatentDataset reads them; contexts have 8 tokens here."""
    monkeypatch.setattr("activation_extraction.inspect.latent_files.ROW", 8)
    monkeypatch.setattr("activation_extraction.inspect.export.CHUNK_BYTES", 4096)
    target, rows, expected = tmp_path / "raw", [], []
    given = ["--output_dir", run.url, "--export", "delphi", "--export_dir", target]
    assert main(*given) == 0
    for sample in run:
        values = sample[CODES].to_scipy().toarray()
        for start in range(0, len(values) - 7, 8):
            part = values[start : start + 8]
            places = map(tuple, np.argwhere(part > 1e-5))
            expected += [(len(rows), *place, part[place]) for place in places]
            rows.append(sample.token_ids[start : start + 8])
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
    assert config["model_name"] == run.tokenizer_path and config["n_tokens"] == 8 * len(rows)
    assert " tokens, too few for a row of " in capsys.readouterr().out
