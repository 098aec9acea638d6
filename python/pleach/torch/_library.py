"""The C ABI of pleach (``ffi/include/pleach.h``) by ctypes. ctypes releases the GIL during a call."""

import ctypes
import functools
import os
import pathlib
from ctypes import c_char, c_char_p, c_int, c_size_t, c_uint32, c_uint64, c_void_p

from ._errors import PleachError, PleachTimeout

SUCCESS, INVALID_ARGUMENT, TIMEOUT = 0, 4, 8
UINT8 = 1
SUM, PROD, MAX, MIN, AVG, BIT_AND, BIT_OR, BIT_XOR = 0, 1, 2, 3, 4, 32, 33, 34
UNIQUE_ID_BYTES = 128
KINDS = (None, "aborted", "mismatch", "compute", "out of reach", "lost", "left", "protocol", "timed out")


class UniqueId(ctypes.Structure):
    """pleachUniqueId."""

    _fields_ = [("internal", c_char * UNIQUE_ID_BYTES)]


class Config(ctypes.Structure):
    """pleachConfig_t."""

    _fields_ = [
        ("size", c_size_t),
        ("timeout_ms", c_uint64),
        ("join_timeout_ms", c_uint64),
        ("fabric", c_char_p),
        ("reproducible", c_int),
        ("reserved", c_int),
    ]


class Failure(ctypes.Structure):
    """pleachFailure_t."""

    _fields_ = [
        ("size", c_size_t),
        ("kind", c_int),
        ("rank", c_int),
        ("found_by", c_int),
        ("host", c_int),
        ("call", c_uint64),
        ("waited_ms", c_uint64),
        ("operation", c_char * 128),
        ("text", c_char * 512),
    ]


_P, _N, _T, _I = c_void_p, c_size_t, c_uint32, c_int
SIGNATURES = {
    "pleachGetUniqueId": [_P],
    "pleachCommInitRankConfig": [_P, _I, UniqueId, _I, _P],
    "pleachCommFinalize": [_P],
    "pleachCommDestroy": [_P],
    "pleachCommAbort": [_P],
    "pleachCommSetTimeout": [_P, c_uint64],
    "pleachCommGetFailure": [_P, _P],
    "pleachRedOpCreatePreMulSum": [_P, _P, _T, _P],
    "pleachRedOpDestroy": [_T, _P],
    "pleachAllReduce": [_P, _P, _N, _T, _T, _P, _P],
    "pleachBroadcast": [_P, _P, _N, _T, _I, _P, _P],
    "pleachReduce": [_P, _P, _N, _T, _T, _I, _P, _P],
    "pleachReduceScatter": [_P, _P, _N, _T, _T, _P, _P],
    "pleachAllGather": [_P, _P, _N, _T, _P, _P],
    "pleachAllGatherV": [_P, _P, _P, _T, _P, _P],
    "pleachAlltoAllV": [_P, _P, _P, _P, _T, _P, _P],
    "pleachGather": [_P, _P, _N, _T, _I, _P, _P],
    "pleachScatter": [_P, _P, _N, _T, _I, _P, _P],
    "pleachSend": [_P, _N, _T, _I, _P, _P],
    "pleachRecv": [_P, _N, _T, _I, _P, _P],
    "pleachBarrier": [_P, _P],
}


@functools.cache
def library():
    """Returns the loaded library: ``PLEACH_LIBRARY``, or ``libpleach.so`` beside the package."""
    beside = pathlib.Path(__file__).parent.parent / "libpleach.so"
    path = os.environ.get("PLEACH_LIBRARY") or (str(beside) if beside.exists() else "libpleach.so")
    try:
        loaded = ctypes.CDLL(path)
    except OSError as error:
        raise ImportError(f"pleach's library cannot be loaded: {error}; set PLEACH_LIBRARY to its path") from error
    loaded.pleachGetLastError.restype = c_char_p
    for name, arguments in SIGNATURES.items():
        getattr(loaded, name).argtypes = arguments
    return loaded


class Comm:
    """A communicator. Calls block and release the GIL; several threads may call."""

    def __init__(self, unique_id, rank, size, timeout_ms):
        self.library = library()
        self.handle = c_void_p()
        self.process = os.getpid()
        config = Config(ctypes.sizeof(Config), timeout_ms, timeout_ms, None, 0, 0)
        self.check(
            self.library.pleachCommInitRankConfig(
                ctypes.byref(self.handle), size, UniqueId.from_buffer_copy(unique_id), rank, ctypes.byref(config)
            )
        )

    @staticmethod
    def unique_id():
        """Returns a new unique id, as bytes. The caller must be rank 0."""
        unique_id = UniqueId()
        if library().pleachGetUniqueId(ctypes.byref(unique_id)) != SUCCESS:
            raise PleachError(library().pleachGetLastError().decode())
        return bytes(unique_id)

    def call(self, name, *arguments):
        """Calls a collective; the communicator and the stream are added."""
        result = getattr(self.library, name)(*arguments, self.handle, None)
        if result != SUCCESS:
            self.check(result)

    def check(self, result):
        """Raises the exception of a result that is no success."""
        if result == SUCCESS:
            return
        text = self.library.pleachGetLastError().decode(errors="replace")
        failure = Failure(ctypes.sizeof(Failure), 0, -1, -1, -1)
        fields = {}
        found = self.library.pleachCommGetFailure(self.handle, ctypes.byref(failure)) if self.handle else result
        if found == SUCCESS and failure.kind:
            fields = {
                "kind": KINDS[failure.kind],
                "rank": failure.rank,
                "found_by": failure.found_by,
                "host": failure.host,
                "operation": failure.operation.decode(errors="replace"),
                "waited_s": failure.waited_ms / 1000,
            }
        elif result == INVALID_ARGUMENT:
            raise ValueError(text)
        raise (PleachTimeout if result == TIMEOUT else PleachError)(text, **fields)

    def set_timeout(self, timeout_ms):
        """Sets how long each later call waits; 0 is the time of the configuration."""
        self.check(self.library.pleachCommSetTimeout(self.handle, timeout_ms))

    def premultiplied(self, factor, data_type):
        """Returns the number of a sum with this factor, a ctypes value of the element type."""
        number = c_uint32()
        self.check(
            self.library.pleachRedOpCreatePreMulSum(ctypes.byref(number), ctypes.byref(factor), data_type, self.handle)
        )
        return number.value

    def abort(self):
        """Ends the work on all ranks and frees the communicator."""
        self.library.pleachCommAbort(self.handle)

    def close(self):
        """Leaves in order and frees the communicator."""
        self.library.pleachCommFinalize(self.handle)
        self.library.pleachCommDestroy(self.handle)
