"""Documents in, packed batches out: reading data sets, tokenising, packing, and the cursor.

Imports no JAX. Knows nothing of the model or of what is stored.
"""
