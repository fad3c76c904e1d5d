"""Documents and samples: formats, splitting between machines, continuing from a cursor."""

import datetime
import json
import queue
import shutil
import threading

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from conftest import tokenizer_of
from small_runs import stream_of
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, trainers

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.run.host_text import Prefetch
from activation_extraction.text import tokenizer as text_tokenizer
from activation_extraction.text.batch import Worker
from activation_extraction.text.file_list import list_files
from activation_extraction.text.samples import SampleForm, samples


def texts_of(path, rank=0, world=1):
    stream = stream_of(path, Worker(rank, world))
    return [document.content.text for document in stream if document is not None]


def test_rows_need_not_have_equal_columns_or_types(texts):
    """Lone surrogates, which JSON may have and UTF-8 may not, are replaced."""
    rows = [
        {"text": "a", "id": 1},
        {"text": None, "id": "x", "extra": [1, {"b": 2}]},
        {"id": 2.5, "text": "bad \ud800 x", "meta": {"k": "v"}},
        {"text": "pair \ud83d\ude42"},
    ]
    path = texts(rows)
    with open(path, "a") as file:
        file.write('\n   \n{"text": "c"}')
    found = [document and (document.content.text, document.doc_id) for document in stream_of(path)]
    assert found == [("a", 1), None, ("bad \ufffd x", 2.5), ("pair 🙂", None), ("c", None)]


@pytest.mark.parametrize(
    "asked,names",
    [
        ("", ["a.jsonl", "part/b.jsonl"]),
        ("/*.jsonl", ["a.jsonl"]),
        ("/*/b.jsonl", ["part/b.jsonl"]),
        ("/part/../part", ["b.jsonl"]),
        ("/a.jsonl", ["a.jsonl"]),
    ],
)
def test_names_of_files_do_not_depend_on_where_they_lie(asked, names, texts, tmp_path):
    """Moved data, or other paths on other hosts, are the same data; another file is not."""
    for folder in ("here", "else/where"):
        (tmp_path / folder / "part").mkdir(parents=True)
        for name in ("a.jsonl", "part/b.jsonl"):
            texts([{"text": "x"}], f"{folder}/{name}")
        assert [file.name for file in list_files(f"{tmp_path}/{folder}{asked}")] == names
    fsspec.filesystem("memory").pipe("/names/named/x.jsonl", b"12345")
    for url in ("memory://names/named", "memory://names/named/*", "memory://names/*/x.jsonl"):
        assert [f.name for f in list_files(url)] == ["named/" * ("*/" in url) + "x.jsonl"]


def test_arc_rows_become_a_prompt(texts, tmp_path):
    pair = {"input": [[0, 1], [2, 3]], "output": [[3, 2]]}
    train = [pair, {"input": [[5]], "output": [[6]]}]
    row = {"id": "x", "train": train, "test": [{"input": [[7, 7]], "output": [[8, 8]]}]}
    expected = (
        "Example 1\nInput:\n0 1\n2 3\nOutput:\n3 2\n\n"
        "Example 2\nInput:\n5\nOutput:\n6\n\n"
        "Test 1\nInput:\n7 7\nOutput:\n"
    )
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "arc.parquet")
    assert texts_of(texts([row])) == texts_of(tmp_path / "arc.parquet") == [expected]


