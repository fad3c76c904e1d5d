#!/usr/bin/env bash
# shellcheck disable=SC2154  # deploy.sh sends this text with every call, behind the variables it uses
#
# deploy.sh's part on a host. A job has a folder there with its command, log and exit status, and
# holds the lock of that folder for as long as it runs; it outlives the connection. So a host always
# knows whether the job runs, and nothing is started twice. Lines "@deploy KIND ..." are for deploy.sh,
# other lines for the user. No function may exit with status 255: gcloud would call it again.
set -euo pipefail
shopt -s inherit_errexit

host_enter() { # Sets what the other functions need, and calls one of them.
    number=${number:-${HOSTNAME##*-w-}} # TPU VMs are called t1v-n-SOMETHING-w-NUMBER
    if [[ $number == *[!0-9]* ]]; then
        echo "@deploy error $target: its name $HOSTNAME does not end with -w-NUMBER" && exit 1
    fi
    label=$target/$number
    [[ $mode == local ]] || { mkdir -p ~/activation-extraction && cd ~/activation-extraction; }
    name=$job # without the machine's number: it may not run twice under two numbers either
    [[ $mode != local ]] || name=$(printf '%s-machine_%03d_host_%02d' "$job" "$machine" "$number")
    folder=$PWD/.deploy/$name
    container=$name-$UID # the engine is shared with the other users of the host, ~ is not
    if [[ $1 == host_stop && -e $folder/command ]]; then # whatever runs there
        image=$(head -n 1 "$folder/command")
    fi
    passed=(COORDINATOR_ADDRESS HOST_ID NUM_HOSTS HF_TOKEN) # into the container, where they are set
    docker=(docker)
    if [[ $image ]] && ! docker version >/dev/null 2>&1; then
        docker=(sudo --non-interactive "--preserve-env=$(IFS=, && echo "${passed[*]}")" docker)
    fi
    "$@"
}

host_command() { # All that tells one job from another.
    printf '%s\n' "$image" "$num_hosts" "$coordinator" "${words[@]:2}"
}

host_state() { # none; running; other: with another command; ended:STATUS; ended:killed
    local same='' locked=''
    while [[ -e $folder/lock ]] && ! flock --shared --nonblock "$folder/lock" true; do
        locked=1
        if [[ -s $folder/pid ]]; then break; fi
        locked='' && sleep 0.05 # it is just being started, and its command not yet written
    done
    if cmp --silent "$folder/command" <(host_command); then same=1; fi
    if [[ $locked ]]; then
        if [[ $same ]]; then echo running; else echo other; fi
    elif [[ $same ]]; then
        echo "ended:$(cat "$folder/status" 2>/dev/null || echo killed)"
    else
        echo none
    fi
}

host_devices() {
    local found=(/dev/accel[0-9]*)
    [[ -e ${found[0]} ]] || found=(/dev/vfio/[0-9]*)
    if [[ -e ${found[0]} ]]; then
        echo "tpu:${#found[@]}"
    elif nvidia-smi --list-gpus >/dev/null 2>&1; then
        echo "gpu:$(nvidia-smi --list-gpus | wc -l)"
    else
        echo none
    fi
}

host_image() { # Prints the image's id, after getting the image.
    if [[ $mode != local ]]; then
        if [[ $image == *.pkg.dev/* ]]; then # Artifact Registry, with the rights of this VM
            "${docker[@]/%docker/gcloud}" auth configure-docker "${image%%/*}" --quiet || true
        fi
        "${docker[@]}" pull --quiet "$image"
    fi >&2
    "${docker[@]}" image inspect --format '{{.Id}}' "$image"
}

host_code() { # Prints the code's version, after unpacking it and installing what it requires.
    local python file=requirements.txt
    case $(host_devices) in tpu:*) file=requirements-tpu.txt ;; gpu:*) file=requirements-gpu.txt ;; esac
    if [[ $mode != local ]]; then
        exec 8>install.lock && flock 8
        mkdir -p "code-$version"
        tar -xzf ~/"activation-extraction-$version.tgz" -C "code-$version"
        if ! cat "code-$version"/requirements*.txt | cmp --silent - venv/installed; then
            for python in python3.14 python3.13 python3.12 python3.11 python3; do
                if command -v "$python" >/dev/null; then break; fi
            done
            "$python" -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python is older than 3.11: use --image")'
            echo "installing $file"
            rm -f venv/installed
            "$python" -m venv venv
            venv/bin/python -m pip install --quiet --requirement "code-$version/$file"
            cat "code-$version"/requirements*.txt >venv/installed
        fi
    fi >&2
    echo "$version"
}

host_refuse() { echo "$1" >&2 && exit 1; }

host_check() {
    local state installed free path
    trap '(($? == 0)) || echo "@deploy error $label: the check failed, see above"' EXIT
    state=$(host_state)
    case $state in
        running | other) installed=$(cat "$folder/version") ;;
        *) if [[ $image ]]; then installed=$(host_image); else installed=$(host_code); fi ;;
    esac
    for path in "${inputs[@]}"; do # Docker would make folders in place of what is missing
        [[ -e $path ]] || host_refuse "$path: is not on this host"
    done
    [[ $output != "~"* ]] || host_refuse "$output: give the whole path, a container has another ~"
    mkdir -p "$output"
    [[ $image || -w $output ]] || host_refuse "$output: is not writable (it is root's after Docker)"
    free=$(df --output=avail --block-size=1000000000 "$output" | tail -n 1)
    echo "@deploy host $machine $label $state $installed $(host_devices) $((free))"
}

host_start() {
    mkdir -p "$folder"
    exec 9>>"$folder/lock"
    until flock --nonblock 9; do # the job has it, or for an instant a host_state
        case $(host_state) in
            running) echo "@deploy started $machine $label by another deploy.sh" && return ;;
            other) echo "@deploy error $label: another job was started there" && exit 1 ;;
        esac
    done
    rm -f "$folder/status" "$folder/pid"
    [[ ! -e $folder/log ]] || mv "$folder/log" "$folder/log.before"
    host_command >"$folder/command"
    echo "$checked" >"$folder/version"
    set -m # the job is a process group of its own, out of reach of what ends this shell
    (trap '' HUP && host_run) </dev/null >"$folder/log" 2>&1 &
    set +m
    echo $! >"$folder/pid"
    echo "@deploy started $machine $label"
}

host_run() { # The job. This shell outlives a SIGTERM to the group, to write down the exit status.
    trap : TERM
    local status=0 variable path options=(--shm-size=16g) inside=$output
    local adc=${GOOGLE_APPLICATION_CREDENTIALS:-~/.config/gcloud/application_default_credentials.json}
    export PYTHONUNBUFFERED=1
    if ((num_hosts > 1)); then
        export COORDINATOR_ADDRESS=$coordinator HOST_ID=$number NUM_HOSTS=$num_hosts
    fi
    if [[ $image ]]; then # The options are explained in the Dockerfile.
        "${docker[@]}" rm --force "$container" >/dev/null 2>&1 || true # a crash left it
        [[ $inside == /* ]] || inside=/workspace/$output
        mkdir -p ~/.cache/huggingface ~/.cache/activation_extraction
        options+=(--volume "$(realpath "$output"):$inside")
        options+=(--volume "$(realpath ~/.cache/huggingface):/cache/huggingface")
        options+=(--volume "$(realpath ~/.cache/activation_extraction):/cache/activation_extraction")
        for path in "${inputs[@]}"; do options+=(--volume "$path:$path:ro"); done
        if [[ -e $adc ]]; then # for buckets, where no service account of the VM serves
            options+=(--volume "$adc:/adc.json:ro" --env GOOGLE_APPLICATION_CREDENTIALS=/adc.json)
        fi
        for variable in "${passed[@]}"; do options+=(--env "$variable"); done
        case $(host_devices) in gpu:*) options+=(--gpus all) ;; *) options+=(--privileged) ;; esac
        "${docker[@]}" run --rm --init --name "$container" --net=host "${options[@]}" \
            "$checked" "${words[@]:2}" || status=$?
    elif [[ $mode == local ]]; then
        "${words[@]}" || status=$?
    else
        venv/bin/python "code-$version/extract_activations.py" "${words[@]:2}" || status=$?
    fi
    echo "$(date '+%Y-%m-%d %H:%M:%S') ended with status $status"
    rm -f "$folder/pid"
    echo "$status" >"$folder/status.part"
    mv "$folder/status.part" "$folder/status"
}

host_follow() { # The end of the log, and all that follows until the job ends.
    local state pid
    state=$(host_state)
    if [[ $state == running ]]; then
        pid=$(cat "$folder/pid" 2>/dev/null) || pid="" # gone when the job ended just now
        tail --lines=50 --sleep-interval=0.2 ${pid:+--follow "--pid=$pid"} "$folder/log" |
            sed --unbuffered -e 's/.*\r//' -e "s|^|[$label] |"
        flock --shared "$folder/lock" true
        state=$(host_state)
    elif [[ $state == ended:[!0]* ]]; then
        tail --lines=5 "$folder/log" | sed "s|^|[$label] |"
    fi
    # A job that is killed may leave half a line, which must not hide what follows.
    [[ ! $(tail --bytes=1 "$folder/log" 2>/dev/null) ]] || echo
    echo "@deploy state $machine $label $state"
}

host_stop() { # SECONDS [any]: asks this job, or any, to stop, and kills it when it has not by then.
    local state
    state=$(host_state)
    if [[ $state == running || $state == other && ${2:-} ]]; then
        for _ in {1..20}; do # it may only be starting
            if [[ $image ]]; then
                "${docker[@]}" stop -t "$1" "$container" >/dev/null 2>&1 && break
            else
                kill -TERM -- "-$(cat "$folder/pid")" 2>/dev/null && break
            fi
            ! flock --shared --wait 1 "$folder/lock" true || break
        done
        # Docker has killed the container by now; what is waited for is its client.
        if ! flock --shared --wait "$((${image:+10} + $1))" "$folder/lock" true; then
            kill -KILL -- "-$(cat "$folder/pid")" 2>/dev/null || true
        fi
        state=stopped
    fi
    echo "@deploy stopped $machine $label $state"
}
