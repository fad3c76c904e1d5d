"""Looks at the output of a run: its status, its soundness, its content.

status.py finds the state of each folder, and status_table.py adds the states up and prints them;
verify.py checks the folders, report.py describes them and export.py converts them. This folder
imports no JAX and never runs pickled code.
"""
