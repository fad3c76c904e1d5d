"""A run as the user meets it: what it prints and logs, that one program serves all its steps and
stores the model's values, how Ctrl-C ends it; and what one says that fails: what has to change, and
the traceback of what nobody expected."""

import gzip
import json
import logging
import pickle
import re
import shutil
import signal
import textwrap
import time

import command_line
import jax
import numpy as np
import pytest
from command_line import main, records_of, start
from conftest import make_reference
from memory_bucket import MemoryBucket, MemoryFolder, Process
from pods import flags_for
from safetensors.numpy import load_file, save_file
from storages import open_storage
from test_model import TOLERANCE, error_of

from activation_extraction import ActivationDataset
from activation_extraction.cli import console
from activation_extraction.cli.console import Progress
from activation_extraction.cli.flags import FLAGS
from activation_extraction.common.errors import RunError
from activation_extraction.common.log import log, start_logging
from activation_extraction.model import devices
from activation_extraction.model.devices import device_errors
from activation_extraction.run import demo
from activation_extraction.store.formats import ShardFormat
from activation_extraction.store.storage import ActivationStorage

LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d (DEBUG|INFO|WARNING) machine 3 host \d: .+")
GAUGES = {"batches_ready": 4, "shards_stored": 2, "bytes_stored": 3 * 10**9}
GAUGES |= {"shards_writing": 4, "upload_retries_since_start": 5}


