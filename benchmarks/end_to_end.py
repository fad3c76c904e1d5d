"""Compares whole extractions by this tool and by others at a real model's size: `make bench`.

The model has random weights in the shape of Qwen2.5-0.5B. Documents have log-normal lengths (median
620 tokens, sigma 1.0, cut at 2048). Layers 10..23 are stored in gzip-pickle shards on disk. The
others are the ways of competitors.py; compute_only.py measures this tool without storing. Every run
is a separate process. The contenders take turns in each of --rounds rounds, and medians are
reported. "disturbed" is the share of the machine's processor time that other processes used
meanwhile. The last line printed is one JSON object.

A contender's tokens/s are measured from the end of loading and compiling until the last shard is on
the disk. Only real tokens and their operations count, no padding. The others take minutes, so
(except with --whole) they compute only one batch of several, and write only one of several
documents of these. Their seconds per token are those of computing plus those of writing, because
they do one after the other.

In a model with experts, all contenders store the numbers of the chosen experts as well. "experts"
is the share of tokens whose experts differ in any layer from those in float32, in documents of at
most 640 tokens. "deviation" compares the tokens whose experts are the same as the first
contender's; see agreement.py.

Results of other families, on an idle machine with 2 cores (--shape SHAPE --documents 24
--batch_size 4 --whole --only ours alone; 17,805 tokens, one round): tokens/s, and the share of the
FLOP/s of the fastest matrix product.

              float32                     bfloat16
              this tool    transformers   this tool    transformers
    qwen3     295  66 %    298  67 %      532  56 %    529  56 %
    qwen3-moe 396  50 %    422  53 %      613  35 %    812  47 %
    qwen3.5   236  58 %    230  56 %      306  34 %    360  40 %

20 documents with the shape 0.5B, an hour later on the same machine: in float32, 182 tokens/s by
this tool and 158 by transformers; in bfloat16, 306 and 313. With qwen3-moe in bfloat16, 26.5 % of
this tool's tokens and 34.9 % of transformers' had other experts than in float32. Both shares are
high because the weights are random, so that many experts are nearly tied.
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

Row = dict[str, Any]  # the figures of one contender in one dtype
# Contender -> the number of batches of which one is computed, and the number of computed documents
# of which one is written.
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
    """The inputs of all contenders, and the flags of the benchmark.

    Attributes:
        folder: The folder of the model, the documents and the outputs.
        options: The parsed flags.
        config: The configuration of the model.
        documents: The token ids of each document.
    """

    folder: Path
    options: argparse.Namespace
    config: ModelConfig
    documents: list[list[int]]

    @property
    def layers(self) -> list[int]:
        """Returns the extracted layers: the tool's default, clipped to the depth of the model."""
        return sorted({min(layer, self.config.num_hidden_layers - 1) for layer in LAYERS})

    @property
    def hooks(self) -> list[str]:
        """Returns the names of the stored hooks.

        They are the residual stream after each extracted layer and, for agreement.py, the numbers
        of the chosen experts of every layer that has experts.
        """
        types = enumerate(self.config.layer_types)
        chosen = [CHOSEN.format(layer) for layer, type_ in types if SPARSE in type_.split()]
        return [RESIDUAL.format(layer) for layer in self.layers] + chosen

    @property
    def has_experts(self) -> bool:
        return len(self.hooks) > len(self.layers)

    def flops(self, lengths: Sequence[int]) -> float:
        """Returns the operations per token that documents of these lengths need."""
        hooks = hook_table(self.config).of_layers(
            [self.layers[-1]], "residual", self.config.num_hidden_layers
        )
        return create_model_with_hooks(self.config, hooks).flops(lengths) / sum(lengths)

    def flags(self) -> list[str]:
        """Returns the flags of this tool's run, without --dtype and --output_dir."""
        flags = ["--model_path", str(self.folder / "model"), "--compilation_cache", "off"]
        flags += ["--dataset_path", str(self.folder / "documents.jsonl")]
        flags += ["--max_seq_length", str(self.options.max_seq_length)]
        if self.options.batch_size is not None:
            flags += ["--batch_size", str(self.options.batch_size)]
        if self.has_experts:
            flags += ["--hook_names", *self.hooks]
        return flags


