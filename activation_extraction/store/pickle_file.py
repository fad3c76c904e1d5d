"""The pickle format of a shard: a dict from the key of each hook to a list of records.

A key is a layer number or the name of a hook. `pickle.loads(gzip.open(path).read())` reads a
compressed file. The list contains one record for each sample, in order. A record is a dict of plain
values and NumPy arrays:

  sample_idx    number of the sample
  hook          full name of the hook
  activation    values at the hook, (tokens, width); missing at a hook with codes
  shape         the tuple (tokens, width)
  text_preview  first 200 characters of the sample's text; "" if there is no text
  doc_id        id of the sample's row in the data set; None if the row has no id
  token_ids     ids of the stored tokens, int32 (tokens,); None if a program with a loop of its own
                has added the sample without token ids
  positions     positions of the stored tokens in the sample, from 0, int32 (tokens,)
  role, turn    labels of the stored tokens, int32 (tokens,) each; missing if the run stores no
                conversations

At a hook with codes, the following arrays replace `activation` (see common/codes.py):

  ids           active features of all tokens, one token after the other, int32
  values        values of these features, float32 or bfloat16
  offsets       index in `ids` of the first feature of each token, and the number of all features,
                int64 (tokens + 1,)
  error         squared norm of the part of the target activation that the features do not
                reconstruct, float32 (tokens,)
  norm          norm of the target activation, float32 (tokens,)

The target activation is the original activation that the autoencoder reconstructs: the activation
at the hook, or at another hook if a transcoder reconstructs another one.

An uncompressed file also contains the id of the process that wrote it (run_log.py explains why).
The id is pickled as a string before the dict, and unpickling ignores it. A compressed file contains
the id in its gzip header. Everything else in a file depends only on the content. A compressed file
must always be read to its end, because its checksum is there; `pickle.load` stops before the
checksum.
"""

import pickle
import struct
import sys
from collections.abc import Mapping
from pickle import PickleBuffer
from typing import IO, Any

import ml_dtypes
import numpy as np
from isal import igzip

from activation_extraction.common.allow_list import AllowListUnpickler
from activation_extraction.common.errors import RunError, one_line
from activation_extraction.store.shard import LABELS, Shard, ShardSample
from activation_extraction.store.stored_hook import HookKey, StoredHook
from activation_extraction.text.sample_facts import SampleFacts

# Key of a hook -> list with one record for each sample. The docstring of this module describes a
# record.
RecordsByHookKey = dict[HookKey, list[dict[str, Any]]]
PROTOCOL_BYTES = 2  # number of bytes at the beginning of a pickle, which name its protocol


class _Pickler(pickle.Pickler):
    """A pickler that writes arrays without copying them.

    The pickle has protocol 5, because only this protocol writes buffers straight from memory.
    `pickle.dump` would keep a copy of every array until it ends.

    In a pickle, an array consists of a function that rebuilds it and of the function's arguments.
    With protocol 5, NumPy 2 would choose a function that NumPy 1.26 lacks. So `reducer_override`
    chooses the function that NumPy uses with protocols up to 4, which every version of NumPy has.
    """

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return NotImplemented
        reduce_tuple_of_empty_array: Any = np.empty(0, value.dtype).__reduce__()
        rebuild_array, rebuild_arguments, array_state = reduce_tuple_of_empty_array
        state_version, _shape, pickled_dtype, is_fortran_order, _data = array_state
        array_content = np.asarray(value, order="C").reshape(-1).view(np.uint8).data
        # A writable buffer would be pickled as a bytearray.
        array_buffer = PickleBuffer(array_content.toreadonly())
        state_with_buffer = (
            state_version,
            value.shape,
            pickled_dtype,
            is_fortran_order,
            array_buffer,
        )
        return rebuild_array, rebuild_arguments, state_with_buffer


class _BufferList(list[memoryview]):
    """The output file of a pickler: a list of the written buffers, which are not copied."""

    def write(self, written_content: bytes | PickleBuffer) -> int:
        self.append(memoryview(written_content).cast("B"))
        return self[-1].nbytes


