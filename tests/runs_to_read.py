"""Small runs to read back. A test can compute every stored value again from its `sample_idx`."""

import zlib
from dataclasses import replace
from types import SimpleNamespace

import ml_dtypes  # noqa: F401  # gives NumPy its bfloat16
import numpy as np
from extractions import identity_of
from storages import open_storage

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.text.batch import Worker

HOOKS = {
    3: "blocks.3.hook_resid_post",
    "wide": "blocks.4.mlp.hook_post",
    5: "blocks.5.hook_attn_out",
}
WIDTHS = dict(zip(HOOKS.values(), (16, 40, 8), strict=True))
OTHER_WIDTH = 256  # of any other hook
DTYPES = ("float32", "float16", "bfloat16")
FORMATS = SHARD_FORMATS


def tokens_of(index):
    """The token ids of a sample; their number varies."""
    return np.random.default_rng(index).integers(0, 50, 1 + index * 7 % 23, np.int32)


def activation_of(index, hook, dtype):
    """What a run stores of a sample at a hook, and here and there a token with a large norm."""
    chance = np.random.default_rng([index, zlib.crc32(hook.encode())])
    shape = len(tokens_of(index)), WIDTHS.get(hook, OTHER_WIDTH)
    values = chance.standard_normal(shape, np.float32)
    values[::9] *= 50
    return values.astype(dtype)


def store(
    root,
    dtype="float32",
    count=20,
    part=(0, 0, 1, 1),
    finish=True,
    hooks=HOOKS,
    shard_format="pickle",
    **options,
):
    """Writes a host's share of a run with the real storage. part: machine, host, machines, hosts.

    finish: False leaves the run as one that is still going on.
    """
    machine, host, machines, hosts = part
    name = f"machine_{machine:03d}" + (f"_host_{host:02d}" if hosts > 1 else "")
    storage = open_storage(
        root / name if machines * hosts > 1 else root,
        hooks,
        identity=replace(
            identity_of(*part), activation_dtype=dtype, max_seq_length=32, shard_format=shard_format
        ),
        shard_format=shard_format,
        metadata={"configuration": {"model_path": "some/model"}, "model": {"hidden_size": 16}},
        hook_facts={key: {"width": WIDTHS.get(n, OTHER_WIDTH)} for key, n in hooks.items()},
        **({"shard_size_gb": 8e-6} | options),
    )
    storage.open()
    for number in range(count):
        index = Worker(machine, machines, host, hosts).sample_idx(number)
        for key, hook in hooks.items():
            values = activation_of(index, hook, dtype)
            more = dict(token_ids=tokens_of(index), doc_id=f"id-{index}")
            storage.add_activation(key, values, index, f"text {index} ä", **more)
    if finish:
        storage.finalize()
    else:
        storage._writer.wait()
        storage.close()


def make_run(root, shard_format, dtype="float32", count=20, machines=(1,), **options):
    """A whole run. machines: the number of hosts of each. Returns what it holds, in order."""
    indices = []
    for machine, hosts in enumerate(machines):
        for host in range(hosts):
            part = machine, host, len(machines), hosts
            store(root, dtype, count, part, shard_format=shard_format, **options)
            worker = Worker(machine, len(machines), host, hosts)
            indices += [worker.sample_idx(number) for number in range(count)]
    return SimpleNamespace(root=root, dtype=dtype, format=shard_format, indices=indices)


def stored_tokens(run, skip_first=0):
    """All tokens of a run in the order of its samples: arrays by name, the hooks among them."""
    lengths = [len(tokens_of(index)) for index in run.indices]
    position = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    found = {
        "token_ids": np.concatenate([tokens_of(index) for index in run.indices]),
        "sample_idx": np.repeat(np.array(run.indices, np.int64), lengths),
        "position": position,
    }
    for hook in WIDTHS:
        parts = [activation_of(index, hook, run.dtype) for index in run.indices]
        found[hook] = np.concatenate(parts)
    return {name: values[position >= skip_first] for name, values in found.items()}


def joined(batches, hooks=tuple(WIDTHS)):
    """The tokens of all batches, as `stored_tokens` has them."""
    batches = list(batches)
    names = ("token_ids", "sample_idx", "position")
    found = {name: np.concatenate([getattr(b, name) for b in batches]) for name in names}
    return found | {hook: np.concatenate([b[hook] for b in batches]) for hook in hooks}


def in_order(tokens):
    """The same tokens, sorted by sample and position."""
    order = np.lexsort((tokens["position"], tokens["sample_idx"]))
    return {name: values[order] for name, values in tokens.items()}


def assert_same(found, expected):
    """Every value of `found` is the expected one, bit by bit, and of the same dtype."""
    for name, values in found.items():
        assert values.dtype == expected[name].dtype, name
        assert values.shape == expected[name].shape, name
        assert values.tobytes() == expected[name].tobytes(), name


def check_samples(dataset, run, hooks=tuple(WIDTHS)):
    assert len(dataset) == len(run.indices)
    for sample, index in zip(dataset, run.indices, strict=True):
        assert list(sample.activations) == list(hooks)
        for hook in hooks:
            assert_same({"": sample[hook]}, {"": activation_of(index, hook, run.dtype)})
        token_ids = tokens_of(index)
        assert_same({"": sample.token_ids}, {"": token_ids})
        np.testing.assert_array_equal(sample.position, np.arange(len(token_ids)))
        told = sample.sample_idx, sample.text_preview, sample.doc_id
        assert told == (index, f"text {index} ä", f"id-{index}")
