"""Whatever happens to the processes of a run, every sample is stored once, with its values.

All but the model runs, over a bucket in memory. Plain sweeps stop a process at each of its
requests, have requests fail with unknown outcomes, and let a second process begin at each of them,
after which the first one wakes up. Then the same command must store what an undisturbed run stores.
"""

import json
import random
import threading
from contextlib import nullcontext, suppress
from functools import lru_cache
from itertools import combinations, count
from typing import NamedTuple

import numpy as np
import pytest
from chat_templates import QWEN3, add_markers
from memory_bucket import MemoryBucket, MemoryFolder, Process, Stopped
from small_runs import HIDDEN, HOOKS, activations
from storages import open_storage

from activation_extraction.cli.config import parse_args
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.inspect.verify_shard import read_samples
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import demo
from activation_extraction.run.host_text import Text
from activation_extraction.run.repair import RepairPlanner
from activation_extraction.store import folder
from activation_extraction.store.commit import Commit, seal
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import read_metadata, read_stored
from activation_extraction.store.owner import LostError, Owner
from activation_extraction.store.sample_table import read_table
from activation_extraction.text import packing
from activation_extraction.text import samples as text_samples
from activation_extraction.text.batch import Worker

CODES = "blocks.2.hook_resid_post.codes"
LENGTH, ROWS, GROUP, VOCABULARY = 24, 2, 3, 2100  # tokens of a row, rows of a batch and of a group
METADATA = {"model": {"hidden_size": HIDDEN, "vocab_size": VOCABULARY}}


class Case(NamedTuple):
    """A case says what is extracted. flags: of the text. before: more flags of the processes that
    come first; they may fail. shard: the most bytes of a shard. grows: whether the file has grown
    when the others come. codes: whether there are codes beside activations."""

    flags: str
    before: str | None = None
    hosts: int = 1
    shard: int = 2500
    grows: bool = False
    codes: bool = False


