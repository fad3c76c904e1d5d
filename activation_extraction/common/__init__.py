"""This folder holds what every other folder may use: failures, the log and the filter of texts.

errors.py defines the two kinds of failure; log.py is the log, and visible.py filters all text that
leaves the program; retries.py rewords what libraries log about requests that they retry;
positions.py parses rules for positions, choices.py has the values that flags offer,
tokenizer_files.py the names of a tokenizer's files, encodings.py the encoding of activations in one
byte per value, and codes.py that of the active features of autoencoders. interrupts.py ends the
process on Ctrl-C, late_imports.py imports transformers, host_memory.py tells how much memory there
is, and allow_list.py unpickles without running code. This folder imports no JAX and nothing from
the other folders.
"""