# Qwen3.5's words have marks in them; transformers splits as Qwen2 does.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("kind", ["of the demo", "of Qwen3.5", "older"])
def test_token_ids_are_those_of_the_files(kind, demo_inputs, tmp_path):
    """From tokenizer.json, also where transformers has others, and from the vocab.json and
    merges.txt of older checkpoints."""
    model = tmp_path / "model"
    shutil.copytree(demo_inputs / "model", model)
    reference = Tokenizer.from_file(str(model / "tokenizer.json"))
    texts = pyarrow.parquet.read_table(demo_inputs / "documents.parquet")["text"].to_pylist()[:50]
    texts += ["", " a  b\n\n c\t", "It's 2048 a\u0301 é 中文 🙂", "x<|endoftext|>y", "\x00\r\n"]
    texts += ["ภาษาไทย ที่นี่", "مُحَمَّد", "हिन्दी विकिपीडिया"]
    if kind == "of Qwen3.5":
        split = pre_tokenizers.Split(Regex(WORDS), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        reference.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
        trainer = trainers.BpeTrainer(vocab_size=2000, show_progress=False)
        reference.train_from_iterator(texts[-3:] * 9, trainer)
        reference.save(str(model / "tokenizer.json"))
        reference = Tokenizer.from_file(str(model / "tokenizer.json"))
    if kind == "older":
        settings = json.loads((model / "tokenizer_config.json").read_text())
        whole = json.loads((model / "tokenizer.json").read_text())
        added = {str(token.pop("id")): token for token in whole["added_tokens"]}
        settings["added_tokens_decoder"] = added
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
        (model / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
        merges = [" ".join(pair) for pair in whole["model"]["merges"]]
        (model / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
        (model / "tokenizer.json").unlink()
    largest = max(reference.get_vocab().values())
    with pytest.raises(InputError, match=f"token id {largest}, but vocab_size in config.json is"):
        tokenizer_of(model, largest)
    found = tokenizer_of(model, largest + 1)
    for text in texts:
        due = reference.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == due


class Panic(BaseException):
    """As pyo3_runtime.PanicException, it is no Exception."""


@pytest.mark.parametrize("error", [RunError("source broke"), Panic("source broke")])
def test_prefetch_runs_ahead_and_raises_in_turn(error):
    produced, asked = queue.Queue(), threading.Event()

    def numbers():
        for n in range(6):
            produced.put(n)
            yield n
        assert asked.wait(600)
        raise error

    items = Prefetch(numbers(), depth=6)
    assert items.peek() == 0
    assert [produced.get(timeout=600) for _ in range(6)] == [*range(6)]  # though none was asked for
    asked.set()
    got = []
    with pytest.raises(RunError, match="source broke"):
        for item in items:
            got.append(item)
    assert got == [*range(6)]


def test_prefetch_ends_when_stopped_while_the_source_hangs():
    def hangs():
        yield 1
        threading.Event().wait()

    stop = threading.Event()
    items = Prefetch(hangs(), depth=2).until(stop.is_set)
    assert next(items) == 1
    stop.set()
    assert next(items, "ended") == "ended"


def test_odd_parquet_files_are_read_as_they_are(tmp_path):
    """Names with brackets, columns that differ in type or are null, files without rows."""
    folder = tmp_path / "with space [1]"
    (folder / ".hidden").mkdir(parents=True)
    for name, columns in {
        "a[1].parquet": {"text": ["bracket"], "id": [1]},
        "a1.parquet": {"text": ["other"], "id": ["x"], "extra": [{"deep": [1]}]},
        "b.parquet": {"text": pyarrow.nulls(2), "id": [2, 3]},
        "c.parquet": {"text": pyarrow.array([], pyarrow.string())},
        "d.parquet": {"text": ["dated"], "id": [datetime.date(2020, 1, 2)]},
        ".hidden/e.parquet": {"text": ["not this"]},
    }.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)
    found = sorted((d.content.text, d.doc_id) for d in stream_of(folder) if d)
    assert found == [("bracket", 1), ("dated", "2020-01-02"), ("other", "x")]
    assert texts_of(folder / "a[1].parquet") == ["bracket"]


MARKER, RULE = "<|object_ref_start|>", "-" * 80


@pytest.mark.parametrize("piece", [300, 2**16])
@pytest.mark.parametrize(
    "text",
    [
        *(each * 3000 for each in ("word ", "é", "x", "ab\n", "a\u0301", "!! \n", "中文\n\n")),
        " " * 3000 + "end",
        *(each * 40 for each in (MARKER, MARKER + "\n", f"a{MARKER}", f" {MARKER} ")),
        "".join(f"line {n}: some words, and 12 more\n" * (n % 3 + 1) for n in range(300)),
        f"{RULE}\n" * 20,
    ],
)
def test_a_long_text_has_the_tokens_of_the_whole(text, piece, tokenizer, texts, monkeypatch):
    """It is tokenised in pieces, a few at a time."""
    monkeypatch.setattr(text_tokenizer, "PIECE_CHARACTERS", piece)
    monkeypatch.setattr(text_tokenizer, "PIECES_AT_ONCE", 7)
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens([AddedToken(each, normalized=False) for each in (MARKER, RULE)])
    ids = own.encode(text, add_special_tokens=False).ids
    path = texts([{"text": text}])
    for most in (1, 2, 7, 30, 64, 400):
        (sample,) = samples(stream_of(path), own, SampleForm(most))
        assert sample.token_ids.tolist() == ids[:most]
        assert sample.cut == max(len(ids) - most, 0)
    starts = [start for start, _ in own.encode(text, add_special_tokens=False).offsets[::30]]
    found = samples(stream_of(path), own, SampleForm(30, split=True))
    assert [each.text_preview for each in found] == [text[at : at + 200] for at in starts]
