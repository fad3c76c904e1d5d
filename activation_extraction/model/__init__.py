"""This folder holds what runs on the devices, from the files of a model to the compiled step.

It knows nothing of files of activations, of other hosts or of the loop. The model itself is in
qwen2_jax.py and qwen2_jax_with_hooks.py, which lie at the top level and belong to this folder.

The files of a model:
    repository.py, repository_files.py, hub_files.py: where they are; not_read.py: errors
    family.py, model_config.py, rope.py: config.json; released.py: the sizes of released models
    checkpoint.py, tensor_names.py, weight_files.py: tensors, in which files
    float8.py, lora.py: scales and adapters; weights.py: from tensors to parameters
    autoencoders.py, torch_file.py: sparse autoencoders

What a token passes:
    numerics.py, parameters.py, layers.py: products, weights, norms and projections
    attention.py, delta_net.py, experts.py: what lies between projections
    decoder.py: the loop over layers
    hooks.py, capture.py: the list of hooks, and their values;
        predictions.py: the hooks that need the logits
    encode.py: the codes of autoencoders
    kernels.py: faster kernels (flash_kernel.py, grouped_kernel.py, delta_kernel.py,
        expert_kernel.py); trial.py compares them with their definitions

The devices:
    devices.py, compilation.py: chips and compilers
    mesh_choice.py, step_cost.py: which mesh a run gets; mesh.py: how arrays lie on it
    host_rows.py, kept.py: rows to the mesh, and activations back to the hosts

The step:
    model_setup.py: from what the flags ask for to a checked model; forward.py: the compiled step
"""
