"""This folder holds what runs on the devices, from a checkpoint to the compiled step.

model_config.py and rope.py read config.json; checkpoint.py finds a model's files, tensor_names.py
finds the text model in them, weight_files.py reads tensors, float8.py multiplies those of float8 by
their scales, lora.py merges an adapter, and weights.py turns them into parameters of the modules in
layers.py, which decoder.py stacks; autoencoders.py reads autoencoders, those in .pt files by
torch_file.py, and encode.py computes their codes; devices.py knows the devices, mesh_choice.py
chooses the mesh by what step_cost.py estimates, mesh.py builds it, host_rows.py brings rows to it,
and compilation.py compiles; attention.py, experts.py and delta_net.py define what kernels.py, on
TPUs delta_kernel.py and expert_kernel.py, and on GPUs flash_kernel.py and grouped_kernel.py,
compute faster, and trial.py compares them; hooks.py lists the hooks,
predictions.py computes those that need the logits, capture.py collects all values, and kept.py
moves those of kept tokens off the devices; forward.py assembles all that. family.py has the table
of the supported models, released.py the sizes of released ones. The model itself is in qwen2_jax.py
and qwen2_jax_with_hooks.py, which lie at the top level and belong to this folder. It knows nothing
of files of activations, of other hosts or of the loop.
"""