def pickle_pieces(shard: Shard, writer: str = "") -> list[memoryview]:
    """Pickles a shard without copying its activations.

    Args:
        shard: Shard, whose values are in the stored form (stored_hook.py).
        writer: Id of the process that writes the file; "" to leave it out.

    Returns:
        Consecutive buffers with the bytes of the file.
    """
    pickled_buffers = _BufferList()
    _Pickler(pickled_buffers, protocol=5).dump(records_of(shard))
    if writer:
        encoded_writer_id = writer.encode()
        writer_id_opcodes = (
            pickle.BINUNICODE
            + struct.pack("<I", len(encoded_writer_id))
            + encoded_writer_id
            + pickle.POP
        )
        first_buffer = pickled_buffers[0]
        pickled_buffers[:1] = [
            first_buffer[:PROTOCOL_BYTES],
            memoryview(writer_id_opcodes),
            first_buffer[PROTOCOL_BYTES:],
        ]
    return pickled_buffers


def records_of(shard: Shard) -> RecordsByHookKey:
    """Returns the content of a shard in the form in which it is pickled.

    Args:
        shard: Shard, whose values are in the stored form (stored_hook.py).

    Returns:
        A dict from the key of each hook to a list with one record per sample. The docstring of this
        module describes a record.
    """

    def record_of(hook_key: HookKey, stored_hook: StoredHook, sample_index: int) -> dict[str, Any]:
        shard_sample = shard.samples[sample_index]
        sample_values = shard.sample_values_by_hook_key[hook_key][sample_index]
        return {
            "sample_idx": shard_sample.facts.sample_idx,
            "hook": stored_hook.name,
            **stored_hook.record(sample_values),
            "shape": sample_values.shape,
            "text_preview": shard_sample.facts.text_preview,
            "token_ids": shard_sample.token_ids,
            "positions": shard_sample.positions,
            "doc_id": shard_sample.facts.doc_id,
            **shard_sample.token_labels_by_name,
        }

    sample_indices = range(len(shard.samples))
    return {
        hook_key: [
            record_of(hook_key, stored_hook, sample_index) for sample_index in sample_indices
        ]
        for hook_key, stored_hook in shard.hook_by_key.items()
    }


def read_records(file: IO[bytes], where: str, limit: int) -> RecordsByHookKey:
    """Reads the records of a pickled shard without running pickled code.

    Args:
        file: File that is open for reading.
        where: Path of the file, for messages. If it ends in .gz, the file is decompressed.
        limit: Largest size in bytes to which the file may be decompressed.

    Returns:
        A dict from the key of each hook to a list with one record per sample. The docstring of this
        module describes a record.

    Raises:
        UnsafeError: If the file contains anything but plain containers and NumPy arrays of numbers,
            or decompresses to more than `limit` bytes.
        RunError: If the file is damaged.
    """
    decompressed_file: Any = (
        igzip.IGzipFile(fileobj=file, mode="rb") if where.endswith(".gz") else file
    )
    try:
        sample_records_by_hook_key = _Unpickler(_LimitedReader(decompressed_file, limit)).load()
        return {
            hook_key: [
                {field_name: _plain(field_value) for field_name, field_value in record.items()}
                for record in records
            ]
            for hook_key, records in sample_records_by_hook_key.items()
        }
    except RunError as error:
        raise type(error)(f"{where}: {error}") from error
    except Exception as error:  # damaged bytes may raise any exception in gzip, pickle or NumPy
        raise RunError(f"{where}: cannot be read: {one_line(error):.200}") from error


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, _Array) else value


def read_pickle(
    file: IO[bytes], where: str, limit: int, hooks: Mapping[HookKey, StoredHook]
) -> Shard:
    """Reads a pickled shard.

    The facts, tokens and labels of the samples are read from the records of the first hook.

    Args:
        file: File that is open for reading.
        where: Path of the file, for messages. If it ends in .gz, the file is decompressed.
        limit: Largest size in bytes to which the file may be decompressed.
        hooks: Hooks to read, by key. Hooks that the file lacks are left out of the result.

    Raises:
        UnsafeError: If the file contains anything but plain containers and NumPy arrays of numbers,
            or decompresses to more than `limit` bytes.
        RunError: If the file is damaged, or its records lack fields.
    """
    sample_records_by_hook_key = read_records(file, where, limit)
    stored_hook_by_key_in_file = {
        hook_key: stored_hook
        for hook_key, stored_hook in hooks.items()
        if hook_key in sample_records_by_hook_key
    }
    try:
        values_by_hook_key = {
            hook_key: [
                stored_hook.from_record(sample_record)
                for sample_record in sample_records_by_hook_key[hook_key]
            ]
            for hook_key, stored_hook in stored_hook_by_key_in_file.items()
        }
        shard_samples = [
            ShardSample(
                SampleFacts(sample_record["sample_idx"]),
                token_ids=sample_record["token_ids"],
                positions=sample_record["positions"],
                token_labels_by_name={
                    label_name: sample_record[label_name]
                    for label_name in LABELS
                    if label_name in sample_record
                },
            )
            for sample_record in next(iter(sample_records_by_hook_key.values()), [])
        ]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunError(f"{where}: its records cannot be read: {error!r:.200}") from error
    return Shard(shard_samples, stored_hook_by_key_in_file, values_by_hook_key)


