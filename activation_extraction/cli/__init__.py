"""Contains the command line: the flags, the configuration, progress, and signals.

    flags.py    declares the flags, and the configuration that consists of their values
    declare.py  contains the functions with which flags.py declares its flags
    values.py   parses the text after a flag
    config.py   parses the command line, adds defaults, checks flags, and writes --help
    console.py  shows the progress of a run, and stops the run on signals

This package imports no JAX, and only the package `common`. Other packages import the parts of the
configuration from flags.py.
"""
