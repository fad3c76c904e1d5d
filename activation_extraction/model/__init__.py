"""What runs on the devices, from a checkpoint to the compiled step.

checkpoint.py reads safetensors files and weights.py makes parameters of them; mesh.py spreads
arrays over devices; attention.py defines which token sees which, and kernels.py computes the same
faster; capture.py collects what the hooks ask for; forward.py checks and assembles all that, and
step.py compiles it. The model family (its configuration, modules, weight table and hooks) is handed
in. This folder knows nothing of files of activations, of other hosts, or of the loop over batches.
"""
