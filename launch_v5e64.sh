#!/usr/bin/env bash
# Starts an extraction on one host: a host of a pod of any kind, or a single one. It runs inside and
# outside of Docker.
set -euo pipefail

usage() {
    cat <<'END'
usage: [VARIABLE=value ...] launch_v5e64.sh [--dry-run] [flags of extract_activations.py ...]

Environment variables become flags. Flags on the command line take precedence over them.

  required        MODEL_PATH, and GCS_BUCKET or OUTPUT_DIR
  hosts of a pod  COORDINATOR_ADDRESS=HOST_0:PORT HOST_ID NUM_HOSTS. Set none of these on Cloud TPU,
                  GKE and Slurm, and all three elsewhere. Without a pod, set only NUM_HOSTS=1
  machines        MACHINE_ID TOTAL_MACHINES
  text            DATASET_NAME DATASET_CONFIG DATASET_SPLIT, or DATASET_PATH; TEXT_COLUMN MAX_SAMPLES
  extraction      LAYERS_TO_EXTRACT="12 18" ACTIVATION_TYPE, or HOOK_NAMES="GLOB ..."
  computing       DTYPE BATCH_SIZE MAX_SEQ_LENGTH MESH_TYPE TPU_MESH_CONFIG=4,4,4
                  TPU_AXIS_NAMES=data,fsdp,model STALL_TIMEOUT
  output          OUTPUT_DIR ACTIVATION_DTYPE SHARD_FORMAT SHARD_SIZE_GB
  upload          GCS_BUCKET (turns it on) GCS_PREFIX UPLOAD_TIMEOUT
                  DELETE_LOCAL_AFTER_UPLOAD=true or false
  PYTHON          the interpreter (default: .venv/bin/python beside this script, or python3)

--dry-run checks the flags and prints the command, quoted for the shell, without starting it.
END
}

fail() {
    echo "error: $1" >&2
    exit 2
}

# has_flag NAME...: succeeds if the command line contains at least one of these flags.
has_flag() {
    local argument flag
    for argument in "${arguments[@]}"; do
        for flag in "$@"; do
            [[ $argument == "--$flag" || $argument == "--$flag="* ]] && return
        done
    done
    return 1
}

dry_run=
arguments=()
for argument in "$@"; do
    case $argument in
        --dry-run) dry_run=1 ;;
        --help | -h) usage && exit ;;
        --) ;; # the arguments after it need no separator, because they are passed on anyway
        *) arguments+=("$argument") ;;
    esac
done

# Without these flags, the tool would use its default model and output folder, which nobody wants on a
# pod. The tool itself checks all other flags.
[[ ${MODEL_PATH:-} ]] || has_flag model_path demo ||
    fail "MODEL_PATH: is not set; give a hub name such as Qwen/Qwen2.5-7B, or a folder on every host"
[[ ${GCS_BUCKET:-}${OUTPUT_DIR:-} ]] || has_flag gcs_bucket output_dir ||
    fail "GCS_BUCKET: is not set; give a bucket, or set OUTPUT_DIR to keep the shards on this host"

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-$repository/.venv/bin/python}
[[ ${PYTHON:-} || -x $python ]] || python=python3
command=("$python" "$repository/extract_activations.py")

# Both functions add the flag --NAME to the command, unless the variable is empty.
# flag NAME VARIABLE: the variable is one value of the flag.
# flags NAME VARIABLE: each word of the variable is a value of the flag.
flag() { [[ ! ${!2:-} ]] || command+=("--$1" "${!2}"); }
flags() {
    local words
    IFS=$' \t\n' read -r -d '' -a words <<<"${!2:-}" || true
    [[ ${#words[@]} == 0 ]] || command+=("--$1" "${words[@]}")
}

[[ ${NUM_HOSTS:-} == 1 ]] || has_flag multihost || command+=(--multihost)
[[ ${NUM_HOSTS:-} == 1 ]] && unset COORDINATOR_ADDRESS HOST_ID NUM_HOSTS
for name in COORDINATOR_ADDRESS HOST_ID NUM_HOSTS MODEL_PATH DTYPE DATASET_NAME DATASET_CONFIG \
    DATASET_SPLIT DATASET_PATH TEXT_COLUMN MAX_SAMPLES MACHINE_ID TOTAL_MACHINES ACTIVATION_TYPE \
    BATCH_SIZE MAX_SEQ_LENGTH MESH_TYPE STALL_TIMEOUT OUTPUT_DIR ACTIVATION_DTYPE SHARD_FORMAT \
    SHARD_SIZE_GB GCS_BUCKET GCS_PREFIX UPLOAD_TIMEOUT; do
    flag "${name,,}" "$name"
done
flag mesh_shape TPU_MESH_CONFIG
flag mesh_axes TPU_AXIS_NAMES
flags layers_to_extract LAYERS_TO_EXTRACT
flags hook_names HOOK_NAMES
[[ ! ${GCS_BUCKET:-} ]] || command+=(--upload_to_gcs)
case ${DELETE_LOCAL_AFTER_UPLOAD:-true} in
    true) ;;
    false) command+=(--keep_local) ;;
    *) fail "DELETE_LOCAL_AFTER_UPLOAD=$DELETE_LOCAL_AFTER_UPLOAD: expected true or false" ;;
esac
command+=("${arguments[@]}")

[[ $dry_run ]] || exec "${command[@]}"

# The tool's own parser checks the flags, if the tool's packages are installed here.
status=0
messages=$(PYTHONPATH=$repository "$python" -m activation_extraction.cli.config "${command[@]:2}" 2>&1 >/dev/null) ||
    status=$?
case $status in
    0) ;;
    2) echo "$messages" >&2 && exit 2 ;;
    *) echo "the flags were not checked: $python cannot run extract_activations.py here" >&2 ;;
esac
printf '%q ' "${command[@]}"
echo
