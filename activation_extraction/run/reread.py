"""The whole text of stored samples of which only some tokens are stored.

To recompute a kept token takes all tokens in front of it. They are read again from the data set,
from where the shard's samples begin.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from activation_extraction.common.errors import InputError
from activation_extraction.inspect.verify_shard import Chosen
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.digests import digest_files
from activation_extraction.run.host_text import Dataset, open_dataset
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import METADATA, identity_of
from activation_extraction.text.choice import TokenChoice
from activation_extraction.text.documents import DocumentStream
from activation_extraction.text.samples import samples
from activation_extraction.text.tokenizer import load_tokenizer

OTHER_TEXT = "the data set now gives other tokens than those that are stored"


@dataclass(frozen=True)
class Texts:
    """The data set and the tokenizer of a run, both checked to be the run's."""

    dataset: Dataset
    tokenizer: Tokenizer
    identity: Identity

    @property
    def choice(self) -> TokenChoice:
        return TokenChoice(self.identity.positions, self.identity.drop_token_ids)

    def whole(self, chosen: Sequence[Chosen]) -> list[np.ndarray | None]:
        """All token ids of every sample; None where the kept ones are not those that are stored."""
        groups: dict[Any, list[Chosen]] = defaultdict(list)
        for sample in chosen:
            groups[sample.worker, sample.shard].append(sample)
        found: dict[int, np.ndarray] = {}
        for group in groups.values():
            found |= self._read(group)
        return [self._checked(sample, found.get(sample.sample_idx)) for sample in chosen]

    def _read(self, group: Sequence[Chosen]) -> dict[int, np.ndarray]:
        """Token ids by `sample_idx`, of samples of one shard."""
        identity, wanted = self.identity, {sample.sample_idx for sample in group}
        documents = DocumentStream(
            self.dataset.rows, identity.text_column, group[0].worker, identity.skip_bad_rows
        )
        found = {}
        stream = samples(documents, self.tokenizer, identity.max_seq_length, start=group[0].start)
        for sample in stream:
            if sample.sample_idx in wanted:
                found[sample.sample_idx] = sample.token_ids
            if sample.sample_idx >= max(wanted):
                break
        return found

    def _checked(self, sample: Chosen, token_ids: np.ndarray | None) -> np.ndarray | None:
        if token_ids is None:
            return None
        positions = self.choice.kept(sample.sample_idx, token_ids)
        same = np.array_equal(positions, sample.positions)
        return (
            token_ids if same and np.array_equal(token_ids[positions], sample.token_ids) else None
        )


def open_texts(
    metadata: Mapping[str, Any], checkpoint: Checkpoint, vocabulary: int, dataset_path: str | None
) -> Texts:
    """dataset_path: where the data set is now; None: where the run had it.

    Raises InputError when the tokenizer or the data set is not the run's.
    """
    identity, asked = identity_of(metadata, METADATA), metadata["configuration"]
    files = checkpoint.tokenizer_files()
    if digest_files(files) != identity.tokenizer_digest:
        raise InputError(
            f"--model_path {checkpoint.model_path}: its tokenizer is not the one of the stored "
            "activations"
        )
    path = dataset_path or asked["dataset_path"]
    source = path, asked["dataset_name"], asked["dataset_config"], asked["dataset_split"]
    dataset = open_dataset(*source, identity.text_column, own=[metadata])
    if (dataset.name, dataset.content) != (identity.data, identity.data_revision):
        raise InputError(f"--dataset_path {path}: is not the data set that the run has read")
    return Texts(dataset, load_tokenizer(files, checkpoint.model_path, vocabulary), identity)
