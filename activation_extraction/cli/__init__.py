"""What the user types and sees.

flags.py and output_flags.py list the flags; declare.py parses their values and words what is wrong
with one. config.py adds environment variables and defaults, and refuses flags that do not fit
together. console.py shows progress and takes signals. This folder imports no JAX, and of the other
folders only `common`.
"""