def test_help_tells_every_flag_with_its_default_and_unit(capsys):
    with pytest.raises(SystemExit) as stopped:
        main("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    for part in ("computing:", "default: 2048", "10^9 bytes", "GLOB", "exit status: "):
        assert part in text
    assert "HOST_ID --host_id (with --multihost)" in text
    for name, flag in FLAGS.items():
        assert f"--{name} " in text and " ".join(flag.argparse_options["help"].split()) in text


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
def test_demo_in_a_new_process_reads_back_as_it_says(demo_inputs, tmp_path, capsys):
    """The demo's model and documents are the same bytes every time. The demo does not load PyTorch,
    which would take seconds, nor says anything about that."""
    (tmp_path / "torch.py").write_text("print('PyTorch')")
    process = start(
        "--demo", "--output_dir", tmp_path / "out", environment={"PYTHONPATH": str(tmp_path)}
    )
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "done: 300 samples" in out and "tokens/s" in out and "PyTorch" not in out + err
    scope: dict = {}
    exec(textwrap.dedent(out.split("read it with:\n")[1]), scope)
    dataset, sample, batch = (scope[name] for name in ("dataset", "sample", "batch"))
    hooks = [f"blocks.{layer}.hook_resid_post" for layer in (10, 11)]
    assert dataset.hooks == dict.fromkeys(hooks, 128) and len(dataset) == 300
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(sample.text_preview[:40]) and shown[0].endswith(", 128)")
    assert shown[1].endswith(f"{batch[hooks[0]].shape}") and len(batch) == 1024
    assert sample.sample_idx == 0 and sample[hooks[0]].shape == (len(sample.token_ids), 128)
    records = pickle.loads(gzip.open(tmp_path / "out/shard_0001.pkl.gz").read())
    assert list(records) == [10, 11] and len(records[10]) == 300
    assert (dataset[299][hooks[1]] == records[11][299]["activation"]).all()
    assert dataset.metadata["status"] == "complete" and dataset.metadata["samples"] == 300
    again = tmp_path / "out/demo_inputs"
    names = [path.relative_to(again) for path in again.rglob("*") if path.is_file()]
    assert len(names) == 5
    for name in names:
        assert (again / name).read_bytes() == (demo_inputs / name).read_bytes(), name


@pytest.mark.long
def test_ctrl_c_commits_what_is_complete(inputs, texts, tmp_path):
    path = texts([{"text": f"text number {n} " * 20} for n in range(20_000)])
    out = tmp_path / "out"
    process = start(
        *inputs, "--dataset_path", path, "--output_dir", out, "--shard_size_gb", 1e-3, "--verbose"
    )
    while not (out / "shard_0003.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and printed.startswith("interrupted: ")
    metadata = json.loads((out / "metadata.json").read_text())
    assert metadata["status"] == "interrupted" and metadata["samples"] < 20_000
    assert metadata["samples"] == len(records_of(out)[10]) > 0
    assert not list(out.glob(".*"))


# What is imported while the command starts, while it looks at a run, and in the middle of a run.
@pytest.mark.parametrize(
    ("module", "flags"),
    [
        ("argparse", "--help"),
        ("pyarrow", "--status"),
        ("jax", "--demo"),
        pytest.param("datasets", "--demo", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("where", ["", "in a destructor"])
def test_ctrl_c_during_imports_is_told_in_one_line(module, flags, where, tmp_path):
    """It comes when the module is imported, or when something that was made there is deleted, from
    which Python would print the exception and go on."""
    interrupt = "import signal; signal.raise_signal(signal.SIGINT)"
    if where:
        interrupt = f"class Made:\n    def __del__(self):\n        {interrupt}\nMade()"
    (tmp_path / f"{module}.py").write_text(interrupt)
    process = start(
        flags, "--output_dir", tmp_path / "out", environment={"PYTHONPATH": str(tmp_path)}
    )
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


def test_a_command_started_with_ctrl_c_ignored_goes_on_ignoring_it(tmp_path, monkeypatch):
    (tmp_path / "difflib.py").write_text(
        "import signal; signal.raise_signal(signal.SIGINT); get_close_matches = None"
    )
    monkeypatch.setattr(command_line, "WITH_SIGNALS", ["sh", "-c", "trap '' INT; exec \"$@\"", ""])
    process = start("--version", environment={"PYTHONPATH": str(tmp_path)})
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0 and out and not err


@pytest.mark.parametrize("sign", ["", "TPU_WORKER_ID"])
def test_libtpu_without_a_tpu_is_left_alone(sign, monkeypatch):
    """It prints errors when it looks for a TPU. Where anything shows one, JAX looks for it."""
    monkeypatch.setattr(devices, "TPU_FILES", ())  # as if this machine had no accelerator
    monkeypatch.setattr(devices, "find_spec", {"libtpu": "installed"}.get)
    for name in devices.TPU_VARIABLES:  # JAX sets some itself where a test has compiled for a TPU
        monkeypatch.delenv(name, raising=False)
    if sign:
        monkeypatch.setenv(sign, "0")
    found: dict[str, object] = {}
    monkeypatch.setattr(type(jax.config), "values", {"jax_platforms": None})
    monkeypatch.setattr("jax.config.update", found.__setitem__)
    devices.leave_out_absent_tpu()
    assert found == ({} if sign else {"jax_platforms": "cpu"})


def test_the_model_of_a_run_is_found_from_any_folder(demo_inputs, tmp_path, monkeypatch):
    """The run records the absolute path of its model."""
    monkeypatch.chdir(demo_inputs)
    flags = "--model_path model --dataset_path documents.parquet --layers_to_extract 0"
    out = ["--output_dir", tmp_path, "--max_seq_length", "32", "--max_samples", "2"]
    assert main(*flags.split(), *out) == 0
    assert ActivationDataset(tmp_path).tokenizer_path == str(demo_inputs / "model")


@pytest.mark.long
def test_stored_records_are_hugging_face_activations(texts, tmp_path, caplog):
    """The whole way: text, tokens, packing, model, shard; the last layer included. JAX says what it
    compiles: one program serves all steps."""
    reference = make_reference(tmp_path / "model", num_key_value_heads=2, vocab_size=300)
    demo.write_tokenizer(reference.folder, [])
    rows = [{"text": f"Sample {n}, " * (n % 9 + 1), "id": n} for n in range(40)]
    depth = reference.config.num_hidden_layers
    out = tmp_path / "out"
    flags = ["--model_path", reference.folder, "--dataset_path", texts(rows)]
    flags += ["--layers_to_extract", 0, depth - 1, "--max_seq_length", 64]
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        assert main(*flags, "--output_dir", out) == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len([m for m in messages if "Finished XLA compilation of jit(apply)" in m]) == 1
    shard = pickle.load(gzip.open(out / "shard_0001.pkl.gz"))
    for first, last in zip(shard[0], shard[depth - 1], strict=True):
        expected = reference.hooked(first["token_ids"][None])
        for layer, record in ((0, first), (depth - 1, last)):
            values = expected[f"blocks.{layer}.hook_resid_post"][0]
            assert error_of(record["activation"], values) < TOLERANCE
            assert record["text_preview"] == rows[record["doc_id"]]["text"][:200]
    assert [record["doc_id"] for record in shard[0]] == list(range(40))


def test_a_run_that_continues_says_so_and_from_where(texts, demo_inputs, tmp_path, capsys):
    """The totals count all that is stored; metrics of earlier runs stay, unless all is deleted."""
    out, path = tmp_path / "out", texts([{"text": f"number {n} " * 9} for n in range(60)])
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--log_every", 1)
    flags += ["--shard_size_gb", 5e-4]

    def printed(*more):
        assert main(*flags, *more) == 0
        return "\n".join(capsys.readouterr())

    assert "continuing" not in printed("--max_samples", 20)
    metrics = (out / "metrics.jsonl").read_text()
    first = json.loads((out / "metadata.json").read_text())
    again = printed("--max_samples", 60)
    whole = json.loads((out / "metadata.json").read_text())
    so_far = f"20 samples and {first['tokens']:,} tokens in {first['shards']} shard"
    assert f"continuing {out} after {so_far}" in again
    assert f"60 of 60 samples, {whole['tokens']:,} tokens, " in again  # progress
    assert f"done: 60 samples, {whole['tokens']:,} tokens, " in again
    of_both = (out / "metrics.jsonl").read_text()
    last = json.loads(of_both.splitlines()[-1])
    assert of_both.startswith(metrics) and last.keys() >= GAUGES.keys()
    assert last["samples"] == 60 and last["tflops_per_second_per_chip"] > 0
    assert last["tokens"] == whole["tokens"] > first["tokens"] > 0
    again = printed("--max_samples", 60)
    assert "everything has been computed already" in again and "continuing" not in again
    printed("--overwrite")
    assert not (out / "metrics.jsonl").read_text().startswith(metrics)


@pytest.mark.parametrize(
    "host,verbose,levels", [(0, False, "IW"), (1, False, "W"), (1, True, "DIW")]
)
def test_log_lines_say_when_where_and_how_grave(capsys, host, verbose, levels):
    start_logging(verbose, 3, host)
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        log.log(level, "a message")
    lines = capsys.readouterr().err.splitlines()
    assert [LINE.fullmatch(line)[1][0] for line in lines] == [*levels]


def test_a_line_of_progress_and_of_metrics_every_interval(monkeypatch, capsys):
    """They count what earlier runs stored. Seconds pass only when the test says so. A quarter of
    the tokens is not kept."""
    now, recorded = [100.0], []
    monkeypatch.setattr(console.time, "perf_counter", lambda: now[0])
    start_logging(False, 3, 0)
    progress = Progress(None, 9900, (40, 900), 30, 4, 8e12, lambda: dict(GAUGES), recorded.append)
    for _ in range(10):
        now[0] += 10
        progress.advance(samples=5, tokens=2000, flops=2e13, kept=1500)
    assert [metrics["samples"] for metrics in recorded] == [55, 70, 85]
    assert [metrics["tokens"] for metrics in recorded] == [5400, 9900, 14400]
    computed = [metrics["tokens_computed_since_start"] for metrics in recorded]
    assert computed == [6000, 12000, 18000]
    assert [metrics["steps_since_start"] for metrics in recorded] == [3, 6, 9]
    for metrics in recorded:
        assert metrics["tokens_per_second"] == 200 and metrics["tokens_per_second_per_chip"] == 50
        assert metrics["tflops_per_second_per_chip"] == 0.5
        assert metrics["model_flops_utilisation"] == 0.25
        assert metrics.items() >= GAUGES.items()
    progress.close()
    assert recorded[-1]["samples"] == 90 and len(recorded) == 4
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(map(LINE.fullmatch, lines))
    stored = "stored 2 shards, 3.00 GB, 4 being written, retries: 5"
    counts = "55 samples, 5,400 of 9,900 tokens"
    assert lines[0].endswith(f": {counts}, 200 tokens/s, 25% of peak; {stored}")


def test_metrics_in_a_bucket_outlive_the_disk(tmp_path):
    remote = MemoryFolder(MemoryBucket(), Process())
    for number in range(3):
        storage = open_storage(tmp_path / str(number), {0: "h"}, remote=remote)
        storage.open()
        storage.record({"number": number})
        storage.finalize(complete=False)
    lines = remote.read("metrics.jsonl").splitlines()
    assert [json.loads(line)["number"] for line in lines] == [0, 1, 2]


@pytest.fixture
def failing(demo_inputs, tmp_path, capsys):
    """Runs with more flags, has to fail with a status, and returns what was printed to stderr."""

    def run(*more, status=1):
        flags = flags_for(demo_inputs, tmp_path / "out", "--max_samples", 6, *more)
        assert main(*flags) == status
        return capsys.readouterr().err

    return run


def test_a_defect_has_its_traceback_and_is_no_failure_of_the_storage(failing, monkeypatch):
    monkeypatch.setattr(ShardFormat, "pack", lambda *_: 1 // 0)
    printed = failing()
    assert "in <lambda>" in printed and "StorageError" not in printed
    last = printed.splitlines()[-1]
    assert last.startswith("error: unexpected ZeroDivisionError: ") and ". Stored in " in last
    assert last.endswith("; this is a bug in this program; its traceback is above")


def test_weights_of_nan_are_to_be_changed(failing, demo_inputs, tmp_path):
    shutil.copytree(demo_inputs / "model", tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    weights = load_file(path)
    weights["model.layers.2.input_layernorm.weight"][:] = np.nan
    save_file(weights, path, metadata={"format": "pt"})
    last = failing("--model_path", tmp_path / "model", status=2).splitlines()[-1]
    assert "hook 3: NaN or infinite float32 values. Stored in " in last
    assert "check its weights" in last and "the same command" not in last


def test_what_does_not_fit_in_memory_asks_for_a_smaller_batch():
    with pytest.raises(RunError, match="the device failed: RESOURCE_EXHAUSTED") as raised:
        with device_errors():
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\n left")
    assert "--batch_size" in raised.value.remedy


def test_a_platform_that_jax_does_not_have_is_bad_input(demo_inputs, tmp_path, monkeypatch, capsys):
    def unknown():
        raise RuntimeError("Unable to initialize\nbackend 'nonsense'")

    monkeypatch.setattr(jax, "devices", unknown)
    assert main(*flags_for(demo_inputs, tmp_path / "out")) == 2
    expected = "error: JAX finds no devices (JAX_PLATFORMS, drivers): Unable to initialize backend"
    assert capsys.readouterr().err.splitlines()[-1].startswith(expected)


def test_nothing_is_stored_after_a_batch_that_could_not_be(failing, monkeypatch):
    """The next ones could move the mark past it, and its samples would be lost."""
    asked, add_batch = [], ActivationStorage.add_batch

    def fail_once(*given):
        asked.append(given)
        if len(asked) == 2:
            raise MemoryError("for a moment")
        add_batch(*given)

    monkeypatch.setattr(ActivationStorage, "add_batch", fail_once)
    last = failing("--max_samples", 200, "--batch_size", 8).splitlines()[-1]
    assert "out of memory on the host: for a moment" in last and len(asked) == 2
