#!/usr/bin/env bash
# Runs one extraction on all hosts of a TPU pod, or on many machines, from a laptop. See --help.
#
# A target is a machine with its part of the data: a pod, whose hosts run as one, or a single host.
# What has to happen on the hosts is in deploy_host.sh, whose text is sent with every call. Calls run in
# the background, one per machine; the facts they report are collected in files by kind.
# shellcheck disable=SC2329  # functions are called through `begin`, `on` and `trap`
set -euo pipefail
if ((BASH_VERSINFO[0] * 100 + BASH_VERSINFO[1] < 404)); then # as on macOS
    echo "error: this is bash $BASH_VERSION; 4.4 or newer is needed" >&2
    exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
    cat <<'END'
usage: [VARIABLE=value ...] deploy.sh MODE [options] TARGET... [-- flags of extract_activations.py]

  gcloud TPU...              Cloud TPUs: each a pod or a single TPU VM
  ssh HOST[,HOST...]...      machines over ssh, the hosts of one joined by commas, host 0 first, under
                             names by which they find each other, too
  local NUMBER_OF_HOSTS...   machines of so many processes on this one, for rehearsal

Several targets are machines that share the data. Variables: see launch_v5e64.sh --help; those of
hosts and machines are set here. COORDINATOR_PORT (8476) is where hosts meet outside Cloud TPU.

  --image IMAGE      run in Docker; without it the code is copied and its requirements installed
  --zone, --project  for gcloud (default: as gcloud is configured)
  --tunnel-through-iap, --internal-ip   how gcloud reaches TPUs without external addresses
  --job NAME         (default: extraction) tells jobs on the same hosts apart
  --only TARGET      deal with this one of the targets (local: machine_0, machine_1, ...)
  --restart          start machines again that failed or were preempted; they continue
  --stop             stop the job on all hosts
  --detach           start, but do not follow
  --min_free_gb N    refuse hosts with less free disk for the output (default: 20)

Run again while the job runs, it follows the job. Ctrl-C stops all hosts, which store what is
complete; a second one kills them. Closing the terminal leaves them running. Exit status: 0 done on
all hosts, 2 refused and nothing started, 130 stopped, else that of a host that failed.
END
}

fail() {
    echo "error: $1" >&2
    exit "${2:-2}"
}

quote() { # $1 as one word of any shell, whatever it contains
    local quote=\' escaped="'\\''"
    printf "'%s'" "${1//$quote/$escaped}"
}

