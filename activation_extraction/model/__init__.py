"""This folder holds what runs on the devices, from a checkpoint to the compiled step.

A model is found and read: repository.py finds its files (repository_files.py, hub_files.py), or
says why they are not read (not_read.py); model_config.py and rope.py read config.json, and
released.py has the sizes of released models; checkpoint.py finds tensors, by tensor_names.py, in
the files that weight_files.py reads; float8.py multiplies tensors by their scales, lora.py merges
an adapter, and weights.py turns tensors into parameters.

A token passes layers.py, attention.py, delta_net.py and experts.py, which decoder.py stacks;
capture.py collects the values at the hooks that hooks.py lists, predictions.py computes those that
need the logits, and encode.py the codes of the autoencoders that autoencoders.py reads. kernels.py
has faster kernels for each platform (delta_kernel.py, expert_kernel.py, flash_kernel.py and
grouped_kernel.py), and trial.py compares them with their definitions.

A step runs on devices.py: mesh_choice.py chooses the mesh by what step_cost.py estimates, mesh.py
builds it, host_rows.py brings rows to it and activations back, kept.py only those of kept tokens,
and compilation.py compiles. model_setup.py makes all that from the flags, and forward.py is the
compiled step.

The model itself is in qwen2_jax.py and qwen2_jax_with_hooks.py, which lie at the top level and
belong to this folder; family.py has the table of the supported models.

This folder knows nothing of files of activations, of other hosts or of the loop.
"""
