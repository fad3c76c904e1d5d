"""Documents and samples: formats, splitting between machines, continuing from a cursor."""

import datetime
import json
import shutil
import threading
import time
from types import SimpleNamespace

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from conftest import tokenizer_of
from small_runs import stream_of
from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers, trainers

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.log import start_logging
from activation_extraction.run.host_text import Prefetch
from activation_extraction.text import samples as text_samples
from activation_extraction.text.batch import Worker
from activation_extraction.text.documents import DocumentStream
from activation_extraction.text.file_list import list_files
from activation_extraction.text.messages import MessagesColumn
from activation_extraction.text.packing import pack
from activation_extraction.text.rows import Content, RowForm, TextColumn, arc_prompt
from activation_extraction.text.samples import SampleForm, pretrained, samples


def texts_of(path, rank=0, world=1, column="text"):
    stream = stream_of(path, Worker(rank, world), form=RowForm(TextColumn(column)))
    return [document.content.text for document in stream if document is not None]


def test_rows_need_not_have_equal_columns_or_types(texts):
    rows = [
        {"text": "a", "id": 1},
        {"text": None, "id": "x", "extra": [1, {"b": 2}]},
        {"id": 2.5, "text": "b", "meta": {"k": "v"}},
    ]
    path = texts(rows)
    with open(path, "a") as file:
        file.write('\n   \n{"text": "c"}')
    found = list(stream_of(path))
    assert [document and (document.content.text, document.doc_id) for document in found] == [
        ("a", 1),
        None,
        ("b", 2.5),
        ("c", None),
    ]


def test_names_of_files_do_not_depend_on_where_they_lie(texts, tmp_path):
    """Moved data, or other paths on other hosts, are the same data; another file is not."""
    described = []
    for folder in ("here", "elsewhere"):
        (tmp_path / folder / "part").mkdir(parents=True)
        for name in ("a.jsonl", "part/b.jsonl"):
            texts([{"text": "x"}], f"{folder}/{name}")
        asked = ("", "/*.jsonl", "/*/b.jsonl", "/part/../part", "/a.jsonl")
        described.append(
            [[f.name for f in list_files(f"{tmp_path}/{folder}{path}")] for path in asked]
        )
    assert described[0] == described[1]
    assert described[0] == [
        ["a.jsonl", "part/b.jsonl"],
        ["a.jsonl"],
        ["part/b.jsonl"],
        ["b.jsonl"],
        ["a.jsonl"],
    ]
    fsspec.filesystem("memory").pipe("/names/named/x.jsonl", b"12345")
    for url in ("memory://names/named", "memory://names/named/*", "memory://names/*/x.jsonl"):
        assert [f.name for f in list_files(url)] == ["named/" * ("*/" in url) + "x.jsonl"]


ARC_ROW = {
    "id": "task",
    "train": [
        {"input": [[0, 1], [2, 3]], "output": [[3, 2]]},
        {"input": [[5]], "output": [[6]]},
    ],
    "test": [{"input": [[7, 7]], "output": [[8, 8]]}],
}


def test_arc_rows_become_a_prompt(texts, tmp_path):
    expected = (
        "Example 1\nInput:\n0 1\n2 3\nOutput:\n3 2\n\n"
        "Example 2\nInput:\n5\nOutput:\n6\n\n"
        "Test 1\nInput:\n7 7\nOutput:\n"
    )
    assert arc_prompt(ARC_ROW) == expected
    assert texts_of(texts([ARC_ROW])) == [expected]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([ARC_ROW]), tmp_path / "arc.parquet")
    assert texts_of(tmp_path / "arc.parquet") == [expected]


