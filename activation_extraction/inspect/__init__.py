"""Looks at the output of a run, for the flags --status, --verify, --report and --export.

look.py starts what a flag asks for: status.py prints the state of every host, verify.py checks the
files, report.py describes the activations, and export.py copies them to files that trainers of
autoencoders (trainer_files.py) and of draft models (draft_files.py) read. This folder imports no
JAX and never runs pickled code.
"""
