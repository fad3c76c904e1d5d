"""The whole job at a real model's size, this tool and others side by side: `make bench`.

Random weights of the Qwen2.5-0.5B shape, documents of log-normal length (median 620 tokens, sigma
1.0, cut at 2048), layers 10..23, gzip-pickle shards on disk. The others are competitors.py's part;
compute_only.py is this tool without storing. Every run is a process of its own; they take turns,
--rounds times, and medians are reported. "disturbed" is what other processes took of the machine
meanwhile. The last line printed is one JSON object.

"end to end" is from after loading and compiling until the last shard is on the disk. Tokens are
real ones, padding not counted, and so are operations. Of what takes others minutes only a part is
done (all with --whole): one batch of so many is computed, one document of so many of these is
written. Their rate is that of computing and writing, one after the other, as they do it.

In a model with experts, everyone stores the numbers of the chosen ones, too. "experts" is how many
tokens, of documents of at most 640, have others than in float32 in any layer. "deviation" is over
the tokens that have the same ones as the first contender's; agreement.py has the rule.

Other families, on a quiet machine of 2 cores (--shape SHAPE --documents 24 --batch_size 4 --whole
--only ours alone; 17,805 tokens, one round): tokens/s, and the share of the fastest matrix product.

              float32                     bfloat16
              this tool    transformers   this tool    transformers
    qwen3     295  66 %    298  67 %      532  56 %    529  56 %
    qwen3-moe 396  50 %    422  53 %      613  35 %    812  47 %
    qwen3.5   236  58 %    230  56 %      306  34 %    360  40 %

In the next hour, 20 documents through the shape 0.5B: 182 and 158 tokens/s in float32, 306 and 313
in bfloat16. With qwen3-moe in bfloat16, 26.5 % of this tool's tokens had other experts, and 34.9 %
of transformers': the weights are random, so there are many near ties.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from activation_extraction.model.family import read_model_config
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.model_config import SPARSE, ModelConfig
from benchmarks.agreement import CHOSEN, RESIDUAL, Agreement, Comparison, Disagreement
from benchmarks.inputs import SHAPES, make_documents, make_model, tokenise
from benchmarks.peak import DTYPES, best
from benchmarks.processes import ROOT, extract, print_result, run
from qwen2_jax_with_hooks import create_model_with_hooks

Row = dict[str, Any]
# Contender -> one batch computed of so many, one document of these written of so many.
PARTS = {"ours": (1, 1), "alone": (4, 1), "sorted": (4, 1), "padded": (4, 8)}
COMPETITORS = ROOT / ".venv/competitors/bin/python"
LAYERS = range(10, 24)  # the tool's default
HEADER = (
    f"{'':17} {'tokens/s':>9} {'compute':>8} {'GFLOP/s':>8} {'compute':>8} {'of peak':>8} "
    f"{'compute':>8} {'memory':>8} {'bytes/tk':>9} {'process':>8} {'deviation':>10} "
    f"{'experts':>8} {'disturbed':>9}  part"
)


@dataclass(frozen=True)
class Bench:
    """Inputs on disk, and what was asked for."""

    folder: Path
    given: argparse.Namespace
    config: ModelConfig
    documents: list[list[int]]

    @property
    def layers(self) -> list[int]:
        """Those extracted: the default, clipped to the model's depth as the tool does."""
        return sorted({min(layer, self.config.num_hidden_layers - 1) for layer in LAYERS})

    @property
    def hooks(self) -> list[str]:
        """Also the chosen experts, for the agreement of a model that has some."""
        types = enumerate(self.config.layer_types)
        chosen = [CHOSEN.format(layer) for layer, type_ in types if SPARSE in type_.split()]
        return [RESIDUAL.format(layer) for layer in self.layers] + chosen

    @property
    def has_experts(self) -> bool:
        return len(self.hooks) > len(self.layers)

    def flops(self, lengths: Sequence[int]) -> float:
        """Per token of documents of these lengths."""
        hooks = hook_table(self.config).of_layers(
            [self.layers[-1]], "residual", self.config.num_hidden_layers
        )
        return create_model_with_hooks(self.config, hooks).flops(lengths) / sum(lengths)

    def flags(self) -> list[str]:
        """Those of this tool."""
        given = self.given
        places = ["--model_path", str(self.folder / "model")]
        places += ["--dataset_path", str(self.folder / "documents.jsonl")]
        sizes = ["--max_seq_length", given.max_seq_length]
        if given.batch_size is not None:
            sizes += ["--batch_size", given.batch_size]
        hooks = ["--hook_names", *self.hooks] if self.has_experts else []
        return [*places, *map(str, sizes), "--compilation_cache", "off", *hooks]