class UnsafeError(RunError):
    """Raised if a pickled shard contains objects that this program never writes, or is too large.

    No code in the pickle was run.
    """


class _LimitedReader:
    """The input of an unpickler, which raises UnsafeError if more than `limit` bytes are read.

    Args:
        stream: Decompressed content of the file.
        limit: Largest number of bytes that may be read.
    """

    def __init__(self, stream: IO[bytes], limit: int) -> None:
        self._content_stream = stream
        self._max_bytes = limit  # largest number of bytes that may be read in total
        self._bytes_left = limit  # number of bytes that may still be read

    def read(self, size: int) -> bytes:
        if not 0 <= size <= self._bytes_left:
            raise UnsafeError(f"unpacks to more than {self._max_bytes} bytes")
        self._bytes_left -= size
        return self._content_stream.read(size)

    def readline(self) -> bytes:
        raise UnsafeError("refused: holds a pickle instruction that no shard of ours has")


class _DType:
    """Stands in for numpy.dtype while a shard is unpickled, and accepts only dtypes of numbers.

    NumPy's own class accepts pickled states that make NumPy read memory outside of an array. This
    class only checks the byte order in a state, and ignores the rest.

    Args:
        type_code: NumPy's code of the dtype, which must be one of NUMBER_TYPES.
        _: Other arguments of numpy.dtype, which are ignored.

    Attributes:
        dtype: NumPy's dtype for the code.

    Raises:
        UnsafeError: If the code is not one of NUMBER_TYPES, or the state has another byte order
            than this machine.
    """

    def __init__(self, type_code: Any, *_: Any) -> None:
        if not isinstance(type_code, str) or type_code not in NUMBER_TYPES:
            raise UnsafeError(f"refused: an array of type {type_code!r:.80}")
        self.dtype = np.dtype(type_code)

    def __setstate__(self, state: Any) -> None:
        if state[1] not in ("<" if sys.byteorder == "little" else ">", "|", "="):
            raise UnsafeError("refused: an array in another byte order")


class _Array(np.ndarray):
    """Stands in for numpy.ndarray while a shard is unpickled, so that only safe arrays are made.

    It is an empty array until `__setstate__` sets its shape, dtype and content. `_DType` stands in
    for the dtype, and accepts only dtypes of numbers.
    """

    def __new__(cls, *_: Any) -> "_Array":
        return super().__new__(cls, 0, np.int8)

    def __setstate__(self, state: Any) -> None:
        state_version, array_shape, dtype_stand_in, is_fortran_order, array_content = state
        super().__setstate__(
            (state_version, array_shape, dtype_stand_in.dtype, is_fortran_order, array_content)
        )


NUMBER_TYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1", "bfloat16")
# Full name of a class or function in a pickle -> object that is used in its place.
REPLACEMENT_BY_ALLOWED_NAME: dict[str, Any] = {
    "numpy.ndarray": _Array,
    "numpy.dtype": _DType,
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "ml_dtypes.bfloat16": ml_dtypes.bfloat16.__name__,
}


class _Unpickler(AllowListUnpickler):
    """An unpickler that makes only plain containers and NumPy arrays of numbers."""

    replacement_by_allowed_name = REPLACEMENT_BY_ALLOWED_NAME
    # Type of the exception for a name in the pickle that `replacement_by_allowed_name` lacks.
    error_type = UnsafeError
    refusal_reason = "no shard of ours does"
