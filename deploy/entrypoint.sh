#!/bin/bash
# What the image runs: `-c "..."` goes to bash, anything else to extract_activations.py.
if [[ ${1:-} == -c ]]; then
    exec bash "$@"
fi
exec python "${BASH_SOURCE[0]%/*}/../extract_activations.py" "$@"