def prepare(folder: Path, given: argparse.Namespace) -> Bench:
    """Makes the inputs in `folder`."""
    model, documents = folder / "model", folder / "documents.jsonl"
    make_model(model, SHAPES[given.shape])
    make_documents(documents, given.documents)
    token_ids = tokenise(model, documents, given.max_seq_length)
    (folder / "token_ids.json").write_text(json.dumps(token_ids))
    return Bench(folder, given, read_model_config(model / "config.json"), token_ids)


def measure_peaks(given: argparse.Namespace) -> dict[str, float]:
    """dtype -> FLOP/s of the fastest matrix product of either library."""
    found: dict[str, float] = defaultdict(float)
    libraries = [(sys.executable, "jax")]
    if set(given.only) != {"ours"}:
        libraries.append((str(given.competitors), "torch"))
    for python, library in libraries:
        command = [python, str(ROOT / "benchmarks/peak.py"), library, "--dtypes", *given.dtypes]
        done = run([*command, "--seconds", str(given.peak_seconds)])
        for dtype, rate in best(done.result).items():
            found[dtype] = max(found[dtype], rate)
    return dict(found)


def run_ours(bench: Bench, dtype: str, output: Path) -> Row:
    """An extraction; and, in a process of its own, the computing alone."""
    flags = [*bench.flags(), "--dtype", dtype]
    whole = extract(output, flags)
    computing = run([sys.executable, "-m", "benchmarks.compute_only", *flags])
    alone = computing.result
    full = alone["full_rows_tokens"] / alone["full_rows_seconds"]
    length = bench.given.max_seq_length
    return {
        "tokens_per_second": whole["tokens"] / whole["extraction_seconds"],
        "compute_tokens_per_second": alone["tokens"] / alone["seconds"],
        "full_rows_tokens_per_second": full,
        "full_rows_flops_per_second": full * bench.flops([length]),
        "steps": alone["steps"],
        "disturbed": max(whole["disturbed"], computing.disturbed),
        "bytes": whole["bytes"],
        "bytes_per_token": whole["bytes"] / whole["tokens"],
        "written_tokens": whole["tokens"],
        **{name: whole[name] for name in ("tokens", "peak_bytes", "process_seconds")},
        **{name: whole[name] for name in ("compile_seconds", "first_batch_seconds")},
    }


def run_other(bench: Bench, name: str, dtype: str, output: Path) -> Row:
    """One of competitors.py."""
    every, written_every = (1, 1) if bench.given.whole else PARTS[name]
    command = [str(bench.given.competitors), str(ROOT / "benchmarks/competitors.py"), name]
    command += ["--model", str(bench.folder / "model"), "--output", str(output), "--dtype", dtype]
    command += ["--token_ids", str(bench.folder / "token_ids.json")]
    command += ["--every", str(every), "--written_every", str(written_every)]
    done = run([*command, "--hooks", *bench.hooks])
    found = done.result
    compute = found["compute_seconds"] / found["tokens"]
    store = found["store_seconds"] / found["written_tokens"]
    return {
        "tokens_per_second": 1 / (compute + store),
        "compute_tokens_per_second": 1 / compute,
        "bytes_per_token": found["bytes"] / found["written_tokens"],
        **{name: found[name] for name in ("bytes", "tokens", "written_tokens")},
        "peak_bytes": done.peak_bytes,
        "process_seconds": done.seconds,
        "disturbed": done.disturbed,
        "versions": found["versions"],
    }


def run_all(bench: Bench) -> dict[str, dict[str, list[Row]]]:
    """Contender -> dtype -> what each round found. Exits when one computes something else."""
    agreement = Agreement(bench.documents)
    rows: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    dtypes = sorted(bench.given.dtypes, reverse=True)  # float32 first: the measure of experts
    for number in range(bench.given.rounds):
        for dtype in dtypes:
            for name in bench.given.only:
                output = bench.folder / name
                row = (
                    run_ours(bench, dtype, output)
                    if name == "ours"
                    else run_other(bench, name, dtype, output)
                )
                try:
                    found = agreement.check(output, dtype, row["written_tokens"])
                    row |= compared(found, bench.has_experts)
                except Disagreement as error:
                    raise SystemExit(f"error: {error}") from error
                shutil.rmtree(output)
                rows[name][dtype].append(row)
                print(
                    f"round {number + 1}: {name} {dtype}: {row['tokens_per_second']:.0f} tokens/s, "
                    f"computing alone {row['compute_tokens_per_second']:.0f}; others used "
                    f"{row['disturbed']:.0%} of the machine",
                    flush=True,
                )
    return rows


def compared(found: Comparison, has_experts: bool) -> Row:
    """What the row of a contender says of its agreement with the others."""
    row: Row = {"deviation": found.worst, "compared_tokens": found.tokens, "changed_experts": None}
    if has_experts and found.changed is not None and found.tokens:
        row["changed_experts"] = found.changed / found.tokens
    return row


