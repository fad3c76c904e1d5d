"""Batches as a PyTorch data set. The only module that needs PyTorch; nothing else imports it."""

from collections.abc import Iterator

from torch.utils.data import IterableDataset, get_worker_info

from activation_extraction.dataset.batches import Batches
from activation_extraction.dataset.token_batch import TokenBatch


class TorchBatches(IterableDataset):
    """The batches of `Batches` as tensors.

    A loop in this process goes on where the batches stand. A DataLoader's worker begins its share
    from the start.
    """

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[TokenBatch]:
        batches = self._batches if get_worker_info() is None else self._batches.again()
        return (batch.torch() for batch in batches)
