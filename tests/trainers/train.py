"""Trains with a real trainer on the run in ./activations, or on its export in ./export, and prints
the losses as the last line, JSON. Runs in the trainers' environment: `train.py NAME`."""

import itertools
import json
import sys

import torch

from activation_extraction import ActivationDataset

HOOK = "blocks.5.hook_resid_post"
SIZE, STEPS = 2048, 80
WIDTH = ActivationDataset("activations").hooks[HOOK]


def activations():
    """Batches (SIZE, WIDTH) without end, shuffled differently in every epoch."""
    dataset = ActivationDataset("activations", hooks=[HOOK])
    for epoch in itertools.count():
        for batch in dataset.batches(SIZE, shuffle=epoch, dtype="float32").torch():
            yield batch[HOOK]


def sae_lens():
    """SAELens's trainer on our batches."""
    from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.sae_trainer import SAETrainer

    sae = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=WIDTH, d_sae=8 * WIDTH))
    config = SAETrainerConfig(SIZE * 100, train_batch_size_samples=SIZE, lr=1e-3, lr_end=1e-3)
    SAETrainer(config, sae, activations()).fit()


def sae_lens_cached():
    """SAELens's own runner, with nothing of ours but the export. It asks for a model and for a data
    set of tokens, which it does not use for training."""
    import sae_lens as lens
    from datasets import Dataset
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    model = HookedTransformerConfig(
        n_layers=1, d_model=WIDTH, n_ctx=128, d_head=8, d_vocab=128, act_fn="relu", device="cpu"
    )
    config = lens.LanguageModelSAERunnerConfig(
        sae=lens.StandardTrainingSAEConfig(d_in=WIDTH, d_sae=8 * WIDTH),
        hook_name=HOOK,
        context_size=128,
        use_cached_activations=True,
        cached_activations_path=f"export/{HOOK}",
        training_tokens=SIZE * STEPS,
        train_batch_size_tokens=SIZE,
        lr=1e-3,
        exclude_special_tokens=[7],
        logger=lens.LoggingConfig(log_to_wandb=False),
        output_path="sae",
    )
    tokens = Dataset.from_dict({"tokens": [list(range(128))]})
    lens.LanguageModelSAETrainingRunner(
        config, override_dataset=tokens, override_model=HookedTransformer(model)
    ).run()


def dictionary_learning():
    """dictionary_learning's trainer on our batches."""
    from dictionary_learning.trainers import StandardTrainer
    from dictionary_learning.training import trainSAE

    trainer = dict(trainer=StandardTrainer, steps=STEPS, activation_dim=WIDTH, dict_size=8 * WIDTH)
    trainer |= dict(layer=5, lm_name="demo", warmup_steps=5, sparsity_warmup_steps=None)
    trainSAE(activations(), [trainer | {"device": "cpu"}], steps=STEPS, device="cpu")


def main(name):
    losses, backward = [], torch.Tensor.backward

    def record_and_go_on(loss, *arguments, **options):
        losses.append(loss.item())
        backward(loss, *arguments, **options)

    torch.Tensor.backward = record_and_go_on
    torch.set_num_threads(1)
    torch.manual_seed(0)
    globals()[name]()
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1])
