"""Turns a checked command line into a job, and finds everything that can be wrong with it.

The cheapest checks come first, and no weight is read here. The hosts of a pod compare what they
have found before they go on.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax

from activation_extraction.cli.config import Config
from activation_extraction.cli.console import log
from activation_extraction.common.errors import InputError
from activation_extraction.model.devices import use_compilation_cache
from activation_extraction.model.family import Families
from activation_extraction.model.forward import (
    Forward,
    ModelRequest,
    build_model,
    log_hooks,
    prepare_model,
)
from activation_extraction.run.demo import MODEL_CONFIG, make_demo
from activation_extraction.run.fingerprint import fingerprint, identity_of, package_versions
from activation_extraction.run.host_text import HostText, open_dataset, share_of
from activation_extraction.run.hosts import Host, Watchdog, agree
from activation_extraction.run.repair import RepairPlanner
from activation_extraction.run.revision import choose_commit, same_commit
from activation_extraction.run.run_folders import (
    RunFolders,
    check_siblings,
    find_metadata,
)
from activation_extraction.store.folder import Folder
from activation_extraction.store.folder_lock import check_free_disk, check_output_dir
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import metadata_in
from activation_extraction.store.options import StorageOptions
from activation_extraction.store.run_record import RunFacts
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch
from activation_extraction.text.choice import TokenChoice
from activation_extraction.text.documents import DocumentStream, check_dataset
from activation_extraction.text.prefetch import Prefetch
from activation_extraction.text.tokenizer import load_tokenizer
from activation_extraction.text.workers import Worker

T = TypeVar("T")


@dataclass(frozen=True)
class Job:
    """A request that has been checked: the model, the text, and where the result goes.

    batches: those that were not stored yet when the text was opened; documents: what they are made
    from. where: the URL or path of the output, for messages. watchdog: of the whole run.
    """

    host: Host
    forward: Forward
    folders: RunFolders
    storage: ActivationStorage
    text: HostText
    documents: DocumentStream
    batches: Prefetch[Batch]
    identity: Identity
    where: str
    repair: RepairPlanner | None
    watchdog: Watchdog

    def with_text_reopened(self) -> "Job":
        """The same job, with the batches that are still not stored."""
        repairing = self.repair is not None
        documents, batches = open_text(self.text, self.storage, repairing, self.watchdog)
        return replace(self, documents=documents, batches=batches)


@dataclass(frozen=True)
class Output:
    """Where the output goes and what is there already.

    remote: this host's folder in the bucket. earlier: (where, metadata) of each root that holds an
    earlier run, and own the metadata of this host's; both are empty when this run starts anew.
    commit: the hub model's, as this host sees it (see choose_commit).
    """

    folders: RunFolders
    remote: Folder | None
    earlier: Sequence[tuple[str, dict[str, Any]]]
    own: Sequence[dict[str, Any]]
    commit: tuple[str, str] | None


def prepare_together(config: Config, host: Host, families: Families, watchdog: Watchdog) -> Job:
    """Checks the request here and compares it with the other hosts'. Raises InputError."""
    output, problem = _attempt(lambda: prepare_output(config, host, watchdog.alive))
    agree(host, {"--model_revision": config.model_revision}, problem)
    assert output is not None
    commit = same_commit(host, output.commit)

    def compared() -> tuple[Job, dict[str, Any]]:
        job = prepare(config, host, families, output, commit, watchdog)
        files = job.text.dataset.files.files
        return job, fingerprint(config, job.forward, job.identity, files)

    prepared, problem = _attempt(compared)
    agree(host, prepared[1] if prepared else {}, problem)
    assert prepared is not None
    job = prepared[0]
    if host.several:  # only now do all of them have files of the same names
        sampled, problem = _attempt(job.text.dataset.files.sampled)
        agree(host, sampled or {}, problem)
    log_hooks(model_request(config), job.forward.model)
    if not job.text.choice.everything:
        log.info("kept tokens: %s", job.text.choice)
    return job


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """What `action` returns or raises: the other hosts must not be left waiting for this one."""
    try:
        return action(), None
    except Exception as error:
        return None, error


def prepare_output(config: Config, host: Host, beat: Callable[[], None]) -> Output:
    """Checks where the output goes, and chooses the model's commit. Raises InputError.

    beat: called whenever an upload makes progress.
    """
    worker = Worker(config.machine_id, config.total_machines, host.id, host.count)
    folders = RunFolders(worker, Path(config.output_dir), config.bucket_url, config.upload_timeout)
    check_output_dir(folders.folder)
    check_free_disk(folders.folder, config.min_free_gb)
    use_compilation_cache(config.compilation_cache, folders.local, host.several)
    remote = folders.open_bucket(beat)
    folders.check_stale_folders(config.overwrite)
    roots = [] if config.overwrite else folders.roots
    earlier = [found for root, _ in roots if (found := find_metadata(root)) is not None]
    places = [] if config.overwrite else [Folder(str(folders.folder)), *filter(None, (remote,))]
    own = [metadata for metadata in map(metadata_in, places) if metadata is not None]
    commit = None
    if not config.demo:
        where, metadata = earlier[0] if earlier else ("", {})
        commit = choose_commit(config.model_path, config.model_revision, where, metadata)
    return Output(folders, remote, earlier, own, commit)


