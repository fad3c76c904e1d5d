"""What a tokenizer's post-processor adds to plain text, as in transformers, and to nothing else."""

import json
import shutil

import numpy as np
import pytest
from chat_templates import QWEN3, VOCABULARY, chat_model, talk
from command_line import assert_refused, main
from conftest import tokenizer_of
from extractions import edit
from row_files import write_rows
from small_runs import stream_of
from tokenizers import Tokenizer, normalizers, processors
from transformers import AutoTokenizer

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.run.estimate import data_size
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.tokenizer import special_tokens_of

START, END = "<|im_start|>", "<|im_end|>"
TEMPLATES = {  # the template -> how it is shown, and how many tokens it adds
    "$A": ("", 0),
    f"$A {END}": (f"text + {END}", 1),
    f"{START} $A": (f"{START} + text", 1),
    f"{START} $A {END}": (f"{START} + text + {END}", 2),
    f"{START} {START} $A:1 {END} {START} {END}:1": (
        f"{START} + {START} + text + {END} + {START} + {END}",
        5,
    ),
}
BOTH = f"{START} $A {END}"
every_template = pytest.mark.parametrize("template", TEMPLATES)
LENGTHS = range(9, 70)
TEXTS = [
    "one",
    "It's 2048 a\u0301 é 中文 🙂",
    f"a marker {END} within, and{START}",
    "seven words of many, " * 3,
    "word " * 400,  # of which only the beginning is read
]


