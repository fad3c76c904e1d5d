"""Looks at the output of a run: its status, its soundness, its content.

look.py does what a flag asks for: status.py finds the state of each folder, adds the states up and
prints them; verify.py checks the folders, report.py describes them and export.py converts them.
This folder imports no JAX and never runs pickled code.
"""
