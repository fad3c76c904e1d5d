"""This module turns a checked command line into a job, and finds all that can be wrong with it.

The cheapest checks come first, and no weight is read here. The hosts of a pod compare what they
have found before they go on.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

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
    ModelRequest,
    build_model,
    log_hooks,
    prepare_model,
)
from activation_extraction.model.repository import Repository
from activation_extraction.run.batch_size import default_rows, fit_rows
from activation_extraction.run.demo import MODEL_CONFIG, make_demo
from activation_extraction.run.host_text import Prefetch, Text
from activation_extraction.run.hosts import Host, Watchdog, gather, together
from activation_extraction.run.inputs import (
    Inputs,
    fingerprint,
    new_identity,
    package_versions,
    settings_of,
    step_of,
)
from activation_extraction.store.identity import RunFacts, StorageOptions
from activation_extraction.store.local_files import check_output_dir, nearest
from activation_extraction.store.metrics import METRICS
from activation_extraction.store.resume import FLAGS_REMEDY
from activation_extraction.store.run_folders import RunFolders
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch, Worker
from activation_extraction.text.mark import Mark


@dataclass(frozen=True)
class Job:
    """A checked request: the model, the text, and where the result goes.

    batches: those that were not stored yet when the text was opened; their `result` is the mark at
    the end of the data.
    """

    host: Host
    forward: Forward
    folders: RunFolders
    storage: ActivationStorage
    text: Text
    batches: Prefetch[Batch, Mark | None]

    @property
    def where(self) -> str:
        """Returns the URL or path of the output, for messages."""
        return self.storage.destination.url

    def with_text_reopened(self, watchdog: Watchdog) -> "Job":
        """Returns the same job, with the batches that are still not stored."""
        worker, shape = self.folders.worker, self.forward.shape
        return replace(self, batches=self.text.open(worker, shape, self.storage, watchdog))


def prepare_together(config: Config, host: Host, watchdog: Watchdog) -> Job:
    """Checks the request here and compares it with the other hosts'. Raises InputError."""
    folders, earlier, chosen, own_memory = together(
        host, lambda: examine_output(config, host), lambda _: settings_of(config)
    )
    names = [plain_url(name) for name, _ in config.mix]
    found = gather(host, (chosen, own_memory, names))
    commits, memories, (sources, *_) = zip(*found, strict=True)
    # A recorded commit, or else that of the first host.
    agreed = min(filter(None, commits), key=lambda each: each[0], default=None)
    commit = agreed[1] if chosen and agreed else None
    memory = min(filter(None, memories), default=None)
    config, request, forward = together(
        host,
        lambda: prepare_forward(config, folders.folder, commit, memory),
        lambda prepared: step_of(prepared[2]),
    )
    facts: dict[str, Any] = {}
    stored = [metadata for _, metadata in earlier]
    if config.batch_size == "auto":
        forward, facts["auto_batch_size"] = fit_rows(host, request, forward, stored)
    vocabulary = forward.model.config.vocab_size
    text = Text(config, forward.checkpoint, vocabulary, stored, sources, forward.adapter_files)
    inputs = Inputs(request, forward, text)
    job, _ = together(
        host,
        lambda: prepare(host, inputs, folders, facts, watchdog),
        lambda prepared: prepared[1],
    )
    log_hooks(request, job.forward)
    totals = job.storage.totals
    if totals.shards and job.storage.plan.repair is None and not job.storage.complete:
        done = [counted(getattr(totals, f"{unit}s"), unit) for unit in ("sample", "token", "shard")]
        log.info("continuing %s after %s and %s in %s", job.where, *done)
    if special := text.form.special:
        log.info("special tokens: %s (--special_tokens none adds none)", special.template)
    if not text.form.choice.everything:
        log.info("kept tokens: %s", text.form.choice)
    return job


def examine_output(
    config: Config, host: Host
) -> tuple[RunFolders, list[tuple[str, dict[str, Any]]], tuple[bool, str] | None, float | None]:
    """Checks where the output goes. Raises InputError.

    Returns the folders; the URL and the metadata of the run that is continued, of each root that
    has it; the model's commit (see `choose_commit`); and the memory of a device, if it is known.
    """
    worker = Worker(config.machine_id, config.total_machines, host.id, host.count)
    output, bucket = Path(config.output_dir), config.bucket_url
    folders = RunFolders(worker, output, bucket, config.upload_timeout)
    check_output_dir(folders.folder, METRICS)
    check_free_disk(folders.folder, config.min_free_gb)
    use_compilation_cache(config.compilation_cache, folders.local, host.several)
    folders.check_bucket()
    folders.check_stale_folders(config.overwrite)
    earlier = [] if config.overwrite else folders.earlier()
    memory = memory_of(devices_of_this_host(usable_devices(config.use_data_parallel))[0])
    return folders, earlier, choose_commit(config, earlier), memory


def check_free_disk(folder: Path, gigabytes: float) -> None:
    """Raises InputError if the disk where `folder` is or will be has too little free space."""
    free = shutil.disk_usage(nearest(folder)).free / 1e9
    if free < gigabytes:
        raise InputError(
            f"--output_dir {folder}: its disk has {free:.1f} GB free, --min_free_gb asks for "
            f"{gigabytes:g}; make room, or choose another disk"
        )


