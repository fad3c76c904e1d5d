"""What the user types and sees.

flags.py and output_flags.py declare the flags and report a value that is missing or malformed.
config.py adds environment variables and defaults, and refuses flags that do not fit together.
console.py shows progress and takes signals; errors.py defines the two kinds of failure. This folder
imports no JAX and nothing from the other folders.
"""