@pytest.fixture(scope="module")
def model_with(demo_inputs, tmp_path_factory):
    """Makes a model whose tokenizer has this template, and is then changed."""
    plain = chat_model(demo_inputs, tmp_path_factory.mktemp("plain"), QWEN3)

    def make(template, change=lambda tokenizer: None):
        folder = tmp_path_factory.mktemp("with") / "model"
        shutil.copytree(plain, folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        known = [(name, tokenizer.token_to_id(name)) for name in (START, END)]
        own = processors.TemplateProcessing(single=template, special_tokens=known)
        to_bytes = processors.ByteLevel(trim_offsets=False)
        tokenizer.post_processor = processors.Sequence([to_bytes, own])
        change(tokenizer)
        (folder / "tokenizer.json").write_text(tokenizer.to_str())
        return folder

    return make


@pytest.fixture(scope="module")
def models(model_with):
    return {template: model_with(template) for template in TEMPLATES}


def read(path, tokenizer, length, max_tokens=None, **form):
    """The samples of a file."""
    form = SampleForm(length, special=special_tokens_of(tokenizer), **form)
    return list(samples(stream_of(path), tokenizer, form, max_tokens=max_tokens))


@every_template
def test_a_text_has_the_tokens_that_transformers_gives_it(template, models, texts):
    """Cut at any length, too; what is cut are tokens of the text."""
    tokenizer = tokenizer_of(models[template], VOCABULARY)
    reference = AutoTokenizer.from_pretrained(models[template])
    special = special_tokens_of(tokenizer)
    assert (special.template, len(special)) == TEMPLATES[template]
    path = texts([{"text": text} for text in TEXTS])
    whole = [reference(text).input_ids for text in TEXTS]
    for length in LENGTHS:
        found = read(path, tokenizer, length)
        for text, ids, sample in zip(TEXTS, whole, found, strict=True):
            due = reference(text, truncation=True, max_length=length).input_ids
            assert sample.token_ids.dtype == np.int32 and sample.token_ids.tolist() == due
            assert sample.cut == len(ids) - len(due)


@every_template
@pytest.mark.parametrize("overlap", [0, 3])
def test_pieces_are_those_of_the_whole(template, overlap, models, texts):
    """The front is in the first piece alone and the end in the last one, at every border."""
    tokenizer = tokenizer_of(models[template], VOCABULARY)
    reference = AutoTokenizer.from_pretrained(models[template])
    text = TEXTS[3]
    whole = reference(text, return_offsets_mapping=True)
    ids, offsets = whole["input_ids"], whole["offset_mapping"]
    own = [number for number, (_, stop) in enumerate(offsets) if stop]
    path = texts([{"text": text}])
    for length in range(4, len(ids) + 2):
        pieces, joined = read(path, tokenizer, length, split=True, overlap=overlap), []
        for number, piece in enumerate(pieces):
            start, repeated = number * (length - overlap), overlap if number else 0
            assert (piece.row["start"], piece.cut) == (start, 0)
            assert piece.token_ids.tolist() == ids[start : start + length]
            assert piece.kept_positions[0] == repeated
            joined += piece.token_ids[repeated:].tolist()
            due = text[offsets[start][0] :] if start in own else text * (start < own[0])
            assert piece.text_preview == due
        assert joined == ids


@pytest.mark.parametrize("split", [False, True])
def test_a_cut_by_a_budget_adds_nothing(split, models, texts):
    """Tokens are those of the samples without it, up to any number."""
    tokenizer = tokenizer_of(models[BOTH], VOCABULARY)
    reference = AutoTokenizer.from_pretrained(models[BOTH])
    three = TEXTS[:3]
    path = texts([{"text": text} for text in three])
    whole = [reference(text).input_ids for text in three]
    stored = whole if split else [[*ids[:8], ids[-1]] if ids[9:] else ids for ids in whole]
    for most in range(1, sum(map(len, stored)) + 3):
        found = read(path, tokenizer, 9, split=split, max_tokens=most)
        assert np.concatenate([s.token_ids for s in found]).tolist() == sum(stored, [])[:most]
        touched = {json.dumps(sample.row["line"]) for sample in found}
        left_out = sum(map(len, whole[: len(touched)])) - sum(len(s.token_ids) for s in found)
        assert sum(sample.cut for sample in found if not split or sample is found[-1]) == left_out


def test_a_text_without_tokens_of_its_own_is_no_sample(model_with, texts):
    def forget(tokenizer):
        tokenizer.normalizer = normalizers.Replace("x", "")

    tokenizer = tokenizer_of(model_with(BOTH, forget), VOCABULARY)
    stream = stream_of(texts([{"text": text} for text in ("", "xx", " ", "axx")]))
    form = SampleForm(9, special=special_tokens_of(tokenizer))
    (sample,) = samples(stream, tokenizer, form)
    assert len(sample.token_ids) == 3 and stream.counts.empty == 3


def flags_of(model, path, out, *more):
    return [
        *("--model_path", model, "--dataset_path", path, "--output_dir", out),
        *("--max_seq_length", 24, "--batch_size", 2, "--layers_to_extract", 1),
        *("--dtype", "float32", "--no_data_parallel", "--shard_size_gb", 3e-5, *more),
    ]


def stored(out):
    return {
        sample.sample_idx: (sample.row, sample.position.tolist(), sample.token_ids.tolist())
        for sample in ActivationDataset(out)
    }


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--long_documents", "split", "--overlap", 5],
        ["--positions", "last:2", "--drop_token_ids", START],
    ],
)
def test_a_run_is_continued_and_verified_with_the_same_tokens(
    more, models, texts, tmp_path, capsys
):
    path = texts([{"text": f"text {n} " * (n % 9 + 1)} for n in range(30)])
    flags = flags_of(models[BOTH], path, tmp_path / "whole", *more)
    told = f"special tokens: {TEMPLATES[BOTH][0]}"
    assert main(*flags) == 0
    assert capsys.readouterr().err.count(f"{told} (--special_tokens none adds none)\n") == 1
    flags = flags_of(models[BOTH], path, tmp_path / "out", *more)
    for most in (7, 20, 1000):
        assert main(*flags, "--max_samples", most) == 0
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    capsys.readouterr()
    verify = "--verify", "--output_dir", tmp_path / "out", "--model_path", models[BOTH]
    assert main(*verify, "--verify_samples", 20) == 0
    assert "recomputed; 0 problems\n" in capsys.readouterr().out
    if "split" in more:
        reference = AutoTokenizer.from_pretrained(models[BOTH])
        dataset = ActivationDataset(tmp_path / "out")
        for index, sample in enumerate(dataset):
            number = sample.row["line"] - 1
            due = reference(f"text {number} " * (number % 9 + 1)).input_ids
            assert dataset.document(index).token_ids.tolist() == due
    assert main(*flags, "--special_tokens", "none") == 2
    differs = "already holds an extraction that differs in special_tokens: "
    assert f"{differs}{TEMPLATES[BOTH][0]}, now nothing; " in capsys.readouterr().err
    assert main("--list_hooks", "--model_path", models[BOTH]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == told


@pytest.mark.parametrize("choice", [[], ["--special_tokens", "none"]])
@pytest.mark.parametrize("column", ["messages", "ids", "text"])
def test_conversations_and_given_ids_get_nothing(column, choice, models, tmp_path):
    row = {"text": "a text", "messages": talk(), "ids": [5, 6, 7]}
    path, reference = tmp_path / "rows.jsonl", AutoTokenizer.from_pretrained(models[BOTH])
    write_rows(path, [row])
    due = row["ids"]
    if column != "ids":
        chat = reference.apply_chat_template(row["messages"], tokenize=False)
        text, own = (chat, False) if column == "messages" else ("a text", not choice)
        due = reference(text, add_special_tokens=own).input_ids
    flags = flags_of(models[BOTH], path, tmp_path / "out", f"--{column}_column", column, *choice)
    assert main(*flags, "--max_seq_length", 1000) == 0
    assert [sample.token_ids.tolist() for sample in ActivationDataset(tmp_path / "out")] == [due]


def test_a_run_from_before_is_verified_without_special_tokens(models, texts, tmp_path, capsys):
    """Then none were added, and nothing was recorded. A flag that changes nothing refuses none."""
    path, out = texts([{"text": f"a text {n}"} for n in range(5)]), tmp_path / "out"
    flags = flags_of(models[BOTH], path, out, "--positions", "every:2")
    assert main(*flags, "--special_tokens", "none") == 0

    def forget(content):
        del content["configuration"]["special_tokens"], content["identity"]["special_tokens"]

    edit(out / "metadata.json", forget)
    assert main("--verify", "--output_dir", out, "--model_path", models[BOTH]) == 0
    assert "5 samples recomputed; 0 problems\n" in capsys.readouterr().out
    flags = flags_of(models["$A"], path, tmp_path / "other")
    assert main(*flags) == 0 and main(*flags, "--special_tokens", "none") == 0


def post_processor(single):
    """Gives a tokenizer this template, in which x is a token id that the model does not have."""
    own = processors.TemplateProcessing(single=single, special_tokens=[("x", VOCABULARY)])
    return lambda tokenizer: setattr(tokenizer, "post_processor", own)


@pytest.mark.parametrize(
    "change,length,told",
    [
        (id, 2, "--max_seq_length 2: has no room for a text and the "),
        (post_processor("$A x"), 24, f"the tokenizer has token id {VOCABULARY}, but vocab_size in"),
        (post_processor("$A $A"), 24, "--special_tokens tokenizer: the post_processor in the mod"),
    ],
)
def test_what_cannot_be_is_refused(change, length, told, model_with, texts, tmp_path, capsys):
    model, path = model_with(BOTH, change), texts([{"text": "one"}])
    more = "--max_seq_length", length
    assert_refused(capsys, tmp_path, flags_of(model, path, tmp_path / "out", *more), told)
    if told.startswith("--"):  # it is known without the model's configuration
        assert_refused(capsys, tmp_path, ["--list_hooks", "--model_path", model, *more], told)


def test_a_plan_counts_them(models, capsys):
    """Two more tokens of each document, where none is cut."""
    flags = "--dataset_path", "x.jsonl", "--max_samples", "1000", "--max_seq_length", "1000000"
    (with_two, _), (without, _) = (data_size(parse_args(flags), n) for n in (2, 0))
    assert with_two - without == pytest.approx(2000)
    found = []
    for choice in ("tokenizer", "none"):
        asked = "--plan", "h100-1", "--model_path", models[BOTH], "--special_tokens", choice
        assert main(*asked, *flags[:4], "--max_seq_length", 1024, "--json") == 0
        found.append(json.loads(capsys.readouterr().out)["terabytes"])
    assert found[0] > found[1]