def prepare(
    config: Config,
    host: Host,
    families: Families,
    output: Output,
    commit: str | None,
    watchdog: Watchdog,
) -> Job:
    """Checks the rest of the request. commit: the hub model's. Raises InputError."""
    if config.demo:
        config = _with_demo(config, output.folders.folder, families)
    request = model_request(config)
    forward = prepare_model(families, replace(request, revision=commit or request.revision))
    checkpoint = forward.checkpoint
    tokenizer = load_tokenizer(
        checkpoint.tokenizer_files(), checkpoint.model_path, forward.model.config.vocab_size
    )
    choice = choose_tokens(config, forward.model.config.vocab_size)
    source = config.dataset_path, config.dataset_name, config.dataset_config, config.dataset_split
    others = [metadata for _, metadata in output.earlier]
    dataset = open_dataset(*source, config.text_column, output.own, others)
    check_dataset(dataset.rows, config.text_column, config.skip_bad_rows)
    worker = output.folders.worker
    identity = identity_of(config, forward, dataset, worker)
    if not config.overwrite:
        for root, _ in output.folders.roots:
            check_siblings(root, identity)
    text = HostText(
        dataset=dataset,
        tokenizer=tokenizer,
        worker=worker,
        text_column=config.text_column,
        skip_bad_rows=config.skip_bad_rows,
        max_samples=share_of(config.max_samples, worker.host, worker.hosts),
        rows=config.batch_size,
        length=config.max_seq_length,
        choice=choice,
    )
    described = describe_run(config, forward)
    repair = plan_repair(config, output, identity, described) if config.repair else None
    storage = open_storage(config, forward, output, identity, described, text, repair)
    documents, batches = open_text(text, storage, repair is not None, watchdog)
    where = output.remote.url if output.remote else str(output.folders.folder)
    return Job(
        host=host,
        forward=forward,
        folders=output.folders,
        storage=storage,
        text=text,
        documents=documents,
        batches=batches,
        identity=identity,
        where=where,
        repair=repair,
        watchdog=watchdog,
    )


def model_request(config: Config) -> ModelRequest:
    """What the flags ask of the model."""
    return ModelRequest(
        model_path=config.model_path,
        revision=config.model_revision,
        dtype=config.dtype,
        activation_dtype=config.activation_dtype,
        hook_names=config.hook_names,
        layers=config.layers_to_extract,
        activation_type=config.activation_type,
        rows=config.batch_size,
        length=config.max_seq_length,
        mesh_type=config.mesh_type,
        mesh_shape=config.mesh_shape,
        mesh_axes=config.mesh_axes,
        every_device=config.use_data_parallel,
        keep_weights=not config.multihost,  # the hosts of a pod may need parts of them only
    )


def choose_tokens(config: Config, vocabulary: int) -> TokenChoice:
    """The tokens that the flags keep. Raises InputError for a token id that the model lacks."""
    if config.drop_token_ids and (largest := config.drop_token_ids[-1]) >= vocabulary:
        raise InputError(
            f"--drop_token_ids {largest}: the model has token ids 0 to {vocabulary - 1}"
        )
    if len(config.drop_token_ids) == vocabulary:
        raise InputError("--drop_token_ids: names every token of the model; nothing is left")
    return TokenChoice(config.positions, config.drop_token_ids)


def _with_demo(config: Config, folder: Path, families: Families) -> Config:
    """Makes the demo's model and documents in `folder`; returns the configuration with them."""
    family, model_config = families.of(MODEL_CONFIG)
    build_model(family, model_request(config), model_config)  # checks
    log.info("demo: making a tiny Qwen2 model and sample documents")
    model, documents = make_demo(folder, families)
    return replace(config, model_path=str(model), dataset_path=str(documents))


def open_text(
    text: HostText, storage: ActivationStorage, repairing: bool, watchdog: Watchdog
) -> tuple[DocumentStream, Prefetch[Batch]]:
    """This host's documents, and the batches of them that are still to be computed."""
    documents = text.documents()
    if repairing:
        return documents, text.of_gaps(storage)
    return documents, text.not_stored(documents, storage, watchdog)


def describe_run(config: Config, forward: Forward) -> dict[str, Any]:
    """What metadata.json records about a run besides its identity."""
    return {
        "configuration": config.to_json(),
        "model": asdict(forward.model.config),
        "model_commit": forward.checkpoint.commit,
        "backend": jax.default_backend(),
        "mesh": forward.layout.shape,
        **{name: choice.to_json() for name, choice in forward.kernels.items()},
        "versions": package_versions(),
    }


def plan_repair(
    config: Config, output: Output, identity: Identity, described: dict[str, Any]
) -> RepairPlanner:
    """--repair: the planner that finds the shards to make again."""
    return RepairPlanner(
        Folder(str(output.folders.folder)),
        output.remote,
        identity,
        described,
    )


def open_storage(
    config: Config,
    forward: Forward,
    output: Output,
    identity: Identity,
    described: dict[str, Any],
    text: HostText,
    repair: RepairPlanner | None,
) -> ActivationStorage:
    """Opens the output for this run. Raises InputError if nothing may be added to it."""
    sizes = forward.sizes
    return ActivationStorage(
        output.folders.folder,
        {key: hook.name for key, hook in forward.hooks.items()},
        StorageOptions(
            shard_size_gb=config.shard_size_gb,
            shard_format=config.shard_format,
            compress=config.compress_shards,
            max_samples=text.max_samples,
            overwrite=config.overwrite,
            keep_local=not config.delete_local_after_upload,
            threads=config.writer_threads,
            waiting_gb=config.waiting_shards_gb,
        ),
        identity,
        output.remote,
        RunFacts(
            metadata=described,
            hooks={key: hook.facts(sizes) for key, hook in forward.hooks.items()},
            sources=text.dataset.files,
        ),
        repair,
    )
