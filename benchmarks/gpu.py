"""The whole job on a GPU, beside transformers on the same one: `python -m benchmarks.gpu`.

Random bfloat16 weights of a released shape, documents of mixed lengths (inputs.py), the residual
stream of some layers in safetensors shards. "step": the tool's compiled step over full rows, with
nothing copied or stored, and its share of the fastest bfloat16 matrix product measured here; "end
to end": documents until the last shard is on the disk, without loading and compiling. transformers
computes batches of as many documents, padded to the longest, as they come and sorted by length, and
copies what its hooks give to pinned memory; nothing is stored. Tokens are real ones. Without a GPU
it ends with status 2, but for `--shapes tiny`, which tries this script out. The last line printed
is one JSON object.
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


def run_ours(folder: Path, hooks: int, given: argparse.Namespace) -> Row:
    """The step alone and the whole job, in a process of its own each."""
    depth = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    flags = ["--model_path", str(folder), "--dataset_path", str(given.folder / "documents.jsonl")]
    flags += ["--batch_size", str(given.rows), "--max_seq_length", str(given.length)]
    flags += ["--dtype", "bfloat16", "--compilation_cache", str(given.folder / "programs")]
    layers = map(str, evenly_spaced(hooks, depth))
    flags += ["--shard_format", "safetensors", "--layers_to_extract", *layers]
    command = [sys.executable, "-m", "benchmarks.compute_only", *flags]
    alone = run(command, given.platform).result
    output = given.folder / "out"
    whole = extract(output, flags, given.platform)
    described = json.loads((output / "metadata.json").read_text())
    shutil.rmtree(output)
    full = alone["full_rows_tokens"] / alone["full_rows_seconds"]
    return {
        "step_tokens_per_second": full,
        "step_flops_per_second": full * alone["full_rows_flops_per_token"],
        "packed_tokens_per_second": alone["tokens"] / alone["seconds"],
        "tokens_per_second": whole["tokens"] / whole["extraction_seconds"],
        "bytes_per_second": whole["bytes"] / whole["extraction_seconds"],
        "kernels": {name: described[name] for name in alone["kernels"]},
        **{name: whole[name] for name in ("tokens", "compile_seconds", "process_seconds")},
    }


def run_torch(folder: Path, hooks: int, given: argparse.Namespace) -> Row:
    """transformers' side (gpu_torch.py); what it failed with, if it failed."""
    command = [sys.executable, "-m", "benchmarks.gpu_torch", "--model", str(folder)]
    command += ["--documents", str(given.folder / "documents.jsonl"), "--hooks", str(hooks)]
    command += ["--rows", str(given.rows), "--length", str(given.length)]
    try:
        return run([*command, "--seconds", str(given.seconds)], given.platform).result
    except SystemExit as failure:
        return {"failed": str(failure)}


def describe(shape: str, hooks: int, ours: Row, others: Row, peak: float) -> Iterator[str]:
    """Lines of the table."""
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
    parser.add_argument("--hooks", nargs="+", type=int, default=[1, 14], help="(default: 1 14)")
    parser.add_argument("--documents", type=int, default=2000, help="(default: 2000)")
    parser.add_argument("--rows", type=int, default=8, help="per step (default: 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row (default: 2048)")
    parser.add_argument(
        "--seconds", type=float, default=2, help="per figure of others (default: 2)"
    )
    parser.add_argument("--folder", type=Path, help="for the inputs (default: a temporary one)")
    given = parser.parse_args(argv)
    device = (
        "import jax; print(jax.default_backend(), jax.local_devices()[0].device_kind, sep='\\n')"
    )
    backend, device = run([sys.executable, "-c", device], None).output.splitlines()[-2:]
    given.platform = "cuda" if backend == "gpu" else "cpu"
    if backend != "gpu" and given.shapes != ["tiny"]:
        print(f"no GPU: JAX finds only {backend}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        given.folder = Path(temporary)
        make_documents(given.folder / "documents.jsonl", given.documents)
        peaks = {}
        for library in ("jax", "torch"):
            products = [sys.executable, str(ROOT / "benchmarks/peak.py"), library]
            products += ["--dtypes", "bfloat16", *(["--gpu"] if backend == "gpu" else [])]
            found = run(products, given.platform).result
            peaks[library] = best(found)["bfloat16"]
        rows: Row = {}
        for shape in given.shapes:
            folder, config = given.folder / shape, SHAPES[shape]
            if given.depth:
                config = config | {"num_hidden_layers": given.depth}
            make_model(folder, config)
            for hooks in given.hooks:
                others = run_torch(folder, hooks, given)
                ours = run_ours(folder, hooks, given)
                rows[f"{shape} {hooks}"] = {"ours": ours, "transformers": others}
                print(
                    *describe(shape, hooks, ours, others, max(peaks.values())), sep="\n", flush=True
                )
            shutil.rmtree(folder)
    result = {"device": device, "peak_flops_per_second": peaks, "rows": rows}
    asked = {name: value for name, value in vars(given).items() if name != "folder"}
    print_result({"asked": asked, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
