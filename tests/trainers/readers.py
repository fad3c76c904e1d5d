"""Reads an export with a trainer's own code, and saves everything that the code returns.

Runs in the trainers' environment. `readers.py NAME ARGUMENTS...` calls a function of this file, and
saves its result in read.pt of the current folder:

- `speculators`: The arguments are those of `python -m speculators.train`.
- `specforge`: The argument is the file of `specforge train --config`.
- `delphi`: The argument is the folder of the export.
- `sae_lens`: The arguments are the folder of a hook in the export, the hook, the tokens of a row,
  and the width.

Nothing of the packages is replaced. They are installed without vllm, sglang and bitsandbytes, which
the imported modules do not need.
"""

import sys
from argparse import Namespace

import torch

EXAMPLES = 2  # number of examples that delphi chooses for training, and for testing
INACTIVE = 3  # number of windows without a feature that delphi chooses for the feature


def speculators(*arguments):
    """Returns the samples that speculators' training reads, their lengths, and the arguments."""
    from hs_connectors import HiddenStatesBackend
    from speculators.train.config import TrainConfig
    from speculators.train.data import ArrowDataset

    options = Namespace(**TrainConfig.resolve([*arguments]).flatten())
    backend = HiddenStatesBackend.registry[options.hidden_states_backend]
    dataset = ArrowDataset(
        max_len=options.total_seq_len,
        datapath=options.data_path,
        transfer=backend.from_train_args(options, options.data_path),
        on_missing=options.on_missing,
        hidden_states_dtype=getattr(torch, options.hidden_states_dtype),
    )
    return {
        "target_layer_ids": options.target_layer_ids,
        "lengths": dataset.approx_lengths,
        "samples": [dataset[index] for index in range(len(dataset))],
    }


def specforge(config_file):
    """Returns the batches, one for each sample, that `specforge train` reads, by their files."""
    from specforge.algorithms.builtin import builtin_algorithm_registry
    from specforge.config import load_config
    from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
    from specforge.runtime.data_plane.feature_store import LocalFeatureStore

    config = load_config(config_file)
    strategy, ttt_length = config.training.strategy, config.training.ttt_length
    max_length = config.data.max_length
    algorithm = builtin_algorithm_registry().resolve(strategy)
    provider = algorithm.providers.offline_for(config.model.input_modality)
    reader = provider.build_reader(
        config.data.hidden_states_path, run_id="run", ttt_length=ttt_length, max_len=max_length
    )
    references = reader.read()
    loader = FeatureDataLoader(
        LocalFeatureStore("run"),
        refs=references,
        collate_fn=provider.build_collator(),
        per_sample_transform=provider.build_normalizer(
            max_length, ttt_length=ttt_length, use_usp_preprocess=False
        ),
        strategy=strategy,
    )
    files = [reference.feature_store_uri for reference in references]
    batches = [dict(batch.tensors) for batch in loader]
    return dict(zip(files, batches, strict=True))


def delphi(folder):
    """Returns what delphi's constructor and sampler make of each feature.

    delphi explains only features with 200 examples by default; here, one example is enough.
    """
    from delphi.config import ConstructorConfig, SamplerConfig
    from delphi.latents import LatentDataset

    sampling = SamplerConfig(
        n_examples_train=EXAMPLES, n_examples_test=EXAMPLES, n_quantiles=2, train_type="top"
    )
    constructing = ConstructorConfig(min_examples=1, n_non_activating=INACTIVE)
    return [
        {
            "hook": record.latent.module_name,
            "feature": record.latent.latent_index,
            "token_frequency": record.per_token_frequency,
            "window_frequency": record.per_context_frequency,
            "token_ids": torch.stack([example.tokens for example in record.examples]),
            "values": torch.stack([example.activations for example in record.examples]),
            "inactive_token_ids": [example.tokens for example in record.not_active],
            "training_texts": [example.str_tokens for example in record.train],
            "test_values": [example.activations for example in record.test],
        }
        for record in LatentDataset(folder, sampling, constructing)
    ]


def sae_lens(folder, hook, row_tokens, width):
    """Returns the activations and token ids of each row, which SAELens reads in order."""
    from sae_lens.config import CacheActivationsRunnerConfig
    from sae_lens.training.activations_store import ActivationsStore

    config = CacheActivationsRunnerConfig(
        dataset_path="",
        model_name="",
        model_batch_size=1,
        hook_name=hook,
        d_in=int(width),
        training_tokens=int(row_tokens),
        context_size=int(row_tokens),
        new_cached_activations_path=folder,
        device="cpu",
    )
    store = ActivationsStore.from_cache_activations(None, config)
    return [store.get_raw_llm_batch() for _ in range(len(store.cached_activation_dataset))]


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(globals()[sys.argv[1]](*sys.argv[2:]), "read.pt")
