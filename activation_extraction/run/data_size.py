"""How much data a run computes and stores, as far as its flags and known data sets tell.

Documents are assumed to be as long as those of FineWeb-Edu, for all of which DOCUMENTS stand.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist, fmean

from activation_extraction.cli.flags import DATASET, Config
from activation_extraction.common.positions import parse_positions

# (data set, configuration) -> its documents, as others have counted them.
KNOWN = {(DATASET[0], "sample-10BT"): 9_672_101, (DATASET[0], "sample-350BT"): 339_347_842}
# Tokens per document of sample-10BT with GPT-2's tokenizer: they are about log-normal.
MEDIAN, SIGMA = 620, 1.0
QUANTILES = 1000
DOCUMENTS = [
    round(MEDIAN * math.exp(SIGMA * NormalDist().inv_cdf((number + 0.5) / QUANTILES)))
    for number in range(QUANTILES)
]


@dataclass(frozen=True)
class DataSize:
    """How much data one machine's run computes and stores.

    computed, stored: tokens per sample on average, all of them and those that are kept. tokens: how
    many are computed in all, at least and at most; None if nothing tells. why: where that number
    comes from.
    """

    computed: float
    stored: float
    tokens: tuple[float, float] | None
    why: str

    @property
    def kept(self) -> float:
        """Returns the share of the computed tokens that is stored."""
        return self.stored / self.computed


def data_size(config: Config) -> DataSize:
    """Returns how much data this machine's run computes and stores."""
    length, rule = config.max_seq_length, parse_positions(config.positions)
    samples = [sample for document in DOCUMENTS for sample in samples_of(config, document)]
    computed = fmean(samples)
    # A piece of a document repeats tokens of the one before, which are not stored again.
    repeated = config.overlap * (1 - QUANTILES / len(samples))
    stored = fmean(rule.expected(sample) for sample in samples)
    stored *= (computed - repeated) / computed
    low, high, reasons = math.inf, math.inf, list[str]()
    documents = KNOWN.get((config.dataset_name or "", config.dataset_config or ""))
    if documents is not None:
        low = high = documents / config.total_machines * len(samples) / QUANTILES * computed
        share = f" over {config.total_machines} machines" * (config.total_machines > 1)
        name = f"{config.dataset_name} {config.dataset_config}"
        reasons.append(f"{documents:,} documents of {name}{share}")
    if config.max_samples is not None:
        longest = length if documents is None else computed
        low, high = min(low, config.max_samples * computed), min(high, config.max_samples * longest)
        reasons.append("--max_samples" + f" of at most {length:,} tokens" * (documents is None))
    if config.max_tokens is not None:
        low, high = (min(size, config.max_tokens * computed / stored) for size in (low, high))
        reasons.append("--max_tokens")
    why = f"{', '.join(reasons)}; a sample has {computed:,.0f} tokens on average, as in FineWeb-Edu"
    return DataSize(computed, stored, None if math.isinf(high) else (low, high), why)


def samples_of(config: Config, document: int) -> list[int]:
    """Returns the lengths of the samples that a document becomes, all in tokens."""
    length = config.max_seq_length
    if config.long_documents != "split":
        return [min(document, length)]
    lengths = [min(document, length)]
    rest = document - lengths[0]
    while rest > 0:
        lengths.append(min(rest + config.overlap, length))
        rest -= lengths[-1] - config.overlap
    return lengths
