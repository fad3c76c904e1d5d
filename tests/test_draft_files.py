"""--export speculators and specforge: hidden states are those of transformers, and the mask of
the loss is the row's own, that of the assistant, or all ones."""

import json
import re
import resource
import subprocess

import numpy as np
import pytest
import torch
from chat_templates import QWEN3, chat_model, talk
from command_line import main
from datasets import Dataset
from hs_connectors.transfer import FP8Transfer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from activation_extraction import ActivationDataset
from activation_extraction.inspect.draft_files import quantize_tokens

LENGTH = 48  # tokens of a sample; longer rows are split
LAYERS = (1, 4)
STREAM = [f"blocks.{layer}.hook_resid_post" for layer in (*LAYERS, 11)]
HOOKS = [*STREAM, "ln_final.hook_out"]
ROWS = [
    {"ids": [*range(3, 3 + length)], "loss_mask": [number % 5 != 1 for number in range(length)]}
    for length in (5, 55, 48, 1, 17, 130)
]


def run(folder, model, rows, *flags, hooks=HOOKS):
    """Extracts from rows into folder/run."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["--model_path", model, "--dataset_path", folder / "rows.jsonl", "--batch_size", 2]
    given += ["--output_dir", folder / "run", "--max_seq_length", LENGTH, "--hook_names", *hooks]
    assert main(*given, *flags) == 0


def exported(folder, form):
    target = folder / form
    given = ["--output_dir", folder / "run", "--export", form, "--export_dir", target]
    assert main(*given) == 0
    return target


def speculators(folder):
    """Yields ids, mask, the layers side by side and the last hidden state as its ArrowDataset."""
    state = json.loads((folder / "state.json").read_text())
    assert state["_format_type"] == "torch"  # which load_from_disk needs PyTorch for
    rows = Dataset.from_file(str(folder / state["_data_files"][0]["filename"]))
    for number, row in enumerate(rows):
        assert row["seq_len"] == len(row["input_ids"])
        row = {name: torch.tensor(values) for name, values in row.items()}
        file = load_file(folder / f"hidden_states/hs_{number}.safetensors")
        assert file.keys() == {"hidden_states", "token_ids"}
        assert torch.equal(file["token_ids"], row["input_ids"])
        states = file["hidden_states"]
        yield row["input_ids"], row["loss_mask"], states[:, :-1].flatten(1), states[:, -1]
    assert len([*(folder / "hidden_states").iterdir()]) == len(rows)


def specforge(folder):
    """Yields the same as its OfflineEagle3Dataset; its last hidden state is after the norm."""
    files = [*folder.rglob("*.ckpt")]
    assert {file.parent.name for file in files} == {"rows_0-2000"}
    for file in sorted(files, key=lambda file: int(re.sub(r"\D", "", file.name))):
        row = torch.load(file, weights_only=True)
        states = row["aux_hidden_state"].squeeze(0), row["hidden_state"].squeeze(0)
        yield row["input_ids"], row["loss_mask"], *states


READ = {"speculators": speculators, "specforge": specforge}


def check(folder, form, model, expected):
    """expected: ids and mask of every sample, in any order."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).model
    last, found = [], []
    network.layers[-1].register_forward_hook(lambda *given: last.append(given[2][0]))
    for ids, mask, layers, end in READ[form](folder):
        assert ids.dtype == mask.dtype == torch.int64
        found.append((ids.tolist(), mask.tolist()))
        with torch.no_grad():
            out = network(ids[None], output_hidden_states=True)
        states = torch.cat([out.hidden_states[layer + 1][0] for layer in LAYERS], dim=1)
        before, normed = last[-1].reshape(-1, 128), out.last_hidden_state[0]
        if form == "specforge":
            states = torch.cat([states, before], 1)
        for ours, theirs in ((layers, states), (end, before if form == "speculators" else normed)):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert sorted(found) == sorted(expected)


def test_rows_have_their_own_mask_of_which_each_piece_has_its_part(
    demo_inputs, tmp_path, monkeypatch, capsys
):
    model = demo_inputs / "model"
    flags = "--ids_column ids --keep_columns loss_mask --shard_format safetensors"
    run(tmp_path, model, ROWS, *flags.split(), "--long_documents", "split")
    monkeypatch.setattr("activation_extraction.inspect.export.CHUNK_BYTES", 20_000)
    expected = []
    for row in ROWS:
        for start in range(0, len(row["ids"]), LENGTH):
            part = slice(start, start + LENGTH)
            expected.append((row["ids"][part], [int(each) for each in row["loss_mask"][part]]))
    for form in READ:
        check(exported(tmp_path, form), form, model, expected)
    told = capsys.readouterr().out
    assert (
        "fp8" not in told
        and "--target-layer-ids 2 5 --on" in told
        and "left out: ln_final.hook_out; " in told
    )
    check_specforge_config(told, tmp_path, model)


def check_specforge_config(told, folder, model):
    """The lines that are printed run in a shell, and its config has the fields of SpecForge 0.2's
    Config: the layers by SpecForge's numbers, and no cut of samples."""
    echo, train = told.split("read it with:\n")[-1].splitlines()
    assert train.strip() == "specforge train --config specforge.json"
    subprocess.run(["bash", "-c", echo], cwd=folder, check=True)
    assert json.loads((folder / "specforge.json").read_text()) == {
        "model": {"target_model_path": str(model), "aux_hidden_state_layer_ids": [*LAYERS, 11]},
        "data": {"hidden_states_path": str(folder / "specforge"), "max_length": LENGTH},
    }


