"""Prepares a run: everything that precedes compiling a step.

`prepare` turns a checked configuration into a `Run`, the cheapest stages first. It finds every
mistake in a request that can be found without reading weights. After each stage, the hosts of a pod
know whether it has succeeded on all of them and whether their results agree, so that all continue
or all stop. extract_activations.py does the rest of the run.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax

from activation_extraction.cli.flags import Config
from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, plain_url
from activation_extraction.model.autoencoders import read_autoencoder
from activation_extraction.model.compilation import use_compilation_cache
from activation_extraction.model.devices import devices_of_this_host, memory_of, usable_devices
from activation_extraction.model.family import parse_model_config
from activation_extraction.model.forward import Forward
from activation_extraction.model.model_setup import (
    StepRequest,
    build_model,
    log_hooks,
    prepare_model,
)
from activation_extraction.model.repository import Repository
from activation_extraction.run.batch_size import default_rows, fit_rows
from activation_extraction.run.demo import MODEL_CONFIG, make_demo
from activation_extraction.run.host_text import Text
from activation_extraction.run.hosts import Host, Watchdog, gather, together
from activation_extraction.run.inputs import (
    fingerprint,
    new_identity,
    package_versions,
    settings_of,
    step_of,
)
from activation_extraction.run.prefetch import Prefetch
from activation_extraction.store.identity import Identity, RunFacts
from activation_extraction.store.local_files import check_output_dir, nearest
from activation_extraction.store.metrics import METRICS
from activation_extraction.store.resume import FLAGS_REMEDY
from activation_extraction.store.run_folders import RunFolders
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch, Worker
from activation_extraction.text.mark import Mark


@dataclass(frozen=True)
class Run:
    """A run on this host that is checked and ready to be compiled.

    Attributes:
        config: The configuration. With --demo, it names the model and the documents of the demo.
        host: This host among the hosts of the run.
        watchdog: The watchdog, which ends the process if nothing happens for too long.
        folders: The folders of the run.
        forward: The model on its mesh, with its checked checkpoint.
        text: The text that the run reads.
        storage: The storage of this host, to which nothing has been written yet.
        batches: The batches whose samples were not stored yet when the text was opened. Their
            `result` is the mark at the end of the data.
    """

    config: Config
    host: Host
    watchdog: Watchdog
    folders: RunFolders
    forward: Forward
    text: Text
    storage: ActivationStorage
    batches: Prefetch[Batch, Mark | None]

    @property
    def where(self) -> str:
        """The URL or path of the output, for messages."""
        return self.storage.destination.url

    def with_text_reopened(self) -> "Run":
        """Returns the same run with new batches, of the samples that are not stored by now.

        Raises:
            InputError: The first batch cannot be read.
        """
        worker, shape = self.folders.worker, self.forward.shape
        return replace(self, batches=self.text.open(worker, shape, self.storage, self.watchdog))


def prepare(config: Config, host: Host, watchdog: Watchdog) -> Run:
    """Prepares a run. All hosts must call this together.

    Args:
        config: The configuration.
        host: This host.
        watchdog: The watchdog, which watches over the stages that read text.

    Returns:
        The run, ready to be compiled.

    Raises:
        InputError: The request cannot be met, or the hosts differ in what must be the same.
        RunError: Something failed on this host or on another one.
    """
    folders = together(host, lambda: check_output(config, host), lambda _: settings_of(config))
    stored = together(host, lambda: stored_runs(config, folders))
    choice = together(host, lambda: choose_commit(config, stored))
    commit = agree_on_commit(host, choice)
    memory = least_memory(config, host)
    sources = sources_of_first_host(config, host)

    config = together(host, lambda: with_inputs_of_demo(config, folders.folder))
    request = together(host, lambda: step_request(config, commit, memory))
    forward = together(host, lambda: prepare_model(request), step_of)
    earlier = [metadata for _, metadata in stored]
    facts: dict[str, Any] = {}
    if config.computing.batch_size == "auto":
        forward, facts["auto_batch_size"] = fit_rows(host, request, forward, earlier)

    vocabulary = forward.model.config.vocab_size
    text = Text(
        config.text, forward.checkpoint, vocabulary, earlier, sources, forward.adapter_files
    )
    identity = together(
        host,
        lambda: identify(config, folders, forward, text, watchdog),
        lambda identity: fingerprint(forward, text, identity),
    )
    facts = describe(config, forward, text) | facts
    storage = together(
        host, lambda: plan_storage(config, folders, forward, text, identity, facts, watchdog)
    )
    batches = together(host, lambda: text.open(folders.worker, forward.shape, storage, watchdog))
    run = Run(config, host, watchdog, folders, forward, text, storage, batches)
    log_beginning(run)
    return run


def check_output(config: Config, host: Host) -> RunFolders:
    """Returns the folders of the run, after all checks that need only the output.

    Args:
        config: The configuration.
        host: This host.

    Raises:
        InputError: The output cannot be written to, its disk has too little free space, or a run
            with other numbers of machines or hosts has left folders there.
    """
    hosts, output = config.hosts, config.output
    worker = Worker(hosts.machine_id, hosts.total_machines, host.id, host.count)
    folders = RunFolders(worker, Path(output.output_dir), output.bucket_url, output.upload_timeout)
    check_output_dir(folders.folder, METRICS)
    check_free_disk(folders.folder, output.min_free_gb)
    use_compilation_cache(config.computing.compilation_cache, folders.local, host.several)
    folders.check_bucket()
    folders.check_stale_folders(config.storage.overwrite)
    return folders


def check_free_disk(folder: Path, gigabytes: float) -> None:
    """Checks that a disk has enough free space.

    Args:
        folder: A folder on the disk, which need not exist yet.
        gigabytes: GB that must be free.

    Raises:
        InputError: There is too little free space.
    """
    free = shutil.disk_usage(nearest(folder)).free / 1e9
    if free < gigabytes:
        raise InputError(
            f"--output_dir {folder}: its disk has {free:.1f} GB free, --min_free_gb asks for "
            f"{gigabytes:g}; make room, or choose another disk"
        )


def stored_runs(config: Config, folders: RunFolders) -> list[tuple[str, dict[str, Any]]]:
    """Returns the records of the run that is continued.

    Args:
        config: The configuration.
        folders: The folders of the run.

    Returns:
        The URL and the content of metadata.json for each output of this host that contains the run.
        Empty if there is no such run, or if it is overwritten.
    """
    return [] if config.storage.overwrite else folders.earlier()


class CommitChoice(NamedTuple):
    """The commit of a hub model, as one host sees it.

    Attributes:
        is_new: Whether no stored run has recorded the commit.
        commit: The commit.
    """

    is_new: bool
    commit: str


def choose_commit(
    config: Config, stored: Sequence[tuple[str, Mapping[str, Any]]]
) -> CommitChoice | None:
    """Returns the commit of the model on the hub, as this host sees it.

    The first start records the commit in metadata.json. A run that continues uses the recorded
    commit, so a new commit on the hub does not stop a long run.

    Args:
        config: The configuration.
        stored: The result of `stored_runs`.

    Returns:
        The commit. None for a local model, and for the demo.

    Raises:
        InputError: The revision that the flags name is not the recorded commit.
    """
    if config.demo:
        return None
    model_path, revision = config.model.model_path, config.model.model_revision
    where, metadata = stored[0] if stored else ("", {})
    recorded = recorded_commit(model_path, metadata)
    # Even if a branch has moved on, the command that began the run continues it.
    if recorded and revision in (None, metadata["configuration"].get("model_revision")):
        return CommitChoice(is_new=False, commit=recorded)
    commit = Repository(model_path, revision).commit
    if commit is not None and recorded not in (None, commit):
        raise InputError(
            f"--model_revision {revision}: is commit {commit}, but {where} holds a run "
            f"with commit {recorded}; {FLAGS_REMEDY}"
        )
    return None if commit is None else CommitChoice(recorded is None, commit)


def recorded_commit(model_path: str, metadata: Mapping[str, Any]) -> str | None:
    """Returns the commit of a model on the hub that a run has recorded.

    Args:
        model_path: The name of the model.
        metadata: The content of metadata.json.

    Returns:
        The commit. None if the run used another model, or if the model is local.
    """
    recorded_path = metadata.get("configuration", {}).get("model_path")
    if recorded_path != plain_url(model_path) or Repository(model_path).local:
        return None
    return metadata.get("model_commit")


def agree_on_commit(host: Host, choice: CommitChoice | None) -> str | None:
    """Returns the commit of the model that all hosts use. All hosts must call this together.

    It is a commit that a stored run has recorded, otherwise the commit that the first host sees.

    Args:
        host: This host.
        choice: The commit that this host sees. None if its model is local.

    Returns:
        The commit. None if the model of this host is local.
    """
    gathered = gather(host, choice)
    choices = [CommitChoice(*fields) for fields in gathered if fields is not None]
    if choice is None or not choices:
        return None
    return min(choices, key=lambda choice: choice.is_new).commit


def least_memory(config: Config, host: Host) -> float | None:
    """Returns the memory of the smallest device of all hosts. All hosts must call this together.

    The hosts gather it because none can query the devices of another host.

    Args:
        config: The configuration.
        host: This host.

    Returns:
        Bytes. None if no device reports its memory.

    Raises:
        InputError: JAX finds no devices.
    """
    every_device = config.computing.use_data_parallel
    memory = together(
        host, lambda: memory_of(devices_of_this_host(usable_devices(every_device))[0])
    )
    return min(filter(None, gather(host, memory)), default=None)


def sources_of_first_host(config: Config, host: Host) -> list[str]:
    """Returns the names of the sources of a mixture on host 0, which all hosts use.

    All hosts must call this together.

    Args:
        config: The configuration of this host, on which the sources may have other paths.
        host: This host.
    """
    return gather(host, [plain_url(name) for name, _ in config.text.mix])[0]


def with_inputs_of_demo(config: Config, folder: Path) -> Config:
    """Makes the model and documents of a demo.

    Args:
        config: The configuration.
        folder: The folder in which they are made.

    Returns:
        The configuration with the paths of the model and documents. Without --demo, the unchanged
        configuration.

    Raises:
        InputError: The flags do not fit the demo's model, or the folder cannot be written to.
    """
    if not config.demo:
        return config
    build_model(step_request(config), parse_model_config(MODEL_CONFIG))  # checks the flags
    log.info("demo: making a tiny Qwen2 model and sample documents")
    model, documents = make_demo(folder)
    return replace(
        config,
        model=replace(config.model, model_path=str(model)),
        text=replace(config.text, dataset_path=str(documents)),
    )


def step_request(
    config: Config,
    commit: str | None = None,
    memory: float | None = None,
    planned: Sequence[Any] | None = None,
) -> StepRequest:
    """Returns the request for a step that follows from the configuration.

    With --batch_size auto it has the default rows, for which `fit_rows` finds a better number.

    Args:
        config: The configuration.
        commit: The commit of the model on the hub. None for --model_revision.
        memory: Bytes of memory of a device. None for the memory that this host's devices report.
        planned: The devices of a machine that is only planned. None for this machine's devices.

    Raises:
        InputError: An autoencoder cannot be read, or JAX finds no devices.
    """
    computing = config.computing
    length = config.text.max_seq_length
    autoencoders = tuple(read_autoencoder(hook, name) for hook, name in config.hooks.encode)
    batch_size = computing.batch_size
    if not isinstance(batch_size, int):
        is_auto = batch_size == "auto"
        batch_size = default_rows(length, computing.use_data_parallel, is_auto, planned)
    return StepRequest(
        replace(config.model, model_revision=commit or config.model.model_revision),
        config.hooks,
        computing,
        (batch_size, length),
        several_hosts=config.hosts.multihost,
        memory=memory,
        devices=planned,
        autoencoders=autoencoders,
    )


def identify(
    config: Config, folders: RunFolders, forward: Forward, text: Text, watchdog: Watchdog
) -> Identity:
    """Checks the text, and returns the identity of the run.

    Args:
        config: The configuration.
        folders: The folders of the run.
        forward: The model.
        text: The text.
        watchdog: The watchdog, which watches over the check of the text.

    Raises:
        InputError: The text cannot be read, or other machines or hosts have stored another run.
    """
    # The data set is opened here, outside the watchdog, because listing its files may take long.
    _ = text.dataset
    with watchdog:
        text.check()
    identity = new_identity(config, forward, text, folders.worker)
    if not config.storage.overwrite:
        folders.check_siblings(identity)
    return identity


def describe(config: Config, forward: Forward, text: Text) -> dict[str, Any]:
    """Returns the facts about a run that metadata.json records beside its identity.

    Args:
        config: The configuration.
        forward: The model.
        text: The text.

    Returns:
        The facts by their keys in metadata.json: configuration, model, model_commit, backend, mesh,
        the choice of each kernel, versions; and, with a tokenizer, tokenizer_path and added_tokens.
    """
    resolved = replace(config, text=replace(config.text, drop_token_ids=text.drop_token_ids))
    configuration = {**resolved.to_json(), "batch_size": forward.shape[0]}
    repositories = {"model_path": forward.checkpoint, "lora": forward.adapter_files}
    for name, repository in repositories.items():
        # An absolute path, by which readers in any working directory find a local tokenizer.
        if repository is not None and repository.local:
            configuration[name] = os.path.abspath(os.path.expanduser(repository.path))
    facts = {
        "configuration": configuration,
        "model": asdict(forward.model.config),
        "model_commit": forward.checkpoint.commit,
        "backend": jax.default_backend(),
        "mesh": forward.layout.shape,
        **{name: choice.to_json() for name, choice in forward.kernels.items()},
        "versions": package_versions(),
    }
    chosen = text.chosen_tokenizer
    if chosen is not None:
        # Readers need the path and the added tokens to show tokens as text.
        name = "model_path" if chosen.home is forward.checkpoint else "lora"
        added = chosen.backend.get_added_tokens_decoder().items()
        facts["tokenizer_path"] = configuration[name]
        facts["added_tokens"] = {str(number): token.content for number, token in added}
    return facts


def plan_storage(
    config: Config,
    folders: RunFolders,
    forward: Forward,
    text: Text,
    identity: Identity,
    facts: Mapping[str, Any],
    watchdog: Watchdog,
) -> ActivationStorage:
    """Returns the storage of this host. It has read the stored shards and has written nothing.

    Args:
        config: The configuration.
        folders: The folders of the run.
        forward: The model.
        text: The text.
        identity: The identity of the run.
        facts: Further facts for metadata.json.
        watchdog: The watchdog. Waiting for an upload counts as progress, because every upload has
            its own time limit.

    Raises:
        InputError: The output holds another run, or one that cannot be continued.
    """
    worker, storage = folders.worker, config.storage
    # --max_samples and --max_tokens are limits of a machine; this host gets its share of them.
    options = replace(
        storage,
        max_samples=worker.share_of(storage.max_samples),
        max_tokens=worker.share_of(storage.max_tokens),
    )
    codes = {encoder.hook.name: encoder.facts() for encoder in forward.encoders}
    hooks = {
        key: codes.get(hook.name) or hook.facts(forward.sizes)
        for key, hook in forward.hooks.items()
    }
    return ActivationStorage(
        folders.folder,
        {key: hook.name for key, hook in forward.hooks.items()},
        options,
        identity,
        folders.remote,
        RunFacts(facts, hooks, text.dataset.files),
        config.repair,
        on_wait=watchdog.reset if folders.remote is not None else lambda: None,
    )


def log_beginning(run: Run) -> None:
    """Logs the hooks, the samples that are stored already, and the tokens that will be kept."""
    storage, form = run.storage, run.text.sample_form
    log_hooks(run.config.hooks, run.forward)
    totals = storage.totals
    if totals.shards and storage.plan.repair is None and not storage.complete:
        log.info(
            "continuing %s after %s and %s in %s",
            run.where,
            counted(totals.samples, "sample"),
            counted(totals.tokens, "token"),
            counted(totals.shards, "shard"),
        )
    if special := form.special:
        log.info("special tokens: %s (--special_tokens none adds none)", special.template)
    if not form.choice.everything:
        log.info("kept tokens: %s", form.choice)
