#!/bin/bash
# The entry point of the image: passes `-c "..."` to bash, and any other arguments to
# extract_activations.py.
if [[ ${1:-} == -c ]]; then
    exec bash "$@"
fi
exec python "${BASH_SOURCE[0]%/*}/../extract_activations.py" "$@"
