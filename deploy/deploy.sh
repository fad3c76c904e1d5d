#!/usr/bin/env bash
# Runs an extraction in Docker on all hosts of a Cloud TPU, from a laptop. See --help.
set -euo pipefail
script_folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'END'
usage: [VARIABLE=value ...] deploy/deploy.sh start TPU --image IMAGE [options] [-- flags]
       deploy/deploy.sh follow TPU [options]
       deploy/deploy.sh stop TPU [options]

  start    pull the image on every host, start the extraction on all of them, and follow it
  follow   print the logs, each line with the number of its host, until the extraction ends
  stop     stop all hosts; they store their complete samples first

Variables: see launch_v5e64.sh --help. Flags of extract_activations.py come after --. Relative paths
are relative to ~/activation-extraction on the hosts; absolute paths must exist there.
Options are those of gcloud: --zone, --project, --tunnel-through-iap, --internal-ip.

Ctrl-C only ends following; the extraction continues. An extraction that has stopped is not
restarted automatically: to continue it, run start again. The exit status is 0 if all hosts are
done, 2 for bad input, and otherwise that of gcloud.
END
}

fail() {
    echo "error: $1" >&2
    exit 2
}

quote() { # prints $1 quoted, so that any shell reads it as one word, whatever it contains
    local quote=\' escaped="'\\''"
    printf "'%s'" "${1//$quote/$escaped}"
}

on_all_hosts() { # SCRIPT ARGUMENT...: runs a bash script with these arguments on all hosts at once
    local command word
    command="bash -euc $(quote "$1")"
    for word in "${@:2}"; do command+=" $(quote "$word")"; done
    command="bash -c $(quote "$command")"
    gcloud compute tpus tpu-vm ssh "$tpu" "${options[@]}" --worker=all --batch-size=all \
        --ssh-flag="-oBatchMode=yes -oServerAliveInterval=30" --command="$command" </dev/null
}

# The scripts that run on the hosts. They must not exit with status 255, because gcloud would then run
# them again.
# shellcheck disable=SC2016  # the hosts expand the variables
{
    pull='
        case $0 in *.pkg.dev/*) sudo gcloud auth configure-docker "${0%%/*}" --quiet ;; esac
        sudo docker pull --quiet "$0"'
    start='
        mkdir -p ~/activation-extraction ~/.cache/huggingface ~/.cache/activation_extraction
        sudo docker rm extraction >/dev/null 2>&1 || true # a container that still runs is not removed
        sudo docker run --detach --init --name extraction --privileged --net=host --shm-size=16g \
            --volume ~/activation-extraction:/data --workdir /data \
            --volume ~/.cache/huggingface:/cache/huggingface \
            --volume ~/.cache/activation_extraction:/cache/activation_extraction "$@" >/dev/null'
    follow='
        host=${HOSTNAME##*-w-} # TPU VMs are called t1v-n-SOMETHING-w-NUMBER
        sudo docker logs --follow --tail=100 extraction 2>&1 |
            sed --unbuffered -e "s/.*\r//" -e "s/^/[$host] /"
        status=$(sudo docker wait extraction)
        echo "[$host] ended with status $status"
        exit "$status"'
    stop='sudo docker stop --time=120 extraction'
}

verb=${1:-} tpu=${2:-} image="" options=()
case $verb in
    start | follow | stop) ;;
    --help | -h) usage && exit ;;
    *) fail "${verb:-VERB}: expected start, follow or stop (see --help)" ;;
esac
[[ $tpu && $tpu != -* ]] || fail "TPU: is missing; expected the name of a Cloud TPU (see --help)"
shift 2
while (($#)) && [[ $1 != -- ]]; do
    case $1 in
        --image | --zone | --project)
            [[ ${2:---} != -- ]] || fail "$1: expected a value after it"
            if [[ $1 == --image ]]; then image=$2; else options+=("$1=$2"); fi
            shift
            ;;
        --tunnel-through-iap | --internal-ip) options+=("$1") ;;
        *) fail "$1: unknown option; flags of extract_activations.py come after --" ;;
    esac
    shift
done
if (($#)); then shift; fi # removes the --

if [[ $verb == stop ]]; then
    on_all_hosts "$stop"
    exit
fi
if [[ $verb == start ]]; then
    [[ $image ]] || fail "--image: is missing; start needs the name of the image to run"
    unset COORDINATOR_ADDRESS HOST_ID NUM_HOSTS # JAX finds the hosts of a Cloud TPU
    command=$("$script_folder/../launch_v5e64.sh" --dry-run "$@")
    # launch_v5e64.sh prints the interpreter, the script and the flags, quoted for the shell.
    words=() && eval "words=($command)"
    mounts=()
    for word in "${words[@]:2}"; do
        path=${word#--*=} path=${path%%[*?[]*} # removes everything from the first wildcard on
        [[ $path != /* ]] || mounts+=(--mount "type=bind,source=$path,target=$path")
    done
    on_all_hosts "$pull" "$image"
    on_all_hosts "$start" bash "${mounts[@]}" "$image" "${words[@]:2}"
    echo "started; Ctrl-C ends following; deploy/deploy.sh stop $tpu ends the extraction"
fi
on_all_hosts "$follow"
