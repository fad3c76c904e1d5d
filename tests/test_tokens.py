"""The token ids of a text are those of the tokenizer's files, with what its post-processor adds, as
in transformers; conversations and given token ids get nothing."""

import random
import shutil

import numpy as np
import pyarrow.parquet
import pytest
from chat_templates import QWEN3, VOCABULARY, chat_model, talk
from command_line import assert_refused, main
from conftest import configure, inputs_with, tokenizer_of
from model_tokenizers import BEGIN_OF_TEXT, as_llama_2, as_llama_3, as_two_files, with_settings
from small_runs import drained, stream_of
from tiny_models import LLAMA
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import demo
from activation_extraction.run.host_text import Text
from activation_extraction.text import tokens
from activation_extraction.text.batch import Worker
from activation_extraction.text.samples import SampleSettings, samples
from activation_extraction.text.tokens import special_tokens_of

START, END = "<|im_start|>", "<|im_end|>"
BOTH = f"{START} $A {END}"
TEMPLATES = {  # the template -> how it is shown
    "$A": "",
    f"$A {END}": f"text + {END}",
    BOTH: f"{START} + text + {END}",
    f"{START} {START} $A:1 {END} {END}:1": f"{START} + {START} + text + {END} + {END}",
}
every_template = pytest.mark.parametrize("template", TEMPLATES)
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


def read(path, tokenizer, length, **settings):
    """Returns the samples of a file."""
    settings = SampleSettings(length, special_tokens=special_tokens_of(tokenizer), **settings)
    return list(samples(stream_of(path), tokenizer, settings))


@every_template
def test_a_text_has_the_tokens_that_transformers_gives_it(template, models, texts):
    """Cut at any length, too; what is cut are tokens of the text."""
    tokenizer = tokenizer_of(models[template], VOCABULARY)
    reference = AutoTokenizer.from_pretrained(models[template])
    assert special_tokens_of(tokenizer).description == TEMPLATES[template]
    path = texts([{"text": text} for text in TEXTS])
    whole = [reference(text).input_ids for text in TEXTS]
    for length in range(9, 70):
        found = read(path, tokenizer, length)
        for text, ids, sample in zip(TEXTS, whole, found, strict=True):
            due = reference(text, truncation=True, max_length=length).input_ids
            assert sample.token_ids.dtype == np.int32 and sample.token_ids.tolist() == due
            assert sample.facts.cut == len(ids) - len(due)


@every_template
@pytest.mark.parametrize("overlap", [0, 3])
def test_pieces_are_those_of_the_whole(template, overlap, models, texts):
    """The front is in the first piece alone and the end in the last one, at every border."""
    tokenizer = tokenizer_of(models[template], VOCABULARY)
    reference = AutoTokenizer.from_pretrained(models[template])
    text = TEXTS[3]
    ids, path = reference(text).input_ids, texts([{"text": text}])
    for length in range(4, len(ids) + 2):
        pieces, joined = read(path, tokenizer, length, splits_documents=True, overlap=overlap), []
        for number, piece in enumerate(pieces):
            start, repeated = number * (length - overlap), overlap if number else 0
            assert (piece.facts.row["start"], piece.facts.cut) == (start, 0)
            assert piece.token_ids.tolist() == ids[start : start + length]
            assert piece.kept_positions[0] == repeated
            joined += piece.token_ids[repeated:].tolist()
        assert joined == ids


def test_a_text_without_tokens_of_its_own_is_no_sample(model_with, texts):
    def forget(tokenizer):
        tokenizer.normalizer = normalizers.Replace("x", "")

    tokenizer = tokenizer_of(model_with(BOTH, forget), VOCABULARY)
    stream = stream_of(texts([{"text": text} for text in ("", "xx", " ", "axx")]))
    settings = SampleSettings(9, special_tokens=special_tokens_of(tokenizer))
    (sample,), end = drained(samples(stream, tokenizer, settings))
    assert len(sample.token_ids) == 3 and end.empty_rows == 3


def flags_of(model, path, out, *more):
    return [
        "--model_path",
        model,
        "--dataset_path",
        path,
        "--output_dir",
        out,
        "--max_seq_length",
        24,
        "--batch_size",
        2,
        "--layers_to_extract",
        1,
        "--dtype",
        "float32",
        "--no_data_parallel",
        "--shard_size_gb",
        3e-5,
        *more,
    ]


