"""All token ids of samples of which a run stores few are read again, and it is said what has
changed if they cannot be."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
from chat_templates import MARKERS, QWEN2_5, QWEN3, chat_model, talk
from command_line import main
from row_files import write_rows
from transformers import AutoTokenizer

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError
from activation_extraction.model.repository import Repository
from activation_extraction.run.reread import (
    NO_SAMPLE,
    OTHER_TOKENS,
    load_for_rereading,
    recorded_repositories,
)
from activation_extraction.store.chosen_samples import read_tokens
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_folders import read_folders
from activation_extraction.text import packing
from activation_extraction.text import samples as text_samples

LENGTH = 24  # the most tokens of a sample
SOURCES = {"texts": 20, "more": 15, "talks": 12}  # files of rows, and how many they have
KEPT = "random:0.15:1"

# How a run is asked for, in a folder with the files and a template. The second machine of two has
# marks and numbers of its own.
CASES = {
    "texts": "--dataset_path texts.jsonl",
    "split": "--dataset_path texts.jsonl --long_documents split --overlap 5 --max_samples 40",
    "conversations": "--dataset_path talks.jsonl --messages_column messages "
    "--chat_template template.jinja --roles user",
    "mixture": "--mix texts.jsonl=2 more.jsonl=1",
    "second machine": "--mix texts.jsonl=2 more.jsonl=1 --machine_id 1 --total_machines 2",
    "cut by a limit": "--dataset_path texts.jsonl --max_tokens 9",
    "shuffled": "--dataset_path texts.jsonl --shuffle_documents 3 --drop_token_ids 5 6 7",
}


@pytest.fixture(scope="module")
def model(demo_inputs, tmp_path_factory):
    """A small model, whose tokenizer knows the markers of conversations."""
    return chat_model(demo_inputs, tmp_path_factory.mktemp("model"), QWEN3)


@pytest.fixture(scope="module")
def run_of(model, tmp_path_factory):
    """A function that returns the folder of a case, which tests must not change: with its files,
    and with a run in the folder `out` that stores few tokens in several shards."""
    folders = {}

    def make(case):
        if case not in folders:
            folder = tmp_path_factory.mktemp("case")
            for name, count in SOURCES.items():
                write_rows(folder / f"{name}.jsonl", (row_of(name, n) for n in range(count)))
            (folder / "template.jinja").write_text(QWEN2_5)
            asked = [str(folder / word) if "." in word else word for word in CASES[case].split()]
            flags = ["--model_path", model, "--layers_to_extract", 0, "--shard_size_gb", 2e-6]
            flags += ["--positions", KEPT, "--max_seq_length", LENGTH, "--batch_size", 1]
            with pytest.MonkeyPatch.context() as patch:  # small groups, so that marks move on
                patch.setattr(packing, "GROUP_SAMPLES", 4)
                patch.setattr(text_samples, "CHUNK_ROWS", 3)
                assert main(*flags, *asked, "--output_dir", folder / "out") == 0
            folders[case] = folder
        return folders[case]

    return make


def row_of(name, number):
    """Rows of different lengths, some of which are longer than a sample."""
    words = " ".join(f"{name} {number} {word}" for word in range(1 + number * 7 % 11))
    return (
        {"messages": talk(words, f"An answer to {words}")} if name == "talks" else {"text": words}
    )


def stored_in(folder):
    """The metadata of a run, and the stored tokens of all its samples."""
    root, tokens = Folder(str(folder)), []
    for name, stored in read_folders(root).items():
        for commit in stored.commits_in_order:
            tokens += read_tokens(root.child(name), stored, commit, range(commit.count))
    return stored.metadata, tokens


def reread(folder, path=None, model=None):
    metadata, tokens = stored_in(folder / "out")
    recorded, adapter = recorded_repositories(metadata)
    files = recorded if model is None else Repository(str(model))
    return load_for_rereading(metadata, files, adapter, path and str(path)), tokens


@pytest.mark.parametrize("case", CASES)
def test_all_token_ids_are_those_that_the_tokenizer_gives(case, run_of, model):
    folder = run_of(case)
    read, stored = reread(folder)
    reference = AutoTokenizer.from_pretrained(model)
    rows = ActivationDataset(folder / "out").samples.to_pylist()
    starts = {tokens.mark_before_sample and tokens.mark_before_sample.samples for tokens in stored}
    assert len(starts) > 1 or case == "cut by a limit"
    results = read(stored)
    assert sum(len(tokens.token_ids) for tokens in stored) < 0.5 * sum(map(len, results))
    assert len(results) == len(stored) == len(rows)
    for tokens, row, token_ids in zip(stored, rows, results, strict=True):
        place = row["row"]
        source = place.get("source", "") or place["file"]
        name = next(name for name in SOURCES if f"{name}.jsonl" in source)
        content = row_of(name, place["line"] - 1)
        if name == "talks":
            text = reference.apply_chat_template(
                content["messages"], chat_template=QWEN2_5, tokenize=False
            )
        else:
            text = content["text"]
        expected = reference(text, add_special_tokens=False).input_ids
        start, length = place.get("start", 0), LENGTH if len(tokens.positions) else 0
        assert token_ids.dtype == np.int32 and tokens.sample_idx == row["sample_idx"]
        assert token_ids.tolist() == expected[start : start + length]
        np.testing.assert_array_equal(token_ids[tokens.positions], tokens.token_ids)


def test_any_samples_are_read_in_any_order(run_of):
    read, stored = reread(run_of("split"))
    every = read(stored)
    chosen = [len(stored) - 1, 3, 0, 3, 17]
    for result, index in zip(read([stored[n] for n in chosen]), chosen, strict=True):
        np.testing.assert_array_equal(result, every[index])
    assert read([]) == []


@pytest.mark.parametrize("case", ["split", "conversations", "mixture"])
def test_verify_recomputes_from_tokens_that_are_read_again(case, run_of, model, capsys):
    flags = "--output_dir", run_of(case) / "out", "--model_path", model
    capsys.readouterr()
    assert main("--verify", *flags, "--verify_samples", 100) == 0
    assert "recomputed; 0 problems" in capsys.readouterr().out


def test_data_that_has_moved_is_read_where_it_is_now(run_of, tmp_path):
    folder = shutil.copytree(run_of("texts"), tmp_path / "copy")
    moved = shutil.move(folder / "texts.jsonl", tmp_path / "other.jsonl")
    read, stored = reread(folder, moved)
    assert not any(isinstance(token_ids, str) for token_ids in read(stored))


def change_file(folder, model):
    path = folder / "more.jsonl"
    path.write_text(path.read_text().replace("more 3", "most 3"))


def change_template(folder, model):
    (folder / "template.jinja").write_text(QWEN3)


def change_tokenizer(folder, model):
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"] = [t for t in content["added_tokens"] if t["content"] not in MARKERS]
    path.write_text(json.dumps(content))


CHANGES = [
    ("mixture", change_file, "more.jsonl is not the file that the run began with"),
    ("conversations", change_template, "template.jinja: the chat template is not the one that"),
    ("texts", change_tokenizer, "/model: the tokenizer is not the one that"),
]


@pytest.mark.parametrize("case,change,message", CHANGES)
def test_the_input_that_has_changed_is_named(case, change, message, run_of, model, tmp_path):
    folder = run_of(case)
    now = shutil.copytree(model, tmp_path / "model")
    saved = {path: path.read_bytes() for path in folder.glob("*.j*")}
    try:
        change(folder, now)
        with pytest.raises(InputError, match=f"^--.*{message}"):
            reread(folder, model=now)
    finally:
        for path, content in saved.items():
            path.write_bytes(content)


def test_a_sample_with_other_tokens_is_named_by_its_row(run_of):
    read, stored = reread(run_of("texts"))
    other = replace(stored[2], token_ids=stored[2].token_ids + 1)
    elsewhere = replace(stored[3], positions=stored[3].positions + 1)
    beyond = replace(stored[4], sample_idx=10**6)
    found = read([stored[1], other, elsewhere, beyond])
    assert not isinstance(found[0], str)
    for message, number in zip(found[1:3], (2, 3), strict=True):
        assert (
            message == f'{OTHER_TOKENS}; its row is {{"file": "texts.jsonl", "line": {number + 1}}}'
        )
    assert found[3] == NO_SAMPLE
