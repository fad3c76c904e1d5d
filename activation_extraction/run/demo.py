"""Makes the inputs of --demo: a small Qwen2 checkpoint and sample documents.

The checkpoint consists of config.json, a safetensors file and tokenizer.json, as a real one does.
The documents are a Parquet file. All files have the same bytes every time. Because the weights are
random, the demo shows that the pipeline works, but nothing that a trained model has learned.
"""

import errno
import json
import math
import random
import re
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

import ml_dtypes
import numpy as np
import pyarrow
import pyarrow.parquet
from safetensors.numpy import save
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from activation_extraction.common.errors import InputError, reason_of
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.weight_files import SINGLE_FILE
from activation_extraction.model.weights import WeightSpec
from activation_extraction.store.local_files import IS_A_LINK, FolderError, write_file
from qwen2_jax import Qwen2, weight_table

VOCAB_SIZE = 2048
DOCUMENTS = 300  # number of documents in the data set
# The number of sentences in a document has a log-normal distribution with this median. SPREAD is
# the standard deviation of its logarithm.
MEDIAN_SENTENCES = 6
SPREAD = 0.8
END_OF_TEXT = "<|endoftext|>"
# The pattern by which Qwen2 splits text before byte-level BPE, copied from its tokenizer.json.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MODEL_CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
}


def make_demo(output: Path) -> tuple[Path, Path]:
    """Makes the model and the documents of --demo in the folder demo_inputs.

    Args:
        output: The folder in which demo_inputs is made.

    Returns:
        The path of the model's folder, and the path of the Parquet file with the documents.

    Raises:
        InputError: If the files cannot be written.
    """
    demo_folder = output / "demo_inputs"
    model_folder = demo_folder / "model"
    documents_file = demo_folder / "documents.parquet"
    specs_of_weights = weight_table(Qwen2(parse_model_config(MODEL_CONFIG))).values()
    text_of_documents = (
        resources.files(__package__).joinpath("demo_texts.txt").read_text(encoding="utf-8")
    )
    paragraphs_of_text = text_of_documents.strip().split("\n\n")
    try:
        for new_folder in (demo_folder, model_folder):
            if new_folder.is_symlink():
                raise OSError(errno.ELOOP, IS_A_LINK)
            new_folder.mkdir(parents=True, exist_ok=True)
        write_documents(documents_file, paragraphs_of_text)
        write_tokenizer(model_folder, paragraphs_of_text)
        write_file(model_folder / "config.json", [json.dumps(MODEL_CONFIG, indent=2).encode()])
        write_weights(model_folder / SINGLE_FILE, specs_of_weights)
    except (OSError, FolderError) as error:
        raise InputError(f"--demo: {demo_folder}: {reason_of(error)}") from error
    return model_folder, documents_file


def write_documents(path: Path, paragraphs: list[str]) -> None:
    """Writes a Parquet file with DOCUMENTS documents.

    A document consists of consecutive sentences of the sample text, demo_texts.txt.

    Args:
        path: The path of the file.
        paragraphs: The paragraphs of the sample text.
    """
    random_generator = random.Random(0)
    sentences: list[str] = []
    for paragraph in paragraphs:
        sentences += re.split(r"(?<=[.!?]) ", paragraph)
    document_rows = []
    for document_number in range(DOCUMENTS):
        num_sentences = math.ceil(
            random_generator.lognormvariate(math.log(MEDIAN_SENTENCES), SPREAD)
        )
        first_sentence_index = random_generator.randrange(len(sentences))
        document_text = " ".join(
            sentences[first_sentence_index : first_sentence_index + num_sentences]
        )
        document_rows.append(
            {
                "text": document_text,
                "id": f"<urn:demo:{document_number:04d}>",
                "score": random_generator.uniform(3, 5),
            }
        )
    parquet_buffer = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(document_rows), parquet_buffer, row_group_size=100
    )
    write_file(path, [parquet_buffer.getvalue().to_pybytes()])


def write_tokenizer(folder: Path, paragraphs: list[str]) -> None:
    """Trains and writes a byte-level BPE tokenizer that splits words as Qwen2's tokenizer does.

    Args:
        folder: The folder of the model.
        paragraphs: The paragraphs of the demo text, on which the tokenizer is trained.
    """
    bpe_tokenizer = Tokenizer(models.BPE())
    bpe_tokenizer.normalizer = normalizers.NFC()
    bpe_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe_tokenizer.decoder = decoders.ByteLevel()
    bpe_trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe_tokenizer.train_from_iterator(paragraphs, bpe_trainer)
    write_file(folder / "tokenizer.json", [bpe_tokenizer.to_str(pretty=True).encode()])
    tokenizer_settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
    }
    write_file(
        folder / "tokenizer_config.json", [json.dumps(tokenizer_settings, indent=2).encode()]
    )


def write_weights(path: Path, table: Iterable[WeightSpec]) -> None:
    """Writes random bfloat16 weights.

    The weights are normally distributed with variance 1 / (length of the last axis). Their mean is
    1 for the weights of norms and 0 for all others.

    Args:
        path: The path of the safetensors file.
        table: The specifications of the model's weights.
    """
    random_generator = np.random.default_rng(0)
    tensor_by_name = {}
    for weight_spec in table:
        for tensor_name in weight_spec.hf_names:
            weight_values = random_generator.standard_normal(weight_spec.hf_shape, np.float32)
            weight_values /= math.sqrt(weight_spec.hf_shape[-1])
            if tensor_name.endswith("norm.weight"):
                weight_values += 1
            tensor_by_name[tensor_name] = weight_values.astype(ml_dtypes.bfloat16)
    write_file(path, [save(tensor_by_name, metadata={"format": "pt"})])
