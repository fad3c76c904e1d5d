"""Whatever happens to the processes of a run, every sample is stored once, with its values.

All but the model runs, over a bucket in memory. Plain sweeps stop a process at each of its
requests, have requests fail with unknown outcomes, and let a second process begin at each of them,
after which the first one wakes up. Then the same command must store what an undisturbed run stores.
test_inputs.py shows for every form of text that it continues from any sample.
"""

import json
import threading
from contextlib import suppress
from functools import cached_property
from itertools import combinations, count
from typing import NamedTuple

import pytest
from memory_bucket import MemoryBucket, MemoryFolder, Process, Stopped
from small_runs import HIDDEN, HOOKS, LENGTH, run_over, stream_of, write_texts

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.positions import Positions
from activation_extraction.store import folder
from activation_extraction.store.chosen_samples import read_samples
from activation_extraction.store.identity import Identity
from activation_extraction.store.log_writer import LogWriter, LostError, RunDescription
from activation_extraction.store.run_log import Commit, RunLog, seal
from activation_extraction.store.sample_table import read_table
from activation_extraction.text import packing
from activation_extraction.text import samples as text_samples
from activation_extraction.text.batch import Worker
from activation_extraction.text.samples import SampleSettings
from activation_extraction.text.token_choice import TokenChoice

NO_LIMITS: dict[str, int | None] = {"max_samples": None, "max_tokens": None}


class Case(NamedTuple):
    """A case says what is extracted. before: limits of the processes that come first. shard: the
    most bytes of a shard."""

    settings: SampleSettings = SampleSettings(LENGTH)
    before: dict[str, int] | None = None
    hosts: int = 1
    shard: int = 2000
    shard_format: str = "pickle"


def keeping(*rule, **more):
    return SampleSettings(LENGTH, token_choice=TokenChoice(Positions(*rule, **more)))


