"""Contains modules that all other packages may use, such as errors, the log and file formats.

    errors.py           the errors of this program, and their exit statuses
    log.py              the log, and a record of what each thread is doing
    visible.py          removes secrets and control characters from text before it is printed
    retries.py          rewords the log lines of libraries about requests that they retry
    interrupts.py       ends the process on Ctrl-C
    late_imports.py     imports transformers when it is needed
    host_memory.py      the bytes of CPU memory that this process can use
    choices.py          choices and defaults of flags that several packages use
    positions.py        the rule that selects the positions of a sample (--positions)
    tokenizer_files.py  the names of the files of a tokenizer
    encodings.py        float8 arrays, which store activations in one byte per value
    codes.py            codes, the active features of autoencoders, as sparse matrices
    safetensors.py      the headers of safetensors files, which contain shards or weights
    allow_list.py       reads pickles without running code that they contain

This package imports no JAX, and nothing from the other packages.
"""
