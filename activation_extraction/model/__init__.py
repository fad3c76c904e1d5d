"""Contains the model, and everything else that computes on devices.

Reading a model:

    repository.py        finds the files of a model, an adapter or an autoencoder
    repository_files.py  reads these files from a local folder or a URL
    hub_files.py         reads these files from the Hugging Face hub or its cache
    not_read.py          makes the errors about files that cannot be read
    family.py            lists the supported families of models, and reads config.json
    model_config.py      ModelConfig, the checked contents of a config.json
    rope.py              the rotary embedding
    released.py          sizes of released models, for plans without access to the hub
    checkpoint.py        finds and reads the tensors of a model
    tensor_names.py      finds the language model among the tensors of a checkpoint
    weight_files.py      reads parts of tensors from files
    float8.py            multiplies float8 tensors by their scales
    lora.py              merges a LoRA adapter into the weights
    weights.py           loads parameters from the tensors of a checkpoint
    autoencoders.py      reads published autoencoders
    torch_file.py        reads .pt files without PyTorch

The layers of a model, with faster kernels for some platforms:

    numerics.py          how products accumulate and are rounded
    parameters.py        declares the parameters of a module
    layers.py            projection, norm and rotary embedding
    attention.py         attention over packed rows
    delta_net.py         the gated delta net
    experts.py           experts, which are many small MLPs in a layer
    decoder.py           runs the layers of a model
    kernels.py           lists the kernels of each platform
    delta_kernel.py      a kernel for the gated delta rule on TPUs
    expert_kernel.py     a kernel for experts on TPUs
    flash_kernel.py      a kernel for attention on GPUs
    grouped_kernel.py    a kernel for experts on GPUs
    trial.py             chooses kernels, after a comparison with slow, exact functions

Extracting values:

    hooks.py             the names of hooks, and the hooks that flags select
    capture.py           collects the values at hooks
    predictions.py       logits, most likely tokens, losses and entropies
    encode.py            encodes values at hooks by autoencoders
    kept.py              copies only the values of kept tokens to the host

Running a step on devices:

    model_setup.py       sets up the model from the flags
    forward.py           loads and compiles the step, and runs it
    devices.py           the devices, their speed and memory, and their errors
    mesh_choice.py       chooses the mesh
    step_cost.py         estimates the memory and the duration of a step
    mesh.py              builds meshes, and splits arrays along their axes
    host_rows.py         passes rows from hosts to devices, and activations back
    compilation.py       compiles programs, and sets up the cache of compiled programs

The modules of the neural network are in qwen2_jax.py and qwen2_jax_with_hooks.py. These two files
are beside extract_activations.py and count as a part of this package. This package does not know
the files in which activations are stored, how hosts agree on a step, or the loop over steps.
"""