CASES = {
    "text": Case(),
    "hosts": Case(hosts=2),
    "pieces": Case(
        SampleSettings(LENGTH, splits_documents=True, overlap=5), shard_format="safetensors"
    ),
    "few tokens": Case(keeping(9, 10), hosts=2, shard=100, shard_format="safetensors"),
    "no tokens": Case(keeping(probability=1e-15), shard=200),
    "more samples": Case(before={"max_samples": 7}),
    "more tokens": Case(before={"max_tokens": 101}, shard_format="safetensors"),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pauses are short, and small data has several groups and chunks."""
    monkeypatch.setattr(folder, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(folder, "MAX_PAUSE", 0.002)
    monkeypatch.setattr(packing, "MIN_GROUP_ROWS", 3)
    monkeypatch.setattr(packing, "MAX_GROUP_ROWS", 3)
    monkeypatch.setattr(text_samples, "CHUNK_ROWS", 5)


class Run:
    """The runs of one case. Each call is a process, which extracts or repairs all but the model."""

    def __init__(self, case, tokenizer, folder):
        self.case, self.tokenizer, self.folder = case, tokenizer, folder
        self.path, self.processes = write_texts(folder / "rows.jsonl", 16), count()

    def __call__(self, bucket, process=None, before=False, repair=False, **options):
        case, root = self.case, MemoryFolder(bucket, process or Process())
        usual = {"shard_size_gb": case.shard / 1e9, "shard_format": case.shard_format}
        usual |= {"metadata": {"model": {"hidden_size": HIDDEN, "vocab_size": 2048}}}
        for host in range(case.hosts):
            place = root.child(f"machine_000_host_{host:02d}")
            worker = Worker(0, 1, host, case.hosts)
            hooks = tuple(HOOKS.values())
            identity = Identity("tiny", data="files", hooks=hooks, worker=worker)
            limits = NO_LIMITS | (case.before or {} if before else {})
            run_over(
                stream_of(self.path, worker),
                self.tokenizer,
                self.folder / f"{next(self.processes)}",
                case.settings,
                **{"identity": identity, "remote": place, "repair": repair},
                **usual | limits | options,
            )

    @property
    def in_turn(self):
        """Whether each process is one of those that come first, in their order."""
        return (False,) if self.case.before is None else (True, False)

    @cached_property
    def undisturbed(self):
        """What is stored if nothing happens, and how many requests a process makes at most."""
        bucket, counts = MemoryBucket(), []
        for before in self.in_turn:
            process = Process()
            self(bucket, process, before)
            counts.append(process.requests)
            assert self.stored_in(bucket)
        return self.stored_in(bucket), max(counts)

    def check(self, bucket, *told):
        """Requires that every sample is stored, once, as if nothing had happened."""
        assert self.stored_in(bucket) == self.undisturbed[0], told

    def stored_in(self, bucket, process=None):
        """Returns all samples by number: their rows of the table, positions and activations. Reads
        as a reader does, and requires that everything holds together."""
        assert not bucket.replaced
        found = {}
        for host in range(self.case.hosts):
            root = MemoryFolder(bucket, process or Process())
            folder = root.child(f"machine_000_host_{host:02d}")
            stored = RunLog.read(folder)
            assert not stored.size_by_file_name or not stored.problems
            for commit in stored.commits_in_order:
                if not commit.count:
                    continue
                table, every = read_table(folder, commit), range(commit.count)
                samples = read_samples(folder, stored, commit, every, "")
                numbers = [sample.tokens.sample_idx for sample in samples]
                assert numbers == sorted(numbers) == table["sample_idx"].to_pylist()
                for row, sample in zip(table.to_pylist(), samples, strict=True):
                    number, positions = row["sample_idx"], sample.tokens.positions
                    assert number not in found, f"sample {number} is stored twice"
                    values = [hook_values.tolist() for hook_values in sample.values_of_hooks]
                    found[number] = str(row), positions.tolist(), values
        return found


def stopped_at(number):
    return Process(lambda n, request: "stop" if n == number else None)


@pytest.fixture(params=["text"])
def run(request, byte_tokenizer, tmp_path):
    """The runs of a case."""
    return Run(CASES[request.param], byte_tokenizer, tmp_path)


@pytest.mark.parametrize("run", CASES, indirect=True)
def test_a_process_may_stop_at_any_request(run):
    """The next one stops soon after; then the same command completes the run, in other batches."""
    whole, requests = run.undisturbed
    assert len(whole) > 8
    for stop in range(0, requests, 1 if run.case == CASES["text"] else 11):
        bucket = MemoryBucket()
        for before in run.in_turn:
            for number in (stop, stop * 5 % 17):
                with suppress(Stopped, InputError, RunError):
                    run(bucket, stopped_at(number), before)
            run(bucket, None, before, rows=3)
        run.check(bucket, stop)


def jsons_in(bucket):
    return sorted(p for p in bucket.objects if "shard" in p and p.endswith(".json"))


def copy_of(bucket):
    copy = MemoryBucket()
    copy.objects |= bucket.objects
    return copy


DAMAGE = {
    "no file": lambda objects, json: objects.pop(json.replace(".json", ".npz"), None),
    "no JSON": lambda objects, json: objects.pop(json, None),
    "a damaged JSON": lambda objects, json: objects.update({json: (b"{}", "v")}),
    "a damaged table": lambda objects, json: objects.update(
        {json.replace(".json", ".samples.parquet"): (b"damaged", "v")}
    ),
}


@pytest.mark.parametrize("run,complete", [("text", True), ("few tokens", False)], indirect=["run"])
def test_any_shards_may_be_lost_and_a_repair_may_stop_at_any_request(run, complete):
    """The run was interrupted, so it has a short shard, and was perhaps completed later."""
    original = MemoryBucket()
    for stop_after in (2, None if complete else 4):
        run(original, stop_after=stop_after)
    jsons = jsons_in(original)
    assert len(jsons) >= 2
    lost = [each for size in (1, 2, len(jsons)) for each in combinations(jsons, size)]
    for case, each in enumerate(lost):
        bucket = copy_of(original)
        for again in (False, True):  # more may be lost after a repair, which made the last one
            for number, name in enumerate(jsons_in(bucket)[-1:] if again else each):
                [*DAMAGE.values()][(case + number) % len(DAMAGE)](bucket.objects, name)
            with suppress(Stopped, InputError, RunError):
                run(bucket, stopped_at(case * 7 % 83), repair=True)
            run(bucket, repair=True, rows=3)
        run(bucket)
        run.check(bucket, each)


@pytest.fixture
def damaged(run):
    """A complete run of which a shard in the middle and the last one are bad."""
    bucket = MemoryBucket()
    run(bucket, shard_size_gb=1e-6)
    jsons, bucket.undamaged = jsons_in(bucket), copy_of(bucket)
    assert len(jsons) > 5
    for number, damage in ((1, "a damaged table"), (3, "no JSON"), (-1, "a damaged JSON")):
        DAMAGE[damage](bucket.objects, jsons[number])
    return bucket


def test_the_shards_of_a_repair_may_be_lost(run, damaged):
    """Smaller ones do not fit the numbers of the bad ones, and larger ones leave some empty. The
    last one may have samples before the mark of others: no run goes on without them."""
    for size in (0.5e-6, 4e-6):
        repaired = copy_of(damaged)
        run(repaired, repair=True, shard_size_gb=size)
        there = jsons_in(repaired)
        for name in (there[-1], there[1]):
            bucket = copy_of(repaired)
            for beside in [p for p in bucket.objects if p.startswith(name.removesuffix("json"))]:
                del bucket.objects[beside]
            for _ in range(2):
                run(bucket, repair=True)
            run(bucket)
            run.check(bucket, size, name)


def test_a_withdrawal_replaces_only_what_was_checked(run, damaged):
    """Commits of an earlier process land at the names of bad shards, just before the repair writes
    there. They are checked, too, found good and kept."""
    jsons = jsons_in(damaged.undamaged)
    late = {path.rpartition("/")[2]: path for path in (jsons[3], jsons[-1])}

    def land(number, request):
        path = late.pop(request.removeprefix("writing "), None)
        if path is not None:
            damaged.objects[path] = damaged.undamaged.objects[path]

    run(damaged, Process(land), repair=True)
    assert not late
    for path in (jsons[3], jsons[-1]):
        assert damaged.objects[path][0] == damaged.undamaged.objects[path][0]
    run(damaged)
    run.check(damaged)


def test_a_request_that_is_refused_ends_a_repair_which_then_withdraws_nothing(run, damaged):
    """It does not make the shard bad that it is about."""
    requests = []
    run(copy_of(damaged), Process(lambda _, request: requests.append(request)), repair=True)
    checks = next(n for n, request in enumerate(requests) if request.startswith("writing"))
    assert checks > 40
    before = damaged.objects.copy()
    for refused in range(checks):
        process = Process(lambda n, _, refused=refused: "refuse" if n == refused else None)
        with pytest.raises(RunError, match="permission denied"):
            run(damaged, process, repair=True)
        assert damaged.objects == before, requests[refused]


def test_a_lost_shard_that_is_put_back_doubles_no_sample(run, damaged):
    """Its samples were stored under other numbers. Whichever shard lists a sample second is bad."""
    lost = jsons_in(damaged.undamaged)[1]
    run(damaged, repair=True, shard_size_gb=4e-6)
    assert b'"count": 0' in damaged.objects[lost][0]
    for path, found in damaged.undamaged.objects.items():
        if path.startswith(lost.removesuffix("json")):
            damaged.objects[path] = found
    with pytest.raises(InputError, match="stored more than once; --repair"):
        run(damaged)
    run(damaged, repair=True)
    run(damaged)
    run.check(damaged)


def test_samples_after_one_that_a_limit_had_cut_come_back(run):
    """The repair stores the cut sample whole, and so more tokens than the limit of the run, which
    ends before them. The same command takes this as it is."""
    bucket, limits = MemoryBucket(), {"max_tokens": 180, "shard_size_gb": 1e-6}
    run(bucket, max_tokens=101, shard_size_gb=1e-6)
    run(bucket, **limits)
    before, whole = run.stored_in(bucket), run.undisturbed[0]
    cut, _ = (number for number in before if before[number] != whole[number])
    lost = []
    for path in jsons_in(bucket):
        samples = json.loads(bucket.objects[path][0])["samples"]
        if samples["first"] <= cut <= samples["last"] or cut < samples["first"]:
            lost.append(path)
    *lost, last = lost
    assert len(lost) > 1
    for path in lost:
        del bucket.objects[path]
    run(bucket, repair=True, **limits)
    for _ in range(2):
        assert run.stored_in(bucket) == before | {cut: whole[cut]}
        run(bucket, **limits)


class Halted:
    """A process in a thread, which halts before one of its requests until it may go on.

    halt: the number of the request before which the process halts, or the request itself.
    """

    def __init__(self, run, bucket, halt, **options):
        self._halted, self._go_on, self._halt = threading.Event(), threading.Event(), halt
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(run, bucket, options))
        self._thread.start()
        assert self._halted.wait(600)

    def _wait(self, number, request):
        if request == self._halt or (isinstance(self._halt, int) and number >= self._halt):
            self._halted.set()
            assert self._go_on.wait(600)

    def _run(self, run, bucket, options):
        try:
            run(bucket, Process(self._wait), **options)
        except (InputError, RunError) as error:
            self.error = error
        finally:
            self._halted.set()

    def go_on(self):
        self._go_on.set()
        self._thread.join(600)
        assert not self._thread.is_alive()
        return self.error


def test_a_repair_may_begin_at_any_request_of_another(run, damaged):
    """The first one wakes up when the second one has stored some shards, or everything."""
    process = Process()
    run(copy_of(damaged), process, repair=True)
    for halt in range(0, process.requests, 11):
        for second_halts in (60, 10**6):
            bucket = copy_of(damaged)
            first = Halted(run, bucket, halt, repair=True)
            second = Halted(run, bucket, second_halts, repair=True, shard_size_gb=0.5e-6)
            assert isinstance(first.go_on(), InputError | None)
            assert isinstance(second.go_on(), InputError | None)
            for _ in range(2):
                run(bucket, repair=True)
            run(bucket)
            run.check(bucket, halt, second_halts)


def test_any_request_may_fail_or_have_an_unknown_outcome(run):
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
            run.check(bucket, fate, every)


FIRST = {  # a process whose requests arrive late, and what was stored before
    "overwrites": {"overwrite": True, "max_samples": 7},
    "repairs": {"repair": True, "shard_size_gb": 4e-6},
}


@pytest.mark.parametrize("first", FIRST)
def test_a_request_may_arrive_after_its_sender_gave_up(run, damaged, first):
    """A PUT or DELETE arrives at some request of the next process, or after it. Its sender was
    killed, or has gone on. A late DELETE may remove what is committed by then: this is refused, and
    a repair computes it again."""
    original = damaged if first == "repairs" else damaged.undamaged
    requests = []
    run(copy_of(original), Process(lambda _, name: requests.append(name)), **FIRST[first])
    changes = [n for n, name in enumerate(requests) if name.startswith(("writing", "deleting"))]
    assert {requests[n].split()[0] for n in changes} == {"writing", "deleting"}
    refused = 0
    for case, late in enumerate(changes):
        for killed in (False, True):

            def lose_answer(number, _, late=late, killed=killed):
                return "late" if number == late else "stop" if killed and number > late else None

            bucket, arrival = copy_of(original), (7 * case + 40 * killed) % 90
            with suppress(Stopped, RunError):
                run(bucket, Process(lose_answer), **FIRST[first])
            next_one = Process(lambda n, _, b=bucket, at=arrival: b.deliver() if n == at else None)
            with suppress(InputError, RunError):
                run(bucket, next_one)
            bucket.deliver()
            try:
                run(bucket)
            except InputError as error:
                assert "--repair" in str(error)
                refused += 1
                run(bucket, repair=True)
                run(bucket)
            run.check(bucket, requests[late], killed, arrival)
    assert refused


@pytest.mark.parametrize("killed", [False, True])
def test_a_commit_may_arrive_after_a_repair_withdrew_the_commit_before_it(run, killed):
    """The request that commits shard 3 arrives at some request of a repair. Its sender committed
    shard 2, which is damaged, and was killed. The repair stores larger shards. A repair before it
    may have been killed at some request, too."""
    bucket, requests = MemoryBucket(), []

    def lose_answer(number, request):
        requests.append(request)
        if "writing shard_0003.json" not in requests:
            return None
        return "stop" if "writing shard_0003.json" in requests[:-1] else "late"

    with suppress(Stopped, RunError):
        run(bucket, Process(lose_answer), shard_size_gb=1e-6)
    assert len(bucket.late) == 1 and len(jsons_in(bucket)) == 2
    DAMAGE["a damaged table"](bucket.objects, jsons_in(bucket)[1])
    objects, late = dict(bucket.objects), [*bucket.late]
    for arrival in count():
        bucket.objects, bucket.late = dict(objects), [*late]
        if killed:
            with suppress(Stopped, RunError):
                run(bucket, stopped_at(arrival), repair=True)
        at = 25 if killed else arrival
        repair = Process(lambda n, _, at=at: bucket.deliver() if n == at else None)
        run(bucket, repair, repair=True, shard_size_gb=4e-6)
        run(bucket)
        run.check(bucket, arrival)
        if repair.requests <= arrival:
            break
    assert arrival > 40


SECOND = [  # when the second process halts, what it does, and at which requests of the first
    (10**6, {}, 2),
    (12, {}, 5),
    (10**6, {"overwrite": True, "shard_size_gb": 5e-6}, 5),
    (10**6, {"repair": True}, 5),
]


@pytest.mark.parametrize("halts,does,step", SECOND)
def test_a_second_process_may_begin_at_any_request_of_the_first(run, halts, does, step):
    """It may begin between a look at the owner and the write that follows. One goes on."""
    whole, requests = run.undisturbed
    lost = 0
    for halt in range(0, requests, step):
        bucket = MemoryBucket()
        first = Halted(run, bucket, halt)
        assert run.stored_in(bucket).items() <= whole.items()
        second = Halted(run, bucket, halts, **does or {"stop_after": 1 if halt % 4 else None})
        errors = list(filter(None, (first.go_on(), second.go_on())))
        assert len(errors) < 2 and all(isinstance(error, InputError) for error in errors)
        for error in errors:
            if isinstance(error, LostError):
                assert "has taken over" in str(error)
                lost += 1
        run(bucket)
        run.check(bucket, halt)
    assert lost


@pytest.mark.parametrize("file", ["pkl.gz", "samples.parquet", "npz"])
def test_a_committed_file_stays_whoever_wrote_the_same_content_before(run, file):
    """Where the version of an object is the digest of its content: one process stores the files of
    a shard and is killed; the next one cuts its shards otherwise, and halts just before it replaces
    a file; a third one stores what the first one did, and commits it."""
    bucket, committing = MemoryBucket(), []

    def stop_before_the_commit(number, request):
        committing.extend([request] * (request == "writing shard_0001.json"))
        return "stop" if len(committing) > 1 else None  # the first one reserves the number

    with suppress(Stopped, RunError):
        run(bucket, Process(stop_before_the_commit))
    assert any(path.endswith(f"shard_0001.{file}") for path in bucket.objects)
    second = Halted(run, bucket, f"writing shard_0001.{file}", shard_size_gb=1)
    run(bucket)
    committed = dict(bucket.objects)
    error = second.go_on()
    assert bucket.objects == committed
    run.check(bucket)
    assert isinstance(error, LostError) and "has taken over" in str(error)


def test_a_writer_may_go_on_at_any_request_of_a_reader(run):
    """The reader finds a shard that is committed in the meantime whole, or not at all."""
    whole, requests = run.undisturbed
    for halt in range(0, requests, 2):
        bucket = MemoryBucket()
        writer, moment = Halted(run, bucket, halt), halt % 5
        reader = Process(lambda n, _, m=moment, w=writer: w.go_on() if n == m else None)
        assert run.stored_in(bucket, reader).items() <= whole.items()
        assert writer.go_on() is None


def test_nothing_replaces_a_commit_of_its_run():
    """Whoever metadata.json names: somebody may have put an older one back."""
    bucket, commit, path = MemoryBucket(), Commit(1, 0.0, None), "mem://bucket/shard_0001.json"
    run_log = LogWriter(MemoryFolder(bucket, Process()), RunDescription(Identity()))
    assert run_log.begin("r", None)
    bucket.put(path, standing := seal({**commit.to_json(), "run": "r", "owner": "another"}))
    with pytest.raises(LostError, match="another has taken over"):
        run_log.commit(commit)
    assert bucket.objects[path][0] == standing
