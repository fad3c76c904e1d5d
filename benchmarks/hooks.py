"""What hooks cost: tokens per second and bytes per token of a few typical requests.

Random weights, documents of log-normal length, and one whole extraction per request and round, each
in a process of its own; the requests take turns, and medians are reported. Tokens are those of the
text, whether they are kept or not. Beside them stands the machine's fastest matrix product. The
last line printed is one JSON object.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from activation_extraction.model.model_config import QwenConfig
from benchmarks.inputs import make_documents, make_model, tokenise
from benchmarks.peak import DTYPES, best
from benchmarks.processes import ROOT, extract, machine, run
from benchmarks.shapes import SHAPES, evenly_spaced
from qwen2_jax_with_hooks import FAMILIES, HOOKS, create_model_with_hooks

Row = dict[str, Any]
LAYERS = 8  # of which residuals and pairs are taken


def requests(depth: int) -> dict[str, tuple[list[str], list[str]]]:
    """What is measured, by name: hooks, and other flags."""
    layers = evenly_spaced(LAYERS, depth)
    residual = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    halves = "mlp.hook_in", "hook_mlp_out"
    return {
        "residual": (residual, []),
        "pairs": ([f"blocks.{layer}.{half}" for layer in layers for half in halves], []),
        "everything at one layer": ([f"blocks.{depth - 1}.*"], []),
        "residual, random:0.1": (residual, ["--positions", "random:0.1"]),
    }


def flops(config: QwenConfig, names: Sequence[str], lengths: Sequence[int]) -> float:
    """Operations of a request on documents of these lengths."""
    hooks = HOOKS.matching(names, config.num_hidden_layers).values()
    return create_model_with_hooks(config, list(hooks)).flops(lengths)


def measure(
    folder: Path, given: argparse.Namespace, lengths: Sequence[int]
) -> dict[str, list[Row]]:
    """Request -> what each round found."""
    _, config = FAMILIES.read_config(folder / "model/config.json")
    found: dict[str, list[Row]] = defaultdict(list)
    sizes = ["--batch_size", str(given.batch_size), "--max_seq_length", str(given.max_seq_length)]
    places = ["--model_path", str(folder / "model")]
    places += ["--dataset_path", str(folder / "documents.jsonl")]
    for number in range(given.rounds):
        for name, (hooks, more) in requests(config.num_hidden_layers).items():
            flags = [*places, *sizes, "--dtype", given.dtype, "--hook_names", *hooks, *more]
            done = extract(folder / "out", flags)
            shutil.rmtree(folder / "out")
            seconds = done["extraction_seconds"]
            row = {
                "tokens_per_second": sum(lengths) / seconds,
                "flops_per_second": flops(config, hooks, lengths) / seconds,
                "bytes_per_token": done["bytes"] / sum(lengths),
                "bytes_per_kept_token": done["bytes"] / done["tokens"],
                "disturbed": done["disturbed"],
                "peak_bytes": done["peak_bytes"],
            }
            found[name].append(row)
            print(
                f"round {number + 1}: {name}: {row['tokens_per_second']:.0f} tokens/s", flush=True
            )
    return found


def fastest_product(dtype: str, seconds: float) -> float:
    """FLOP/s."""
    command = [sys.executable, str(ROOT / "benchmarks/peak.py"), "jax", "--dtypes", dtype]
    return best(run([*command, "--seconds", str(seconds)]).result)[dtype]


def summarise(rounds: Sequence[Row], peak: float) -> Row:
    """Medians, the share of the peak, and the rounds' tokens per second."""
    row = {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
    row["of_peak"] = row["flops_per_second"] / peak
    return {**row, "rounds": [each["tokens_per_second"] for each in rounds]}


def line(name: str, row: Row) -> str:
    """One line of the table."""
    least, most = min(row["rounds"]), max(row["rounds"])
    return (
        f"{name:24} {row['tokens_per_second']:9,.0f} {f'{least:,.0f}-{most:,.0f}':>15} "
        f"{row['bytes_per_token']:9,.0f} {row['flops_per_second'] / 1e9:8,.0f} "
        f"{row['of_peak']:8.0%} {row['peak_bytes'] / 1e9:5.1f} GB {row['disturbed']:9.0%}"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--documents", type=int, default=87, help="(default: 87)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    parser.add_argument("--batch_size", type=int, default=8, help="rows per step (default: 8)")
    parser.add_argument("--max_seq_length", type=int, default=2048, help="(default: 2048)")
    parser.add_argument("--shape", choices=SHAPES, default="0.1B", help="(default: 0.1B)")
    parser.add_argument("--peak_seconds", type=float, default=0.5, help="per matrix product")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", SHAPES[given.shape])
        make_documents(folder / "documents.jsonl", given.documents)
        documents = tokenise(folder / "model", folder / "documents.jsonl", given.max_seq_length)
        lengths = [len(ids) for ids in documents]
        before = fastest_product(given.dtype, given.peak_seconds)
        rounds = measure(folder, given, lengths)
        peak = max(before, fastest_product(given.dtype, given.peak_seconds))
    rows = {name: summarise(found, peak) for name, found in rounds.items()}
    print(
        f"{'':24} {'tokens/s':>9} {'rounds':>15} {'bytes/tk':>9} {'GFLOP/s':>8} {'of peak':>8} "
        f"{'memory':>8} {'disturbed':>9}"
    )
    print(*(line(name, row) for name, row in rows.items()), sep="\n")
    print(f"fastest matrix product: {peak / 1e9:,.0f} GFLOP/s in {given.dtype}")
    found = {"machine": machine(), "asked": vars(given), "peak_flops_per_second": peak}
    print(json.dumps({**found, "tokens": sum(lengths), "requests": rows}))


if __name__ == "__main__":
    main()