def prepare(folder: Path, options: argparse.Namespace) -> Bench:
    """Writes the model and the documents to `folder`."""
    model, documents = folder / "model", folder / "documents.jsonl"
    make_model(model, SHAPES[options.shape])
    make_documents(documents, options.documents)
    token_ids = tokenise(model, documents, options.max_seq_length)
    (folder / "token_ids.json").write_text(json.dumps(token_ids))
    return Bench(folder, options, read_model_config(model / "config.json"), token_ids)


def measure_peaks(options: argparse.Namespace) -> dict[str, float]:
    """Measures the fastest matrix product of JAX and, if it takes part, of torch.

    Returns:
        dtype -> FLOP/s of the faster library.
    """
    rates: dict[str, float] = defaultdict(float)
    libraries = [(sys.executable, "jax")]
    if set(options.only) != {"ours"}:
        libraries.append((str(options.competitors), "torch"))
    for python, library in libraries:
        command = [python, str(ROOT / "benchmarks/peak.py"), library, "--dtypes", *options.dtypes]
        done = run([*command, "--seconds", str(options.peak_seconds)])
        for dtype, rate in best(done.result).items():
            rates[dtype] = max(rates[dtype], rate)
    return dict(rates)


def run_ours(bench: Bench, dtype: str, output: Path) -> Row:
    """Runs an extraction by this tool, and the step alone in another process."""
    flags = [*bench.flags(), "--dtype", dtype]
    whole = extract(output, flags)
    computing = run([sys.executable, "-m", "benchmarks.compute_only", *flags])
    alone = computing.result
    full = alone["full_rows_tokens"] / alone["full_rows_seconds"]
    length = bench.options.max_seq_length
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
    """Runs one of the ways of competitors.py."""
    one_of, written_every = (1, 1) if bench.options.whole else PARTS[name]
    command = [str(bench.options.competitors), str(ROOT / "benchmarks/competitors.py"), name]
    command += ["--model", str(bench.folder / "model"), "--output", str(output), "--dtype", dtype]
    command += ["--token_ids", str(bench.folder / "token_ids.json")]
    command += ["--every", str(one_of), "--written_every", str(written_every)]
    command += ["--hooks", *bench.hooks]
    done = run(command)
    figures = done.result
    compute = figures["compute_seconds"] / figures["tokens"]
    store = figures["store_seconds"] / figures["written_tokens"]
    return {
        "tokens_per_second": 1 / (compute + store),
        "compute_tokens_per_second": 1 / compute,
        "bytes_per_token": figures["bytes"] / figures["written_tokens"],
        **{name: figures[name] for name in ("bytes", "tokens", "written_tokens")},
        "peak_bytes": done.peak_bytes,
        "process_seconds": done.seconds,
        "disturbed": done.disturbed,
        "versions": figures["versions"],
    }


def run_all(bench: Bench) -> dict[str, dict[str, list[Row]]]:
    """Runs all contenders in turn, in every dtype and round.

    Returns:
        Contender -> dtype -> the figures of each round.

    Raises:
        SystemExit: If a contender stores something else than the first one.
    """
    agreement = Agreement(bench.documents)
    rows: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    dtypes = sorted(bench.options.dtypes, reverse=True)  # float32 first: the reference for experts
    for number in range(bench.options.rounds):
        for dtype in dtypes:
            for name in bench.options.only:
                output = bench.folder / name
                row = (
                    run_ours(bench, dtype, output)
                    if name == "ours"
                    else run_other(bench, name, dtype, output)
                )
                try:
                    comparison = agreement.check(output, dtype, row["written_tokens"])
                    row |= compared(comparison, bench.has_experts)
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


def compared(comparison: Comparison, has_experts: bool) -> Row:
    """Returns a contender's agreement with the first one, for its row of the table.

    Returns:
        deviation: See `Comparison.worst`.
        compared_tokens: The number of compared tokens.
        changed_experts: The share of these whose experts differ from those in float32. None in a
            model without experts or without a float32 run.
    """
    row: Row = {
        "deviation": comparison.worst,
        "compared_tokens": comparison.tokens,
        "changed_experts": None,
    }
    if has_experts and comparison.changed is not None and comparison.tokens:
        row["changed_experts"] = comparison.changed / comparison.tokens
    return row


