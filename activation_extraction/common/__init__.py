"""What every other folder may use: the two kinds of failure, the log, the filter of texts.

errors.py defines the kinds of failure; log.py is the log, and visible.py the one filter for text
that leaves the program; retries.py words what libraries say of requests that they retry;
positions.py parses rules for positions, and choices.py has values that flags offer. This folder
imports no JAX and nothing from the other folders.
"""
