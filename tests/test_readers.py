"""Trainers' own code reads the exports for it, and returns what the run stored.

speculators, SpecForge, SAELens and delphi run in an environment of their own (trainer_scripts.py).
test_draft_files.py and test_codes.py compare the files themselves in more cases, test_trainers.py
trains with SAELens, and test_nla.py repeats the next stage of natural language autoencoders.
"""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import autoencoder_files as made
import numpy as np
import pytest
import torch
from command_line import main
from pods import first_documents
from test_draft_files import LAYERS, LENGTH, ROWS, STREAM, run
from trainer_scripts import MARKS, run_script
from transformers import AutoTokenizer

from activation_extraction import ActivationDataset
from activation_extraction.common.codes import Codes

pytestmark = MARKS
CODED_HOOK = "blocks.1.hook_resid_post"
CODES = f"{CODED_HOOK}.codes"
ROW_TOKENS = 64  # tokens of a row for delphi
WINDOW_TOKENS = 32  # tokens of an example of delphi
SMALLEST_VALUE = 1e-5  # delphi leaves out values of this or a smaller magnitude


def export(folder: Path, form: str, *flags: str) -> Path:
    """Exports folder/run to folder/FORM, which is returned."""
    target = folder / form
    command = ["--output_dir", folder / "run", "--export", form, "--export_dir", target]
    assert main(*command, *flags) == 0
    return target


def read(*arguments: object, folder: Path) -> Any:
    """Returns what a function of tests/trainers/readers.py returns."""
    run_script("readers.py", *arguments, folder=folder)
    return torch.load(folder / "read.pt", weights_only=True)


class StoredSample(NamedTuple):
    """A stored piece of one of ROWS.

    Attributes:
        token_ids: Its token ids, (tokens,).
        loss_mask: Its part of the row's mask, (tokens,).
        states: The activations by hook, float32 (tokens, width).
    """

    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    states: dict[str, torch.Tensor]


def stored_samples(folder: Path) -> Iterator[StoredSample]:
    """Yields the samples of folder/run, in stored order."""
    dataset = ActivationDataset(folder / "run")
    for sample in dataset:
        assert sample.row is not None
        row = ROWS[sample.row["line"] - 1]
        start = sample.row.get("start", 0)
        part = slice(start, start + len(sample.token_ids))
        assert sample.token_ids.tolist() == row["ids"][part]
        yield StoredSample(
            torch.tensor(row["ids"][part]),
            torch.tensor(row["loss_mask"][part], dtype=torch.int64),
            {hook: torch.tensor(sample[hook].astype(np.float32)) for hook in dataset.hooks},
        )


def allowed_error(states: torch.Tensor) -> torch.Tensor:
    """Returns the largest error of float8 states that are read as bfloat16.

    e4m3 has 3 bits after the point, so values are rounded by 1/16 of themselves at most, and those
    below 2**-6 by 2**-10, where the largest value of a token is 448. bfloat16 has 7 bits.

    Args:
        states: The stored states, (tokens, layers, width).
    """
    largest = states.abs().amax(dim=(1, 2), keepdim=True)
    float8_error = torch.maximum(states.abs() / 16, largest / 448 * 2**-10)
    return float8_error + (states.abs() + float8_error) * 2**-8


