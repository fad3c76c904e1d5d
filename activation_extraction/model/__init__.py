"""What runs on the devices, from the files of a model to the compiled step.

A model is found and read:

    repository.py        finds the files of a model, an adapter or an autoencoder
    repository_files.py  these files in a folder, at a URL or on the hub
    hub_files.py         these files on the hub or in its cache
    not_read.py          says why files are not read
    family.py            the table of the supported models
    model_config.py      ModelConfig: a checked config.json
    rope.py              the rotary embedding
    released.py          the sizes of released models, for plans
    checkpoint.py        finds the tensors of a model
    tensor_names.py      finds the text model among the tensors
    weight_files.py      reads parts of tensors from files
    float8.py            multiplies float8 tensors by their scales
    lora.py              merges an adapter
    weights.py           turns tensors into parameters
    autoencoders.py      reads published autoencoders
    torch_file.py        reads .pt files without PyTorch

A token passes these layers, of which there are faster kernels for each platform:

    numerics.py          how products accumulate and are rounded
    parameters.py        declares the parameters of a module
    layers.py            projections, norms and rotations
    attention.py         attention over packed rows
    delta_net.py         the gated delta net
    experts.py           experts
    decoder.py           stacks of layers
    kernels.py           the kernels of each platform
    delta_kernel.py      the gated delta rule on TPUs
    expert_kernel.py     experts on TPUs
    flash_kernel.py      attention on GPUs
    grouped_kernel.py    experts on GPUs
    trial.py             compares kernels with their definitions, and chooses

Values are extracted:

    hooks.py             names the hooks of a model, and finds those that are asked for
    capture.py           collects the values of hooks
    predictions.py       losses, entropies and the most likely tokens
    encode.py            encodes values by autoencoders
    kept.py              brings only the values of kept tokens off the devices

A step runs on devices:

    model_setup.py       sets up the model from what the flags ask for
    forward.py           the compiled step
    devices.py           the devices, their speed, memory and errors
    mesh_choice.py       chooses the mesh
    step_cost.py         estimates the memory and the time of a step, for the choice
    mesh.py              meshes, and how arrays lie on them
    host_rows.py         brings rows from hosts to the mesh, and activations back
    compilation.py       compiles programs, and keeps compiled ones

The model itself is in qwen2_jax.py and qwen2_jax_with_hooks.py, which lie at the top level and
belong to this room. It knows nothing of files of activations, of other hosts or of the loop.
"""
