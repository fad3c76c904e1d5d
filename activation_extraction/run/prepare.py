"""Prepares a run: everything that precedes compiling a step.

`prepare` turns a checked configuration into a `Run`. It begins with the cheapest stages and finds
every mistake in a request that can be found without reading weights. After each stage, the hosts of
a pod compare whether it has succeeded and whether their results agree, so either all hosts continue
or all stop. extract_activations.py compiles the step and carries out the rest of the run.
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
    contents_to_compare,
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
    """A run on this host, which is checked and ready to be compiled.

    Attributes:
        config: The configuration. With --demo, it contains the paths of the demo's model and
            documents.
        host: This host among the hosts of the run.
        watchdog: The watchdog, which ends the process if nothing happens for too long.
        folders: The local folder and the folder in a bucket to which this host writes.
        forward: The model on its mesh, whose checkpoint is checked but not read yet.
        text_pipeline: The text pipeline, which makes samples and batches from the rows of the data
            set.
        storage: The storage of this host, to which nothing has been written yet.
        batches: The batches of the samples that were not stored yet when the text was opened. After
            the last batch, the attribute `generator_result` is the mark at the end of the data.
    """

    config: Config
    host: Host
    watchdog: Watchdog
    folders: RunFolders
    forward: Forward
    text_pipeline: Text
    storage: ActivationStorage
    batches: Prefetch[Batch, Mark | None]

    @property
    def output_url(self) -> str:
        """The URL or path of the output, for messages."""
        return self.storage.destination.url

    def with_text_reopened(self) -> "Run":
        """Returns the same run with new batches, which leave out all samples stored by now.

        Raises:
            InputError: If the first batch cannot be read.
        """
        worker, batch_shape = self.folders.worker, self.forward.batch_shape
        return replace(
            self, batches=self.text_pipeline.open(worker, batch_shape, self.storage, self.watchdog)
        )


def prepare(config: Config, host: Host, watchdog: Watchdog) -> Run:
    """Prepares everything that a run needs before it is compiled. All hosts must call it together.

    Args:
        config: The configuration.
        host: This host.
        watchdog: The watchdog. It ends the process if a stage that reads text makes no progress.

    Returns:
        The run, ready to be compiled.

    Raises:
        InputError: If the run that the flags request is not possible, or if settings or inputs that
            must be the same differ between hosts.
        RunError: If a stage failed on this host or on another host.
    """
    run_folders = together(host, lambda: check_output(config, host), lambda _: settings_of(config))
    earlier_outputs = together(host, lambda: find_earlier_outputs(config, run_folders))
    model_commit_choice = together(host, lambda: choose_model_commit(config, earlier_outputs))
    model_commit = agree_on_model_commit(host, model_commit_choice)
    device_memory_bytes = smallest_device_memory(config, host)
    source_names = source_names_of_first_host(config, host)

    config = together(host, lambda: with_inputs_of_demo(config, run_folders.folder))
    request = together(host, lambda: step_request(config, model_commit, device_memory_bytes))
    step_program = together(host, lambda: prepare_model(request), step_of)
    metadata_of_earlier_outputs = [metadata for _, metadata in earlier_outputs]
    value_by_metadata_key: dict[str, Any] = {}
    if config.computing_options.batch_size == "auto":
        step_program, value_by_metadata_key["auto_batch_size"] = fit_rows(
            host, request, step_program, metadata_of_earlier_outputs
        )

    vocabulary_size = step_program.model.config.vocab_size
    text_pipeline = Text(
        config.text_options,
        step_program.checkpoint,
        vocabulary_size,
        metadata_of_earlier_outputs,
        source_names,
        step_program.adapter_files,
    )
    identity = together(
        host,
        lambda: check_and_identify(config, run_folders, step_program, text_pipeline, watchdog),
        lambda identity: contents_to_compare(step_program, text_pipeline, identity),
    )
    value_by_metadata_key = {
        **facts_of_run(config, step_program, text_pipeline),
        **value_by_metadata_key,
    }
    activation_storage = together(
        host,
        lambda: plan_storage(
            config,
            run_folders,
            step_program,
            text_pipeline,
            identity,
            value_by_metadata_key,
            watchdog,
        ),
    )
    batches_to_compute = together(
        host,
        lambda: text_pipeline.open(
            run_folders.worker, step_program.batch_shape, activation_storage, watchdog
        ),
    )
    prepared_run = Run(
        config,
        host,
        watchdog,
        run_folders,
        step_program,
        text_pipeline,
        activation_storage,
        batches_to_compute,
    )
    log_start(prepared_run)
    return prepared_run


def check_output(config: Config, host: Host) -> RunFolders:
    """Checks the folders to which this host will write, and returns them.

    This stage reads neither the model nor the data.

    Args:
        config: The configuration.
        host: This host.

    Raises:
        InputError: If a folder cannot be written to, if its disk has too little free space, or if
            the output folder, local or in the bucket, contains folders or files of a run with
            other numbers of machines or hosts.
    """
    host_options, output_options = config.host_options, config.output_options
    worker = Worker(host_options.machine_id, host_options.total_machines, host.id, host.num_hosts)
    run_folders = RunFolders(
        worker,
        Path(output_options.output_dir),
        output_options.bucket_url,
        output_options.upload_timeout,
    )
    check_output_dir(run_folders.folder, METRICS)
    check_free_disk(run_folders.folder, output_options.min_free_gb)
    use_compilation_cache(
        config.computing_options.compilation_cache,
        run_folders.local_output_path,
        host.is_one_of_several,
    )
    run_folders.check_bucket()
    run_folders.check_stale_folders(config.storage_options.overwrite)
    return run_folders


def check_free_disk(folder: Path, min_free_gigabytes: float) -> None:
    """Checks that a disk has enough free space.

    Args:
        folder: A folder on the disk, which need not exist yet.
        min_free_gigabytes: The space that must be free, in GB (10^9 bytes).

    Raises:
        InputError: If there is too little free space.
    """
    free_gigabytes = shutil.disk_usage(nearest(folder)).free / 1e9
    if free_gigabytes < min_free_gigabytes:
        raise InputError(
            f"--output_dir {folder}: its disk has {free_gigabytes:.1f} GB free, --min_free_gb asks "
            f"for {min_free_gigabytes:g}; make room, or choose another disk"
        )


def find_earlier_outputs(config: Config, folders: RunFolders) -> list[tuple[str, dict[str, Any]]]:
    """Reads each metadata.json that the run has stored already, on the disk or in the bucket.

    Args:
        config: The configuration.
        folders: The folders of the run.

    Returns:
        A tuple for each metadata.json:
            The URL or path of its folder.
            Its content.
        The list is empty for a new run and with --overwrite.
    """
    return [] if config.storage_options.overwrite else folders.earlier()


class ModelCommitChoice(NamedTuple):
    """The git commit of a model on the hub that one host proposes to use.

    Attributes:
        is_commit_recorded: Whether the host has found this commit in the metadata of the run. False
            if the metadata records no commit.
        git_commit: The commit.
    """

    is_commit_recorded: bool
    git_commit: str


def choose_model_commit(
    config: Config, earlier_outputs: Sequence[tuple[str, Mapping[str, Any]]]
) -> ModelCommitChoice | None:
    """Chooses the git commit of the model on the hub, by the metadata that this host can read.

    The first start of a run records the commit in metadata.json. A run that continues uses the
    recorded commit, so a new commit on the hub does not stop a long run.

    Args:
        config: The configuration.
        earlier_outputs: The URL or path of each folder in which this run has stored a metadata.json
            already, and its content. Empty for a new run.

    Returns:
        The commit that this host proposes to use. `agree_on_model_commit` then decides which commit
        all hosts use. None for a local model and for the demo.

    Raises:
        InputError: If --model_revision names another commit than the metadata of the run.
    """
    if config.demo:
        return None
    model_path, requested_revision = (
        config.model_options.model_path,
        config.model_options.model_revision,
    )
    earlier_output_url, earlier_output_metadata = (
        earlier_outputs[0] if earlier_outputs else ("", {})
    )
    recorded_git_commit = recorded_model_commit(model_path, earlier_output_metadata)
    # --model_revision may name a branch, which may have a newer commit by now. The recorded commit
    # is used again, so that the same command continues the run with the same model.
    if recorded_git_commit and requested_revision in (
        None,
        earlier_output_metadata["configuration"].get("model_revision"),
    ):
        return ModelCommitChoice(is_commit_recorded=True, git_commit=recorded_git_commit)
    requested_git_commit = Repository(model_path, requested_revision).git_commit
    if requested_git_commit is not None and recorded_git_commit not in (None, requested_git_commit):
        raise InputError(
            f"--model_revision {requested_revision}: is commit {requested_git_commit}, but "
            f"{earlier_output_url} holds a run with commit {recorded_git_commit}; {FLAGS_REMEDY}"
        )
    return (
        None
        if requested_git_commit is None
        else ModelCommitChoice(recorded_git_commit is not None, requested_git_commit)
    )


def recorded_model_commit(model_path: str, metadata: Mapping[str, Any]) -> str | None:
    """Returns the git commit of a model on the hub that the metadata of a run records.

    Args:
        model_path: The name of the model on the hub, or its path.
        metadata: The content of metadata.json.

    Returns:
        The commit. None if the run used another model, or if the model is local.
    """
    recorded_model_path = metadata.get("configuration", {}).get("model_path")
    if recorded_model_path != plain_url(model_path) or Repository(model_path).is_local:
        return None
    return metadata.get("model_commit")


def agree_on_model_commit(host: Host, model_commit_choice: ModelCommitChoice | None) -> str | None:
    """Returns the git commit from which this host reads the model on the hub.

    All hosts must call this together. The hosts that read the model from the hub use the same
    commit. If one of them has found a commit in the metadata of the run, they use this commit.
    Otherwise, they use the commit that the first of them has chosen.

    Args:
        host: This host.
        model_commit_choice: The result of `choose_model_commit` on this host.

    Returns:
        The commit. None if this host does not read the model from the hub, because its model is
        local or the model of the demo.
    """
    # With several hosts, `gather` sends each choice as JSON and returns it as a list of its fields,
    # so each `ModelCommitChoice` is made again.
    git_commit_choices_of_hosts = [
        ModelCommitChoice(*choice_fields)
        for choice_fields in gather(host, model_commit_choice)
        if choice_fields is not None
    ]
    if model_commit_choice is None or not git_commit_choices_of_hosts:
        return None
    for git_commit_choice in git_commit_choices_of_hosts:
        if git_commit_choice.is_commit_recorded:
            return git_commit_choice.git_commit
    return git_commit_choices_of_hosts[0].git_commit


def smallest_device_memory(config: Config, host: Host) -> float | None:
    """Returns the smallest memory of a device on any host.

    Only the first device of each host is queried, because the devices of one host are assumed to
    have equal memory. All hosts must call this together,
    because no host can query the devices of another host.

    Args:
        config: The configuration.
        host: This host.

    Returns:
        The memory in bytes. None if no device reports its memory.

    Raises:
        InputError: If JAX finds no devices.
    """
    uses_all_devices = config.computing_options.use_data_parallel

    def memory_bytes_of_first_device() -> float | None:
        devices_of_host = devices_of_this_host(usable_devices(uses_all_devices))
        return memory_of(devices_of_host[0])

    device_memory_bytes = together(host, memory_bytes_of_first_device)
    return min(filter(None, gather(host, device_memory_bytes)), default=None)


def source_names_of_first_host(config: Config, host: Host) -> list[str]:
    """Returns the names of the sources of a mixture on host 0, which all hosts use.

    All hosts must call this together.

    Args:
        config: The configuration of this host, whose paths may differ from host 0's.
        host: This host.
    """
    return gather(
        host,
        [
            plain_url(path_or_hub_dataset_name)
            for path_or_hub_dataset_name, _ in config.text_options.mix
        ],
    )[0]


def with_inputs_of_demo(config: Config, folder: Path) -> Config:
    """Makes the model and the documents of --demo, and adds their paths to the configuration.

    Args:
        config: The configuration.
        folder: The folder in which the model and the documents are made.

    Returns:
        The configuration with the paths. Without --demo, the unchanged configuration.

    Raises:
        InputError: If the flags do not fit the demo's model, or if the folder cannot be written to.
    """
    if not config.demo:
        return config
    # Building the model raises InputError for flags that do not fit it, before files are written.
    build_model(step_request(config), parse_model_config(MODEL_CONFIG))
    log.info("demo: making a tiny Qwen2 model and sample documents")
    model_folder, documents_file = make_demo(folder)
    return replace(
        config,
        model_options=replace(config.model_options, model_path=str(model_folder)),
        text_options=replace(config.text_options, dataset_path=str(documents_file)),
    )


def step_request(
    config: Config,
    model_commit: str | None = None,
    device_memory_bytes: float | None = None,
    planned: Sequence[Any] | None = None,
) -> StepRequest:
    """Returns the request for a step: the model, the hooks, the mesh and the shape of batches.

    With --batch_size auto, the request has the default number of rows, and `fit_rows` finds a
    better number afterwards.

    Args:
        config: The configuration.
        model_commit: The git commit of the model on the hub. None to use --model_revision.
        device_memory_bytes: The memory of each device in bytes. None for the memory that this
            host's devices report.
        planned: The devices of the machine that --plan names, on which a step is only estimated.
            None for this machine's devices.

    Raises:
        InputError: If an autoencoder cannot be read, or if JAX finds no devices.
    """
    computing_options = config.computing_options
    tokens_per_row = config.text_options.max_seq_length
    autoencoders = tuple(
        read_autoencoder(hook_name, autoencoder_name)
        for hook_name, autoencoder_name in config.hook_options.encode
    )
    batch_size = computing_options.batch_size
    if not isinstance(batch_size, int):
        is_batch_size_auto = batch_size == "auto"
        batch_size = default_rows(
            tokens_per_row, computing_options.use_data_parallel, is_batch_size_auto, planned
        )
    return StepRequest(
        replace(
            config.model_options, model_revision=model_commit or config.model_options.model_revision
        ),
        config.hook_options,
        computing_options,
        (batch_size, tokens_per_row),
        has_several_hosts=config.host_options.multihost,
        device_memory_bytes=device_memory_bytes,
        devices_of_planned_machine=planned,
        autoencoders=autoencoders,
    )


def check_and_identify(
    config: Config, folders: RunFolders, forward: Forward, text_pipeline: Text, watchdog: Watchdog
) -> Identity:
    """Checks that the inputs of the text pipeline can be used, and returns the identity of the run.

    Args:
        config: The configuration.
        folders: The folders of the run.
        forward: The model on its mesh. The identity contains its hooks and its files.
        text_pipeline: The text pipeline of the run. Its tokenizer, its chat template and the first
            row of each data set are checked.
        watchdog: The watchdog, which watches over these checks.

    Raises:
        InputError: If the tokenizer, the chat template or a data set cannot be used, or if another
            machine or host has stored a run with another identity in the same output folder, local
            or in the bucket.
    """
    # The data set is opened before the watchdog starts, because listing its files may take long.
    _ = text_pipeline.dataset
    with watchdog:
        text_pipeline.check()
    identity = new_identity(config, forward, text_pipeline, folders.worker)
    if not config.storage_options.overwrite:
        folders.check_siblings(identity)
    return identity


def facts_of_run(config: Config, forward: Forward, text_pipeline: Text) -> dict[str, Any]:
    """Returns the facts about a run that metadata.json records in addition to its identity.

    Args:
        config: The configuration.
        forward: The model on its mesh, with the kernels that compute it.
        text_pipeline: The text pipeline of the run, which contains the tokenizer.

    Returns:
        A dict with these keys of metadata.json:
            "configuration": The flags, with the number of rows of a batch for --batch_size, token
                ids for --drop_token_ids, and absolute paths of a local model and adapter.
            "model": The configuration of the model.
            "model_commit": The git commit of the model on the hub. None for a local model.
            "backend": JAX's name of the platform.
            "mesh": The shape of the mesh.
            "versions": The versions of the packages that determine which bytes are stored.
            "attention" and, if the model needs them, "experts" and "delta_rule" (see `Kernels`):
                The kernel that was chosen for this operation, as `Choice.to_json` returns it.
            "tokenizer_path" (only if the run uses a tokenizer): The path of the tokenizer.
            "added_tokens" (only if the run uses a tokenizer): The tokens that were added to its
                vocabulary, by their token ids as text.
    """
    resolved_config = replace(
        config,
        text_options=replace(config.text_options, drop_token_ids=text_pipeline.drop_token_ids),
    )
    stored_configuration = {**resolved_config.to_json(), "batch_size": forward.batch_shape[0]}
    repository_by_flag = {"model_path": forward.checkpoint, "lora": forward.adapter_files}
    for path_flag_name, repository in repository_by_flag.items():
        # The path is absolute so that readers in any working directory find a local tokenizer.
        if repository is not None and repository.is_local:
            stored_configuration[path_flag_name] = os.path.abspath(
                os.path.expanduser(repository.path)
            )
    value_by_metadata_key = {
        "configuration": stored_configuration,
        "model": asdict(forward.model.config),
        "model_commit": forward.checkpoint.git_commit,
        "backend": jax.default_backend(),
        "mesh": forward.layout.shape,
        **{
            operation_name: kernel_choice.to_json()
            for operation_name, kernel_choice in forward.kernel_choice_by_operation.items()
        },
        "versions": package_versions(),
    }
    chosen_tokenizer = text_pipeline.chosen_tokenizer
    if chosen_tokenizer is not None:
        # To decode token ids, readers need the path of the tokenizer and the tokens that were added
        # to its vocabulary.
        path_flag_name = (
            "model_path" if chosen_tokenizer.repository is forward.checkpoint else "lora"
        )
        added_token_by_id = chosen_tokenizer.backend.get_added_tokens_decoder()
        value_by_metadata_key["tokenizer_path"] = stored_configuration[path_flag_name]
        value_by_metadata_key["added_tokens"] = {
            str(token_id): added_token.content
            for token_id, added_token in added_token_by_id.items()
        }
    return value_by_metadata_key


def plan_storage(
    config: Config,
    folders: RunFolders,
    forward: Forward,
    text_pipeline: Text,
    identity: Identity,
    value_by_metadata_key: Mapping[str, Any],
    watchdog: Watchdog,
) -> ActivationStorage:
    """Returns the storage of this host, which has read the run log but has written nothing yet.

    Args:
        config: The configuration.
        folders: The folders of the run.
        forward: The model on its mesh, with the hooks whose values are stored.
        text_pipeline: The text pipeline of the run. metadata.json records the files of its data
            set.
        identity: The identity of the run.
        value_by_metadata_key: The facts that metadata.json records in addition to the identity, by
            their keys in it.
        watchdog: The watchdog. It is reset while the storage waits for an upload, because each
            upload has its own time limit.

    Raises:
        InputError: If the folders contain another run, or a run that cannot be continued.
    """
    worker, storage_options = folders.worker, config.storage_options
    # --max_samples and --max_tokens are limits of a machine, and each host gets a part of them.
    storage_options_of_host = replace(
        storage_options,
        max_samples=worker.share_of(storage_options.max_samples),
        max_tokens=worker.share_of(storage_options.max_tokens),
    )
    encoder_metadata_by_hook_name = {
        encoder.hook.name: encoder.metadata() for encoder in forward.encoders
    }
    metadata_by_hook_key = {
        hook_key: encoder_metadata_by_hook_name.get(hook.name) or hook.metadata(forward.sizes)
        for hook_key, hook in forward.hook_by_key.items()
    }
    return ActivationStorage(
        folders.folder,
        {hook_key: hook.name for hook_key, hook in forward.hook_by_key.items()},
        storage_options_of_host,
        identity,
        folders.remote,
        RunFacts(value_by_metadata_key, metadata_by_hook_key, text_pipeline.dataset.files),
        config.repair,
        on_wait=watchdog.reset if folders.remote is not None else lambda: None,
    )


def log_start(run: Run) -> None:
    """Logs the settings of a run that a user should see before it begins.

    They are the hooks, the number of samples that are stored already, the special tokens that each
    text gets, and the rule by which tokens are kept.
    """
    activation_storage, sample_settings = run.storage, run.text_pipeline.sample_settings
    log_hooks(run.config.hook_options, run.forward)
    stored_totals = activation_storage.totals
    is_repair = activation_storage.plan.repair is not None
    if stored_totals.shards and not is_repair and not activation_storage.complete:
        log.info(
            "continuing %s after %s and %s in %s",
            run.output_url,
            counted(stored_totals.samples, "sample"),
            counted(stored_totals.tokens, "token"),
            counted(stored_totals.shards, "shard"),
        )
    if special_tokens := sample_settings.special_tokens:
        log.info("special tokens: %s (--special_tokens none adds none)", special_tokens.description)
    if not sample_settings.token_choice.keeps_everything:
        log.info("kept tokens: %s", sample_settings.token_choice)
