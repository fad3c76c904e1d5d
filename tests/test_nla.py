"""--export nla: the file has what the first stage of natural language autoencoders would write: the
text before each stored token, also where it is read again, and the residual stream. The next stage
divides the rows by their documents."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import yaml
from chat_templates import QWEN3, chat_model
from command_line import main
from extractions import HOOKS, extract
from row_files import write_rows
from transformers import AutoTokenizer

from activation_extraction import ActivationDataset
from activation_extraction.inspect.nla_files import NlaFormat

HOOK = "blocks.1.hook_resid_post"
LENGTH = 24  # the most tokens of a sample
ROWS = 12
ROW_GROUP = 7
# A run's flags -> the most tokens of a sample that --positions keeps.
CASES = {
    "every token": ("", LENGTH),
    "few tokens": ("--positions every:5 --drop_token_ids 5 6 7 --id_column name", 5),
    "random": ("--positions random:0.15:1 --shard_format safetensors --dtype bfloat16", 4),
    "random count": ("--positions random:3:7:2", 3),
    "split": ("--positions last:2 --long_documents split --id_column name", 2),
    "split by row": ("--long_documents split --overlap 5 --activation_dtype float16", LENGTH),
    "token ids": ("--ids_column ids --positions every:5", 5),
    "machines": ("--positions random:0.2 --total_machines 2", 5),
    "chosen hook": ("--layers_to_extract 0 1 --positions last", 1),
}


@pytest.fixture(scope="module")
def model(demo_inputs, tmp_path_factory):
    """A small model, whose tokenizer has special tokens."""
    return chat_model(demo_inputs, tmp_path_factory.mktemp("model"), QWEN3)


def text_of(number):
    """Texts of different lengths, some longer than a sample, with a special token within."""
    return f"<|im_start|>row {number} " + " ".join(f"word {n}ä" for n in range(1 + number * 5 % 9))


@pytest.fixture(scope="module")
def run_of(model, tmp_path_factory):
    """A function that returns the folder of a case, which tests must not change: a file of rows,
    and a run in several shards in the folder `out`."""
    folders = {}

    def make(case):
        if case not in folders:
            folder = tmp_path_factory.mktemp("case")
            tokenizer = AutoTokenizer.from_pretrained(model)
            texts = {n: text_of(n) for n in range(ROWS)}
            ids = {n: tokenizer(texts[n], add_special_tokens=False).input_ids for n in texts}
            rows = ({"text": texts[n], "ids": ids[n], "name": f"number {n}"} for n in texts)
            write_rows(folder / "texts.jsonl", rows)
            flags, _ = CASES[case]
            layers = () if "--layers" in flags else ("--layers_to_extract", 1)
            usual = ["--model_path", model, "--dataset_path", folder / "texts.jsonl", *layers]
            usual += ["--max_seq_length", LENGTH, "--batch_size", 1, "--shard_size_gb", 2e-6]
            for machine in range(1 + (case == "machines")):
                asked = *flags.split(), "--machine_id", machine
                assert main(*usual, *asked, "--output_dir", folder / "out") == 0
            folders[case] = folder
        return folders[case]

    return make


def export(folder, target, *flags):
    return main("--output_dir", folder, "--export", "nla", "--export_dir", target, *flags)


def expected_rows(dataset, tokenizer):
    """The rows that the first stage would make of the tokens that a run stores."""
    rows = []
    for sample in dataset:
        place = dict(sample.row)
        start = place.pop("start", 0)
        place.pop("piece", None)
        ids = tokenizer(text_of(place["line"] - 1), add_special_tokens=False).input_ids
        for position, vector in zip(sample.position.tolist(), sample[HOOK], strict=True):
            text = tokenizer.decode(ids[start : start + position + 1], skip_special_tokens=True)
            doc_id = json.dumps(place) if sample.doc_id is None else sample.doc_id
            rows.append((position + 1, text, vector.astype(np.float32).tolist(), 1, doc_id))
    return rows


@pytest.mark.parametrize("case", CASES)
def test_a_row_has_the_text_up_to_a_token_and_its_stream(
    case, run_of, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(NlaFormat, "max_tokens_per_chunk", ROW_GROUP)
    folder = run_of(case)
    target = tmp_path / "target"
    capsys.readouterr()
    assert export(folder / "out", target, "--hook_names", HOOK) == 0
    out = capsys.readouterr().out
    assert f"python -m nla.datagen.stage1_split --base {target}/base.parquet " in out
    assert "left out" not in out
    dataset = ActivationDataset(folder / "out")
    assert len(dataset.shards.commits) > 1
    names = ["base.parquet", "base.parquet.nla_meta.yaml"]
    assert sorted(path.name for path in target.iterdir()) == names

    file = pq.ParquetFile(target / "base.parquet")
    groups = [file.metadata.row_group(n).num_rows for n in range(file.num_row_groups)]
    assert groups[:-1] == [ROW_GROUP] * (len(groups) - 1) and 0 < groups[-1] <= ROW_GROUP
    width = dataset.hooks[HOOK]
    types = [str(field.type) for field in file.schema_arrow]
    vectors = file.schema_arrow.field("activation_vector").type
    assert (vectors.list_size, str(vectors.value_type)) == (width, "float")
    assert [*types[:2], *types[3:]] == ["int64", "string", "int64", "string"]
    rows = list(zip(*file.read().to_pydict().values(), strict=True))
    assert rows == expected_rows(dataset, AutoTokenizer.from_pretrained(model))
    assert any("ä" in text for _, text, *_ in rows) and "<|im_start|>" not in str(rows)

    description = yaml.safe_load((target / names[1]).read_text())
    assert description.pop("dataset_id").startswith("base_model_L1_")
    assert description.pop("created_by").startswith("activation_extraction ")
    assert description == {
        "kind": "nla_dataset",
        "schema_version": 1,
        "stage": "base",
        "row_count": len(rows),
        "extraction": {
            "base_model": str(model),
            "d_model": width,
            "layer_index": 1,
            "norm": "none",
            "corpus": str(folder / "texts.jsonl"),
            "corpus_slice": {"start": 0, "length": ROWS},
            "positions_per_doc": CASES[case][1],
        },
    }


# The parts into which stage 1 divides the documents, with their default fractions.
PARTS = {"av_sft": 0.3, "ar_sft": 0.3, "rl": 0.4}
SIDECAR_FIELDS = {"dataset_id", "stage", "row_count", "extraction", "kind", "schema_version"}
EXTRACTION_FIELDS = {
    *("base_model", "d_model", "layer_index", "norm", "corpus", "corpus_slice"),
    "positions_per_doc",
}


def split_documents(base: Path) -> dict[str, dict[str, list[Any]]]:
    """Repeats stage 1 of the pipeline, which divides the documents of stage 0 at random.

    The pipeline cannot be installed as a package. Like `nla.datagen.stage1_split`, this function
    reads the sidecar first, and makes a dataclass of its field `extraction`, which must therefore
    have the fields of the dataclass. Then it reads all document ids. Last, it reads the rows in
    batches, and writes each row to the file of the part that its document belongs to.

    Args:
        base: The Parquet file of stage 0.

    Returns:
        The columns of the file of each part, read again, by the part's name.
    """
    sidecar = yaml.safe_load(Path(f"{base}.nla_meta.yaml").read_text())
    assert sidecar.keys() >= SIDECAR_FIELDS and sidecar["extraction"].keys() == EXTRACTION_FIELDS
    facts = sidecar["kind"], sidecar["schema_version"], sidecar["stage"]
    assert facts == ("nla_dataset", 1, "base")
    file = pq.ParquetFile(base)
    documents = sorted(set(file.read(columns=["doc_id"])["doc_id"].to_pylist()))
    random.Random(42).shuffle(documents)
    parts: dict[str, dict[str, list[Any]]] = {}
    first_document = 0
    for part, fraction in PARTS.items():
        is_last = part == [*PARTS][-1]
        stop = len(documents) if is_last else first_document + int(len(documents) * fraction)
        part_documents = pyarrow.array(documents[first_document:stop], pyarrow.string())
        part_file = base.with_name(f"{part}_raw.parquet")
        with pq.ParquetWriter(part_file, file.schema_arrow) as writer:
            for batch in file.iter_batches(batch_size=5):
                is_in_part = pc.is_in(batch.column("doc_id"), value_set=part_documents)
                writer.write_table(pyarrow.Table.from_batches([batch.filter(is_in_part)]))
        parts[part] = pq.read_table(part_file).to_pydict()
        first_document = stop
    assert sum(len(columns["doc_id"]) for columns in parts.values()) == sidecar["row_count"]
    return parts


@pytest.mark.parametrize("case", ["every token", "split", "split by row", "machines"])
def test_the_next_stage_divides_the_rows_by_documents(case, run_of, model, tmp_path):
    """All pieces of a document are in the same part. Each part has the rows of its documents, in
    the order of the run."""
    folder = run_of(case)
    assert export(folder / "out", tmp_path / "target", "--hook_names", HOOK) == 0
    parts = split_documents(tmp_path / "target/base.parquet")
    dataset = ActivationDataset(folder / "out")
    rows = expected_rows(dataset, AutoTokenizer.from_pretrained(model))
    line_of_row = [sample.row["line"] for sample in dataset for _ in sample.position]
    part_of_line: dict[int, str] = {}
    for part, columns in parts.items():
        documents = set(columns["doc_id"])
        part_rows = [row for row in rows if row[-1] in documents]
        assert list(zip(*columns.values(), strict=True)) == part_rows != []
        for row, line in zip(rows, line_of_row, strict=True):
            if row[-1] in documents:
                assert part_of_line.setdefault(line, part) == part
    assert part_of_line.keys() == set(line_of_row)


def refused(capsys, tmp_path, folder, *flags):
    """The message with which an export is refused; nothing is left of it."""
    capsys.readouterr()
    assert export(folder, tmp_path / "target", *flags) == 2
    assert not list(tmp_path.glob("target*"))
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "Traceback" not in err
    return err


def test_other_hooks_and_several_hooks_are_refused(run_of, model, tmp_path, capsys):
    out = run_of("chosen hook") / "out"
    both = f"blocks.0.hook_resid_post, {HOOK}"
    assert both in refused(capsys, tmp_path, out)
    assert both in refused(capsys, tmp_path, out, "--hook_names", "*")
    flags = "--model_path", model, "--dataset_path", run_of("chosen hook") / "texts.jsonl"
    flags += "--max_seq_length", LENGTH, "--hook_names", "blocks.1.hook_mlp_out"
    assert main(*flags, "--output_dir", tmp_path / "mlp") == 0
    message = refused(capsys, tmp_path, tmp_path / "mlp")
    assert "--export nla: takes one hook blocks.K.hook_resid_post" in message
    assert message.endswith("chooses blocks.1.hook_mlp_out\n")


def test_a_run_of_another_program_is_refused(tmp_path, capsys):
    extract(tmp_path / "run", identity={"data": ""})
    hook = "--hook_names", next(iter(HOOKS.values()))
    message = refused(capsys, tmp_path, tmp_path / "run", *hook)
    assert "records no data set, because another program stored it" in message


def test_a_file_of_the_data_that_has_changed_is_named(run_of, tmp_path, capsys):
    """Unless the run stores all tokens: then the file is not read."""
    for case in ("few tokens", "every token"):
        folder = run_of(case)
        saved = (folder / "texts.jsonl").read_bytes()
        try:
            (folder / "texts.jsonl").write_bytes(saved.replace(b"word 3", b"word 4"))
            if case == "few tokens":
                message = refused(capsys, tmp_path, folder / "out")
                assert "texts.jsonl is not the file that the run began with" in message
            else:
                assert export(folder / "out", tmp_path / "target") == 0
        finally:
            (folder / "texts.jsonl").write_bytes(saved)


def test_inputs_that_have_moved_are_read_where_they_are_now(run_of, model, tmp_path, capsys):
    folder = shutil.copytree(run_of("few tokens"), tmp_path / "copy")
    moved = shutil.move(folder / "texts.jsonl", tmp_path / "other.jsonl")
    now = shutil.copytree(model, tmp_path / "model")
    flags = "--dataset_path", moved, "--model_path", now
    assert export(folder / "out", tmp_path / "copied", *flags) == 0
    assert export(run_of("few tokens") / "out", tmp_path / "first") == 0
    first, second = (
        pq.read_table(tmp_path / name / "base.parquet") for name in ("first", "copied")
    )
    assert first.equals(second)
    path = now / "tokenizer.json"
    content = json.loads(path.read_text())
    content["added_tokens"].pop()
    path.write_text(json.dumps(content))
    message = refused(capsys, tmp_path, run_of("every token") / "out", "--model_path", now)
    assert f"--model_path {now}: the tokenizer is not the one" in message


def test_a_sample_with_other_tokens_ends_the_export(run_of, tmp_path, monkeypatch, capsys):
    """The row is named, and nothing is left of the export."""
    message = "the data set now ends before this sample"
    monkeypatch.setattr(
        "activation_extraction.run.reread._read_again", lambda text, stored: [message] * len(stored)
    )
    capsys.readouterr()
    assert export(run_of("few tokens") / "out", tmp_path / "target") == 1
    err = capsys.readouterr().err
    assert f"shard_0001.pkl.gz: sample 0: its text cannot be read again: {message}" in err
    assert not list(tmp_path.iterdir())