value_of() { # FLAG DEFAULT: its last value on the command line in `words`
    local i value=$2
    for ((i = 0; i < ${#words[@]}; i++)); do
        case ${words[i]} in
            "--$1") value=${words[i + 1]:-} ;;
            "--$1="*) value=${words[i]#*=} ;;
        esac
    done
    printf '%s' "$value"
}

program() { # MACHINE HOST NUMBER FUNCTION...: a bash program that calls a host_* function
    local machine=$1 target=$2 number=$3 words path output coordinator num_hosts inputs=()
    eval "words=(${commands[machine]})" # quoted by launch_v5e64.sh
    output=$(value_of output_dir activations)
    for path in "$(value_of model_path "")" "$(value_of dataset_path "")"; do
        # of a glob the folder above it
        if [[ $path == *[*?[]* ]]; then path=${path%%[*?[]*} path=${path%/*}; fi
        if [[ $path == /* ]]; then inputs+=("$path"); fi
    done
    num_hosts=${counts[machine]}
    case $mode in
        gcloud) num_hosts=0 coordinator= ;; # JAX finds them
        ssh) coordinator=${targets[machine]%%,*} coordinator=${coordinator#*@}:$port ;;
        local) coordinator=127.0.0.1:$((port + machine)) ;;
    esac
    declare -p mode job image version checked machine target number words num_hosts coordinator \
        output inputs
    cat "$here/deploy_host.sh"
    printf '%q ' host_enter "${@:4}"
}

on() { # MACHINE FUNCTION...: calls a host_* function on every host of the machine, at the same time
    local machine=$1 host hosts number=0
    case $mode in
        gcloud)
            gcloud compute tpus tpu-vm ssh "${names[machine]}" "${reach[@]}" --worker=all \
                --batch-size=all --ssh-flag="-oBatchMode=yes -oServerAliveInterval=30" \
                --command="bash -c $(quote "$(program "$machine" "${names[machine]}" "" "${@:2}")")"
            ;;
        ssh)
            IFS=, read -r -a hosts <<<"${targets[machine]}"
            for host in "${hosts[@]}"; do
                "${ssh[@]}" "$host" "bash -c $(quote "$(program "$machine" "$host" "$number" "${@:2}")")" &
                number=$((number + 1))
            done
            ;;
        local)
            while ((number < counts[machine])); do
                bash -c "$(program "$machine" "${names[machine]}" "$number" "${@:2}")" &
                number=$((number + 1))
            done
            ;;
    esac </dev/null
    wait
}

check() { # MACHINE
    local state count host hosts package=activation-extraction-$version.tgz
    if [[ $mode == gcloud ]]; then
        IFS=$'\t' read -r state count < <(gcloud compute tpus tpu-vm describe "${names[$1]}" \
            "${gcloud_flags[@]}" --format='value(state,networkEndpoints.len())' </dev/null) || true
        if [[ ${state:-} != READY ]]; then
            echo "@deploy error ${names[$1]}: is ${state:-not there}, not READY: create it (again), or see --only"
            return
        fi
        counts[$1]=$count
    fi
    echo "@deploy expected $1 ${counts[$1]}"
    if [[ ! $image && $mode == gcloud ]]; then
        gcloud compute tpus tpu-vm scp "$scratch/$package" "${names[$1]}:" "${reach[@]}" \
            --worker=all --batch-size=all --scp-flag=-oBatchMode=yes </dev/null
    elif [[ ! $image && $mode == ssh ]]; then
        IFS=, read -r -a hosts <<<"${targets[$1]}"
        for host in "${hosts[@]}"; do
            "${ssh[@]}" "$host" "cat >$package" <"$scratch/$package" &
        done
        wait
    fi
    on "$1" host_check
}

start() { # MACHINE
    if [[ ${plans[$1]} == restart ]]; then on "$1" host_stop 30; fi
    on "$1" host_start
}

relay() { # MACHINE: lines for the user get a prefix, if they have none; others go to their files.
    local line kind
    while IFS= read -r line || [[ $line ]]; do
        case $line in
            "@deploy "*) read -r _ kind line <<<"$line" && echo "$line" >>"$scratch/$kind" ;;
            "["*/*"] "*) printf '%s\n' "$line" ;;
            *) printf '[%s] %s\n' "${names[$1]}" "$line" ;;
        esac
    done
}

begin() { # MACHINE FUNCTION...: in the background, in a process group that Ctrl-C does not reach
    ( # Job control makes the group, and stays in this shell: with it, bash may exit at a Ctrl-C.
        set -m
        { ("${@:2:1}" "$1" "${@:3}" 2>&1 || true) | relay "$1"; } &
        trap 'kill -TERM -- "-$!"' TERM HUP
        wait
    ) &
    calls+=($!)
}

finish() { # Waits for all that was begun, and does what signals ask for in the meantime.
    while ((${#calls[@]})); do
        obey
        if kill -0 "${calls[0]}" 2>/dev/null; then sleep 0.1 || true; else calls=("${calls[@]:1}"); fi
    done
}

recorded() { cat "$scratch/$1" 2>/dev/null || true; } # KIND

stop_all() { # SECONDS [any]
    local m
    for m in "${chosen[@]}"; do begin "$m" on host_stop "$@"; done
}

obey() { # The trap only counts: bash does not survive a signal inside a trap that calls functions.
    while ((obeyed < interrupts)); do
        obeyed=$((obeyed + 1))
        case $stage:$obeyed in
            follow:1) echo "stopping all hosts; again to kill them" >&2 && stop_all 120 ;;
            follow:2) echo "killing the job on all hosts" >&2 && stop_all 0 ;;
            start:1) echo "stopping all hosts as soon as they have started" >&2 ;;
            *) exit 130 ;;
        esac
    done
}

cleanup() { # Whatever the reason for leaving; jobs on the hosts are not touched.
    ((!${#calls[@]})) || kill -TERM "${calls[@]}" 2>/dev/null || true
    rm -rf "$scratch"
}

# ---- the command line ----------------------------------------------------------------------------

mode=${1:-}
case $mode in
    gcloud | ssh | local) shift ;;
    --help | -h) usage && exit ;;
    *) fail "${mode:-MODE}: expected gcloud, ssh or local (see --help)" ;;
esac
image="" job=extraction only="" restart="" stop="" detach="" min_free=20 targets=() gcloud_flags=() reach=()
while (($#)) && [[ $1 != -- ]]; do
    case $1 in
        --help | -h) usage && exit ;;
        --restart) restart=1 ;;
        --stop) stop=1 ;;
        --detach) detach=1 ;;
        --tunnel-through-iap | --internal-ip) reach+=("$1") ;;
        --*)
            [[ ${2:---} != -- ]] || fail "$1: needs a value, or is unknown (see --help)"
            case $1 in
                --image) image=$2 ;;
                --job) job=$2 ;;
                --only) only=$2 ;;
                --min_free_gb) min_free=$2 ;;
                --zone | --project) gcloud_flags+=("$1=$2") ;;
                *) fail "$1: unknown; flags of extract_activations.py come after --" ;;
            esac
            shift
            ;;
        *) targets+=("$1") ;;
    esac
    shift
