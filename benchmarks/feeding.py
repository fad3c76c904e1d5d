"""Measures reading, rendering, tokenising and packing, without a model.

`python -m benchmarks.feeding [--tokenizer FOLDER]` prints tokens per second of six kinds of input:
plain text, the same text as conversations, a mixture of two files, shuffled documents, documents
split into pieces, and a column of token ids. The kinds take turns in every round. The last line is
JSON: the medians, their ratios to plain text, and the share of padding in batches of documents of
FineWeb-Edu's lengths. The tokenizer is a small one, unless FOLDER contains another one, such as
that of Qwen2.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
from tokenizers import AddedToken, Tokenizer

from activation_extraction.cli.config import parse_args
from activation_extraction.cli.flags import TextOptions
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import demo
from activation_extraction.run.host_text import Text
from activation_extraction.text.batch import Worker
from activation_extraction.text.packing import pack, samples_of
from activation_extraction.text.roles import END, START
from activation_extraction.text.samples import samples
from benchmarks.processes import print_result

TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
"""
# Parameters of the log-normal lengths of documents, as in FineWeb-Edu: the median number of words
# or tokens, and the standard deviation of its logarithm.
MEDIAN_WORDS, MEDIAN_TOKENS, SPREAD = 450, 620, 1.0
LENGTH, ROWS = 2048, 8  # tokens of a row and rows of a batch, where speed is measured
PADDED_DOCUMENTS = 20_000  # for measuring padding
PADDED_SHAPES = ((8, 2048), (32, 2048), (4, 512))  # rows of a batch and tokens of a row


def demo_text() -> str:
    return Path(demo.__file__).with_name("demo_texts.txt").read_text(encoding="utf-8")


def make_rows(folder: Path, count: int) -> None:
    """Writes documents of random words to 0.parquet and 1.parquet, half of them in each file.

    The columns are the document as text, as a conversation, and as random token ids.
    """
    chance = np.random.default_rng(0)
    words = demo_text().split()
    lengths = chance.lognormal(np.log(MEDIAN_WORDS), SPREAD, count).astype(int) + 8
    texts = [" ".join(chance.choice(words, n)) for n in lengths]
    rows = [
        {"text": text, "messages": turns_of(text), "ids": chance.integers(0, 2048, n).tolist()}
        for text, n in zip(texts, lengths, strict=True)
    ]
    for number in range(2):
        table = pyarrow.Table.from_pylist(rows[number::2])
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet", row_group_size=500)


def turns_of(text: str) -> list[dict[str, str]]:
    """Returns the text as messages of 100 words, alternately of the user and the assistant."""
    words = text.split()
    return [
        {"role": ("user", "assistant")[n % 2], "content": " ".join(words[at : at + 100])}
        for n, at in enumerate(range(0, len(words), 100))
    ]


def make_tokenizer(folder: Path) -> None:
    """Writes the demo's tokenizer with the markers of messages, and an empty config.json."""
    demo.write_tokenizer(folder, demo_text().split("\n\n"))
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in (START, END)])
    path.write_text(tokenizer.to_str())
    (folder / "config.json").write_text("{}")


def measure(options: TextOptions, model: Path) -> float:
    """Returns the tokens per second of reading, tokenising and packing a text.

    Args:
        options: The flags of the text.
        model: The folder of the tokenizer.
    """
    text = Text(options, Checkpoint(str(model)), 2**20)
    form, documents = text.sample_form, text.documents(Worker())
    began, tokens = time.perf_counter(), 0
    for batch in pack(samples(documents, text.tokenizer, form), ROWS, LENGTH):
        tokens += batch.num_tokens
    return tokens / (time.perf_counter() - began)


def padding(rows: int, length: int) -> float:
    """Returns the share of tokens that are padding, in batches of random documents.

    Args:
        rows: The rows of a batch.
        length: The tokens of a row.
    """
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), SPREAD, PADDED_DOCUMENTS)
    lengths = np.clip(drawn.round().astype(int), 1, length)
    batches = pack(samples_of(np.zeros(n, np.int32) for n in lengths), rows, length)
    return 1 - int(lengths.sum()) / (sum(1 for _ in batches) * rows * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="folder (default: a small tokenizer)")
    parser.add_argument("--documents", type=int, default=4000, help="(default: 4000)")
    parser.add_argument("--rounds", type=int, default=3, help="of the medians (default: 3)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_rows(folder, options.documents)
        if options.tokenizer is None:
            make_tokenizer(folder)
        (folder / "template.jinja").write_text(TEMPLATE)
        text = f"--dataset_path {folder}/*.parquet"
        kinds = {
            "text": text,
            "chat": f"{text} --messages_column messages --chat_template {folder}/template.jinja",
            "mixture": f"--mix {folder}/0.parquet=0.7 {folder}/1.parquet=0.3",
            "shuffled": f"{text} --shuffle_documents 1",
            "split": f"{text} --long_documents split",
            "ids": f"{text} --ids_column ids",
        }
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind, flags in kinds.items():
                config = parse_args(flags.split())
                speed = measure(config.text, options.tokenizer or folder)
                speeds[kind].append(speed)
                print(f"{kind}: {speed:,.0f} tokens/s", flush=True)
        medians = {kind: statistics.median(rounds) for kind, rounds in speeds.items()}
        ratios = {kind: round(median / medians["text"], 2) for kind, median in medians.items()}
        shares = {
            f"{rows} x {length}": round(padding(rows, length), 4) for rows, length in PADDED_SHAPES
        }
        print_result({"tokens_per_second": medians, "of_text": ratios, "padding": shares})


if __name__ == "__main__":
    main()
