"""Compares extractions by this tool and by transformers on one GPU: `python -m benchmarks.gpu`.

The model has random bfloat16 weights in the shape of a released model, and the documents have mixed
lengths (inputs.py). The residual stream of some layers is stored in safetensors shards.

"step" is the speed of this tool's compiled step over full rows, when nothing is copied to the host
or stored. It is also given as a fraction of the fastest bfloat16 matrix product on this GPU. "end
to end" is the speed from the first document until the last shard is on the disk, without loading
and compiling. transformers computes batches of --rows documents, padded to the longest one. It is
measured twice: with the documents in the order of the file, and with documents sorted by length. It
copies the activations to pinned memory and stores nothing (gpu_torch.py). Padding never counts as
tokens.

Without a GPU, the benchmark ends with status 2. Only `--shapes tiny`, which tests this script, runs
without one. The last line printed is one JSON object.
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

# The measurements of one program with one model and one number of hooks. The keys are the names of
# figures, such as "tokens_per_second".
Figures = dict[str, Any]


def measure_tool(folder: Path, num_hooks: int, options: argparse.Namespace) -> Figures:
    """Measures this tool: runs compute_only.py and an extraction, each in its own process.

    Args:
        folder: The folder of the model.
        num_hooks: The number of layers whose residual stream is stored.
        options: The parsed flags of this benchmark.

    Returns:
        A dict with these figures.
        step_tokens_per_second, step_flops_per_second: The speed of the step alone, which
            compute_only.py measures on rows without padding.
        packed_tokens_per_second: The speed of the step alone on the rows into which the documents
            are packed, which contain padding.
        tokens_per_second, bytes_per_second: The tokens and the bytes of activation files that the
            extraction stores per second.
        tokens, compile_seconds, process_seconds: Figures of the extraction, from `extract` in
            processes.py: its tokens, the seconds of compiling, and the seconds of its process.
        kernels: A dict: the field of metadata.json that describes a kernel -> its value.
    """
    num_layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    extraction_flags = [
        "--model_path",
        str(folder),
        "--dataset_path",
        str(options.folder / "documents.jsonl"),
    ]
    extraction_flags += ["--batch_size", str(options.rows), "--max_seq_length", str(options.length)]
    extraction_flags += [
        "--dtype",
        "bfloat16",
        "--compilation_cache",
        str(options.folder / "programs"),
    ]
    layer_number_texts = [
        str(layer_number) for layer_number in evenly_spaced(num_hooks, num_layers)
    ]
    extraction_flags += [
        "--shard_format",
        "safetensors",
        "--layers_to_extract",
        *layer_number_texts,
    ]
    compute_command = [sys.executable, "-m", "benchmarks.compute_only", *extraction_flags]
    compute_figure_by_name = run(compute_command, options.platform).result
    output_folder = options.folder / "out"
    extraction_figure_by_name = extract(output_folder, extraction_flags, options.platform)
    run_metadata = json.loads((output_folder / "metadata.json").read_text())
    shutil.rmtree(output_folder)
    full_rows_tokens_per_second = (
        compute_figure_by_name["full_rows_tokens"] / compute_figure_by_name["full_rows_seconds"]
    )
    return {
        "step_tokens_per_second": full_rows_tokens_per_second,
        "step_flops_per_second": full_rows_tokens_per_second
        * compute_figure_by_name["full_rows_flops_per_token"],
        "packed_tokens_per_second": compute_figure_by_name["tokens"]
        / compute_figure_by_name["seconds"],
        "tokens_per_second": extraction_figure_by_name["tokens"]
        / extraction_figure_by_name["extraction_seconds"],
        "bytes_per_second": extraction_figure_by_name["bytes"]
        / extraction_figure_by_name["extraction_seconds"],
        "kernels": {
            kernel_field: run_metadata[kernel_field]
            for kernel_field in compute_figure_by_name["kernels"]
        },
        **{
            figure_name: extraction_figure_by_name[figure_name]
            for figure_name in ("tokens", "compile_seconds", "process_seconds")
        },
    }


def measure_transformers(folder: Path, num_hooks: int, options: argparse.Namespace) -> Figures:
    """Measures how fast transformers computes residual streams and copies them to the host.

    The measurement is made by gpu_torch.py, which this function runs in its own process.

    Args:
        folder: The folder of the model.
        num_hooks: The number of layers whose residual stream is copied to the host.
        options: The parsed flags of this benchmark.

    Returns:
        A dict with these figures.
        tokens_per_second: A dict: order of the documents, "as they come", "by length" or "full
            rows" -> tokens per second, without padding. In full rows, all documents have the same
            length.
        versions: A dict: name of a package, "torch" or "transformers" -> its version.
        failed: The error message. It is the only figure if gpu_torch.py failed, for example because
            the memory of the GPU was full. Otherwise, it is missing.
    """
    transformers_command = [sys.executable, "-m", "benchmarks.gpu_torch", "--model", str(folder)]
    transformers_command += [
        "--documents",
        str(options.folder / "documents.jsonl"),
        "--hooks",
        str(num_hooks),
    ]
    transformers_command += ["--rows", str(options.rows), "--length", str(options.length)]
    try:
        return run(
            [*transformers_command, "--seconds", str(options.seconds)], options.platform
        ).result
    except SystemExit as failure:
        return {"failed": str(failure)}


def describe(
    shape: str,
    num_hooks: int,
    tool_figure_by_name: Figures,
    transformers_figure_by_name: Figures,
    peak: float,
) -> Iterator[str]:
    """Yields lines that describe the figures of one model and one number of hooks.

    Args:
        shape: The name of the model's shape.
        num_hooks: The number of layers whose residual stream is stored.
        tool_figure_by_name: Name of a figure of this tool -> figure (see `measure_tool`).
        transformers_figure_by_name: Name of a figure of transformers -> figure (see
            `measure_transformers`). It is {"failed": message} if transformers could not be
            measured.
        peak: The FLOP/s of the fastest matrix product.
    """
    tool_tokens_per_second = tool_figure_by_name["tokens_per_second"]
    yield (
        f"{shape} {num_hooks} hooks: "
        f"step {tool_figure_by_name['step_tokens_per_second']:.0f} tokens/s, "
        f"{tool_figure_by_name['step_flops_per_second'] / peak:.0%} of {peak / 1e12:.0f} TFLOP/s; "
        f"end to end {tool_tokens_per_second:.0f} tokens/s "
        f"({tool_figure_by_name['packed_tokens_per_second']:.0f} without storing), "
        f"{tool_figure_by_name['bytes_per_second'] / 1e9:.2f} GB/s to disk"
    )
    for batch_order, transformers_tokens_per_second in transformers_figure_by_name.get(
        "tokens_per_second", {}
    ).items():
        yield (
            f"{shape} {num_hooks} hooks: transformers, {batch_order}: "
            f"{transformers_tokens_per_second:.0f} tokens/s "
            f"(ours {tool_tokens_per_second / transformers_tokens_per_second:.2f})"
        )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "7B"])
    parser.add_argument("--depth", type=int, help="layers of each shape (default: all)")
    parser.add_argument(
        "--hooks", nargs="+", type=int, default=[1, 14], help="layers to store (default: 1 14)"
    )
    parser.add_argument("--documents", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--rows", type=int, default=8, help="per step (default: 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row (default: 2048)")
    parser.add_argument(
        "--seconds", type=float, default=2, help="per figure of transformers (default: 2)"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        help="in which a temporary folder is made (default: the system's temporary folder)",
    )
    parsed_flags = parser.parse_args(argv)
    device_script = (
        "import jax; print(jax.default_backend(), jax.local_devices()[0].device_kind, sep='\\n')"
    )
    backend, device_kind = run([sys.executable, "-c", device_script], None).stdout.splitlines()[-2:]
    parsed_flags.platform = "cuda" if backend == "gpu" else "cpu"
    if backend != "gpu" and parsed_flags.shapes != ["tiny"]:
        print(f"error: expected a GPU, but JAX finds only: {backend}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(dir=parsed_flags.folder) as temporary_folder:
        parsed_flags.folder = Path(temporary_folder)
        make_documents(parsed_flags.folder / "documents.jsonl", parsed_flags.documents)
        peak_flops_per_second_by_library = {}
        for library in ("jax", "torch"):
            peak_flops_command = [sys.executable, str(ROOT / "benchmarks/peak.py"), library]
            peak_flops_command += ["--dtypes", "bfloat16"]
            if backend == "gpu":
                peak_flops_command.append("--gpu")
            peak_flops_per_second_by_library[library] = best(
                run(peak_flops_command, parsed_flags.platform).result
            )["bfloat16"]
        # Shape and number of hooks, such as "7B 14" -> "ours" or "transformers" -> figures.
        figures_by_shape_and_hooks: dict[str, dict[str, Figures]] = {}
        for shape_name in parsed_flags.shapes:
            model_folder, model_config = parsed_flags.folder / shape_name, SHAPES[shape_name]
            if parsed_flags.depth:
                model_config = model_config | {"num_hidden_layers": parsed_flags.depth}
            make_model(model_folder, model_config)
            for num_hooks in parsed_flags.hooks:
                transformers_figure_by_name = measure_transformers(
                    model_folder, num_hooks, parsed_flags
                )
                tool_figure_by_name = measure_tool(model_folder, num_hooks, parsed_flags)
                figures_by_shape_and_hooks[f"{shape_name} {num_hooks}"] = {
                    "ours": tool_figure_by_name,
                    "transformers": transformers_figure_by_name,
                }
                peak_flops_per_second = max(peak_flops_per_second_by_library.values())
                description_lines = describe(
                    shape_name,
                    num_hooks,
                    tool_figure_by_name,
                    transformers_figure_by_name,
                    peak_flops_per_second,
                )
                print(*description_lines, sep="\n", flush=True)
            shutil.rmtree(model_folder)
    value_by_flag_name = vars(parsed_flags).copy()
    # --folder is a temporary folder, which means nothing to readers of the result.
    del value_by_flag_name["folder"]
    print_result(
        {
            "asked": value_by_flag_name,
            "device": device_kind,
            "peak_flops_per_second": peak_flops_per_second_by_library,
            "rows": figures_by_shape_and_hooks,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
