"""What runs on the devices: attention, the mesh, the checkpoint and its weights, the compiled step.

Knows nothing of text, files of activations or other hosts.
"""
