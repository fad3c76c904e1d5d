"""What runs on the devices, from a checkpoint to the compiled step.

A model family (its configuration, modules, weight table and hooks) is handed in. This room puts its
weights and arrays on a mesh, captures what hooks ask for, and compiles. It knows nothing of files
of activations, of other hosts, or of the loop over batches.
"""
