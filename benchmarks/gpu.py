"""Compares extractions by this tool and by transformers on one GPU: `python -m benchmarks.gpu`.

The model has random bfloat16 weights in a released shape, the documents have mixed lengths
(inputs.py), and the residual stream of some layers is stored in safetensors shards. "step" is the
tool's compiled step over full rows, with nothing copied to the host or stored, and its share of the
fastest bfloat16 matrix product measured on this GPU. "end to end" lasts from the first document
until the last shard is on the disk, without loading and compiling. transformers computes batches of
--rows documents, padded to the longest one, in the order of the file and sorted by length; it
copies the activations to pinned memory and stores nothing (gpu_torch.py). Padding never counts as
tokens. Without a GPU the benchmark ends with status 2, except with `--shapes tiny`, which tests
this script. The last line printed is one JSON object.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.inputs import SHAPES, evenly_spaced, make_documents, make_model
from benchmarks.peak import best
from benchmarks.processes import ROOT, extract, print_result, run

Row = dict[str, Any]


def run_ours(folder: Path, hooks: int, options: argparse.Namespace) -> Row:
    """Runs the step alone and an extraction, each in its own process.

    Args:
        folder: The folder of the model.
        hooks: The number of layers to store.
        options: The parsed flags.
    """
    depth = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    flags = ["--model_path", str(folder), "--dataset_path", str(options.folder / "documents.jsonl")]
    flags += ["--batch_size", str(options.rows), "--max_seq_length", str(options.length)]
    flags += ["--dtype", "bfloat16", "--compilation_cache", str(options.folder / "programs")]
    layers = map(str, evenly_spaced(hooks, depth))
    flags += ["--shard_format", "safetensors", "--layers_to_extract", *layers]
    command = [sys.executable, "-m", "benchmarks.compute_only", *flags]
    step = run(command, options.platform).result
    output = options.folder / "out"
    extraction = extract(output, flags, options.platform)
    metadata = json.loads((output / "metadata.json").read_text())
    shutil.rmtree(output)
    full_rows_rate = step["full_rows_tokens"] / step["full_rows_seconds"]
    return {
        "step_tokens_per_second": full_rows_rate,
        "step_flops_per_second": full_rows_rate * step["full_rows_flops_per_token"],
        "packed_tokens_per_second": step["tokens"] / step["seconds"],
        "tokens_per_second": extraction["tokens"] / extraction["extraction_seconds"],
        "bytes_per_second": extraction["bytes"] / extraction["extraction_seconds"],
        "kernels": {name: metadata[name] for name in step["kernels"]},
        **{name: extraction[name] for name in ("tokens", "compile_seconds", "process_seconds")},
    }


def run_torch(folder: Path, hooks: int, options: argparse.Namespace) -> Row:
    """Runs gpu_torch.py, with the parameters of `run_ours`.

    Returns:
        The JSON that it printed, or {"failed": message} if it failed, for example because the
        memory of the GPU was full.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_torch", "--model", str(folder)]
    command += ["--documents", str(options.folder / "documents.jsonl"), "--hooks", str(hooks)]
    command += ["--rows", str(options.rows), "--length", str(options.length)]
    try:
        return run([*command, "--seconds", str(options.seconds)], options.platform).result
    except SystemExit as failure:
        return {"failed": str(failure)}


def describe(shape: str, hooks: int, ours: Row, others: Row, peak: float) -> Iterator[str]:
    """Yields the lines of the table.

    Args:
        shape: The name of the model's shape.
        hooks: The number of stored layers.
        ours: The figures of `run_ours`.
        others: The figures of `run_torch`.
        peak: FLOP/s of the fastest matrix product.
    """
    yield (
        f"{shape} {hooks} hooks: step {ours['step_tokens_per_second']:.0f} tokens/s, "
        f"{ours['step_flops_per_second'] / peak:.0%} of {peak / 1e12:.0f} TFLOP/s; end to end "
        f"{ours['tokens_per_second']:.0f} tokens/s ({ours['packed_tokens_per_second']:.0f} without "
        f"storing), {ours['bytes_per_second'] / 1e9:.2f} GB/s to disk"
    )
    for name, rate in others.get("tokens_per_second", {}).items():
        ratio = ours["tokens_per_second"] / rate
        yield f"{shape} {hooks} hooks: transformers, {name}: {rate:.0f} tokens/s (ours {ratio:.2f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "7B"])
    parser.add_argument("--depth", type=int, help="layers of each shape (default: all)")
    parser.add_argument(
        "--hooks", nargs="+", type=int, default=[1, 14], help="layers to store (default: 1 14)"
    )
    parser.add_argument("--documents", type=int, default=2000, help="(default: 2000)")
    parser.add_argument("--rows", type=int, default=8, help="per step (default: 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row (default: 2048)")
    parser.add_argument(
        "--seconds", type=float, default=2, help="per figure of transformers (default: 2)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="where a temporary folder is made (default: the system's folder for these)",
    )
    options = parser.parse_args(argv)
    script = (
        "import jax; print(jax.default_backend(), jax.local_devices()[0].device_kind, sep='\\n')"
    )
    backend, device = run([sys.executable, "-c", script], None).output.splitlines()[-2:]
    options.platform = "cuda" if backend == "gpu" else "cpu"
    if backend != "gpu" and options.shapes != ["tiny"]:
        print(f"error: expected a GPU, but JAX finds only: {backend}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        options.folder = Path(temporary)
        make_documents(options.folder / "documents.jsonl", options.documents)
        peaks = {}
        for library in ("jax", "torch"):
            products = [sys.executable, str(ROOT / "benchmarks/peak.py"), library]
            products += ["--dtypes", "bfloat16", *(["--gpu"] if backend == "gpu" else [])]
            figures = run(products, options.platform).result
            peaks[library] = best(figures)["bfloat16"]
        rows: Row = {}
        for shape in options.shapes:
            folder, config = options.folder / shape, SHAPES[shape]
            if options.depth:
                config = config | {"num_hidden_layers": options.depth}
            make_model(folder, config)
            for hooks in options.hooks:
                torch_figures = run_torch(folder, hooks, options)
                tool_figures = run_ours(folder, hooks, options)
                rows[f"{shape} {hooks}"] = {"ours": tool_figures, "transformers": torch_figures}
                peak = max(peaks.values())
                lines = describe(shape, hooks, tool_figures, torch_figures, peak)
                print(*lines, sep="\n", flush=True)
            shutil.rmtree(folder)
    flags = vars(options).copy()
    del flags["folder"]  # a path of this machine
    print_result({"asked": flags, "device": device, "peak_flops_per_second": peaks, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
