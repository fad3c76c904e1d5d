"""What the user types and sees: flags, the configuration they make, errors, log, progress.

Imports no JAX, and nothing of the other rooms.
"""
