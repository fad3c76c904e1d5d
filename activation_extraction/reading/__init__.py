"""What reads a finished or running extraction: --status and --verify.

Imports no JAX. Never runs pickled code.
"""
