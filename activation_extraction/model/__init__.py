"""What runs on the devices, from a checkpoint to the compiled step.

checkpoint.py finds a model's files, weight_files.py reads tensors from them, and weights.py makes
parameters of these; mesh.py spreads arrays over devices; attention.py and experts.py define what
kernels.py computes faster, and trial.py says which of them a run uses; hook_points.py lists the
hooks and capture.py collects their values; forward.py checks and assembles all that, and step.py
compiles it. The model families (configuration, modules, weight table, hooks) are handed in. This
folder knows nothing of files of activations, of other hosts, or of the loop over batches.
"""