def summarise(bench: Bench, rounds: Sequence[Row], peak: float) -> Row:
    """Returns the medians of one contender's rounds, and figures derived from them.

    Args:
        bench: The inputs.
        rounds: The figures of each round.
        peak: FLOP/s of the fastest matrix product in this dtype.
    """
    row = {
        name: statistics.median(figures[name] for figures in rounds)
        for name, figure in rounds[0].items()
        if isinstance(figure, int | float)
    }
    per_token = bench.flops([len(ids) for ids in bench.documents])
    row["flops_per_second"] = row["tokens_per_second"] * per_token
    row["compute_flops_per_second"] = row["compute_tokens_per_second"] * per_token
    for name in ("flops_per_second", "compute_flops_per_second", "full_rows_flops_per_second"):
        if name in row:
            row[name.replace("flops_per_second", "of_peak")] = row[name] / peak
    row["end_to_end_over_compute"] = row["tokens_per_second"] / row["compute_tokens_per_second"]
    others = {name: rounds[0].get(name) for name in ("deviation", "changed_experts", "versions")}
    spread = [figures["tokens_per_second"] for figures in rounds]
    return {**others, **row, "tokens_per_second_of_rounds": spread}


def report(bench: Bench, rows: dict[str, dict[str, list[Row]]], peaks: dict[str, Any]) -> Row:
    """Prints the table, and returns the content of the JSON line.

    Args:
        bench: The inputs.
        rows: Contender -> dtype -> the figures of each round.
        peaks: "best", "before" and "after" -> dtype -> FLOP/s of the fastest matrix product.
    """
    print(HEADER)
    contenders: dict[str, dict[str, Row]] = defaultdict(dict)
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for name, of_dtypes in rows.items():
        part = (1, 1) if bench.options.whole else PARTS[name]
        for dtype, rounds in of_dtypes.items():
            row = summarise(bench, rounds, peaks["best"][dtype])
            contenders[name][dtype] = {**row, "part": part}
            print(line(name, dtype, row, part))
    for dtype, row in contenders.get("ours", {}).items():
        for name in contenders.keys() - {"ours"}:
            other = contenders[name][dtype]["tokens_per_second"]
            ratios[name][dtype] = row["tokens_per_second"] / other
        print(
            f"ours {dtype}: compiled in {row['compile_seconds']:.1f} s; the storage got the first "
            f"batch {row['first_batch_seconds']:.1f} s after the start; the step alone computes "
            f"full rows at {row['full_rows_tokens_per_second']:.0f} tokens/s, "
            f"{row['full_rows_of_peak']:.0%} of the peak of {peaks['best'][dtype] / 1e9:.0f} "
            "GFLOP/s"
        )
    for name, ratio_by_dtype in ratios.items():
        parts = [f"{dtype} {ratio:.2f}" for dtype, ratio in ratio_by_dtype.items()]
        print(f"ours / {name}: " + ", ".join(parts))
    lengths = [len(ids) for ids in bench.documents]
    options = vars(bench.options).copy()
    del options["competitors"]  # a path of this machine
    return {
        "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy", "isal")},
        "asked": options,
        "documents": {"count": len(lengths), "tokens": sum(lengths), "layers": bench.layers},
        "peak_flops_per_second": peaks,
        "contenders": contenders,
        "ours_over": ratios,
    }


def line(name: str, dtype: str, row: Row, part: tuple[int, int]) -> str:
    """Returns one line of the table.

    Args:
        name: The contender.
        dtype: Its dtype.
        row: Its figures, as `summarise` returns them.
        part: The computed and the written part, as in PARTS.
    """
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
    parser.add_argument(
        "--whole", action="store_true", help="let the others process everything, which takes hours"
    )
    parser.add_argument("--shape", choices=SHAPES, default="0.5B", help="(default: 0.5B)")
    parser.add_argument(
        "--peak_seconds",
        type=float,
        default=0.5,
        help="for which each matrix product is measured (default: 0.5)",
    )
    parser.add_argument(
        "--competitors",
        type=Path,
        default=COMPETITORS,
        help="Python with the packages of the others (default: the one that `make bench` installs)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if set(options.only) != {"ours"} and not options.competitors.exists():
        raise SystemExit(
            f"--competitors {options.competitors}: no such file; `make bench` installs it"
        )
    with tempfile.TemporaryDirectory() as name:
        bench = prepare(Path(name), options)
        before = measure_peaks(options)
        rows = run_all(bench)
        after = measure_peaks(options)
        best_of = {dtype: max(before[dtype], after[dtype]) for dtype in before}
        summary = report(bench, rows, {"before": before, "after": after, "best": best_of})
    print_result(summary)


if __name__ == "__main__":
    main()
