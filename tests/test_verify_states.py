"""--verify of hidden states that another program has stored: a right folder is right within the
error of its dtype, and each fault that was planted is named."""

import gzip
import json
import random
import re
import shutil
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
from command_line import main
from conftest import make_reference
from datasets import Dataset
from safetensors.torch import load_file, save_file
from tiny_models import TINY

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.inspect.compare_states import Limits, match_hooks
from activation_extraction.inspect.draft_files import quantize_tokens
from activation_extraction.inspect.hidden_states import StoredRow, find_states_folder
from activation_extraction.inspect.verify_states import RowComparison, verify_hidden_states
from activation_extraction.run.recompute_states import load_for_hidden_states

DEPTH, WIDTH, VOCABULARY = 8, 64, 211
BLOCKS = (1, 3, 4)  # the default ones of both programs at this depth
AUX = [f"blocks.{block}.hook_resid_post" for block in BLOCKS]
LAST = {"speculators": f"blocks.{DEPTH - 1}.hook_resid_post", "specforge": "ln_final.hook_out"}
LENGTHS = (20, 33, 7, 50, 12, 28)  # tokens of each row
PROGRAMS = tuple(LAST)
both_programs = pytest.mark.parametrize("program", PROGRAMS)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns the model's folder, and what transformers computes for each row.

    Attributes:
        folder: The folder of the checkpoint.
        ids: The token ids of each row.
        states: dtype -> the hidden states of each row by the names of hooks.
        load: A function that returns the model for verify_hidden_states, made once for each dtype.
    """
    folder = tmp_path_factory.mktemp("model")
    reference = make_reference(folder, num_hidden_layers=DEPTH, num_key_value_heads=2)
    generator = np.random.default_rng(1)
    ids = [generator.integers(0, VOCABULARY, length) for length in LENGTHS]
    ids[5][:4] = ids[4][:4]  # two rows with the same beginning, as chat templates make them
    networks = {"float32": reference.model, "bfloat16": reference.in_bfloat16().model}
    states = {
        dtype: [states_of(network, row) for row in ids] for dtype, network in networks.items()
    }
    loaded = {}

    def load(*flags):
        if flags not in loaded:
            arguments = ["--verify", "--model_path", str(folder), *map(str, flags)]
            loaded[flags] = load_for_hidden_states(parse_args(arguments), ids, WIDTH)
        return lambda token_ids, width: loaded[flags]

    return SimpleNamespace(folder=folder, ids=ids, states=states, load=load)


def states_of(network, row):
    """Returns the residual streams and the normed last state of a row, as transformers has them."""
    last = []
    handle = network.model.layers[-1].register_forward_hook(
        lambda module, inputs, output: last.append(output)
    )
    with torch.no_grad():
        output = network.model(torch.tensor(row)[None], output_hidden_states=True)
    handle.remove()
    before_norm = last[0][0] if isinstance(last[0], tuple) else last[0]
    streams = [*output.hidden_states[:-1], before_norm]
    names = ["blocks.0.hook_resid_pre"]
    names += [f"blocks.{block}.hook_resid_post" for block in range(DEPTH)]
    states = {name: stream.reshape(-1, WIDTH) for name, stream in zip(names, streams, strict=True)}
    return states | {"ln_final.hook_out": output.last_hidden_state[0]}


def right_layers(model, program, dtype="float32", hooks=AUX):
    """Returns the right layers of each row, (tokens, width) each."""
    return [[states[hook] for hook in (*hooks, LAST[program])] for states in model.states[dtype]]


def write(folder, program, model, rows, data_set=True, compressed=False):
    """Writes files as the other program's documentation describes them.

    Args:
        folder: The folder, which is created.
        program: The program.
        model: The model with the token ids.
        rows: The layers of each row.
        data_set: Whether to write the data set of speculators.
        compressed: Whether to compress the files of SpecForge.
    """
    folder.mkdir()
    if program == "speculators" and data_set:
        columns = {"input_ids": [ids.tolist() for ids in model.ids]}
        Dataset.from_dict(columns).save_to_disk(folder)
    for number, (ids, layers) in enumerate(zip(model.ids, rows, strict=True)):
        tensors = {"token_ids": torch.tensor(ids), "hidden_states": torch.stack(layers, 1)}
        if program == "speculators":
            (folder / "hidden_states").mkdir(exist_ok=True)
            save_file(tensors, folder / f"hidden_states/hs_{number}.safetensors")
            continue
        content = {
            "input_ids": torch.tensor(ids),
            "loss_mask": torch.ones(len(ids), dtype=torch.long),
            "aux_hidden_state": torch.cat(layers[:-1], 1)[None],
            "hidden_state": layers[-1][None].clone(),
        }
        (folder / "rows_0-2000").mkdir(exist_ok=True)
        path = folder / f"rows_0-2000/data_{number}.ckpt{'.gz' * compressed}"
        with (gzip.open if compressed else open)(path, "wb") as file:
            torch.save(content, file)
    return folder


def check(folder, model, capsys, *flags, count=6):
    """Returns the exit status and the lines of --verify."""
    capsys.readouterr()
    status = verify_hidden_states(find_states_folder(folder), model.load(*flags), count)
    return status, capsys.readouterr().out.splitlines()


def verify(folder, model, *flags):
    return main("--verify", "--output_dir", folder, "--model_path", model, *flags)


NAMED = "--layers_to_extract", *BLOCKS


@both_programs
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("flags", [(), NAMED], ids=["unnamed", "named"])
def test_a_right_folder_is_right(program, dtype, flags, model, tmp_path, capsys):
    """The other program is transformers. Ours computes in float32."""
    rows = right_layers(model, program, dtype)
    folder = write(tmp_path / "out", program, model, rows, compressed=dtype == "bfloat16")
    status, lines = check(folder, model, capsys, *flags)
    assert status == 0
    for number, (line, hook) in enumerate(zip(lines, [*AUX, LAST[program]], strict=False), 1):
        assert line.startswith(f"layer {number} of 4: {hook}, right in 6 of 6 rows, error ")
        percent = re.search(r"error (?:at most|below) (\S+) %$", line)[1]
        assert float(percent) < (0.02 if dtype == "float32" else 5)
    notes = [line for line in lines if line.startswith("note: ")]
    assert [("no flag names the layers" in note) for note in notes] == [True] * (not flags)
    assert "; 6 rows compared, 0 wrong" in lines[-1] and lines[-1].startswith("in order: ")


@both_programs
def test_both_sides_in_bfloat16_and_other_layers_than_the_default(program, model, tmp_path, capsys):
    hooks = ["blocks.0.hook_resid_pre", *AUX[1:]]
    if program == "specforge":
        hooks = ["blocks.2.hook_resid_post", *AUX[1:]]
    folder = write(
        tmp_path / "out", program, model, right_layers(model, program, "bfloat16", hooks)
    )
    status, lines = check(folder, model, capsys, "--dtype", "bfloat16")
    assert status == 0 and lines[0].startswith(f"layer 1 of 4: {hooks[0]}, right in 6 of 6")
    numbers = {"speculators": "2, 4, 5", "specforge": "1, 3, 4"}[program]
    default = f"stores {', '.join(AUX)} (its layers {numbers})"
    assert any(line.startswith("note: by default, ") and default in line for line in lines)
    names = "--dtype", "bfloat16", "--hook_names", *hooks, LAST[program]
    assert check(folder, model, capsys, *names)[0] == 0


def test_float8_with_a_scale_for_each_token(model, tmp_path, capsys):
    """The first layer is so small beside the last one that most of its values are lost."""
    rows = right_layers(model, "speculators", hooks=["blocks.0.hook_resid_pre", AUX[1]])
    folder = write(tmp_path / "out", "speculators", model, rows, data_set=False)
    for path in folder.glob("hidden_states/*"):
        tensors = load_file(path)
        values, scales = quantize_tokens(tensors["hidden_states"].numpy())
        tensors["hidden_states"] = torch.from_numpy(values.view(np.uint8)).view(torch.float8_e4m3fn)
        save_file(tensors | {"hidden_states_scales": torch.from_numpy(scales)}, path)
    status, lines = check(folder, model, capsys)
    assert status == 0, lines
    assert "right in 6 of 6 rows" in lines[0]
    assert "note: there is no data set beside hidden_states" in "\n".join(lines)


# A fault is a function that changes layers of row 3. FAULTS has the numbers of these layers,
# counted from 1, and what is said about them.


def set_layers(rows, change, layers=range(4)):
    for layer in layers:
        rows[3][layer] = change(rows[3][layer].clone(), layer)


def zeros(rows, model, program):
    set_layers(rows, lambda states, _: states * 0)


def zeros_at_the_beginning(rows, model, program):
    def change(states, layer):
        states[:16] = 0
        return states

    set_layers(rows, change)


def not_a_number(rows, model, program):
    def change(states, layer):
        states[5, 3] = torch.nan
        return states

    set_layers(rows, change, [1])


def next_token(rows, model, program):
    set_layers(rows, lambda states, _: states.roll(-1, 0))


def previous_token(rows, model, program):
    set_layers(rows, lambda states, _: states.roll(1, 0))


def shorter_row(rows, model, program):
    rows[3] = [states.clone() for states in rows[2]]


def far_row_of_a_batch(rows, model, program):
    """A batch was cut at the wrong offsets: row 3 begins with the end of row 1."""
    for layer in range(4):
        rows[3][layer] = torch.cat([rows[1][layer][-10:], rows[3][layer][:-10]])


def cached_prefix(rows, model, program):
    """The first 16 tokens were in a cache, so their states were not computed."""
    set_layers(rows, lambda states, _: states[16:])


def cut_short(rows, model, program):
    set_layers(rows, lambda states, _: states[:30])


def layer_too_early(rows, model, program):
    rows[3][1] = model.states["float32"][3]["blocks.2.hook_resid_post"]


def two_layers_too_late(rows, model, program):
    rows[3][1] = model.states["float32"][3]["blocks.5.hook_resid_post"]


def other_side_of_the_norm(rows, model, program):
    rows[3][3] = model.states["float32"][3][
        LAST["specforge" if program == "speculators" else "speculators"]
    ]


def wrong_last_token(rows, model, program):
    def change(states, layer):
        states[-1] = states[7]
        return states

    set_layers(rows, change)


def noise(rows, model, program):
    """As if computed in bfloat16, but stored in float32."""
    set_layers(rows, lambda states, _: states * 1.01)


def a_third_of_a_percent(rows, model, program):
    """Float32 explains 0.2 % of the whole row, and twice as much of a token."""
    set_layers(rows, lambda states, _: states * 1.003)


def too_many(rows, model, program):
    set_layers(rows, lambda states, _: torch.cat([states, states[:7]]))


ALL = (1, 2, 3, 4)
FAULTS = {
    zeros: (ALL, "found zeros"),
    zeros_at_the_beginning: (
        ALL,
        "found zeros in tokens 0 to 15; the right states in tokens 16 to 49",
    ),
    not_a_number: ((2,), "found NaN or infinity in token 5"),
    next_token: (ALL, "found each token with the state of the next token (error "),
    previous_token: (ALL, "found each token with the state of the previous token (error "),
    shorter_row: (ALL, "found 7 states for 50 tokens; the states of row 2"),
    far_row_of_a_batch: (
        ALL,
        "found the states of tokens 0 to 39 of the same row in tokens 10 to 49; "
        "the states of tokens 23 to 32 of row 1 in tokens 0 to 9",
    ),
    cached_prefix: (ALL, "found 34 states for 50 tokens: those of the last 34"),
    cut_short: (ALL, "found 30 states for 50 tokens: those of the first 30"),
    layer_too_early: ((2,), "found blocks.2.hook_resid_post, one layer too early (error "),
    two_layers_too_late: ((2,), "found blocks.5.hook_resid_post, 2 layers too late (error "),
    other_side_of_the_norm: ((4,), "the final norm instead of"),
    wrong_last_token: (ALL, "found the right states in tokens 0 to 48; no match for token 49"),
    a_third_of_a_percent: (
        ALL,
        "found the right hook and tokens, but other values (error 0.3 %, a token up to 0.3 %; "
        "at most 0.2 % is explained by rounding)",
    ),
    too_many: (
        ALL,
        "found 57 states for 50 tokens; the right states in tokens 0 to 49; "
        "the states of tokens 0 to 6 of the same row in tokens 50 to 56",
    ),
    noise: (
        ALL,
        "found no match; nearest is ",
        "(error 1 %, a token up to 1 %; rounding to bfloat16 may explain it: verify with --dtype "
        "bfloat16)",
    ),
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@both_programs
def test_a_fault_in_one_row_is_named(program, fault, model, tmp_path, capsys):
    rows = right_layers(model, program)
    fault(rows, model, program)
    folder = write(tmp_path / "out", program, model, rows)
    status, lines = check(folder, model, capsys)
    assert status == 1
    messages = [line for line in lines if line.startswith("row ")]
    hooks = [*AUX, LAST[program]]
    layers, *words = FAULTS[fault]
    assert len(messages) == len(layers)
    for layer, message in zip(layers, messages, strict=True):
        assert message.startswith(f"row 3, layer {layer} of 4: expected {hooks[layer - 1]}, found ")
        assert all(phrase in message for phrase in words), message
    assert lines[-1].startswith("FAILED: ") and lines[-1].endswith("6 rows compared, 1 wrong")


@pytest.mark.parametrize(
    "program,found",
    [
        ("speculators", "ln_final.hook_out, after the final norm instead of before it"),
        ("specforge", "blocks.7.hook_resid_post, before the final norm instead of after it"),
    ],
)
def test_the_last_layer_of_all_rows_is_on_the_other_side_of_the_norm(
    program, found, model, tmp_path, capsys
):
    other = LAST["specforge" if program == "speculators" else "speculators"]
    rows = right_layers(model, program)
    for row, states in zip(rows, model.states["float32"], strict=True):
        row[3] = states[other]
    status, lines = check(write(tmp_path / "out", program, model, rows), model, capsys)
    assert status == 1 and lines[3] == f"layer 4 of 4: {LAST[program]}, right in 0 of 6 rows"
    assert sum(f"expected {LAST[program]}, found {found} (error" in line for line in lines) == 6


@both_programs
def test_layers_one_off_are_named_if_a_flag_says_which_were_asked_for(
    program, model, tmp_path, capsys
):
    """The numbers of the two programs differ by one. The last layer is one too early, too."""
    early = [f"blocks.{block - 1}.hook_resid_post" for block in BLOCKS]
    rows = right_layers(model, program, hooks=early)
    for row, states in zip(rows, model.states["float32"], strict=True):
        row[3] = states["blocks.6.hook_resid_post"]
    folder = write(tmp_path / "out", program, model, rows)
    status, lines = check(folder, model, capsys, *NAMED)
    assert status == 1
    for number, hook in enumerate([*early, "blocks.6.hook_resid_post"], 1):
        lines_about_layer = [line for line in lines if f"layer {number} of 4: expected" in line]
        assert len(lines_about_layer) == 6 and all(
            f"found {hook}, one layer too early" in line for line in lines_about_layer
        )
    status, lines = check(folder, model, capsys)
    assert status == 1 and lines[0].startswith(f"layer 1 of 4: {early[0]}, right in 6 of 6 rows")
    assert any(line.startswith("note: by default, ") for line in lines)


def test_a_layer_that_differs_less_than_rounding_allows_is_still_named():
    """Two layers differ by 2 %, and bfloat16 may differ by 5 %."""
    generator = np.random.default_rng(1)
    early = generator.normal(size=(30, WIDTH)).astype(np.float32)
    late = (early * 1.02).astype(np.float32)
    row = StoredRow(np.arange(30), [early.astype(ml_dtypes.bfloat16)])
    check = RowComparison(0, row, Limits.of(row.dtype, "float32", has_experts=False))
    computed = {"early": early, "late": late}
    check.matches_of_layers.append(match_hooks(row, 0, computed, check.error_limits))
    assert check.matches_of_layers[0]["late", 0].within(check.error_limits)
    assert check.is_right(0, "early") and not check.is_right(0, "late")


def test_one_wrong_token_of_many_is_found_in_bfloat16():
    generator = np.random.default_rng(1)
    computed = generator.normal(size=(3000, WIDTH)).astype(np.float32)
    stored = computed.astype(ml_dtypes.bfloat16)
    stored[2000] = stored[2001]
    row = StoredRow(np.arange(3000), [stored])
    check = RowComparison(0, row, Limits.of(row.dtype, "bfloat16", has_experts=False))
    check.matches_of_layers.append(match_hooks(row, 0, {"hook": computed}, check.error_limits))
    assert (
        check.matches_of_layers[0]["hook", 0].rms_token_error
        < check.error_limits.max_rms_token_error
    )
    assert not check.is_right(0, "hook")


def test_layers_must_ascend(model, tmp_path, capsys):
    rows = right_layers(model, "speculators", hooks=[AUX[1], AUX[0], AUX[2]])
    folder = write(tmp_path / "out", "speculators", model, rows)
    status, lines = check(folder, model, capsys)
    assert status == 1 and "the layers are not in ascending order: blocks.3" in "\n".join(lines)


@both_programs
def test_a_fault_in_all_rows_is_named(program, model, tmp_path, capsys):
    def told(name, change):
        rows = [[change(number, layer) for layer in range(4)] for number in range(len(LENGTHS))]
        folder = write(tmp_path / name, program, model, rows)
        status, lines = check(folder, model, capsys)
        assert status == 1 and lines[-1].endswith("6 rows compared, 6 wrong")
        return [line for line in lines if line.startswith(("row ", "layer "))]

    right = right_layers(model, program)
    lines = told("zeros", lambda number, layer: right[number][layer] * 0)
    assert lines[0] == "layer 1 of 4: no row matches a hook"
    assert sum(line.endswith("of 4: found zeros") for line in lines) == 18
    lines = told("shifted", lambda number, layer: right[number][layer].roll(-1, 0))
    assert lines[0] == f"layer 1 of 4: {AUX[0]}, right in 0 of 6 rows"
    assert (
        sum("found each token with the state of the next token (" in line for line in lines) == 24
    )
    # Each row has the states of the row before it, as far as both have tokens.
    lengths = [*map(len, model.ids)]

    def of_row_before(number, layer):
        return right[number - 1][layer][: lengths[number]]

    lines = told("swapped", of_row_before)
    assert lines[0] == "layer 1 of 4: no row matches a hook"
    for number in (1, 3, 4):
        first, _, _, last = (line for line in lines if line.startswith(f"row {number}, "))
        assert first.endswith(f"the states of row {number - 1}, of {AUX[0]}")
        assert last.endswith(f"the states of row {number - 1}")


def test_the_neighbours_of_few_chosen_rows_are_tried_too(model, tmp_path, capsys, monkeypatch):
    rows = right_layers(model, "speculators")
    rows[3], rows[4] = ([states[:12] for states in rows[3]], rows[3])
    rows[4] = [states[:12] for states in right_layers(model, "speculators")[3]]
    folder = write(tmp_path / "out", "speculators", model, rows)
    monkeypatch.setattr(random, "sample", lambda numbers, count: [4])
    status, lines = check(folder, model, capsys, *NAMED, count=1)
    assert status == 1 and lines[-1].endswith("6 rows; 1 row compared, 1 wrong")
    messages = [line for line in lines if line.startswith("row ")]
    assert [message.rpartition("found ")[2] for message in messages] == ["the states of row 3"] * 4


def test_token_ids_are_those_of_the_data_set(model, tmp_path, capsys):
    folder = write(tmp_path / "out", "speculators", model, right_layers(model, "speculators"))
    columns = {"input_ids": [ids.tolist() for ids in model.ids]}
    columns["input_ids"][2][5] += 1
    columns["input_ids"][4].append(1)
    columns["input_ids"].append([1])
    Dataset.from_dict(columns).save_to_disk(folder)
    status, lines = check(folder, model, capsys)
    assert status == 1 and lines[-1].endswith("2 wrong")
    file = "hidden_states/hs_{0}.safetensors: has "
    assert lines[4:6] == [
        "row 2: " + file.format(2) + "another token id than the data set at token 5",
        "row 4: " + file.format(4) + "12 token ids, the data set has 13",
    ]
    assert "note: 1 of the 7 rows of the data set have no file" in lines


class Code:
    """An object that a pickle makes by running code."""

    def __reduce__(self):
        return exec, ("raise SystemExit('code has run')",)


def test_files_that_cannot_be_used_are_wrong_rows(model, tmp_path, capsys):
    folder = write(tmp_path / "speculators", "speculators", model, right_layers(model, PROGRAMS[0]))
    files = [folder / f"hidden_states/hs_{number}.safetensors" for number in range(6)]
    files[0].write_bytes(files[0].read_bytes()[:-1])
    files[1].write_bytes(b"")
    save_file({"hidden_states": torch.zeros(3, 4, WIDTH)}, files[2])
    tensors = {"token_ids": torch.tensor(model.ids[4])}
    save_file(tensors | {"hidden_states": torch.zeros(12, 3, WIDTH)}, files[4])
    status, lines = check(folder, model, capsys)
    assert status == 1 and lines[-1].endswith("6 rows compared, 4 wrong")
    lines_about_rows = [line for line in lines if line.startswith("row ")]
    words = "not a complete", "hs_1", "lacks the tensor token_ids", "holds 3 layers of 64 values; "
    assert all(word in line for word, line in zip(words, lines_about_rows, strict=True))

    folder = write(tmp_path / "specforge", "specforge", model, right_layers(model, "specforge"))
    torch.save({"input_ids": Code()}, folder / "rows_0-2000/data_3.ckpt")
    (folder / "rows_0-2000/data_4.ckpt").write_bytes(b"PK")
    status, lines = check(folder, model, capsys)
    assert status == 1 and lines[-1].endswith("6 rows compared, 2 wrong")
    lines_about_rows = [line for line in lines if line.startswith("row ")]
    assert len(lines_about_rows) == 2
    assert all("ckpt: is damaged, or holds more than tensors" in line for line in lines_about_rows)


@both_programs
def test_a_model_with_experts_is_right_although_rounding_chooses_other_experts(
    program, tmp_path, capsys
):
    """The other program computes in bfloat16. Zeros in a few tokens are still found."""
    changes = TINY["qwen3_moe"] | {"num_hidden_layers": DEPTH}
    reference = make_reference(tmp_path / "model", **changes)
    generator = np.random.default_rng(1)
    ids = [generator.integers(0, VOCABULARY, length) for length in (200, 100, 240)]
    states = [states_of(reference.in_bfloat16().model, row) for row in ids]
    model = SimpleNamespace(ids=ids, states={"bfloat16": states})
    rows = right_layers(model, program, "bfloat16")
    folder = write(tmp_path / "right", program, model, rows)
    assert verify(folder, reference.folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "tokens that may have other experts)" in lines[0]
    for layers in rows:
        for layer in layers:
            layer[3:5] = 0
    folder = write(tmp_path / "wrong", program, model, rows)
    assert verify(folder, reference.folder) == 1
    out = capsys.readouterr().out
    assert out.count("found zeros in tokens 3 to 4; ") == 12 and "3 wrong" in out


# The command line.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_this_program_exports_is_right(dtype, model, tmp_path, capsys):
    rows = "".join(json.dumps({"ids": ids.tolist()}) + "\n" for ids in model.ids)
    (tmp_path / "rows.jsonl").write_text(rows)
    hooks = *AUX, *LAST.values()
    flags = "--dataset_path", tmp_path / "rows.jsonl", "--ids_column", "ids", "--dtype", dtype
    flags += "--output_dir", tmp_path / "run", "--max_seq_length", 64, "--hook_names", *hooks
    assert main("--model_path", model.folder, *flags) == 0
    exports = [(program, ()) for program in PROGRAMS]
    exports.append(("speculators", ("--export_dtype", "float8")))
    for number, (program, more) in enumerate(exports):
        target = tmp_path / f"export_{number}"
        export_arguments = (
            "--output_dir",
            tmp_path / "run",
            "--export",
            program,
            "--export_dir",
            target,
        )
        export_arguments += "--hook_names", *AUX, LAST[program]
        assert main(*export_arguments, *more) == 0
        capsys.readouterr()
        assert verify(target, model.folder, "--dtype", dtype) == 0
        assert capsys.readouterr().out.splitlines()[-1].startswith("in order: hidden states of ")


def test_bad_input_is_refused_in_one_line(model, tmp_path, capsys, monkeypatch):
    folder = write(tmp_path / "out", "specforge", model, right_layers(model, "specforge"))

    def refused(words, *flags):
        capsys.readouterr()
        assert main("--verify", "--output_dir", folder, *flags) == 2
        out, err = capsys.readouterr()
        assert out == "" and words in err.splitlines()[-1] and "Traceback" not in err

    model_flag = "--model_path", model.folder
    refused("holds hidden states of SpecForge, which are compared with a model; give --model_path")
    refused("--verify_samples", *model_flag, "--verify_samples", 0)
    refused("--encode: hidden states of other programs", *model_flag, "--encode", "sae")
    refused("name blocks.1.hook_resid_post; the files of", *model_flag, "--layers_to_extract", 1)
    refused(
        "--hook_names blocks.1.hook_mlp_out: is no residual stream",
        *model_flag,
        "--hook_names",
        "blocks.1.hook_mlp_out",
    )
    refused("layer", *model_flag, "--layers_to_extract", 99)
    other = make_reference(tmp_path / "narrow", hidden_size=32, num_key_value_heads=2).folder
    refused("its hidden states have 32 values, the stored ones have 64", "--model_path", other)
    other = make_reference(tmp_path / "few", num_key_value_heads=2, vocab_size=100).folder
    refused("has 100 tokens; a stored sample has the token id ", "--model_path", other)
    other = make_reference(
        tmp_path / "short", num_key_value_heads=2, max_position_embeddings=40
    ).folder
    refused("; a stored sample has 50 tokens", "--model_path", other)
    monkeypatch.setitem(sys.modules, "torch", None)
    refused("reading it needs torch; run: ", *model_flag)
    monkeypatch.undo()
    shutil.rmtree(folder / "rows_0-2000")
    refused("holds no run", *model_flag)
    with pytest.raises(InputError, match="has the same row as"):
        for name in ("rows_0-2000", "rows_2000-4000"):
            (folder / name).mkdir()
            (folder / name / "data_1.ckpt").touch()
        find_states_folder(folder)