def summarise(bench: Bench, rounds: Sequence[Row], peak: float) -> Row:
    """Medians of one contender's rounds, and what follows from them."""
    row = {
        name: statistics.median(found[name] for found in rounds)
        for name, value in rounds[0].items()
        if isinstance(value, int | float)
    }
    per_token = bench.flops([len(ids) for ids in bench.documents])
    row["flops_per_second"] = row["tokens_per_second"] * per_token
    row["compute_flops_per_second"] = row["compute_tokens_per_second"] * per_token
    for name in ("flops_per_second", "compute_flops_per_second", "full_rows_flops_per_second"):
        if name in row:
            row[name.replace("flops_per_second", "of_peak")] = row[name] / peak
    row["end_to_end_over_compute"] = row["tokens_per_second"] / row["compute_tokens_per_second"]
    others = {name: rounds[0].get(name) for name in ("deviation", "changed_experts", "versions")}
    spread = [found["tokens_per_second"] for found in rounds]
    return {**others, **row, "tokens_per_second_of_rounds": spread}


def report(bench: Bench, rows: dict[str, dict[str, list[Row]]], peaks: dict[str, Any]) -> Row:
    """Prints the table; returns what the JSON line has."""
    print(HEADER)
    contenders: dict[str, dict[str, Row]] = defaultdict(dict)
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for name, of_dtypes in rows.items():
        part = (1, 1) if bench.given.whole else PARTS[name]
        for dtype, rounds in of_dtypes.items():
            row = summarise(bench, rounds, peaks["best"][dtype])
            contenders[name][dtype] = {**row, "part": part}
            print(line(name, dtype, row, part))
    for dtype, row in contenders.get("ours", {}).items():
        for name in contenders.keys() - {"ours"}:
            other = contenders[name][dtype]["tokens_per_second"]
            ratios[name][dtype] = row["tokens_per_second"] / other
        print(
            f"ours {dtype}: compiled in {row['compile_seconds']:.1f} s, the first batch handed to "
            f"the storage {row['first_batch_seconds']:.1f} s after the start; full rows alone, "
            f"{row['full_rows_tokens_per_second']:.0f} tokens/s, {row['full_rows_of_peak']:.0%} of "
            f"the peak of {peaks['best'][dtype] / 1e9:.0f} GFLOP/s"
        )
    for name, of_dtype in ratios.items():
        print(f"ours / {name}: " + ", ".join(f"{d} {r:.2f}" for d, r in of_dtype.items()))
    lengths = [len(ids) for ids in bench.documents]
    asked = {name: value for name, value in vars(bench.given).items() if name != "competitors"}
    return {
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy", "isal")},
        "asked": asked,
        "documents": {"count": len(lengths), "tokens": sum(lengths), "layers": bench.layers},
        "peak_flops_per_second": peaks,
        "contenders": contenders,
        "ours_over": ratios,
    }


def line(name: str, dtype: str, row: Row, part: tuple[int, int]) -> str:
    """One line of the table."""
    deviation = "-" if row["deviation"] is None else f"{row['deviation']:.1e}"
    experts = "-" if row["changed_experts"] is None else f"{row['changed_experts']:.1%}"
    return (
        f"{name:8}{dtype:9} {row['tokens_per_second']:9.0f} {row['compute_tokens_per_second']:8.0f}"
        f" {row['flops_per_second'] / 1e9:8.0f} {row['compute_flops_per_second'] / 1e9:8.0f}"
        f" {row['of_peak']:8.0%} {row['compute_of_peak']:8.0%} {row['peak_bytes'] / 1e9:5.1f} GB"
        f" {row['bytes_per_token']:9.0f} {row['process_seconds']:6.0f} s {deviation:>10}"
        f" {experts:>8} {row['disturbed']:9.0%}  1/{part[0]} computed, 1/{part[1]} of it written"
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--documents", type=int, default=87, help="(default: 87, which take 39 rows of 2048)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="(default: 1)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch_size", type=int, help="rows per step (default: the tool's)")
    parser.add_argument("--max_seq_length", type=int, default=2048, help="(default: 2048)")
    parser.add_argument("--whole", action="store_true", help="others do all, too: hours")
    parser.add_argument("--shape", choices=SHAPES, default="0.5B", help="(default: 0.5B)")
    parser.add_argument("--peak_seconds", type=float, default=0.5, help="per matrix product")
    parser.add_argument(
        "--competitors", type=Path, default=COMPETITORS, help="their Python (default: make bench's)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = parse(argv)
    if set(given.only) != {"ours"} and not given.competitors.exists():
        raise SystemExit(f"{given.competitors}: no such Python; `make bench` makes it")
    with tempfile.TemporaryDirectory() as name:
        bench = prepare(Path(name), given)
        before = measure_peaks(given)
        rows = run_all(bench)
        after = measure_peaks(given)
        best_of = {dtype: max(before[dtype], after[dtype]) for dtype in before}
        found = report(bench, rows, {"before": before, "after": after, "best": best_of})
    print_result(found)


if __name__ == "__main__":
    main()
