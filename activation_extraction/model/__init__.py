"""This folder holds what runs on the devices, from a checkpoint to the compiled step.

model_config.py and rope.py read config.json; checkpoint.py finds a model's files, tensor_names.py
finds the text model in them, weight_files.py reads tensors, float8.py multiplies those of float8 by
their scales, lora.py merges an adapter, and weights.py turns them into parameters; mesh.py spreads
arrays over devices, and automatic_mesh.py chooses how; attention.py, experts.py and delta_net.py
define what kernels.py, on TPUs delta_kernel.py and expert_kernel.py, and on GPUs flash_kernel.py
and grouped_kernel.py, compute faster, and trial.py compares them; hooks.py lists the hooks,
predictions.py computes those that need the logits, and capture.py collects all values; forward.py
assembles all that. The script passes the model families in.
This folder knows nothing of files of activations, of other hosts or of the loop.
"""
