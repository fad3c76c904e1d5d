"""Compares the speed of this tool with transformers at a real model's size: `make bench`.

A contender is a program whose speed is compared: this tool ("ours"), or a competitor. A competitor
is one of the three extraction methods of competitors.py, which use transformers: "padded" and
"sorted" compute batches of padded documents, and "alone" computes one document at a time. Each
contender extracts the residual streams after layers 10 to 23 of the same documents, and stores them
as gzipped pickles on the disk. The model has random weights in the shape of Qwen2.5-0.5B. The
documents have log-normal lengths, with a median of 620 tokens and a sigma of 1.0, and are cut at
2048 tokens. compute_only.py measures this tool without storing. Every measurement runs in a
separate process. Each of --rounds rounds measures every contender once, and medians are reported.

The program prints a table with a line for each contender, then one JSON object as the last line.

A contender's tokens per second are measured from the end of loading and compiling until the last
shard is on the disk. Padding is not counted as tokens, and computing it is not counted as
operations. The competitors take minutes. Therefore, without --whole, they compute only every fourth
batch, and "padded" writes only every eighth of the computed documents. Their time per token is then
the measured time of computing per computed token, plus the measured time of writing per written
token, because they do one after the other.

In a model with experts, all contenders also store the numbers of the experts to which tokens are
routed. Some columns of the table need an explanation:

compute    the speed of computing without storing
of peak    the operations per second, as a fraction of those of the fastest matrix product
deviation  the largest difference between an activation and the first contender's activation in the
           same dtype, divided by the root mean square of the first contender's activations. It is
           measured for tokens that both contenders route to the same experts (see agreement.py)
experts    the fraction of tokens that are not routed to the same experts in all layers as in the
           float32 run of the first contender
disturbed  the fraction of the machine's processor time that other processes used meanwhile

Activations and experts are compared only in documents of at most 640 tokens.

Results for other families, in tokens per second and as a fraction of the speed of the fastest
matrix product, on an idle machine with 2 cores (--shape SHAPE --documents 24 --batch_size 4 --whole
--only ours alone; the column "transformers" shows the competitor "alone"; one round of 17,805
tokens):

              float32                     bfloat16
              this tool    transformers   this tool    transformers
    qwen3     295  66 %    298  67 %      532  56 %    529  56 %
    qwen3-moe 396  50 %    422  53 %      613  35 %    812  47 %
    qwen3.5   236  58 %    230  56 %      306  34 %    360  40 %

An hour later, the same machine computed 20 documents with the shape 0.5B at 182 tokens per second
with this tool and at 158 with transformers in float32, and at 306 and 313 in bfloat16. With
qwen3-moe in bfloat16, 26.5 % of this tool's tokens and 34.9 % of transformers' tokens were routed
to other experts than in float32. Both fractions are high, because the weights are random, and
therefore many experts are nearly tied.
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
from typing import Any, NamedTuple

from activation_extraction.model.family import read_model_config
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.model_config import SPARSE, ModelConfig
from benchmarks.agreement import CHOSEN, RESIDUAL, Agreement, Comparison, Disagreement
from benchmarks.inputs import SHAPES, make_documents, make_model, tokenise
from benchmarks.peak import DTYPES, best
from benchmarks.processes import ROOT, extract, print_result, run
from qwen2_jax_with_hooks import create_model_with_hooks

# Name of a figure -> figure, for one contender (this tool or a competitor) in one dtype.
Figures = dict[str, Any]


class SelectionRatios(NamedTuple):
    """How many of the documents a contender (a measured program) computes and writes.

    Attributes:
        batches_per_computed_batch: Number of successive batches of which one is computed. 1 to
            compute all batches.
        computed_documents_per_written_document: Number of successive computed documents of which
            one is written. 1 to write all computed documents.
    """

    batches_per_computed_batch: int
    computed_documents_per_written_document: int


ALL_DOCUMENTS = SelectionRatios(1, 1)
# Name of a contender -> two ratios: it computes one of so many batches, and writes one of so many
# of the computed documents. With --whole, all contenders have the ratios in ALL_DOCUMENTS.
SELECTION_RATIOS_BY_CONTENDER = {
    "ours": ALL_DOCUMENTS,
    "alone": SelectionRatios(4, 1),
    "sorted": SelectionRatios(4, 1),
    "padded": SelectionRatios(4, 8),
}
COMPETITORS = ROOT / ".venv/competitors/bin/python"
# The default layers of --layers_to_extract.
LAYERS = range(10, 24)
HEADER = (
    f"{'':17} {'tokens/s':>9} {'compute':>8} {'GFLOP/s':>8} {'compute':>8} {'of peak':>8} "
    f"{'compute':>8} {'memory':>8} {'bytes/tk':>9} {'process':>8} {'deviation':>10} "
    f"{'experts':>8} {'disturbed':>9}  part"
)


@dataclass(frozen=True)
class BenchmarkInputs:
    """The inputs that are the same for all measured programs, and the flags of this script.

    Attributes:
        folder: Folder of the model, the documents and the outputs.
        parsed_flags: Parsed flags of this script.
        model_config: Configuration of the model.
        documents: Token ids of each document.
    """

    folder: Path
    parsed_flags: argparse.Namespace
    model_config: ModelConfig
    documents: list[list[int]]

    @property
    def layer_numbers(self) -> list[int]:
        """The numbers of the extracted layers.

        They are the default of --layers_to_extract. If the model lacks some of these layers, its
        last layer takes their place, once.
        """
        last_layer_number = self.model_config.num_hidden_layers - 1
        return sorted({min(layer_number, last_layer_number) for layer_number in LAYERS})

    @property
    def hook_names(self) -> list[str]:
        """The names of the stored hooks.

        They are the residual stream after each extracted layer and, in every layer with experts,
        the indices of the experts of each token, which agreement.py compares.
        """
        residual_hook_names = [RESIDUAL.format(layer_number) for layer_number in self.layer_numbers]
        expert_hook_names = [
            CHOSEN.format(layer_number)
            for layer_number, layer_type in enumerate(self.model_config.layer_types)
            if SPARSE in layer_type.split()
        ]
        return residual_hook_names + expert_hook_names

    @property
    def has_experts(self) -> bool:
        return len(self.hook_names) > len(self.layer_numbers)

    def flops_per_token(self, lengths: Sequence[int]) -> float:
        """Returns the mean number of floating-point operations that a token needs.

        Layers after the last extracted layer are not computed, so their operations do not count.

        Args:
            lengths: The number of tokens of each document.
        """
        hooks_of_last_layer = hook_table(self.model_config).of_layers(
            [self.layer_numbers[-1]], "residual", self.model_config.num_hidden_layers
        )
        return create_model_with_hooks(self.model_config, hooks_of_last_layer).flops(lengths) / sum(
            lengths
        )

    def flags(self) -> list[str]:
        """Returns the flags with which extract_activations.py is measured.

        The flags --dtype and --output_dir differ between measurements and are not included.
        """
        extraction_flags = [
            "--model_path",
            str(self.folder / "model"),
            "--compilation_cache",
            "off",
        ]
        extraction_flags += ["--dataset_path", str(self.folder / "documents.jsonl")]
        extraction_flags += ["--max_seq_length", str(self.parsed_flags.max_seq_length)]
        if self.parsed_flags.batch_size is not None:
            extraction_flags += ["--batch_size", str(self.parsed_flags.batch_size)]
        if self.has_experts:
            extraction_flags += ["--hook_names", *self.hook_names]
        return extraction_flags

    def selection_ratios_of(self, contender_name: str) -> SelectionRatios:
        """Returns which parts of the documents a contender computes and writes.

        With --whole, every contender computes and writes all documents. Otherwise,
        SELECTION_RATIOS_BY_CONTENDER contains the parts.

        Args:
            contender_name: The name of the contender (a measured program): "ours" for this tool, or
                the name of an extraction method of competitors.py.
        """
        return (
            ALL_DOCUMENTS
            if self.parsed_flags.whole
            else SELECTION_RATIOS_BY_CONTENDER[contender_name]
        )


def prepare(folder: Path, options: argparse.Namespace) -> BenchmarkInputs:
    """Writes the inputs: a model with random weights, random documents, and their token ids.

    Args:
        folder: The folder to which the files are written.
        options: The parsed flags of this script.

    Returns:
        The inputs, which are the same for all measured programs, and the flags.
    """
    model_folder, documents_path = folder / "model", folder / "documents.jsonl"
    make_model(model_folder, SHAPES[options.shape])
    make_documents(documents_path, options.documents)
    token_ids_of_documents = tokenise(model_folder, documents_path, options.max_seq_length)
    (folder / "token_ids.json").write_text(json.dumps(token_ids_of_documents))
    return BenchmarkInputs(
        folder, options, read_model_config(model_folder / "config.json"), token_ids_of_documents
    )


def measure_peaks(options: argparse.Namespace) -> dict[str, float]:
    """Measures the fastest matrix product of JAX and, if transformers is measured, of PyTorch.

    Args:
        options: The parsed flags of this script.

    Returns:
        dtype -> FLOP/s of the fastest matrix product in the faster library.
    """
    peak_flops_per_second_by_dtype: dict[str, float] = defaultdict(float)
    interpreter_paths_and_libraries = [(sys.executable, "jax")]
    if set(options.only) != {"ours"}:
        interpreter_paths_and_libraries.append((str(options.competitors), "torch"))
    for interpreter_path, library in interpreter_paths_and_libraries:
        peak_flops_command = [
            interpreter_path,
            str(ROOT / "benchmarks/peak.py"),
            library,
            "--dtypes",
            *options.dtypes,
        ]
        peak_flops_process = run([*peak_flops_command, "--seconds", str(options.peak_seconds)])
        for dtype, flops_per_second in best(peak_flops_process.result).items():
            peak_flops_per_second_by_dtype[dtype] = max(
                peak_flops_per_second_by_dtype[dtype], flops_per_second
            )
    return dict(peak_flops_per_second_by_dtype)


def run_ours(benchmark_inputs: BenchmarkInputs, dtype: str, output: Path) -> Figures:
    """Measures this tool: runs extract_activations.py and compute_only.py in separate processes.

    Args:
        benchmark_inputs: The model, the documents and the flags of the benchmark, which are the
            same for all contenders (programs whose speeds are compared).
        dtype: The dtype of the model and of the activations.
        output: The folder of the shards.

    Returns:
        A dict with these figures.
        tokens_per_second, bytes_per_token: The speed of the extraction, and the bytes of its files
            for each token.
        tokens, written_tokens, bytes, peak_bytes, process_seconds, compile_seconds,
            first_batch_seconds: See `extract` in processes.py. All tokens are written.
        compute_tokens_per_second, steps: The speed of compute_only.py, and the number of its
            batches.
        full_rows_tokens_per_second, full_rows_flops_per_second: The speed of compute_only.py with
            batches without padding, in which each row is one document.
        disturbed: The fraction of the machine's processor time that other processes used meanwhile.
            It is the larger of two fractions: one is measured while extract_activations.py runs,
            the other while compute_only.py runs.
    """
    extraction_flags = [*benchmark_inputs.flags(), "--dtype", dtype]
    extraction_figure_by_name = extract(output, extraction_flags)
    compute_process = run([sys.executable, "-m", "benchmarks.compute_only", *extraction_flags])
    compute_figure_by_name = compute_process.result
    full_rows_tokens_per_second = (
        compute_figure_by_name["full_rows_tokens"] / compute_figure_by_name["full_rows_seconds"]
    )
    full_row_flops_per_token = benchmark_inputs.flops_per_token(
        [benchmark_inputs.parsed_flags.max_seq_length]
    )
    return {
        "tokens_per_second": extraction_figure_by_name["tokens"]
        / extraction_figure_by_name["extraction_seconds"],
        "compute_tokens_per_second": compute_figure_by_name["tokens"]
        / compute_figure_by_name["seconds"],
        "full_rows_tokens_per_second": full_rows_tokens_per_second,
        "full_rows_flops_per_second": full_rows_tokens_per_second * full_row_flops_per_token,
        "steps": compute_figure_by_name["steps"],
        "disturbed": max(
            extraction_figure_by_name["disturbed"], compute_process.cpu_fraction_of_other_processes
        ),
        "bytes": extraction_figure_by_name["bytes"],
        "bytes_per_token": extraction_figure_by_name["bytes"] / extraction_figure_by_name["tokens"],
        "written_tokens": extraction_figure_by_name["tokens"],
        "tokens": extraction_figure_by_name["tokens"],
        "peak_bytes": extraction_figure_by_name["peak_bytes"],
        "process_seconds": extraction_figure_by_name["process_seconds"],
        "compile_seconds": extraction_figure_by_name["compile_seconds"],
        "first_batch_seconds": extraction_figure_by_name["first_batch_seconds"],
    }


def run_competitor(
    benchmark_inputs: BenchmarkInputs, name: str, dtype: str, output: Path
) -> Figures:
    """Measures a competitor, which uses transformers: runs competitors.py in a separate process.

    Args:
        benchmark_inputs: The model, the documents and the flags of the benchmark, which are the
            same for all contenders (programs whose speeds are compared).
        name: The name of the competitor, which is the name of an extraction method of
            competitors.py.
        dtype: The dtype of the model.
        output: The folder of the shards.

    Returns:
        A dict with these figures.
        tokens_per_second, compute_tokens_per_second: The speed of computing and storing, and the
            speed of computing alone. If only some batches are computed or only some documents are
            written, these are estimates of the speeds for all batches and documents.
        bytes_per_token, bytes: The bytes of the written files, for each written token and in total.
        tokens, written_tokens: The number of computed tokens, and the number of written tokens.
        peak_bytes, process_seconds, disturbed: The peak memory of the process, its duration, and
            the fraction of processor time that other processes used meanwhile.
        versions: A dict: name of a package -> its version.
    """
    selection_ratios = benchmark_inputs.selection_ratios_of(name)
    competitor_command = [
        str(benchmark_inputs.parsed_flags.competitors),
        str(ROOT / "benchmarks/competitors.py"),
        name,
    ]
    competitor_command += [
        "--model",
        str(benchmark_inputs.folder / "model"),
        "--output",
        str(output),
        "--dtype",
        dtype,
    ]
    competitor_command += ["--token_ids", str(benchmark_inputs.folder / "token_ids.json")]
    competitor_command += ["--every", str(selection_ratios.batches_per_computed_batch)]
    competitor_command += [
        "--written_every",
        str(selection_ratios.computed_documents_per_written_document),
    ]
    competitor_command += ["--hooks", *benchmark_inputs.hook_names]
    competitor_process = run(competitor_command)
    competitor_figure_by_name = competitor_process.result
    computing_seconds_per_token = (
        competitor_figure_by_name["compute_seconds"] / competitor_figure_by_name["tokens"]
    )
    storing_seconds_per_token = (
        competitor_figure_by_name["store_seconds"] / competitor_figure_by_name["written_tokens"]
    )
    return {
        "tokens_per_second": 1 / (computing_seconds_per_token + storing_seconds_per_token),
        "compute_tokens_per_second": 1 / computing_seconds_per_token,
        "bytes_per_token": competitor_figure_by_name["bytes"]
        / competitor_figure_by_name["written_tokens"],
        "bytes": competitor_figure_by_name["bytes"],
        "tokens": competitor_figure_by_name["tokens"],
        "written_tokens": competitor_figure_by_name["written_tokens"],
        "peak_bytes": competitor_process.peak_memory_bytes,
        "process_seconds": competitor_process.seconds,
        "disturbed": competitor_process.cpu_fraction_of_other_processes,
        "versions": competitor_figure_by_name["versions"],
    }


def run_all(benchmark_inputs: BenchmarkInputs) -> dict[str, dict[str, list[Figures]]]:
    """Runs every contender once for each round and dtype.

    A contender is this tool or a competitor, which is an extraction method of competitors.py.

    Args:
        benchmark_inputs: The model, the documents and the flags of the benchmark, which are the
            same for all contenders (programs whose speeds are compared).

    Returns:
        Name of a contender -> dtype -> a list with the figures of each round.

    Raises:
        SystemExit: If a contender stored other tokens than the documents have, or if its
            activations differ from the first contender's by more than rounding explains.
    """
    agreement_checker = Agreement(benchmark_inputs.documents)
    figures_of_rounds_by_dtype_by_contender: dict[str, dict[str, list[Figures]]] = defaultdict(
        lambda: defaultdict(list)
    )
    # float32 is measured first, because the experts that tokens are routed to in bfloat16 are
    # compared with the experts in float32.
    dtypes = sorted(benchmark_inputs.parsed_flags.dtypes, reverse=True)
    for round_number in range(1, benchmark_inputs.parsed_flags.rounds + 1):
        for dtype in dtypes:
            for contender_name in benchmark_inputs.parsed_flags.only:
                output_folder = benchmark_inputs.folder / contender_name
                if contender_name == "ours":
                    contender_figure_by_name = run_ours(benchmark_inputs, dtype, output_folder)
                else:
                    contender_figure_by_name = run_competitor(
                        benchmark_inputs, contender_name, dtype, output_folder
                    )
                try:
                    comparison = agreement_checker.check(
                        output_folder, dtype, contender_figure_by_name["written_tokens"]
                    )
                except Disagreement as error:
                    raise SystemExit(f"error: {error}") from error
                contender_figure_by_name |= agreement_figures(
                    comparison, benchmark_inputs.has_experts
                )
                shutil.rmtree(output_folder)
                figures_of_rounds_by_dtype_by_contender[contender_name][dtype].append(
                    contender_figure_by_name
                )
                print(
                    f"round {round_number}: {contender_name} {dtype}: "
                    f"{contender_figure_by_name['tokens_per_second']:.0f} tokens/s, "
                    f"computing alone {contender_figure_by_name['compute_tokens_per_second']:.0f}; "
                    "other processes used "
                    f"{contender_figure_by_name['disturbed']:.0%} of the machine",
                    flush=True,
                )
    return figures_of_rounds_by_dtype_by_contender


def agreement_figures(comparison: Comparison, has_experts: bool) -> Figures:
    """Returns figures that describe how well a contender agrees with the first contender.

    A contender is a measured program: this tool or a competitor.

    Args:
        comparison: The comparison of the contender with the first contender in the same dtype. It
            also contains the number of tokens whose experts differ from the experts in the float32
            run of the first contender.
        has_experts: Whether the model has experts.

    Returns:
        A dict with these figures.
        deviation: The largest difference between an activation of the contender and the activation
            of the first contender in the same dtype, divided by the root mean square of the first
            contender's activations in the same document and at the same hook. None if no
            activations were compared, as in the first round for the first contender.
        compared_tokens: The number of compared tokens.
        changed_experts: The fraction of these tokens that are not routed to the same experts in all
            layers as in the float32 run of the first contender. None if the model has no experts,
            if there was no float32 run, or if no tokens were compared.
    """
    fraction_of_tokens_with_changed_experts = None
    if (
        has_experts
        and comparison.num_tokens_with_changed_experts is not None
        and comparison.num_compared_tokens
    ):
        fraction_of_tokens_with_changed_experts = (
            comparison.num_tokens_with_changed_experts / comparison.num_compared_tokens
        )
    return {
        "deviation": comparison.largest_deviation,
        "compared_tokens": comparison.num_compared_tokens,
        "changed_experts": fraction_of_tokens_with_changed_experts,
    }


def summarise(benchmark_inputs: BenchmarkInputs, rounds: Sequence[Figures], peak: float) -> Figures:
    """Summarises the figures of one contender in one dtype over all rounds.

    A contender is either this tool or a competitor, which is an extraction method of
    competitors.py.

    Args:
        benchmark_inputs: The model, the documents and the flags of the benchmark, which are the
            same for all contenders (programs whose speeds are compared).
        rounds: For each round, the figures of the contender: name of a figure -> figure.
        peak: The FLOP/s of the fastest matrix product in this dtype.

    Returns:
        A dict with these figures.
        The figures in `rounds` that are numbers: The median of each figure over the rounds.
        deviation: The median over the rounds of the largest deviation from the first contender (see
            `agreement_figures`). None if it was not measured in the first round.
        changed_experts: The median over the rounds of the fraction of tokens with other experts
            than in the float32 run of the first contender. None if it was not measured in the first
            round.
        versions: Name of a package -> its version, for competitors. None for this tool.
        flops_per_second, compute_flops_per_second: FLOP/s of the extraction, and of computing
            alone.
        of_peak, compute_of_peak: FLOP/s of the extraction, and of computing alone, divided by
            `peak`.
        full_rows_of_peak: FLOP/s of computing batches whose rows contain no padding (full rows),
            divided by `peak`. It is missing for competitors.
        end_to_end_over_compute: The speed of the extraction, divided by the speed of computing.
        tokens_per_second_of_rounds: The speed of the extraction in each round.
    """
    median_by_figure_name = {
        figure_name: statistics.median(figure_by_name[figure_name] for figure_by_name in rounds)
        for figure_name, figure in rounds[0].items()
        if isinstance(figure, int | float)
    }
    flops_per_token = benchmark_inputs.flops_per_token(
        [len(token_ids) for token_ids in benchmark_inputs.documents]
    )
    median_by_figure_name["flops_per_second"] = (
        median_by_figure_name["tokens_per_second"] * flops_per_token
    )
    median_by_figure_name["compute_flops_per_second"] = (
        median_by_figure_name["compute_tokens_per_second"] * flops_per_token
    )
    for figure_name in (
        "flops_per_second",
        "compute_flops_per_second",
        "full_rows_flops_per_second",
    ):
        if figure_name in median_by_figure_name:
            median_by_figure_name[figure_name.replace("flops_per_second", "of_peak")] = (
                median_by_figure_name[figure_name] / peak
            )
    median_by_figure_name["end_to_end_over_compute"] = (
        median_by_figure_name["tokens_per_second"]
        / median_by_figure_name["compute_tokens_per_second"]
    )
    # These figures may be None or a dict. For them the values of the first round are returned,
    # because they have no median. If a figure is a number, its median replaces its value below.
    first_round_value_by_figure_name = {
        figure_name: rounds[0].get(figure_name)
        for figure_name in ("deviation", "changed_experts", "versions")
    }
    speeds_of_rounds = [figure_by_name["tokens_per_second"] for figure_by_name in rounds]
    return {
        **first_round_value_by_figure_name,
        **median_by_figure_name,
        "tokens_per_second_of_rounds": speeds_of_rounds,
    }


def report(
    benchmark_inputs: BenchmarkInputs,
    figures_of_rounds_by_dtype_by_contender: dict[str, dict[str, list[Figures]]],
    peaks: dict[str, dict[str, float]],
) -> dict[str, Any]:
    """Prints a table of the figures of all contenders, and returns the figures as a dict for JSON.

    A contender is this tool ("ours") or a competitor, which is an extraction method of
    competitors.py.

    Args:
        benchmark_inputs: The model, the documents and the flags of the benchmark, which are the
            same for all contenders (programs whose speeds are compared).
        figures_of_rounds_by_dtype_by_contender: Name of a contender -> dtype -> a list with the
            figures of each round.
        peaks: A dict of three dicts, each with dtype -> FLOP/s of the fastest matrix product. The
            dicts "before" and "after" were measured before and after the runs of the contenders,
            and "best" contains the larger value for each dtype.

    Returns:
        A dict with these keys.
        versions: Name of a package that this tool uses -> its version.
        asked: Name of a flag of this script -> value.
        documents: A dict with "count", the number of documents, "tokens", the number of their
            tokens, and "layers", a list of the extracted layers, counted from 0.
        peak_flops_per_second: The argument `peaks`.
        contenders: Name of a contender -> dtype -> a dict of the figures (see `summarise`). Each of
            these dicts also has the key "part", which tells how many of the documents the
            contender computed and wrote (see `SelectionRatios`).
        ours_over: Name of a competitor -> dtype -> speed of this tool, divided by the competitor's
            speed.
    """
    print(HEADER)
    summary_by_dtype_by_contender: dict[str, dict[str, Figures]] = defaultdict(dict)
    for (
        contender_name,
        figures_of_rounds_by_dtype,
    ) in figures_of_rounds_by_dtype_by_contender.items():
        selection_ratios = benchmark_inputs.selection_ratios_of(contender_name)
        for dtype, figures_of_rounds in figures_of_rounds_by_dtype.items():
            summary_by_figure_name = summarise(
                benchmark_inputs, figures_of_rounds, peaks["best"][dtype]
            )
            summary_by_dtype_by_contender[contender_name][dtype] = {
                **summary_by_figure_name,
                "part": selection_ratios,
            }
            print(table_line(contender_name, dtype, summary_by_figure_name, selection_ratios))
    # Name of a competitor -> dtype -> speed of this tool, divided by the competitor's speed.
    speed_ratio_by_dtype_by_competitor: dict[str, dict[str, float]] = defaultdict(dict)
    for dtype, summary_by_figure_name in summary_by_dtype_by_contender.get("ours", {}).items():
        for competitor_name in summary_by_dtype_by_contender.keys() - {"ours"}:
            competitor_tokens_per_second = summary_by_dtype_by_contender[competitor_name][dtype][
                "tokens_per_second"
            ]
            speed_ratio_by_dtype_by_competitor[competitor_name][dtype] = (
                summary_by_figure_name["tokens_per_second"] / competitor_tokens_per_second
            )
        print(
            f"ours {dtype}: compiled in {summary_by_figure_name['compile_seconds']:.1f} s; "
            "the storage got the first batch "
            f"{summary_by_figure_name['first_batch_seconds']:.1f} s after the start; "
            "the step alone computes full rows at "
            f"{summary_by_figure_name['full_rows_tokens_per_second']:.0f} tokens/s, "
            f"{summary_by_figure_name['full_rows_of_peak']:.0%} of the peak of "
            f"{peaks['best'][dtype] / 1e9:.0f} GFLOP/s"
        )
    for competitor_name, speed_ratio_by_dtype in speed_ratio_by_dtype_by_competitor.items():
        ratio_texts = [
            f"{dtype} {speed_ratio:.2f}" for dtype, speed_ratio in speed_ratio_by_dtype.items()
        ]
        print(f"ours / {competitor_name}: " + ", ".join(ratio_texts))
    document_lengths = [len(token_ids) for token_ids in benchmark_inputs.documents]
    value_by_flag_name = vars(benchmark_inputs.parsed_flags).copy()
    # --competitors is a path on this machine, which means nothing to readers of the result.
    del value_by_flag_name["competitors"]
    package_names = ("jax", "jaxlib", "numpy", "isal")
    return {
        "versions": {package_name: version(package_name) for package_name in package_names},
        "asked": value_by_flag_name,
        "documents": {
            "count": len(document_lengths),
            "tokens": sum(document_lengths),
            "layers": benchmark_inputs.layer_numbers,
        },
        "peak_flops_per_second": peaks,
        "contenders": summary_by_dtype_by_contender,
        "ours_over": speed_ratio_by_dtype_by_competitor,
    }


def table_line(name: str, dtype: str, figures: Figures, selection_ratios: SelectionRatios) -> str:
    """Returns the line of one contender in one dtype, for the table that `report` prints.

    HEADER contains the names of the columns.

    Args:
        name: The name of the contender.
        dtype: The dtype of the contender's model.
        figures: The figures of the contender, as `summarise` returns them.
        selection_ratios: Which parts of the documents the contender computes and writes: one of
            several batches, and one of several documents.
    """
    end_to_end_tokens_per_second = figures["tokens_per_second"]
    tokens_per_second_of_computation = figures["compute_tokens_per_second"]
    gflop_per_second = figures["flops_per_second"] / 1e9
    gflop_per_second_of_computation = figures["compute_flops_per_second"] / 1e9
    deviation_text = "-" if figures["deviation"] is None else f"{figures['deviation']:.1e}"
    changed_experts_text = (
        "-" if figures["changed_experts"] is None else f"{figures['changed_experts']:.1%}"
    )
    return (
        f"{name:8}{dtype:9} {end_to_end_tokens_per_second:9.0f}"
        f" {tokens_per_second_of_computation:8.0f}"
        f" {gflop_per_second:8.0f} {gflop_per_second_of_computation:8.0f}"
        f" {figures['of_peak']:8.0%} {figures['compute_of_peak']:8.0%}"
        f" {figures['peak_bytes'] / 1e9:5.1f} GB {figures['bytes_per_token']:9.0f}"
        f" {figures['process_seconds']:6.0f} s {deviation_text:>10} {changed_experts_text:>8}"
        f" {figures['disturbed']:9.0%}  1/{selection_ratios.batches_per_computed_batch} computed,"
        f" 1/{selection_ratios.computed_documents_per_written_document} of it written"
    )


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--documents", type=int, default=87, help="how many (default: 87, which fill 39 rows)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="how many (default: 1)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=SELECTION_RATIOS_BY_CONTENDER,
        default=list(SELECTION_RATIOS_BY_CONTENDER),
        metavar="NAME",
        help=f"contenders to measure (default: {' '.join(SELECTION_RATIOS_BY_CONTENDER)})",
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--batch_size", type=int, help="rows per step (default: the tool's)")
    parser.add_argument(
        "--max_seq_length", type=int, default=2048, help="tokens per row (default: 2048)"
    )
    parser.add_argument(
        "--whole",
        action="store_true",
        help="compute and write all documents with transformers, too, which takes hours",
    )
    parser.add_argument(
        "--shape", choices=SHAPES, default="0.5B", help="of the model (default: 0.5B)"
    )
    parser.add_argument(
        "--peak_seconds",
        type=float,
        default=0.5,
        help="seconds for which each matrix product is measured (default: 0.5)",
    )
    parser.add_argument(
        "--competitors",
        type=Path,
        default=COMPETITORS,
        help="Python with transformers (default: the one that `make bench` installs)",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    parsed_flags = parse_options(argv)
    if set(parsed_flags.only) != {"ours"} and not parsed_flags.competitors.exists():
        raise SystemExit(
            f"--competitors {parsed_flags.competitors}: no such file; `make bench` installs it"
        )
    with tempfile.TemporaryDirectory() as temporary_folder:
        benchmark_inputs = prepare(Path(temporary_folder), parsed_flags)
        peak_flops_per_second_by_dtype_before_runs = measure_peaks(parsed_flags)
        figures_of_rounds_by_dtype_by_contender = run_all(benchmark_inputs)
        peak_flops_per_second_by_dtype_after_runs = measure_peaks(parsed_flags)
        best_peak_flops_per_second_by_dtype = {
            dtype: max(
                peak_flops_per_second_by_dtype_before_runs[dtype],
                peak_flops_per_second_by_dtype_after_runs[dtype],
            )
            for dtype in peak_flops_per_second_by_dtype_before_runs
        }
        measured_peaks = {
            "before": peak_flops_per_second_by_dtype_before_runs,
            "after": peak_flops_per_second_by_dtype_after_runs,
            "best": best_peak_flops_per_second_by_dtype,
        }
        report_fields = report(
            benchmark_inputs, figures_of_rounds_by_dtype_by_contender, measured_peaks
        )
    print_result(report_fields)


if __name__ == "__main__":
    main()