def stored(out):
    return {sample.sample_idx: (sample.row, *sample.token_ids) for sample in ActivationDataset(out)}


def test_a_run_is_continued_and_verified_with_the_same_tokens(models, texts, tmp_path, capsys):
    """Pieces of a text make it up again. Without these tokens, it is another run."""
    every = [f"text {n} " * (n % 9 + 1) for n in range(30)]
    path = texts([{"text": text} for text in every])
    more = "--long_documents", "split", "--overlap", 5
    assert main(*flags_of(models[BOTH], path, tmp_path / "whole", *more)) == 0
    told = f"special tokens: {TEMPLATES[BOTH]} (--special_tokens none adds none)\n"
    assert capsys.readouterr().err.count(told) == 1
    flags = flags_of(models[BOTH], path, tmp_path / "out", *more)
    for most in (7, 20, 1000):
        assert main(*flags, "--max_samples", most) == 0
    assert stored(tmp_path / "out") == stored(tmp_path / "whole")
    capsys.readouterr()
    verify = "--verify", "--output_dir", tmp_path / "out", "--model_path", models[BOTH]
    assert main(*verify, "--verify_samples", 20) == 0
    assert "recomputed; 0 problems\n" in capsys.readouterr().out
    reference = AutoTokenizer.from_pretrained(models[BOTH])
    dataset = ActivationDataset(tmp_path / "out")
    for index, sample in enumerate(dataset):
        due = reference(every[sample.row["line"] - 1]).input_ids
        assert dataset.document(index).token_ids.tolist() == due
    assert main(*flags, "--special_tokens", "none") == 2
    differs = "already holds a run that differs in special_tokens: "
    assert f"{differs}{TEMPLATES[BOTH]}, now nothing; " in capsys.readouterr().err


@pytest.mark.parametrize(
    "asked", ["--messages_column messages", "--ids_column ids", "--special_tokens none"]
)
def test_conversations_and_given_ids_get_nothing(asked, models, texts):
    """A text for which that is asked gets nothing, either."""
    row = {"text": "a text", "messages": talk(), "ids": [5, 6, 7]}
    path, reference = texts([row]), AutoTokenizer.from_pretrained(models[BOTH])
    chat = reference.apply_chat_template(row["messages"], tokenize=False)
    due = row["ids"]
    if "ids" not in asked:
        text = chat if "messages" in asked else row["text"]
        due = reference(text, add_special_tokens=False).input_ids
    config = parse_args(["--dataset_path", str(path), "--max_seq_length", "1000", *asked.split()])
    text = Text(config.text_options, Checkpoint(str(models[BOTH])), VOCABULARY)
    (sample,) = samples(text.documents(Worker()), text.tokenizer, text.sample_settings)
    assert sample.token_ids.tolist() == due


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


