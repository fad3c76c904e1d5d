"""What reads the output of a run, finished or still going on: ActivationDataset, --status, --verify.

Imports no JAX. Never runs pickled code.
"""