@pytest.mark.parametrize(
    "run_flags,export_flags,is_float8",
    [
        ("--dtype bfloat16", "", False),
        ("--dtype bfloat16", "--export_dtype float8", True),
        ("--activation_dtype float8 --shard_format safetensors", "", True),
    ],
)
def test_speculators_reads_the_stored_samples(
    run_flags, export_flags, is_float8, demo_inputs, tmp_path, capsys
):
    """Its own parser reads the printed command, which chooses the backend of the files."""
    flags = "--ids_column ids --keep_columns loss_mask --long_documents split".split()
    run(tmp_path, demo_inputs / "model", ROWS, *flags, *run_flags.split(), hooks=STREAM)
    capsys.readouterr()
    export(tmp_path, "speculators", *export_flags.split())
    [command] = re.findall("python -m speculators.train (.*)", capsys.readouterr().out)
    result = read("speculators", *shlex.split(command), folder=tmp_path)
    assert result["target_layer_ids"] == [layer + 1 for layer in LAYERS]
    expected_samples = [*stored_samples(tmp_path)]
    assert result["lengths"] == [len(expected.token_ids) for expected in expected_samples]
    assert len(expected_samples) > len(ROWS)
    has_error = False
    for sample, expected in zip(result["samples"], expected_samples, strict=True):
        assert torch.equal(sample["input_ids"], expected.token_ids)
        assert torch.equal(sample["loss_mask"], expected.loss_mask)
        layers, last_layer = sample["hidden_states"], sample["verifier_last_hidden_states"]
        assert layers.dtype == last_layer.dtype == torch.bfloat16
        states = torch.stack([expected.states[hook] for hook in STREAM], dim=1)
        read_states = torch.cat([layers, last_layer], dim=1).float().reshape(states.shape)
        errors = (read_states - states).abs()
        assert (errors <= (allowed_error(states) if is_float8 else 0)).all()
        has_error |= bool(errors.any())
    assert has_error == is_float8


def test_specforge_reads_the_stored_samples(demo_inputs, tmp_path, capsys):
    """Its own parser reads the printed configuration. Without its `max_length`, samples would be
    cut. The loss of the last token never counts, because SpecForge predicts the next token."""
    flags = "--ids_column ids --keep_columns loss_mask --long_documents split --dtype bfloat16"
    run(tmp_path, demo_inputs / "model", ROWS, *flags.split())
    capsys.readouterr()
    export(tmp_path, "specforge")
    [config_json] = re.findall("echo (.*) > specforge.json", capsys.readouterr().out)
    (tmp_path / "specforge.json").write_text(*shlex.split(config_json))
    batches = read("specforge", "specforge.json", folder=tmp_path)
    files = sorted(batches, key=lambda file: int(re.sub(r"\D", "", Path(file).name)))
    lengths = []
    for file, expected in zip(files, stored_samples(tmp_path), strict=True):
        batch = {name: tensor.squeeze(0) for name, tensor in batches[file].items()}
        expected.loss_mask[-1] = 0
        lengths.append(len(expected.token_ids))
        assert torch.equal(batch["input_ids"], expected.token_ids)
        assert torch.equal(batch["loss_mask"], expected.loss_mask)
        assert batch["attention_mask"].all()
        assert batch["hidden_state"].dtype == batch["target"].dtype == torch.bfloat16
        states = torch.cat([expected.states[hook] for hook in STREAM], dim=1)
        assert torch.equal(batch["hidden_state"].float(), states)
        assert torch.equal(batch["target"].float(), expected.states["ln_final.hook_out"])
    assert max(lengths) == LENGTH == json.loads(*shlex.split(config_json))["data"]["max_length"]


def test_sae_lens_reads_the_stored_tokens(demo_inputs, tmp_path, capsys):
    """The rows are full, because ROWS have twice the tokens of a row."""
    flags = "--ids_column ids --keep_columns loss_mask --long_documents split --dtype bfloat16"
    run(tmp_path, demo_inputs / "model", ROWS, *flags.split(), hooks=STREAM)
    capsys.readouterr()
    target = export(tmp_path, "sae_lens")
    row_tokens = int(*set(re.findall(r"context_size=(\d+)", capsys.readouterr().out)))
    samples = [*stored_samples(tmp_path)]
    assert sum(len(sample.token_ids) for sample in samples) == 2 * row_tokens
    for hook in (STREAM[0], STREAM[-1]):
        states = torch.cat([sample.states[hook] for sample in samples])
        arguments = target / hook, hook, row_tokens, states.shape[1]
        rows = read("sae_lens", *arguments, folder=tmp_path)
        assert len(rows) == 2
        assert torch.equal(torch.cat([values for values, _ in rows]), states)
        read_ids = torch.cat([token_ids for _, token_ids in rows])
        assert read_ids.tolist() == torch.cat([s.token_ids for s in samples]).tolist()


