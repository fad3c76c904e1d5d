"""Prints the state, progress and speed of every host of a run, and the totals, for --status.

Only JSON files are read. With --aggregate, the totals are also written to
aggregated_metadata.json in the output folder.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from activation_extraction.common.visible import counted, say
from activation_extraction.store.folder import ANY, Folder
from activation_extraction.store.run_folders import (
    AGGREGATE,
    HostFolder,
    expected_names,
    read_folders,
)
from activation_extraction.store.run_log import FORMAT_VERSION, Commit, RunLog, seal
from activation_extraction.store.statistics_lines import (
    code_lines,
    code_warnings,
    error_lines,
)
from activation_extraction.store.totals import COUNTED, Totals

SILENT_SECONDS = 900.0  # smallest number of seconds without a write after which a host is "silent"
# Number of a host's last shards from which its speed is computed. Earlier shards do not count, so
# that the speed is the present speed.
RECENT_SHARDS = 20
# States of a host in which the user has to intervene.
PROBLEM_STATES = {"damaged", "silent", "failed"}


@dataclass(frozen=True)
class HostState:
    """The state of one host of a run. Times are in seconds since 1970 (Unix time).

    The names of the fields are keys in the output of --status --json and in
    aggregated_metadata.json, so renaming a field would break programs that read this JSON.

    Attributes:
        name: The name of the host's folder; "" if the host stores its files in the output folder
            itself.
        machine: The number of the machine.
        host: The number of the host on its machine.
        state: "complete", "running", "silent" (the metadata says running, but nothing has been
            written for a long time), "interrupted", "failed", "not started" or "damaged" (files are
            unreadable or missing).
        shards: The number of stored shards.
        samples: The number of stored samples.
        tokens: The number of stored tokens.
        bytes: The size of the activation files in bytes.
        last_commit: The time at which the last shard was committed. None if there is no shard.
        last_sign: The time of the host's last sign of life: the last write to metadata.json or the
            last commit, whichever is later. None if metadata.json cannot be read.
        tokens_per_second: The speed over the last RECENT_SHARDS shards, without pauses between
            processes. None if it is unknown.
        utilisation: The FLOP/s that the model computes, as a fraction of the devices' peak FLOP/s.
            It is from metrics.jsonl. None if it is unknown.
        waited: The seconds for which computing waited because the memory for shards was full. The
            keys are the phases of storing a shard (`store.shard_queue.PHASES`). The seconds of a
            wait are added to the phase in which the oldest shard was during the wait.
        expected_end: The time at which the host will reach its --max_samples or --max_tokens at its
            present speed. None if the time is unknown.
        share: The progress of the host as a fraction: the number of stored samples divided by
            --max_samples, or the number of stored tokens divided by --max_tokens, whichever is
            larger. 1 if the host is complete. None without these limits. The name has nothing to do
            with the share of the data that the host reads.
    """

    name: str
    machine: int
    host: int
    state: str
    shards: int = 0
    samples: int = 0
    tokens: int = 0
    bytes: int = 0
    last_commit: float | None = None
    last_sign: float | None = None
    tokens_per_second: float | None = None
    utilisation: float | None = None
    waited: dict[str, float] = field(default_factory=dict)
    expected_end: float | None = None
    share: float | None = None


def show_status(root: Folder, writes_totals: bool, as_json: bool = False) -> int:
    """Prints the state of every host and the totals.

    Args:
        root: The folder with the output of all hosts.
        writes_totals: Whether to write the totals to aggregated_metadata.json in `root`, too.
        as_json: Whether to print one JSON object instead of a table and lines.

    Returns:
        The exit status: 1 if the state of a host is in PROBLEM_STATES, otherwise 0.
    """
    log_by_folder = read_folders(root)
    states_of_hosts = host_states(log_by_folder)
    totals_of_run = sum_of_host_totals(log_by_folder)
    aggregated_metadata = aggregate(log_by_folder, totals_of_run, states_of_hosts)
    problem_messages = [
        problem_message
        for run_log in log_by_folder.values()
        for problem_message in run_log.problems
    ]
    if as_json:
        say(json.dumps({**aggregated_metadata, "problems": problem_messages}))
    else:
        _print_table(states_of_hosts, aggregated_metadata)
        if unstarted_folder_names := [
            host_state.name for host_state in states_of_hosts if host_state.state == "not started"
        ]:
            say(f"not started: {', '.join(unstarted_folder_names)}")
        if totals_of_run.skipped_rows:
            say(f"skipped: {counted(totals_of_run.skipped_rows, 'row')} that could not be used")
        if totals_of_run.empty_rows:
            say(
                f"empty: {counted(totals_of_run.empty_rows, 'row')} without text, "
                "which gave no sample"
            )
        for error_line in error_lines(totals_of_run.statistics):
            say(error_line)
        for codes_line in code_lines(totals_of_run.statistics):
            say(codes_line)
        for warning_line in code_warnings(totals_of_run.statistics):
            say(f"warning: {warning_line}")
        for problem_message in problem_messages:
            say(f"damaged: {problem_message}")
    if writes_totals:
        root.write(AGGREGATE, seal(aggregated_metadata), ANY)
        if not as_json:
            say(f"written: {root.url}/{AGGREGATE}")
    has_problem = any(host_state.state in PROBLEM_STATES for host_state in states_of_hosts)
    return 1 if has_problem else 0


def host_states(log_by_folder: dict[str, RunLog]) -> list[HostState]:
    """Returns the state of every host, including hosts that have not started.

    Args:
        log_by_folder: The run log of each folder, by the folder's name.
    """
    folder_names = sorted({*expected_names(log_by_folder), *log_by_folder})
    return [
        _host_state(folder_name, log_by_folder.get(folder_name, RunLog()))
        for folder_name in folder_names
    ]


def _host_state(folder_name: str, run_log: RunLog) -> HostState:
    """Returns the state of a host.

    Args:
        folder_name: The name of the host's folder.
        run_log: The run log of the folder. An empty one if the folder does not exist.
    """
    host_folder = HostFolder.parse(folder_name) or HostFolder(0)
    commits = run_log.commits_in_order
    run_metadata = run_log.metadata
    host_totals = Totals.of_log(run_log)
    seconds_by_phase = {}
    for metric_name, metric_value in run_log.metrics.items():
        if phase_match := re.fullmatch("waited_([a-z]+)_seconds_since_start", metric_name):
            seconds_by_phase[phase_match[1]] = metric_value
    state_without_metadata = HostState(
        name=folder_name,
        machine=host_folder.machine_number,
        host=host_folder.host_number or 0,
        state="damaged" if run_log.size_by_file_name else "not started",
        **{count_name: getattr(host_totals, count_name) for count_name in COUNTED},
        last_commit=max((commit.committed for commit in commits), default=None),
        utilisation=run_log.metrics.get("model_flops_utilisation"),
        waited=seconds_by_phase,
    )
    if run_metadata is None:
        return state_without_metadata
    recent_speeds = _recent_speeds(commits)
    expected_end_time = None
    stored_fraction_of_limit = None
    last_write_time = max([run_metadata["written"], *(commit.committed for commit in commits)])
    state_name = _state(run_log, run_metadata, recent_speeds, last_write_time)
    limit_by_count_name = {}
    for count_name in ("samples", "tokens"):
        max_count = run_metadata.get(f"max_{count_name}")
        if max_count is not None:
            limit_by_count_name[count_name] = max_count
    if limit_by_count_name:
        stored_fractions_of_limits = []
        for count_name, max_count in limit_by_count_name.items():
            stored_fractions_of_limits.append(getattr(host_totals, count_name) / (max_count or 1))
        stored_fraction_of_limit = (
            1.0 if state_name == "complete" else max(stored_fractions_of_limits)
        )
    if state_name == "running" and recent_speeds is not None:
        seconds_until_sample_and_token_limits = []
        for count_name, max_count in limit_by_count_name.items():
            count_per_second = getattr(recent_speeds, f"{count_name}_per_second")
            if count_per_second:
                remaining_count = max_count - getattr(host_totals, count_name)
                seconds_until_sample_and_token_limits.append(remaining_count / count_per_second)
        if seconds_until_sample_and_token_limits:
            expected_end_time = last_write_time + min(seconds_until_sample_and_token_limits)
    return replace(
        state_without_metadata,
        state=state_name,
        last_sign=last_write_time,
        tokens_per_second=None if recent_speeds is None else recent_speeds.tokens_per_second,
        expected_end=expected_end_time,
        share=stored_fraction_of_limit,
    )


class RecentSpeeds(NamedTuple):
    """The speeds of a host over its last RECENT_SHARDS shards.

    Attributes:
        tokens_per_second: Number of stored tokens per second.
        samples_per_second: Number of stored samples per second.
        seconds_per_shard: Mean number of seconds per shard.
    """

    tokens_per_second: float
    samples_per_second: float
    seconds_per_shard: float


def shard_seconds(commits: Iterable[Commit]) -> Iterator[tuple[Commit, float]]:
    """Yields the seconds that each shard of a host took, in the order of the commits.

    The time of a shard starts at the previous commit of the same process. The time of the first
    shard of a process starts when the process starts. So the time between two processes belongs to
    no shard. If a process with --repair replaces a shard, the time that this takes belongs only to
    the new shard, not to the shards that an earlier process committed before and after it.

    Args:
        commits: The commits of the shards of a host, in any order.

    Yields:
        A tuple of the commit of a shard and the seconds that the shard took. A shard is left out if
        the times in the commits do not show how long it took.
    """
    # Unix time of the last commit of each process, by the Unix time at which the process began.
    last_commit_time_by_process_start: dict[float, float] = {}
    for commit in sorted(commits, key=lambda commit: commit.committed):
        shard_start_time = last_commit_time_by_process_start.get(commit.began, commit.began)
        if commit.committed > shard_start_time:
            yield commit, commit.committed - shard_start_time
        last_commit_time_by_process_start[commit.began] = commit.committed


def _recent_speeds(commits: list[Commit]) -> RecentSpeeds | None:
    """Returns the speeds of a host over its last RECENT_SHARDS shards.

    Args:
        commits: The commits of the shards of the host, in any order.

    Returns:
        The speeds. None if the times in the commits do not show how long the shards took.
    """
    commits_and_seconds = list(shard_seconds(commits))[-RECENT_SHARDS:]
    if not commits_and_seconds:
        return None
    total_seconds = sum(seconds_of_shard for _, seconds_of_shard in commits_and_seconds)
    token_count = sum(commit.tokens for commit, _ in commits_and_seconds)
    sample_count = sum(commit.count for commit, _ in commits_and_seconds)
    return RecentSpeeds(
        token_count / total_seconds,
        sample_count / total_seconds,
        total_seconds / len(commits_and_seconds),
    )


def _state(
    run_log: RunLog,
    metadata: dict[str, Any],
    recent_speeds: RecentSpeeds | None,
    last_sign_time: float,
) -> str:
    """Returns the state of a host that has written metadata.json, such as "running" or "silent".

    `HostState.state` lists the states.

    Args:
        run_log: The run log of the host's folder.
        metadata: The content of metadata.json.
        recent_speeds: The speeds of the host over its last shards. None if they are unknown.
        last_sign_time: The Unix time of the last write to metadata.json or of the last commit.
    """
    if run_log.problems:
        return "damaged"
    if metadata["status"] != "running":
        return metadata["status"]
    max_silent_seconds = max(
        SILENT_SECONDS, 5 * recent_speeds.seconds_per_shard if recent_speeds is not None else 0
    )
    return "silent" if time.time() - last_sign_time > max_silent_seconds else "running"


def sum_of_host_totals(log_by_folder: Mapping[str, RunLog]) -> Totals:
    """Returns the counts and the statistics of the shards of all hosts together.

    Args:
        log_by_folder: The run log of each folder, by the folder's name.
    """
    totals_of_run = Totals()
    for run_log in log_by_folder.values():
        totals_of_run.add_host(Totals.of_log(run_log))
    return totals_of_run


def aggregate(
    log_by_folder: Mapping[str, RunLog], totals: Totals, hosts: list[HostState]
) -> dict[str, Any]:
    """Returns the content of aggregated_metadata.json, which --status --json also prints.

    Args:
        log_by_folder: The run log of each folder, by the folder's name.
        totals: The totals over all hosts.
        hosts: The states of all hosts.

    Returns:
        A JSON object with the counts of `totals` by their names and these keys:

        - format_version: FORMAT_VERSION.
        - status: "complete" or "incomplete".
        - hooks: A list with an object for each hook: its key, name, width and statistics.
        - parts: A list with an object for each host: the fields of its HostState.
        - written: The current Unix time.
    """
    is_complete = all(host_state.state == "complete" for host_state in hosts)
    hook_description_by_name = {}
    for run_log in log_by_folder.values():
        for commit in run_log.commits_in_order:
            hook_description_by_name.update(
                {hook_description["name"]: hook_description for hook_description in commit.hooks}
            )
    hook_descriptions = []
    for hook_name, hook_statistics in totals.statistics.items():
        hook_description = hook_description_by_name[hook_name]
        selected_hook_fields = {
            field_name: hook_description[field_name] for field_name in ("key", "name", "width")
        }
        hook_descriptions.append(selected_hook_fields | hook_statistics.to_json())
    return {
        "format_version": FORMAT_VERSION,
        "status": "complete" if is_complete else "incomplete",
        **totals.counts,
        "hooks": hook_descriptions,
        "parts": [asdict(host_state) for host_state in hosts],
        "written": round(time.time(), 3),
    }


def _print_table(hosts: list[HostState], aggregated_metadata: dict[str, Any]) -> None:
    started_hosts = [host_state for host_state in hosts if host_state.state != "not started"]
    cell_by_title_of_rows = [_cell_by_title(host_state) for host_state in started_hosts]
    sum_cell_by_title = _cell_by_title(_sum_of_hosts(hosts, aggregated_metadata))
    cell_by_title_of_rows.append({**sum_cell_by_title, "machine": "all", "host": ""})
    column_titles = tuple(cell_by_title_of_rows[0])
    table_rows = [
        column_titles,
        *(tuple(cell_by_title.values()) for cell_by_title in cell_by_title_of_rows),
    ]
    column_widths = [max(map(len, column_cells)) for column_cells in zip(*table_rows, strict=True)]
    for row_cells in table_rows:
        say(
            "  ".join(
                cell_text.rjust(column_width)
                for cell_text, column_width in zip(row_cells, column_widths, strict=True)
            )
        )


def _sum_of_hosts(hosts: list[HostState], aggregated_metadata: dict[str, Any]) -> HostState:
    """Combines the states of all hosts into the last row of the table of hosts.

    Args:
        hosts: The states of all hosts.
        aggregated_metadata: The content of aggregated_metadata.json.

    Returns:
        A `HostState` for the whole run, of which these fields are shown in the table:

        - state: The status of the run, "complete" or "incomplete".
        - shards, samples, tokens and bytes: The sums over all hosts.
        - last_commit: The latest commit of any host. None if no host has stored a shard.
        - tokens_per_second: The sum of the known speeds of the running hosts. None if no speed is
          known.
        - expected_end: The time at which the last running host is expected to end. None if this
          time is unknown for a running host, or if no host is running.
        - share: The progress as a fraction of --max_samples or --max_tokens. It is the mean over
          all hosts, in which a host that has not started counts as 0. None if the progress of a
          host that has started is unknown, or if no host has started.
    """
    running_hosts = [host_state for host_state in hosts if host_state.state == "running"]
    known_host_speeds = [
        host_state.tokens_per_second
        for host_state in running_hosts
        if host_state.tokens_per_second is not None
    ]
    expected_end_times = [
        host_state.expected_end
        for host_state in running_hosts
        if host_state.expected_end is not None
    ]
    expected_end_time = None
    if expected_end_times and len(expected_end_times) == len(running_hosts):
        expected_end_time = max(expected_end_times)
    started_hosts = [host_state for host_state in hosts if host_state.state != "not started"]
    stored_fractions_of_hosts = [
        host_state.share for host_state in started_hosts if host_state.share is not None
    ]
    stored_fraction_of_run = None
    if stored_fractions_of_hosts and len(stored_fractions_of_hosts) == len(started_hosts):
        stored_fraction_of_run = sum(stored_fractions_of_hosts) / len(hosts)
    last_commit_times = [
        host_state.last_commit for host_state in hosts if host_state.last_commit is not None
    ]
    return HostState(
        name="",
        machine=0,
        host=0,
        state=aggregated_metadata["status"],
        **{count_name: aggregated_metadata[count_name] for count_name in COUNTED},
        last_commit=max(last_commit_times, default=None),
        tokens_per_second=sum(known_host_speeds) if known_host_speeds else None,
        expected_end=expected_end_time,
        share=stored_fraction_of_run,
    )


def _cell_by_title(host: HostState) -> dict[str, str]:
    """Returns the texts in the cells of a host's row in the table, by the titles of the columns.

    A text is "" if the host's value is unknown.

    Args:
        host: The state of a host, or the sums over all hosts.
    """
    current_time = time.time()
    state_phrase = host.state
    if host.state == "silent" and host.last_sign is not None:
        state_phrase = f"silent for {_duration_phrase(current_time - host.last_sign)}"
    waiting_time_and_phase_phrase = ""
    total_waiting_seconds = sum(host.waited.values())
    if total_waiting_seconds >= 1:
        phase_with_longest_wait = max(host.waited, key=lambda phase: host.waited[phase])
        waiting_time_and_phase_phrase = (
            f"{_duration_phrase(total_waiting_seconds)} ({phase_with_longest_wait})"
        )

    def cell(number: float | None, to_phrase: Callable[[float], str]) -> str:
        return "" if number is None else to_phrase(number)

    def time_since(unix_time: float) -> str:
        return f"{_duration_phrase(current_time - unix_time)} ago"

    def time_until(unix_time: float) -> str:
        return f"in {_duration_phrase(unix_time - current_time)}"

    return {
        "machine": str(host.machine),
        "host": str(host.host),
        "state": state_phrase,
        "shards": f"{host.shards:,}",
        "samples": f"{host.samples:,}",
        "tokens": f"{host.tokens:,}",
        "GB": f"{host.bytes / 1e9:,.3f}",
        "done": cell(host.share, "{:.1%}".format),
        "last commit": cell(host.last_commit, time_since),
        "tokens/s": cell(host.tokens_per_second, "{:,.0f}".format),
        "of peak": cell(host.utilisation, "{:.0%}".format),
        "waited to store": waiting_time_and_phase_phrase,
        "expected end": cell(host.expected_end, time_until),
    }


def _duration_phrase(seconds: float) -> str:
    """Returns a duration in words, such as "2 h 5 min". A negative duration counts as 0."""
    total_minutes, seconds_beyond_minutes = divmod(int(max(seconds, 0)), 60)
    total_hours, minutes_beyond_hours = divmod(total_minutes, 60)
    if total_hours >= 24:
        return f"{total_hours // 24} d {total_hours % 24} h"
    if total_hours:
        return f"{total_hours} h {minutes_beyond_hours} min"
    return f"{minutes_beyond_hours} min {seconds_beyond_minutes} s"