def test_token_ids_are_those_of_the_files(demo_inputs, tmp_path):
    """From tokenizer.json, and from the vocab.json and merges.txt of older checkpoints."""
    model = tmp_path / "model"
    shutil.copytree(demo_inputs / "model", model)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    whole = json.loads((model / "tokenizer.json").read_text())
    settings["added_tokens_decoder"] = {
        str(token.pop("id")): token for token in whole["added_tokens"]
    }
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    reference = Tokenizer.from_file(str(model / "tokenizer.json"))
    one_file = tokenizer_of(model, 2048)
    (model / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    (model / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (model / "tokenizer.json").unlink()
    two_files = tokenizer_of(model, 2048)
    texts = pyarrow.parquet.read_table(demo_inputs / "documents.parquet")["text"].to_pylist()
    texts += ["", " a  b\n\n c\t", "It's 2048 a\u0301 é 中文 🙂", "x<|endoftext|>y", "\x00\r\n"]
    for text in texts:
        expected = reference.encode(text, add_special_tokens=False).ids
        assert one_file.encode(text, add_special_tokens=False).ids == expected
        assert two_files.encode(text, add_special_tokens=False).ids == expected


# Words of Qwen3.5, which have marks in them; transformers splits as Qwen2 does.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("text", ["ภาษาไทย ที่นี่", "مُحَمَّد", "हिन्दी विकिपीडिया"])
def test_token_ids_are_those_of_tokenizer_json_where_transformers_has_others(
    text, demo_inputs, tmp_path, capsys
):
    """One line of the first host says so, and none where both have the same."""
    model = shutil.copytree(demo_inputs / "model", tmp_path / "model")
    start_logging(False, 0, 0)
    tokenizer_of(demo_inputs / "model", 2048)
    assert "token ids are" not in capsys.readouterr().err
    own = Tokenizer.from_file(str(model / "tokenizer.json"))
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    own.train_from_iterator([text] * 9, trainers.BpeTrainer(vocab_size=2000, show_progress=False))
    own.save(str(model / "tokenizer.json"))
    expected = own.encode(text, add_special_tokens=False).ids
    assert pretrained(model / "tokenizer.json").encode(text, add_special_tokens=False) != expected
    assert tokenizer_of(model, 2048).encode(text, add_special_tokens=False).ids == expected
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"token ids are those of {model}/tokenizer.json; Qwen2Tokenizer of" in printed
    start_logging(False, 0, 1)
    tokenizer_of(model, 2048)
    assert capsys.readouterr().err == ""


def test_tokenizer_of_another_model_is_refused(demo_inputs):
    with pytest.raises(InputError, match="token id 2047, but vocab_size in config.json is 100"):
        tokenizer_of(demo_inputs / "model", vocab_size=100)


def test_prefetch_runs_ahead_and_raises_in_turn():
    produced: list[int] = []
    ended = threading.Event()

    def numbers():
        for n in range(6):
            produced.append(n)
            yield n
        ended.wait()
        raise RunError("source broke")

    items = Prefetch(numbers(), depth=6)
    assert items.peek() == 0
    while len(produced) < 6:  # without anything more being asked for
        time.sleep(0.001)
    ended.set()
    got = []
    with pytest.raises(RunError, match="source broke"):
        for item in items:
            got.append(item)
    assert got == list(range(6))


def test_prefetch_ends_when_stopped_while_the_source_hangs():
    def hangs():
        yield 1
        threading.Event().wait()

    stop = threading.Event()
    items = Prefetch(hangs(), depth=2).until(stop.is_set)
    assert next(items) == 1
    stop.set()
    assert next(items, "ended") == "ended"


@pytest.mark.parametrize("bad_line", [1, 2, 21, 65, 130])
def test_all_samples_before_a_bad_row_come_before_its_error(texts, tokenizer, bad_line):
    lines = [json.dumps({"text": f"text {n}"}) for n in range(200)]
    path = texts([])
    path.write_text("\n".join([*lines[: bad_line - 1], "{", *lines[bad_line - 1 :]]))

    got = []
    with pytest.raises(RunError, match=f"line {bad_line}: not JSON"):
        for batch in pack(samples(stream_of(path), tokenizer, SampleForm(32)), 2, 32):
            got += [placed.sample.number for placed in batch.samples]
    assert sorted(got) == [*range(bad_line - 1)]


def test_odd_parquet_files_are_read_as_they_are(tmp_path):
    """Names with brackets, columns that differ in type or are null, files without rows."""
    folder = tmp_path / "with space [1]"
    folder.mkdir()

    def write(name, **columns):
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / name)

    write("a[1].parquet", text=["bracket"], id=[1])
    write("a1.parquet", text=["other"], id=["x"], extra=[{"deep": [1]}])
    write("b.parquet", text=pyarrow.nulls(2), id=[2, 3])
    write("c.parquet", text=pyarrow.array([], pyarrow.string()))
    write("d.parquet", text=["dated"], id=[datetime.date(2020, 1, 2)])
    (folder / ".hidden").mkdir()
    write(".hidden/e.parquet", text=["not this"])
    found = [d for d in stream_of(folder) if d]
    assert sorted((d.content.text, d.doc_id) for d in found) == [
        ("bracket", 1),
        ("dated", "2020-01-02"),
        ("other", "x"),
    ]
    assert texts_of(folder / "a[1].parquet") == ["bracket"]


def test_lone_surrogates_do_not_stop_the_run(texts, tokenizer):
    path = texts([{"text": "bad \ud800 x"}, {"text": "pair \ud83d\ude42"}])
    stream = stream_of(path)
    assert [s.text_preview for s in samples(stream, tokenizer, SampleForm(32))] == [
        "bad \ufffd x",
        "pair 🙂",
    ]


@pytest.mark.parametrize(
    "text",
    ["word " * 9000, "é" * 9000, "x" * 9000, " " * 9000 + "end", "ab\n" * 9000, "a\u0301" * 9000],
)
def test_a_long_text_has_the_tokens_of_the_whole(tokenizer, text):
    for most in (1, 7, 64, 400):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        (tokens,) = text_samples._tokenise(tokenizer, [Content(text)], most)
        assert (tokens.ids.tolist(), tokens.total) == (ids[:most], len(ids))


def test_a_marker_that_a_cut_goes_through(tokenizer):
    """Its pieces would be other tokens than it is."""
    marker = "<|object_ref_start|>"
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens([AddedToken(marker, normalized=False)])
    for text in (marker * 40, (marker + "\n") * 40, f"a{marker}" * 40):
        ids = own.encode(text, add_special_tokens=False).ids
        for most in range(1, 30):
            (tokens,) = text_samples._tokenise(own, [Content(text)], most)
            assert tokens.ids.tolist() == ids[:most]


def test_few_pieces_are_read_by_few_workers(texts, tmp_path):
    """Seven workers on three files: a worker touches one file, not all."""
    for number in range(3):
        texts([{"body": f"{number}"}] * 14, f"{number}.jsonl")
    for rank in range(7):
        assert len({*texts_of(tmp_path / "*.jsonl", rank, 7, column="body")}) == 1


def test_shuffled_rows_of_the_hub_are_those_in_order():
    """Objects out of Arrow have null for keys that they lack, which a template must not see."""
    talks = [
        [{"role": "user", "content": "x", "more": {name: 1}} for name in names]
        for names in ("ab", "cd")
    ]
    rows = datasets.Dataset.from_dict({"talk": talks}).to_iterable_dataset()
    template = SimpleNamespace(content=lambda messages, tools: Content(json.dumps(messages)))
    form = RowForm(MessagesColumn("talk", template))
    in_order, shuffled = (
        [document.content.text for document in DocumentStream(rows, form, shuffle=seed)]
        for seed in (None, 1)
    )
    assert sorted(shuffled) == in_order and "null" not in in_order[0]
