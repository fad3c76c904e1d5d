"""Measures how fast a data set becomes batches, without a model.

`python -m benchmarks.feeding [--tokenizer FOLDER]` reads rows, renders conversations, tokenises,
and packs the tokens. It prints tokens per second for six kinds of input: plain text, the same text
as conversations, a mixture of two files, shuffled documents, documents split into pieces, and a
column of token ids. Every round measures each input once.

The last line is JSON with the medians over the rounds and their ratios to plain text. It also
contains the fraction of padding in batches of documents whose lengths are distributed like the
lengths of documents in FineWeb-Edu. FOLDER contains a tokenizer, such as the one of Qwen2. Without
it, a small tokenizer is used.
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
# Documents have log-normal lengths, as in FineWeb-Edu. These are the median in words, the median in
# tokens, and the standard deviation of the logarithm.
MEDIAN_WORDS, MEDIAN_TOKENS, SPREAD = 450, 620, 1.0
# The shape of the batches that are packed when speed is measured.
ROW_TOKENS, BATCH_ROWS = 2048, 8
# The number of documents from whose lengths the fraction of padding is computed.
PADDING_DOCUMENTS = 20_000
# The shapes of batches, (rows, tokens of a row), for which the fraction of padding is computed.
PADDING_SHAPES = ((8, 2048), (32, 2048), (4, 512))


def demo_text() -> str:
    return Path(demo.__file__).with_name("demo_texts.txt").read_text(encoding="utf-8")


def make_rows(folder: Path, count: int) -> None:
    """Writes random documents of mixed lengths to 0.parquet and 1.parquet, half to each file.

    A row has three columns: "text" contains random words, "messages" the same words as a
    conversation, and "ids" as many random token ids as there are words.

    Args:
        folder: The folder of the files.
        count: The number of documents.
    """
    rng = np.random.default_rng(0)
    words = demo_text().split()
    word_counts = rng.lognormal(np.log(MEDIAN_WORDS), SPREAD, count).astype(int) + 8
    texts = [" ".join(rng.choice(words, word_count)) for word_count in word_counts]
    document_rows = [
        {
            "text": text,
            "messages": messages_of(text),
            "ids": rng.integers(0, 2048, word_count).tolist(),
        }
        for text, word_count in zip(texts, word_counts, strict=True)
    ]
    for file_number in range(2):
        document_table = pyarrow.Table.from_pylist(document_rows[file_number::2])
        pyarrow.parquet.write_table(
            document_table, folder / f"{file_number}.parquet", row_group_size=500
        )


def messages_of(text: str) -> list[dict[str, str]]:
    """Splits a text into messages of 100 words, written by user and assistant in turn.

    Args:
        text: The text.

    Returns:
        A dict for each message, with its role and its content.
    """
    words = text.split()
    messages: list[dict[str, str]] = []
    for first_word_index in range(0, len(words), 100):
        role = "user" if len(messages) % 2 == 0 else "assistant"
        messages.append(
            {"role": role, "content": " ".join(words[first_word_index : first_word_index + 100])}
        )
    return messages


def make_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and an empty config.json, to measure without a model.

    The folder takes the place of a model's folder. The measurement reads only the tokenizer.

    The tokenizer is the one of --demo, with special tokens for the start and end of messages.

    Args:
        folder: The folder of the files.
    """
    demo.write_tokenizer(folder, demo_text().split("\n\n"))
    tokenizer_path = folder / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    tokenizer.add_special_tokens(
        [AddedToken(special_token, normalized=False) for special_token in (START, END)]
    )
    tokenizer_path.write_text(tokenizer.to_str())
    (folder / "config.json").write_text("{}")


def measure(options: TextOptions, model_folder: Path) -> float:
    """Returns the tokens per second at which a data set is read, tokenised and packed.

    Args:
        options: The flags that select the data set and say how to tokenise it.
        model_folder: The folder of the tokenizer.
    """
    text_source = Text(options, Checkpoint(str(model_folder)), 2**20)
    documents = text_source.documents(Worker())
    num_tokens = 0
    start_time = time.perf_counter()
    for batch in pack(
        samples(documents, text_source.tokenizer, text_source.sample_settings),
        BATCH_ROWS,
        ROW_TOKENS,
    ):
        num_tokens += batch.num_tokens
    return num_tokens / (time.perf_counter() - start_time)


def padding_fraction(rows: int, length: int) -> float:
    """Returns the fraction of padding in batches of random documents.

    The lengths of the documents have the distribution of the lengths in FineWeb-Edu.

    Args:
        rows: The number of rows of a batch.
        length: The number of tokens of a row.
    """
    rng = np.random.default_rng(0)
    document_lengths = rng.lognormal(np.log(MEDIAN_TOKENS), SPREAD, PADDING_DOCUMENTS)
    document_lengths = np.clip(document_lengths.round().astype(int), 1, length)
    token_ids_of_documents = (np.zeros(num_tokens, np.int32) for num_tokens in document_lengths)
    num_batches = sum(1 for _ in pack(samples_of(token_ids_of_documents), rows, length))
    return 1 - int(document_lengths.sum()) / (num_batches * rows * length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokenizer", type=Path, help="its folder (default: a small tokenizer)")
    parser.add_argument("--documents", type=int, default=4000, help="how many (default: 4000)")
    parser.add_argument("--rounds", type=int, default=3, help="how many (default: 3)")
    parsed_flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary_folder:
        data_folder = Path(temporary_folder)
        make_rows(data_folder, parsed_flags.documents)
        if parsed_flags.tokenizer is None:
            make_tokenizer(data_folder)
        (data_folder / "template.jinja").write_text(TEMPLATE)
        dataset_flags_text = f"--dataset_path {data_folder}/*.parquet"
        chat_flags_text = f"--messages_column messages --chat_template {data_folder}/template.jinja"
        flags_text_by_input_name = {
            "text": dataset_flags_text,
            "chat": f"{dataset_flags_text} {chat_flags_text}",
            "mixture": f"--mix {data_folder}/0.parquet=0.7 {data_folder}/1.parquet=0.3",
            "shuffled": f"{dataset_flags_text} --shuffle_documents 1",
            "split": f"{dataset_flags_text} --long_documents split",
            "ids": f"{dataset_flags_text} --ids_column ids",
        }
        tokens_per_second_of_rounds_by_input: dict[str, list[float]] = {
            input_name: [] for input_name in flags_text_by_input_name
        }
        for _ in range(parsed_flags.rounds):
            for input_name, flags_text in flags_text_by_input_name.items():
                config = parse_args(flags_text.split())
                tokens_per_second = measure(
                    config.text_options, parsed_flags.tokenizer or data_folder
                )
                tokens_per_second_of_rounds_by_input[input_name].append(tokens_per_second)
                print(f"{input_name}: {tokens_per_second:,.0f} tokens/s", flush=True)
        median_speed_by_input_name = {
            input_name: statistics.median(speeds_of_rounds)
            for input_name, speeds_of_rounds in tokens_per_second_of_rounds_by_input.items()
        }
        speed_ratio_by_input_name = {
            input_name: round(median_speed / median_speed_by_input_name["text"], 2)
            for input_name, median_speed in median_speed_by_input_name.items()
        }
        padding_fraction_by_shape = {
            f"{num_rows} x {row_length}": round(padding_fraction(num_rows, row_length), 4)
            for num_rows, row_length in PADDING_SHAPES
        }
        print_result(
            {
                "tokens_per_second": median_speed_by_input_name,
                "of_text": speed_ratio_by_input_name,
                "padding": padding_fraction_by_shape,
            }
        )


if __name__ == "__main__":
    main()