done
if (($#)); then shift; fi # the --
reach+=("${gcloud_flags[@]}")
((${#targets[@]})) || fail "TARGET: none is given (see --help)"
[[ $job =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] || fail "--job $job: letters, digits, _ . - only"
[[ $min_free =~ ^[0-9]+$ ]] || fail "--min_free_gb $min_free: not a whole number"
port=${COORDINATOR_PORT:-8476}
[[ $port =~ ^[0-9]+$ ]] || fail "COORDINATOR_PORT=$port: not a number"
ssh=(ssh -oBatchMode=yes -oConnectTimeout=20 -oServerAliveInterval=30)
names=() counts=() commands=() chosen=() plans=() seen=,
for ((m = 0; m < ${#targets[@]}; m++)); do
    target=${targets[m]}
    case $mode in
        gcloud) names+=("$target") counts+=(0) pattern='^[a-z0-9_-]+$' ;; # counted by `check`
        ssh) names+=("${target%%,*}") pattern='^[A-Za-z0-9@_.-]+(,[A-Za-z0-9@_.-]+)*$' ;;
        local) names+=("machine_$m") counts+=("$target") pattern='^[1-9][0-9]{0,2}$' ;;
    esac
    [[ $target =~ $pattern && $target != -* ]] || fail "$target: not a target for $mode (see --help)"
    if [[ $mode == ssh ]]; then counts+=("$(tr ',' '\n' <<<"$target" | wc -l)"); fi
    for host in ${target//,/ }; do
        [[ $mode == local || $seen != *",$host,"* ]] || fail "$host: is given twice"
        seen+=$host,
    done
    [[ $only && $only != "${names[m]}" ]] || chosen+=("$m")
done
((${#chosen[@]})) || fail "--only $only: is none of ${names[*]}"
for variable in MACHINE_ID TOTAL_MACHINES COORDINATOR_ADDRESS HOST_ID NUM_HOSTS; do
    [[ ! ${!variable:-} ]] || fail "$variable: is set here from the targets; unset it"
    for argument in "$@"; do
        [[ $argument != "--${variable,,}" && $argument != "--${variable,,}="* ]] ||
            fail "--${variable,,}: is set here from the targets"
    done
done
for m in "${!targets[@]}"; do
    where=(MACHINE_ID="$m" TOTAL_MACHINES="${#targets[@]}" NUM_HOSTS="${counts[m]}")
    ((counts[m] == 1)) || where=("${where[@]:0:2}")
    ((m == 0)) || where+=(FLAGS_CHECKED=1)
    commands[m]=""
    [[ $stop ]] || commands[m]=$(env "${where[@]}" "$here/launch_v5e64.sh" --dry-run "$@")
done

# ---- check, start, follow, report ----------------------------------------------------------------

scratch=$(mktemp -d)
trap cleanup EXIT
trap 'exit 129' HUP
trap 'interrupts=$((interrupts + 1))' INT TERM
stage=check interrupts=0 obeyed=0 calls=() checked=""
version=$(cd "$here" && cat requirements*.txt ./*.py activation_extraction/*.* | sha256sum | cut -c -12)
(cd "$here" && tar -czf "$scratch/activation-extraction-$version.tgz" --exclude=__pycache__ \
    requirements*.txt ./*.py activation_extraction)

if [[ $stop ]]; then
    stop_all 120 any
    finish
    recorded stopped | sort -V | while read -r m label state; do echo "$label: $state"; done
    [[ $(recorded stopped) ]] || fail "no host answered" 1
    exit 0
fi

for m in "${chosen[@]}"; do begin "$m" check; done
finish
obey
declare -A versions=() devices=() states=()
while read -r m count; do counts[m]=$count; done < <(recorded expected)
while read -r m label state installed kind free; do
    states[$m]+=" $state"
    versions[$installed]+=" $label"
    devices[$kind]+=" $label"
    if [[ $state == other ]]; then
        echo "$label: a job with another command runs there: --stop it, or give another --job"
    elif [[ $state != running ]] && ((free < min_free)); then
        echo "$label: $free GB free for the output, --min_free_gb is $min_free"
    fi >>"$scratch/error"
done < <(recorded host | sort -V)
{
    for m in "${chosen[@]}"; do
        count=$(wc -w <<<"${states[$m]:-}")
        ((count == counts[m] && count)) || echo "${names[m]}: $count of ${counts[m]} hosts passed the check"
    done
    for key in "${!versions[@]}"; do
        ((${#versions[@]} < 2)) || echo "hosts differ in version (image or code): $key on${versions[$key]}"
    done
    for key in "${!devices[@]}"; do
        ((${#devices[@]} < 2)) || echo "hosts differ in devices: $key on${devices[$key]}"
    done
} >>"$scratch/error"
if [[ -s $scratch/error ]]; then
    sed 's/^/error: /' "$scratch/error" >&2
    fail "nothing was started"
fi
checked=${!versions[*]}
echo "hosts: $(recorded host | wc -l), version: $checked, devices per host: ${!devices[*]}"

stage=start begun=()
for m in "${chosen[@]}"; do
    plans[m]=follow
    case "${states[$m]} " in
        *" ended:"[!0]*) if [[ $restart ]]; then plans[m]=restart; fi ;;
        *" none "*) plans[m]=start ;;
    esac
    if [[ ${plans[m]} != follow ]]; then
        begun+=("$m")
        begin "$m" start
    fi
done
finish
for m in "${begun[@]}"; do
    count=$(recorded started | grep -c "^$m ") || true
    ((count == counts[m])) || echo "${names[m]}: started on $count of ${counts[m]} hosts" >>"$scratch/error"
done
if [[ -s $scratch/error ]]; then
    sed 's/^/error: /' "$scratch/error" >&2
    chosen=()
    for m in "${begun[@]}"; do
        recorded started | grep -q "^$m .* by another" || chosen+=("$m")
    done
    stop_all 30
    finish
    ((!interrupts)) || exit 130
    fail "what was started is stopped again" 1
fi
for m in "${chosen[@]}"; do
    if [[ ${plans[m]} == follow && ${states[$m]} == *running* ]]; then echo "${names[m]}: runs already"; fi
done

stage=follow
if ((obeyed)); then stop_all 120; fi
if [[ $detach ]] && ((!interrupts)); then # what remains is to report what neither runs nor started
    ended=()
    for m in "${chosen[@]}"; do
        [[ ${plans[m]} != follow || ${states[$m]} == *running* ]] || ended+=("$m")
    done
    ((${#ended[@]} == ${#chosen[@]})) || echo "started; without --detach, the same command follows"
    chosen=("${ended[@]}")
fi
for m in "${chosen[@]}"; do begin "$m" on host_follow; done
finish

result=0
for m in "${chosen[@]}"; do
    count=0 status=0
    while read -r _ label state; do
        count=$((count + 1))
        case $state in
            ended:0) ;;
            ended:killed) echo "$label: killed, or its machine was" && status=1 ;;
            ended:*) echo "$label: exit status ${state#*:}" && status=${state#*:} ;;
            *) echo "$label: $state" && status=1 ;;
        esac
    done < <(recorded state | grep "^$m " | sort -V -u)
    if ((count < counts[m])); then
        echo "${names[m]}: lost contact with $((counts[m] - count)) of ${counts[m]} hosts; run this again"
        status=1
    fi
    ((status)) || echo "${names[m]}: done on all $count hosts"
    result=$((result ? result : status))
done
((!interrupts)) || exit 130
case $result in
    0) ;;
    2) echo "status 2 is a refusal: change what the log names, then run this again (with --restart if the flags stay)" ;;
    *) echo "with --restart, what failed starts again; it continues unless its log names what to change" ;;
esac
exit "$result"
