"""What every other folder may use: the two kinds of failure and the text that reaches the user.

errors.py defines the kinds of failure; visible.py is the one filter for text that leaves the
program; retries.py words what libraries say of requests that they retry; positions.py parses rules
for positions. This folder imports no JAX and nothing from the other folders.
"""
