"""Trains with a real trainer on the run in ./activations, or on its export in ./export, and prints
the losses as the last line, JSON. Runs in the trainers' environment: `train.py NAME`."""

import itertools
import json
import runpy
import sys
from pathlib import Path

import torch

from activation_extraction.dataset.dataset import ActivationDataset

FIRST, SECOND = "blocks.3.hook_resid_post", "blocks.5.hook_resid_post"
SIZE, STEPS = 2048, 80


def lines(name):
    """Lines of the README, as they stand there."""
    runpy.run_path(str(Path(__file__).with_name(name)))


def epochs(hooks):
    """Batches without end, shuffled differently in every epoch."""
    dataset = ActivationDataset("activations", hooks=hooks)
    for epoch in itertools.count():
        for batch in dataset.batches(SIZE, shuffle=epoch, dtype="float32"):
            yield batch.torch()


def dictionary_learning(data):
    """data: an iterator of tensors (batch, width)."""
    from dictionary_learning.trainers import StandardTrainer
    from dictionary_learning.training import trainSAE

    width = ActivationDataset("activations").hooks[SECOND]
    trainer = {
        "trainer": StandardTrainer,
        "steps": STEPS,
        "activation_dim": width,
        "dict_size": 8 * width,
        "layer": 5,
        "lm_name": "demo",
        "warmup_steps": 5,
        "sparsity_warmup_steps": None,
        "device": "cpu",
    }
    trainSAE(data, [trainer], steps=STEPS, device="cpu")


def llamascopium_settings(hook_in, hook_out):
    from llamascopium import (
        ActivationFactoryActivationsSource,
        ActivationFactoryConfig,
        ActivationFactoryTarget,
        InitializerConfig,
        SAEConfig,
        TrainerConfig,
        TrainSAESettings,
    )

    source = ActivationFactoryActivationsSource(
        path="export", name="run", dtype=torch.float32, num_workers=0, prefetch=None
    )
    return TrainSAESettings(
        sae=SAEConfig(
            hook_point_in=hook_in,
            hook_point_out=hook_out,
            d_model=ActivationDataset("activations").hooks[hook_in],
            expansion_factor=8,
            act_fn="topk",
            top_k=8,
            dtype=torch.float32,
            device="cpu",
        ),
        initializer=InitializerConfig(),
        trainer=TrainerConfig(
            amp_dtype=torch.float32,
            lr=1e-3,
            lr_warm_up_steps=5,
            initial_k=8,
            l1_coefficient=None,
            total_training_tokens=SIZE * STEPS,
            n_checkpoints=0,
            exp_result_path="results",
        ),
        activation_factory=ActivationFactoryConfig(
            sources=[source],
            target=ActivationFactoryTarget.ACTIVATIONS_1D,
            hook_points=list(dict.fromkeys([hook_in, hook_out])),
            batch_size=SIZE,
            buffer_size=4 * SIZE,
        ),
        sae_name="demo",
        sae_series="demo",
        device_type="cpu",
    )


def llamascopium_export(hook_in, hook_out):
    """Llamascopium's own runner, with nothing of ours but the export."""
    from llamascopium import train_sae

    train_sae(llamascopium_settings(hook_in, hook_out))


def llamascopium_iterator():
    """A transcoder from our batches, without an export."""
    from llamascopium import Initializer, Trainer

    def stream():
        for batch in epochs([FIRST, SECOND]):
            ones = torch.ones(len(batch), dtype=torch.int32)
            yield {**batch.activations, "tokens": batch.token_ids.long(), "mask": ones}

    settings = llamascopium_settings(FIRST, SECOND)
    sae = Initializer(settings.initializer).initialize_sae_from_config(
        settings.sae, activation_stream=stream()
    )
    Trainer(settings.trainer).fit(sae=sae, activation_stream=stream())


def sae_lens_cached():
    """SAELens's own runner, with nothing of ours but the export. It asks for a model and for a data
    set of tokens, which it does not use for training."""
    from datasets import Dataset
    from sae_lens import (
        LanguageModelSAERunnerConfig,
        LanguageModelSAETrainingRunner,
        LoggingConfig,
        StandardTrainingSAEConfig,
    )
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    width = ActivationDataset("activations").hooks[SECOND]
    model = HookedTransformerConfig(
        n_layers=1, d_model=width, n_ctx=128, d_head=8, d_vocab=128, act_fn="relu", device="cpu"
    )
    config = LanguageModelSAERunnerConfig(
        sae=StandardTrainingSAEConfig(d_in=width, d_sae=8 * width),
        hook_name=SECOND,
        context_size=128,
        use_cached_activations=True,
        cached_activations_path=f"export/{SECOND}",
        training_tokens=SIZE * STEPS,
        train_batch_size_tokens=SIZE,
        lr=1e-3,
        exclude_special_tokens=[7],
        logger=LoggingConfig(log_to_wandb=False),
        output_path="sae",
    )
    LanguageModelSAETrainingRunner(
        config,
        override_dataset=Dataset.from_dict({"tokens": [list(range(128))]}),
        override_model=HookedTransformer(model),
    ).run()


TRAINERS = {
    "sae_lens": lambda: lines("sae_lens_lines.py"),
    "sae_lens_cached": sae_lens_cached,
    "pytorch": lambda: lines("pytorch_lines.py"),
    "dictionary_learning": lambda: dictionary_learning(b[SECOND] for b in epochs([SECOND])),
    "llamascopium": lambda: llamascopium_export(SECOND, SECOND),
    "llamascopium_transcoder": lambda: llamascopium_export(FIRST, SECOND),
    "transcoder": llamascopium_iterator,
}


def main(name):
    losses = []
    backward = torch.Tensor.backward

    def record_and_go_on(loss, *arguments, **options):
        losses.append(loss.item())
        backward(loss, *arguments, **options)

    torch.Tensor.backward = record_and_go_on
    torch.set_num_threads(1)
    torch.manual_seed(0)
    TRAINERS[name]()
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1])