def choose_commit(
    config: Config, earlier: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[bool, str] | None:
    """Returns the hub model's commit as this host sees it, after whether it is a new one.

    The first start records it in metadata.json, so a new commit on the hub does not stop a long
    run. None for a local folder. Raises InputError if the revision asked for is not the recorded
    commit.
    """
    if config.demo:
        return None
    revision = config.model_revision
    where, metadata = earlier[0] if earlier else ("", {})
    recorded = recorded_commit(config.model_path, metadata)
    # Even if a branch has moved on, the command that began the extraction continues it.
    if recorded and revision in (None, metadata["configuration"].get("model_revision")):
        return False, recorded
    commit = Repository(config.model_path, revision).commit
    if commit is not None and recorded not in (None, commit):
        raise InputError(
            f"--model_revision {revision}: is commit {commit}, but {where} holds an extraction "
            f"with commit {recorded}; {FLAGS_REMEDY}"
        )
    return None if commit is None else (recorded is None, commit)


def recorded_commit(model_path: str, metadata: Mapping[str, Any]) -> str | None:
    """Returns the commit that an extraction used; None if its model is another or a local one."""
    recorded_path = metadata.get("configuration", {}).get("model_path")
    if recorded_path != plain_url(model_path) or Repository(model_path).local:
        return None
    return metadata.get("model_commit")


def prepare_forward(
    config: Config, folder: Path, commit: str | None, memory: float | None
) -> tuple[Config, ModelRequest, Forward]:
    """Returns the configuration (a demo makes its own), the request and the checked model.

    folder: for the demo's inputs; commit: the hub model's; memory: of each device. Raises
    InputError.
    """
    if config.demo:
        # This checks the flags.
        build_model(model_request(config), parse_model_config(MODEL_CONFIG))
        log.info("demo: making a tiny Qwen2 model and sample documents")
        model, documents = make_demo(folder)
        config = replace(config, model_path=str(model), dataset_path=str(documents))
    revision = commit or config.model_revision
    request = replace(model_request(config), model_revision=revision, memory=memory)
    return config, request, prepare_model(request)


def prepare(
    host: Host,
    inputs: Inputs,
    folders: RunFolders,
    facts: Mapping[str, Any],
    watchdog: Watchdog,
) -> tuple[Job, dict[str, Any]]:
    """Checks the rest of the request; returns the job, and what hosts compare.

    facts: what metadata.json records besides what this function knows. Raises InputError.
    """
    forward = inputs.forward
    text = inputs.text
    worker = folders.worker
    files = text.dataset.files  # listing them is not watched: it may take long
    config = replace(text.config, drop_token_ids=text.drop_token_ids)
    with watchdog:
        text.check()
    identity = new_identity(inputs, worker)
    if not config.overwrite:
        folders.check_siblings(identity)
    # The flags limit what a machine stores, and this is one of its hosts.
    options = replace(
        config.part(StorageOptions),
        max_samples=worker.share_of(config.max_samples),
        max_tokens=worker.share_of(config.max_tokens),
    )
    configuration = {**config.to_json(), "batch_size": forward.shape[0]}
    repositories = {"model_path": forward.checkpoint, "lora": forward.adapter_files}
    for name, repository in repositories.items():
        # Readers find the tokenizer of a local one from any folder.
        if repository is not None and repository.local:
            configuration[name] = os.path.abspath(os.path.expanduser(repository.path))
    chosen = text.chosen_tokenizer
    if chosen is not None:  # readers show the text of tokens with these
        name = "model_path" if chosen.home is forward.checkpoint else "lora"
        added = chosen.backend.get_added_tokens_decoder().items()
        facts = {
            **facts,
            "tokenizer_path": configuration[name],
            "added_tokens": {str(number): token.content for number, token in added},
        }
    metadata = {
        "configuration": configuration,
        "model": asdict(forward.model.config),
        "model_commit": forward.checkpoint.commit,
        "backend": jax.default_backend(),
        "mesh": forward.layout.shape,
        **{name: choice.to_json() for name, choice in forward.kernels.items()},
        "versions": package_versions(),
        **facts,
    }
    codes = {encoder.hook.name: encoder.facts() for encoder in forward.encoders}
    hooks = {k: codes.get(h.name) or h.facts(forward.sizes) for k, h in forward.hooks.items()}
    storage = ActivationStorage(
        folders.folder,
        {key: hook.name for key, hook in forward.hooks.items()},
        options,
        identity,
        folders.remote,
        RunFacts(metadata, hooks, files),
        config.repair,
        # Uploads have time limits of their own.
        on_wait=watchdog.reset if folders.remote is not None else lambda: None,
    )
    batches = text.open(worker, forward.shape, storage, watchdog)
    job = Job(host, forward, folders, storage, text, batches)
    return job, fingerprint(inputs, identity)


def model_request(config: Config, planned: Sequence[Any] | None = None) -> ModelRequest:
    """Returns what the flags ask of the model; `auto` rows are the default until `fit_rows`.

    planned: the devices of a machine that is not here. Raises InputError for an autoencoder that
    cannot be read.
    """
    autoencoders = tuple(read_autoencoder(hook, name) for hook, name in config.encode)
    request = replace(config.part(ModelRequest), devices=planned, autoencoders=autoencoders)
    rows = config.batch_size
    if not isinstance(rows, int):
        rows = default_rows(
            request.max_seq_length, request.use_data_parallel, rows == "auto", planned
        )
    return replace(request, batch_size=rows)