# Qwen3.5's words have marks in them; transformers splits as Qwen2 does.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.mark.parametrize("kind", ["of the demo", "of Qwen3.5", "older"])
def test_token_ids_are_those_of_the_files(kind, demo_inputs, tmp_path):
    """The files are tokenizer.json, also where transformers has other ids, or the vocab.json and
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
        as_two_files(model)
    largest = max(reference.get_vocab().values())
    with pytest.raises(InputError, match=f"token id {largest}, but vocab_size in config.json is"):
        tokenizer_of(model, largest)
    found = tokenizer_of(model, largest + 1)
    for text in texts:
        due = reference.encode(text, add_special_tokens=False).ids
        assert found.encode(text, add_special_tokens=False).ids == due


OWN, RIGHT = "<|mine|>", "<|right|>"
ADDED = dict(lstrip=False, normalized=False, rstrip=False, single_word=False, special=True)
# What may stand beside tokenizer.json and changes token ids -> settings of tokenizer_config.json,
# and other files.
SETTINGS = {
    "added_tokens_decoder": ({"added_tokens_decoder": {"2060": dict(ADDED, content=OWN)}}, {}),
    "extra_special_tokens": ({"extra_special_tokens": [OWN]}, {}),
    "extra_special_tokens by name": ({"extra_special_tokens": {"my_token": OWN}}, {}),
    "additional_special_tokens": ({"additional_special_tokens": [OWN]}, {}),
    "bos_token": ({"bos_token": OWN}, {}),
    "a token of its own name": ({"image_token": OWN}, {}),
    "a token that takes the spaces around it": (
        {"eos_token": {"__type": "AddedToken", "content": OWN, **ADDED, "rstrip": True}},
        {},
    ),
    "added_tokens.json": ({}, {"added_tokens.json": {OWN: 2060}}),
    "special_tokens_map.json": (
        {},
        {"special_tokens_map.json": {"additional_special_tokens": [OWN], "bos_token": RIGHT}},
    ),
    "split_special_tokens": ({"split_special_tokens": True}, {}),
    "add_prefix_space": ({"add_prefix_space": True}, {}),
}
# Other classes of transformers have words of their own, but not other special tokens.
CLASSES = ["Qwen2Tokenizer", "Qwen2TokenizerFast", "PreTrainedTokenizerFast", None]
SAID = [
    "a word,no space",
    f" a  {OWN}  b{OWN}{OWN}{RIGHT} c",
    f"{START}user\nx<|endoftext|>{END}\n<think>\n\n</think>",
    f"It's 2048 a\u0301 é\n\n中文 🙂{OWN}",
]


def ids_of(tokenizer, special):
    return [tokenizer.encode(text, add_special_tokens=special).ids for text in SAID]


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("case", SETTINGS)
def test_what_stands_beside_the_vocabulary_counts_as_in_transformers(case, kind, model_with):
    settings, files = SETTINGS[case]
    model = with_settings(model_with(BOTH), {**settings, "tokenizer_class": kind}, files)
    found, reference = tokenizer_of(model, VOCABULARY), AutoTokenizer.from_pretrained(model)
    for special in (True, False):
        due = [reference(text, add_special_tokens=special).input_ids for text in SAID]
        assert ids_of(found, special) == due
    alone = ids_of(Tokenizer.from_file(str(model / "tokenizer.json")), False)
    assert due != alone  # or the case shows nothing
    assert {*files, "tokenizer_config.json"} <= {
        path.name for path in Checkpoint(str(model)).tokenizer_files()
    }


@pytest.mark.parametrize("kind", [*CLASSES, "LlamaTokenizerFast", "GPT2TokenizerFast", "Unknown"])
def test_the_words_are_those_of_tokenizer_json_whatever_class_is_named(kind, model_with):
    """The class decides in transformers. A token that only a setting has counts all the same."""

    def split(tokenizer):
        words = pre_tokenizers.Split(Regex(WORDS.replace(r"\p{N}", r"\p{N}{1,3}")), "isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
        tokenizer.normalizer = None

    settings = {"tokenizer_class": kind, "extra_special_tokens": [OWN]}
    model = with_settings(model_with(BOTH, split), settings)
    words = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = tokenizer_of(model, VOCABULARY)
    (own,) = {found.token_to_id(OWN)} - {None}
    for text in SAID:
        pieces = text.split(OWN)
        due = [words.encode(piece, add_special_tokens=False).ids for piece in pieces]
        joined = due[0] + [token for ids in due[1:] for token in (own, *ids)]
        assert found.encode(text, add_special_tokens=False).ids == joined


MARKER, RULE = "<|object_ref_start|>", "-" * 80
LINES = "".join(f"line {n}: some words, and 12 more\n" * (n % 3 + 1) for n in range(300))
LONG = [each * 3000 for each in ("word ", "é", "ab\n", "a\u0301", "!! \n", "中文\n\n")]
LONG += [" " * 3000 + "end", LINES, f"{RULE}\n" * 20]
LONG += [each * 40 for each in (MARKER, MARKER + "\n", f"a{MARKER}", f" {MARKER} ")]


@pytest.mark.parametrize("text", LONG)
def test_a_long_text_has_the_tokens_of_the_whole(text, tokenizer, texts, monkeypatch):
    """It is tokenised in pieces, a few at a time."""
    monkeypatch.setattr(tokens, "SECTION_CHARACTERS", 300)
    monkeypatch.setattr(tokens, "SECTIONS_AT_ONCE", 7)
    own = Tokenizer.from_str(tokenizer.to_str())
    own.add_special_tokens([AddedToken(each, normalized=False) for each in (MARKER, RULE)])
    ids = own.encode(text, add_special_tokens=False).ids
    path = texts([{"text": text}])
    for most in (1, 7, 64, 400):
        (sample,) = samples(stream_of(path), own, SampleSettings(most))
        assert sample.token_ids.tolist() == ids[:most]
        assert sample.facts.cut == max(len(ids) - most, 0)
    starts = [start for start, _ in own.encode(text, add_special_tokens=False).offsets[::30]]
    pieces = samples(stream_of(path), own, SampleSettings(30, splits_documents=True))
    assert [piece.facts.text_preview for piece in pieces] == [text[at : at + 200] for at in starts]


# Tokens that take the spaces beside them, and tokens with spaces within.
GREEDY = [
    AddedToken("<|r|>", rstrip=True, normalized=False),
    AddedToken("<|l|>", lstrip=True, normalized=False),
    AddedToken("two words", normalized=False),
    AddedToken("c\nd", normalized=False),
]
PIPELINES = {
    "as Qwen2": None,
    "as GPT-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "one word": pre_tokenizers.Metaspace(prepend_scheme="first", split=False),
    "a space in front": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "a space in front of every word": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False),
        ]
    ),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_no_long_text_is_cut_where_its_tokens_would_differ(pipeline, tokenizer, texts, monkeypatch):
    monkeypatch.setattr(tokens, "SECTION_CHARACTERS", 20)
    own, chance = Tokenizer.from_str(tokenizer.to_str()), random.Random(pipeline)
    if PIPELINES[pipeline] is not None:
        own.pre_tokenizer = PIPELINES[pipeline]
    words = ["the", "and", *(token.content for token in GREEDY), " ", " ", "\n", "\n\n", "  ", "."]
    said = ["x" + "".join(chance.choices(words, k=300)) for _ in range(40)]
    # Tokens of several spaces, new lines and, if the words are not split, of several words.
    own.train_from_iterator(said, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    own.add_tokens(GREEDY)
    found = samples(stream_of(texts([{"text": text} for text in said])), own, SampleSettings(4000))
    for text, sample in zip(said, found, strict=True):
        assert sample.token_ids.tolist() == own.encode(text, add_special_tokens=False).ids


def of_documents(demo_inputs):
    return pyarrow.parquet.read_table(demo_inputs / "documents.parquet")["text"].to_pylist()


LLAMAS = {
    "Llama 2": as_llama_2,
    "Llama 3": lambda model, _: as_llama_3(model),
}


@pytest.mark.parametrize("kind", LLAMAS)
def test_long_texts_of_llama_have_the_tokens_of_transformers(
    kind, demo_inputs, texts, tmp_path, monkeypatch
):
    """Llama 2's tokenizer takes them whole, and Llama 3's in pieces."""
    monkeypatch.setattr(tokens, "SECTION_CHARACTERS", 40)
    documents = of_documents(demo_inputs)
    model = tmp_path / "model"
    shutil.copytree(demo_inputs / "model", model)
    configure(model, model_type="llama")
    LLAMAS[kind](model, documents)
    tokenizer, reference = tokenizer_of(model, VOCABULARY), AutoTokenizer.from_pretrained(model)
    assert (tokens.safe_cuts(tokenizer) is None) == (kind == "Llama 2")
    said = [
        *documents[:20],
        "\n\n".join(documents[20:30]),
        "of the\nof the",
        "1234567 é 中文\n🙂 x",
    ]
    found = read(texts([{"text": text} for text in said]), tokenizer, 10**6)
    for text, sample in zip(said, found, strict=True):
        assert sample.token_ids.tolist() == reference(text).input_ids


def test_a_run_with_llama_puts_its_first_token_before_every_text(
    demo_inputs, texts, tmp_path, capsys
):
    raw = {**demo.MODEL_CONFIG, **LLAMA, "vocab_size": VOCABULARY}
    inputs = inputs_with(raw, demo_inputs, tmp_path / "inputs")
    model = as_llama_3(inputs / "model")
    said = ["one text", "another, longer text", ""]
    flags = flags_of(model, texts([{"text": text} for text in said]), tmp_path / "out")
    assert main(*flags) == 0
    assert f"special tokens: {BEGIN_OF_TEXT} + text" in capsys.readouterr().err
    reference = AutoTokenizer.from_pretrained(model)
    due = [reference(text).input_ids for text in said[:2]]
    begin = reference.convert_tokens_to_ids(BEGIN_OF_TEXT)
    assert [ids[0] for ids in due] == [begin, begin]
    assert [[*sample.token_ids] for sample in ActivationDataset(tmp_path / "out")] == due
    flags[flags.index("--output_dir") + 1] = tmp_path / "none"
    assert main(*flags, "--special_tokens", "none") == 0
    stored_ids = [[*sample.token_ids] for sample in ActivationDataset(tmp_path / "none")]
    assert stored_ids == [ids[1:] for ids in due]
