"""How fast the input side alone is: reading, rendering, tokenising and packing, without a model.

`python -m benchmarks.feeding [--tokenizer FOLDER]` prints tokens per second of plain text, of the
same text as conversations, of a mixture of two files, in shuffled order, split, and of given token
ids, one after the other in every round. Its last line is JSON with the medians and their ratio to
plain text, and how much of the batches is padding for documents of FineWeb-Edu's lengths. The
tokenizer is a small one, unless FOLDER has another, such as the real one of Qwen2.
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
MEDIAN_WORDS, SPREAD = 450, 1.0  # of documents, which then have FineWeb-Edu's lengths
LENGTH, ROWS = 2048, 8
PADDED, SHAPES = 20_000, ((8, 2048), (32, 2048), (4, 512))  # documents; rows and length of batches
MEDIAN_TOKENS = 620


def demo_text() -> str:
    return Path(demo.__file__).with_name("demo_texts.txt").read_text(encoding="utf-8")


def make_rows(folder: Path, count: int) -> None:
    """Writes documents of random words, each also as a conversation and as token ids, half of them
    in each file."""
    chance = np.random.default_rng(0)
    words = demo_text().split()
    lengths = chance.lognormal(np.log(MEDIAN_WORDS), SPREAD, count).astype(int) + 8
    texts = [" ".join(chance.choice(words, n)) for n in lengths]
    every = [
        {"text": text, "messages": turns_of(text), "ids": chance.integers(0, 2048, n).tolist()}
        for text, n in zip(texts, lengths, strict=True)
    ]
    for number in range(2):
        rows = every[number::2]
        path = folder / f"{number}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=500)


def turns_of(text: str) -> list[dict[str, str]]:
    """The text in turns of about 100 words."""
    words = text.split()
    return [
        {"role": ("user", "assistant")[n % 2], "content": " ".join(words[at : at + 100])}
        for n, at in enumerate(range(0, len(words), 100))
    ]


def make_tokenizer(folder: Path) -> None:
    demo.write_tokenizer(folder, demo_text().split("\n\n"))
    path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False) for marker in (START, END)])
    path.write_text(tokenizer.to_str())
    (folder / "config.json").write_text("{}")


def measure(options: TextOptions, model: Path) -> float:
    """Tokens per second."""
    text = Text(options, Checkpoint(str(model)), 2**20)
    form, documents = text.sample_form, text.documents(Worker())
    began, tokens = time.perf_counter(), 0
    for batch in pack(samples(documents, text.tokenizer, form), ROWS, LENGTH):
        tokens += batch.num_tokens
    return tokens / (time.perf_counter() - began)


def padding(rows: int, length: int) -> float:
    """Returns the share of all batches that is padding."""
    drawn = np.random.default_rng(0).lognormal(np.log(MEDIAN_TOKENS), SPREAD, PADDED)
    lengths = np.clip(drawn.round().astype(int), 1, length)
    batches = pack(samples_of(np.zeros(n, np.int32) for n in lengths), rows, length)
    return 1 - int(lengths.sum()) / (sum(1 for _ in batches) * rows * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--documents", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_rows(folder, asked.documents)
        if asked.tokenizer is None:
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
        found: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(asked.rounds):
            for kind, flags in kinds.items():
                found[kind].append(
                    measure(parse_args(flags.split()).text, asked.tokenizer or folder)
                )
                print(f"{kind}: {found[kind][-1]:,.0f} tokens/s", flush=True)
        medians = {kind: statistics.median(each) for kind, each in found.items()}
        ratios = {kind: round(each / medians["text"], 2) for kind, each in medians.items()}
        empty = {f"{rows} x {length}": round(padding(rows, length), 4) for rows, length in SHAPES}
        print_result({"tokens_per_second": medians, "of_text": ratios, "padding": empty})


if __name__ == "__main__":
    main()