class Windows(NamedTuple):
    """The windows of a run's samples that delphi can show as examples.

    Attributes:
        token_ids: The token ids, (windows, WINDOW_TOKENS).
        values: The values of all features, (windows, WINDOW_TOKENS, features). Values that delphi
            leaves out are 0.
    """

    token_ids: np.ndarray
    values: np.ndarray

    def examples(self, chosen: np.ndarray, feature: int) -> list[tuple[list, list]]:
        """Returns token ids and values of the chosen windows (a mask), sorted."""
        values = self.values[chosen, :, feature].tolist()
        return sorted(zip(self.token_ids[chosen].tolist(), values, strict=True))


def windows_of(folder: Path) -> Windows:
    """Returns the windows of folder/run: halves of rows, which lie in one sample each."""
    token_ids, values = [], []
    for sample in ActivationDataset(folder / "run", [CODES]):
        codes = sample[CODES]
        assert isinstance(codes, Codes)
        features = codes.to_scipy().toarray()
        features[np.abs(features) <= SMALLEST_VALUE] = 0
        end = len(features) // ROW_TOKENS * ROW_TOKENS
        for start in range(0, end, WINDOW_TOKENS):
            part = slice(start, start + WINDOW_TOKENS)
            token_ids.append(sample.token_ids[part])
            values.append(features[part])
    return Windows(np.stack(token_ids), np.stack(values))


def test_delphi_makes_examples_of_the_stored_features(demo_inputs, tmp_path, capsys):
    autoencoder, _ = made.sae_lens(tmp_path / "sae", "jumprelu", normalize_activations="layer_norm")
    documents = first_documents(demo_inputs, tmp_path / "few.parquet", 12)
    flags = ["--model_path", demo_inputs / "model", "--dataset_path", documents, "--batch_size", 4]
    flags += ["--max_seq_length", 160, "--shard_size_gb", 1e-3, "--encode", autoencoder]
    assert main(*flags, "--output_dir", tmp_path / "run") == 0
    capsys.readouterr()
    target = export(tmp_path, "delphi")
    call = f"LatentDataset({str(target)!r}, SamplerConfig(), ConstructorConfig())"
    assert call in capsys.readouterr().out
    records = read("delphi", target, folder=tmp_path)

    windows = windows_of(tmp_path)
    is_active = windows.values.any(axis=1)  # (windows, features)
    assert len(is_active) >= 8 and {*is_active.sum(0)} > {1, 2}
    active_features = np.flatnonzero(is_active.any(axis=0)).tolist()
    assert sorted(record["feature"] for record in records) == active_features
    tokenizer = AutoTokenizer.from_pretrained(demo_inputs / "model")
    has_inactive_windows = False
    for record in records:
        feature = record["feature"]
        assert record["hook"] == CODES
        assert record["token_frequency"] == np.mean(windows.values[:, :, feature] != 0)
        assert record["window_frequency"] == np.mean(is_active[:, feature])
        token_ids, values = record["token_ids"].tolist(), record["values"].tolist()
        examples = zip(token_ids, values, strict=True)
        assert sorted(examples) == windows.examples(is_active[:, feature], feature)
        largest_values = [max(example) for example in values]
        assert largest_values == sorted(largest_values, reverse=True)
        texts = [tokenizer.batch_decode(example) for example in token_ids]
        assert record["training_texts"] == texts[: len(record["training_texts"])] != []
        assert all(example.tolist() in values for example in record["test_values"])
        inactive = windows.token_ids[~is_active[:, feature]].tolist()
        assert all(example.tolist() in inactive for example in record["inactive_token_ids"])
        has_inactive_windows |= len(record["inactive_token_ids"]) > 0
    assert has_inactive_windows
