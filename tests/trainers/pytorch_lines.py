import torch

from activation_extraction import ActivationDataset

hook = "blocks.5.hook_resid_post"
dataset = ActivationDataset("activations", hooks=[hook])  # or a bucket: "gs://bucket/run"
width = dataset.hooks[hook]
encoder, decoder = torch.nn.Linear(width, 8 * width), torch.nn.Linear(8 * width, width)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for batch in dataset.batches(2048, shuffle=0, dtype="float32"):
    activations = batch.torch()[hook]
    features = torch.relu(encoder(activations))
    loss = (decoder(features) - activations).square().sum(1).mean() + 1e-3 * features.sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