def float8_states(folder):
    """Yields token ids and hidden states of each row, as speculators' own reader restores them."""
    files = [*(folder / "hidden_states").iterdir()]
    for number in range(len(files)):
        row = FP8Transfer(folder / "hidden_states", torch.float32).get_cached(number)
        assert row.keys() == {"hidden_states", "token_ids"}
        yield row["token_ids"], row["hidden_states"]


@pytest.mark.parametrize(
    "run_flags,export_flags",
    [
        ("--dtype bfloat16", "--export_dtype float8"),
        ("--activation_dtype float8 --shard_format safetensors", ""),
    ],
)
def test_float8_hidden_states_differ_by_the_error_of_e4m3_alone(
    run_flags, export_flags, demo_inputs, tmp_path, capsys
):
    flags = ["--ids_column", "ids", "--keep_columns", "loss_mask", *run_flags.split()]
    run(tmp_path, demo_inputs / "model", ROWS[:1] + ROWS[3:5], *flags)
    target = tmp_path / "float8"
    command = ["--output_dir", tmp_path / "run", "--export", "speculators", "--export_dir", target]
    assert main(*command, *export_flags.split()) == 0
    assert "--hidden-states-backend fp8 " in capsys.readouterr().out
    samples = {tuple(s.token_ids.tolist()): s for s in ActivationDataset(tmp_path / "run")}
    rows = list(float8_states(target))
    assert len(rows) == len(samples) == 3
    for token_ids, restored in rows:
        sample = samples[tuple(token_ids.tolist())]
        layers = [torch.tensor(sample[hook].astype(np.float32)) for hook in STREAM]
        stored = torch.stack(layers, dim=1)
        largest = stored.abs().amax(dim=(1, 2), keepdim=True)
        # e4m3 has 3 bits after the point, so values are rounded by 1/16 of themselves at most, and
        # those below 2**-6 by 2**-10; the largest value of a token is 448.
        allowed = torch.maximum(stored.abs() / 16, largest / 448 * 2**-10) * (1 + 1e-5)
        assert ((restored - stored).abs() <= allowed).all()
        assert (restored - stored).abs().max() > 0


def test_tokens_of_zeros_and_of_huge_values_are_quantized():
    states = np.zeros((3, 2, 4), np.float32)
    states[1], states[2, 0, 0] = 3e38, -7.0
    values, scales = quantize_tokens(states)
    restored = values.astype(np.float32) * scales
    np.testing.assert_allclose(restored, states, rtol=1e-6)


def test_only_speculators_takes_float8(demo_inputs, tmp_path, capsys):
    run(tmp_path, demo_inputs / "model", ROWS[:1], "--ids_column", "ids")
    command = ["--output_dir", tmp_path / "run", "--export_dir", tmp_path / "new"]
    assert main(*command, "--export", "specforge", "--export_dtype", "float8") == 2
    assert "--export_dtype float8: needs --export speculators" in capsys.readouterr().err


def test_conversations_teach_what_the_assistant_says_and_texts_every_token(demo_inputs, tmp_path):
    model = chat_model(demo_inputs, tmp_path, QWEN3)
    answers = ["<think>\na thought\n</think>\n\n" + "word " * n for n in (1, 3, 6)]
    rows = [{"messages": talk("a question", answer)} for answer in answers]
    run(tmp_path, model, rows, "--messages_column", "messages", hooks=STREAM)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for ids, mask, _, _ in speculators(exported(tmp_path, "speculators")):
        learned = tokenizer.decode(ids[mask == 1].tolist())
        assert "a thought" in learned and "word" in learned and "question" not in learned
    texts = tmp_path / "texts"
    texts.mkdir()
    run(texts, demo_inputs / "model", [{"text": "some words"}, {"text": ""}], hooks=STREAM)
    [(_, mask, _, _)] = speculators(exported(texts, "speculators"))
    assert len(mask) > 1 and mask.all()


def test_a_file_that_cannot_be_written_ends_an_export_in_one_line(demo_inputs, tmp_path, capsys):
    """PyTorch reports a full disk, for which a limit on the size of files stands here, as a
    RuntimeError if it writes the file itself."""
    flags = "--ids_column", "ids", "--keep_columns", "loss_mask"
    run(tmp_path, demo_inputs / "model", ROWS, *flags)
    target = tmp_path / "export"
    arguments = ["--output_dir", tmp_path / "run", "--export", "specforge", "--export_dir", target]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    capsys.readouterr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (32_768, limits[1]))
    try:
        assert main(*arguments) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large; nothing is left of the export" in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "run"}


def test_what_a_trainer_cannot_take_is_refused(demo_inputs, tmp_path, capsys):
    def told(form, *more):
        capsys.readouterr()
        given = ["--output_dir", tmp_path / "run", "--export", form, "--export_dir"]
        assert main(*given, tmp_path / "new", *more) > 0
        assert {path.name for path in tmp_path.iterdir()} == {"rows.jsonl", "run"}
        return capsys.readouterr().err

    rows, few = [{"ids": [5, 6, 7], "loss_mask": [1, 0]}], ("--hook_names", *STREAM[:2])
    flags = "--ids_column ids --keep_columns loss_mask --overwrite".split()
    run(tmp_path, demo_inputs / "model", rows, *flags)
    assert "needs the hooks blocks.11.hook_resid_post and " in told("speculators", *few)
    three = "needs the hooks ln_final.hook_out and blocks.K.hook_resid_post of exactly three"
    assert three in told("specforge", *few)
    assert three in told("specforge", "--hook_names", *STREAM[1:], "ln_final.hook_out")
    assert "sample 0: its column loss_mask: expected a 0 or 1 for" in told("speculators")
    run(tmp_path, demo_inputs / "model", rows, *flags, "--positions", "last")
    for form in ("speculators", "specforge", "delphi"):  # before anything about hooks or samples
        assert "stores only some of its tokens; expected all of them, which a run" in told(form)
