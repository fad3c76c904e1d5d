"""What reads the output of a run: ActivationDataset, --status and --verify.

It reads runs that are finished and runs that are still going on. It imports no JAX and never runs
pickled code.
"""