TEXT, CHAT = "--dataset_path {}/text.jsonl", "--dataset_path {}/chat.jsonl --messages_column m"
CASES = {
    "text": Case(TEXT),
    "hosts": Case(TEXT, hosts=2),
    "shuffled": Case(f"{TEXT} --shuffle_documents 3 --keep_columns id"),
    "split": Case("--dataset_path {}/long.jsonl --long_documents split --overlap 5", shard=4000),
    "mixture": Case("--mix {}/text.jsonl=0.7 {}/long.jsonl=0.3 --max_tokens 400"),
    "conversations": Case(f"{CHAT} --roles assistant --long_documents split"),
    "turns": Case(f"{CHAT} --positions last_of_turn", shard=400),
    "token ids": Case("--dataset_path {}/ids.jsonl --ids_column ids --mask_column mask"),
    "few tokens": Case(f"{TEXT} --positions 9:10", hosts=2, shard=100),
    "no tokens": Case(f"{TEXT} --positions random:1e-15", shard=200),
    "more samples": Case(TEXT, before="--max_samples 7"),
    "more tokens": Case(TEXT, before="--max_tokens 101"),
    "a bad row": Case("--dataset_path {}/bad.jsonl --skip_bad_rows", before=""),
    "a file that grows": Case(TEXT, before="--max_samples 12", grows=True),
    "codes": Case("--dataset_path {}/long.jsonl --long_documents split", shard=6000, codes=True),
    "some codes": Case(f"{TEXT} --positions every:2", codes=True),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A tokenizer of bytes and small files of each kind."""
    folder, chance = tmp_path_factory.mktemp("data"), random.Random(1)
    demo.write_tokenizer(folder, [])
    (folder / "config.json").write_text("{}")
    add_markers(folder, QWEN3)

    def write(name, rows):
        lines = (json.dumps({"id": n, **row}) for n, row in enumerate(rows))
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))

    def turns():
        pair = [
            {"role": role, "content": "x" * chance.randint(0, 6)} for role in ("user", "assistant")
        ]
        return pair * chance.randint(1, 2)

    texts = ["x" * chance.choice([0, 1, *range(2, 31)]) for _ in range(26)]
    write("text", [{"text": text} for text in texts])
    write("long", [{"text": "x" * chance.randint(1, 99)} for _ in range(12)])
    write("bad", [{"text": text if n != 19 else 5} for n, text in enumerate(texts)])
    write("chat", [{"m": turns()} for _ in range(12)])
    sizes = [chance.randint(1, 30) for _ in range(20)]
    write(
        "ids", [{"ids": [7] * n, "mask": [chance.randint(0, 1) for _ in range(n)]} for n in sizes]
    )
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pauses are short, and small data has several groups and chunks."""
    monkeypatch.setattr(folder, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(folder, "MAX_PAUSE", 0.002)
    monkeypatch.setattr(packing, "LEAST_ROWS", GROUP)
    monkeypatch.setattr(packing, "GROUP_ROWS", GROUP)
    monkeypatch.setattr(text_samples, "CHUNK_ROWS", 5)


@lru_cache
def config_of(flags, data):
    """What flags ask of the text."""
    given = flags.replace("{}", str(data)).split()
    return parse_args([*given, "--max_seq_length", str(LENGTH)])


def values_of(number, positions, key):
    """The activations of a sample, (tokens, width), however it is packed."""
    return np.float32(number + key - 1 + positions[:, None] / 64 + np.arange(HIDDEN))


MOST = 3  # features of a token that are kept


def codes_of(number, positions, most=MOST):
    """The records of a sample, of which some tokens have more features than are kept, or none."""
    active = (number + positions) % 5
    ids = number + np.arange(MOST) * (1 + positions[:, None])
    values = values_of(number, positions, 1)[:, :MOST]
    kept = np.arange(MOST) < active[:, None]
    head = np.stack([np.minimum(active, most), active / 8, active / 4], 1).astype(np.float32)
    found = np.concatenate([head, np.where(kept, values, 0)], 1).view(np.int32)
    found[:, 0] = head[:, 0]
    return np.concatenate([found[:, :3], np.where(kept, ids, 0), found[:, 3:]], 1).astype(np.int32)


def with_codes(batch):
    """The activations of a batch, and codes."""
    records = np.zeros((*batch.token_ids.shape, 3 + 2 * MOST), np.int32)
    for placed in batch.samples:
        place = np.arange(placed.stop - placed.start)
        own = codes_of(placed.sample.sample_idx, place, 5)
        records[placed.row, placed.start : placed.stop] = own
    return activations(batch) | {CODES: records}


class Run:
    """The runs of one case. Each call is a process, which extracts or repairs all but the model."""

    def __init__(self, case, shard_format, data, folder):
        self.case, self.format, self.data, self.folder = case, shard_format, data, folder
        self.processes = count()

    def __call__(self, bucket, process=None, before=False, repair=False, **options):
        root = MemoryFolder(bucket, process or Process())
        for host in range(self.case.hosts):
            self._host(root.child(f"machine_000_host_{host:02d}"), host, before, repair, **options)

    def _host(self, folder, host, before, repair, rows=ROWS, stop_after=None, **options):
        """Extracts or repairs the share of a host, and stops before batch `stop_after`."""
        case = self.case
        if case.grows:
            self._grow("" if before else '{"text": "new"}\n')
        config = config_of(case.flags + f" {case.before}" * before, self.data)
        worker = Worker(host=host, hosts=case.hosts)
        own = list(filter(None, [read_metadata(folder)]))
        text = Text(config, Checkpoint(str(self.data)), VOCABULARY, own)
        hooks = HOOKS | ({CODES: CODES} if case.codes else {})
        identity = Identity(
            "tiny",
            data=text.dataset.name,
            hooks=tuple(hooks.values()),
            code_hooks=(CODES,) * case.codes,
            host=host,
            num_hosts=case.hosts,
            positions=str(config.positions),
            mask_column=config.mask_column or "",
            overlap=config.overlap,
            roles=config.roles,
        )
        asked = {"max_samples": config.max_samples, "max_tokens": config.max_tokens}
        limits = {name: worker.share_of(limit) for name, limit in asked.items()}
        place = open_storage(
            self.folder / f"{next(self.processes)}",
            hooks,
            hook_facts={CODES: {"width": 200, "most": MOST}},
            identity=identity,
            remote=folder,
            sources=text.dataset.files,
            metadata=METADATA,
            planner=RepairPlanner(folder, identity, limits) if repair else None,
            **({"shard_size_gb": case.shard / 1e9, "shard_format": self.format} | limits | options),
        )
        try:
            place.open()
            complete = False
            try:
                for number, batch in enumerate(
                    text.open(worker, (rows, LENGTH), place, nullcontext())[1]
                ):
                    if number == stop_after:
                        return
                    values, kept = (with_codes if case.codes else activations)(batch), batch.kept
                    rows_kept = {key: v if kept is None else v[kept] for key, v in values.items()}
                    place.add_batch(batch, rows_kept)
                complete = True
            finally:
                place.finalize(complete)
        finally:
            place.close(patient=True)

    def _grow(self, more):
        path = self.data / "text.jsonl"
        lines = [line for line in path.read_text().splitlines() if "new" not in line]
        path.write_text("\n".join(lines) + f"\n{more}")

    def undisturbed(self):
        """Returns what is stored if nothing happens, and how many requests each process makes."""
        bucket, counts = MemoryBucket(), []
        for before in (True, False) if self.case.before is not None else (False,):
            process = Process()
            with suppress(*(InputError, RunError) if before else ()):
                self(bucket, process, before)
            counts.append(process.requests)
            assert self.stored_in(bucket)
        return self.stored_in(bucket), counts[::-1]

    def stored_in(self, bucket, process=None):
        """Returns all samples by number: their rows of the table. Reads as a reader does, and
        requires that everything holds together."""
        assert not bucket.replaced
        found = {}
        for host in range(self.case.hosts):
            root = MemoryFolder(bucket, process or Process())
            folder = root.child(f"machine_000_host_{host:02d}")
            stored = read_stored(folder)
            assert not stored.files or not stored.problems
            for commit in stored.in_order:
                if not commit.count:
                    continue
                table, every = read_table(folder, commit), range(commit.count)
                samples = read_samples(folder, stored, commit, every, "")
                numbers = [sample.row.sample_idx for sample in samples]
                assert numbers == sorted(numbers) == table["sample_idx"].to_pylist()
                for row, sample in zip(table.to_pylist(), samples, strict=True):
                    number, positions = row["sample_idx"], sample.row.positions
                    assert number not in found, f"sample {number} is stored twice"
                    for key, values in zip(HOOKS, sample.activations, strict=False):
                        np.testing.assert_array_equal(values, values_of(number, positions, key))
                    if self.case.codes:
                        found_codes = sample.activations[-1].records(MOST)
                        np.testing.assert_array_equal(found_codes, codes_of(number, positions))
                    found[number] = str(row), positions.tolist()
        return found


@pytest.fixture
def run(request, data, tmp_path):
    """The runs of a case in one of the two forms."""
    name, shard_format = getattr(request, "param", ("text", "pickle"))
    return Run(CASES[name], shard_format, data, tmp_path)


def stopped_at(number):
    return Process(lambda n, request: "stop" if n == number else None)


EVERY = [(name, SHARD_FORMATS[n % 2]) for n, name in enumerate(CASES)] + [("text", "safetensors")]
every_case = pytest.mark.parametrize("run", EVERY, ids="-".join, indirect=True)


@every_case
def test_a_process_may_stop_at_any_request(run):
    """The next one stops soon after; then the same command completes the run, in other batches."""
    whole, counts = run.undisturbed()
    assert len(whole) > 8
    step = 1 if run.case == CASES["text"] else 4
    for stop in range(0, max(counts), step):
        bucket = MemoryBucket()
        for before in (True, False) if run.case.before is not None else (False,):
            for number in (stop, stop * 5 % 17):
                with suppress(Stopped, InputError, RunError):
                    run(bucket, stopped_at(number), before)
            with suppress(*(InputError, RunError) if before else ()):
                run(bucket, None, before, rows=3)
        assert run.stored_in(bucket) == whole, stop


def jsons_in(bucket):
    return sorted(p for p in bucket.objects if "shard" in p and p.endswith(".json"))


DAMAGE = {
    "no file": lambda objects, json: objects.pop(json.replace(".json", ".npz"), None),
    "no JSON": lambda objects, json: objects.pop(json, None),
    "a damaged JSON": lambda objects, json: objects.update({json: (b"{}", "v")}),
    "a damaged table": lambda objects, json: objects.update(
        {json.replace(".json", ".samples.parquet"): (b"damaged", "v")}
    ),
}


@pytest.mark.parametrize(
    "run",
    [("text", "pickle"), ("some codes", "safetensors"), ("few tokens", "pickle")],
    ids="-".join,
    indirect=True,
)
@pytest.mark.parametrize("complete", [True, False])
def test_any_shards_may_be_lost_and_a_repair_may_stop_at_any_request(run, complete):
    """The run was interrupted, so it has a short shard, and was perhaps completed later."""
    whole, _ = run.undisturbed()
    original = MemoryBucket()
    for stop_after in (2, None if complete else 4):
        run(original, stop_after=stop_after)
    jsons = jsons_in(original)
    assert len(jsons) >= 2
    lost = [each for size in (1, 2, len(jsons)) for each in combinations(jsons, size)]
    for case, each in enumerate(lost):
        bucket = MemoryBucket()
        bucket.objects |= original.objects
        later = jsons[(jsons.index(each[0]) + 1) % len(jsons)]
        for again in ((), (later,)):  # more may be lost after a repair
            for number, name in enumerate(again or each):
                [*DAMAGE.values()][(case + number) % len(DAMAGE)](bucket.objects, name)
            with suppress(Stopped, InputError, RunError):
                run(bucket, stopped_at(case * 7 % 83), repair=True)
            run(bucket, repair=True, rows=3)
        run(bucket)
        assert run.stored_in(bucket) == whole, each


def damaged(run):
    """A complete run of which a shard in the middle and the last one are bad."""
    bucket = MemoryBucket()
    run(bucket, shard_size_gb=1e-6)
    jsons = jsons_in(bucket)
    assert len(jsons) > 5
    for number, damage in ((1, "a damaged table"), (3, "no JSON"), (-1, "a damaged JSON")):
        DAMAGE[damage](bucket.objects, jsons[number])
    return bucket


@pytest.mark.parametrize("size", [0.5e-6, 4e-6])
def test_the_shards_of_a_repair_may_be_lost(run, size):
    """Smaller ones do not fit the numbers of the bad ones, and larger ones leave some empty. The
    last one may have samples before the mark of others: no run goes on without them."""
    whole, _ = run.undisturbed()
    bucket = damaged(run)
    run(bucket, repair=True, shard_size_gb=size)
    there = jsons_in(bucket)
    for name in (there[-1], there[1]):
        again = MemoryBucket()
        again.objects |= bucket.objects
        for beside in [p for p in again.objects if p.startswith(name.removesuffix("json"))]:
            del again.objects[beside]
        for _ in range(2):
            run(again, repair=True)
        run(again)
        assert run.stored_in(again) == whole


def test_a_repair_may_begin_at_any_request_of_another(run):
    """The first one wakes up when the second one has stored some shards, or everything."""
    whole, _ = run.undisturbed()
    process = Process()
    run(damaged(run), process, repair=True)
    for halt in range(0, process.requests, 5):
        for second_halts in (60, 10**6):
            bucket = damaged(run)
            first = Halted(run, bucket, halt, repair=True)
            second = Halted(run, bucket, second_halts, repair=True, shard_size_gb=0.5e-6)
            assert isinstance(first.go_on(), InputError | None)
            assert isinstance(second.go_on(), InputError | None)
            for _ in range(2):
                run(bucket, repair=True)
            run(bucket)
            assert run.stored_in(bucket) == whole


def test_any_request_may_fail_or_have_an_unknown_outcome(run):
    whole, _ = run.undisturbed()
    for fate in ("fail", "lost"):
        for every in (1, 2, 3):
            failed = set()

            def doubt(number, request, fate=fate, every=every, failed=failed):
                if number % every or request in failed:
                    return None
                failed.add(request)
                return fate

            bucket = MemoryBucket()
            run(bucket, Process(doubt))
            assert run.stored_in(bucket) == whole


class Halted:
    """A process in a thread, which halts before one of its requests until it may go on."""

    def __init__(self, run, bucket, halt, **options):
        self._halted, self._go_on, self._halt = threading.Event(), threading.Event(), halt
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(run, bucket, options))
        self._thread.start()
        self._halted.wait(60)

    def _wait(self, number, request):
        if number >= self._halt:
            self._halted.set()
            assert self._go_on.wait(60)

    def _run(self, run, bucket, options):
        try:
            run(bucket, Process(self._wait), **options)
        except (InputError, RunError) as error:
            self.error = error
        self._halted.set()

    def go_on(self):
        self._go_on.set()
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error


@pytest.mark.parametrize("second_halts", [10**6, 12])
def test_a_second_process_may_begin_at_any_request_of_the_first(run, second_halts):
    """It may begin between a look at the owner and the write that follows. One goes on."""
    whole, (requests,) = run.undisturbed()
    lost = 0
    for halt in range(requests):
        bucket = MemoryBucket()
        first = Halted(run, bucket, halt)
        second = Halted(run, bucket, second_halts, stop_after=1 if halt % 2 else None)
        errors = first.go_on(), second.go_on()
        assert None in errors and all(isinstance(error, LostError | None) for error in errors)
        lost += errors != (None, None)
        run(bucket)
        assert run.stored_in(bucket) == whole
    assert lost


def test_a_run_may_be_overwritten_and_read_at_any_request(run):
    """Earlier processes may leave files, but no commit that counts."""
    whole, (requests,) = run.undisturbed()
    for halt in range(requests):
        bucket = MemoryBucket()
        first = Halted(run, bucket, halt)
        assert run.stored_in(bucket).items() <= whole.items()
        run(bucket, overwrite=True, shard_size_gb=5e-6)
        assert isinstance(first.go_on(), InputError | None)  # it may not have begun before
        assert run.stored_in(bucket) == whole


def test_a_writer_may_go_on_at_any_request_of_a_reader(run):
    """The reader finds a shard that is committed in the meantime whole, or not at all."""
    whole, (requests,) = run.undisturbed()
    for halt in range(requests):
        bucket = MemoryBucket()
        writer, moment = Halted(run, bucket, halt), halt % 5
        reader = Process(lambda n, _, m=moment, w=writer: w.go_on() if n == m else None)
        assert run.stored_in(bucket, reader).items() <= whole.items()
        assert writer.go_on() is None


STANDING = {  # what stands where a process commits a shard -> whether it may replace that
    "nothing": ({}, True),
    "a reservation": ({"reserved": True, "run": "r"}, True),
    "a commit of another run": ({"run": "old"}, True),
    "a commit of the run": ({"run": "r"}, False),
}


@pytest.mark.parametrize("case", STANDING)
def test_nothing_replaces_a_commit_of_its_run(case):
    """Whoever metadata.json names: somebody may have put an older one back."""
    content, replaced = STANDING[case]
    commit = Commit(1, 0.0, None)
    bucket = MemoryBucket()
    owner = Owner(MemoryFolder(bucket, Process()), "me")
    assert owner.begin("r", {"format_version": 5, "identity": {}}, None)
    path = "mem://bucket/shard_0001.json"
    if content:
        standing = {**commit.to_json(), "owner": "another", **content}
        bucket.put(path, before := seal(standing))
    if replaced:
        assert owner.commit(commit).owner == "me"
        assert json.loads(bucket.objects[path][0])["owner"] == "me"
    else:
        assert not owner.reserve(1)
        with pytest.raises(LostError, match="another has taken over"):
            owner.commit(commit)
        assert bucket.objects[path][0] == before
