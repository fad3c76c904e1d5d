from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
from sae_lens.config import SAETrainerConfig
from sae_lens.training.sae_trainer import SAETrainer

from activation_extraction import ActivationDataset

hook = "blocks.5.hook_resid_post"
dataset = ActivationDataset("activations", hooks=[hook])  # or a bucket: "gs://bucket/run"
batches = dataset.batches(2048, shuffle=0, dtype="float32")
width = dataset.hooks[hook]
sae = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=width, d_sae=8 * width))
config = SAETrainerConfig(dataset.tokens, train_batch_size_samples=2048, lr=1e-3, lr_end=1e-3)
SAETrainer(config, sae, (batch.torch()[hook] for batch in batches)).fit()
sae.save_inference_model("sae")
