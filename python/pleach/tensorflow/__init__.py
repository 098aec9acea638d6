"""The server protocol "grpc+pleach" of TensorFlow.

Import this module right after TensorFlow, and change one word::

    import tensorflow as tf
    import pleach.tensorflow

    server = tf.distribute.Server(cluster, job_name="worker", task_index=0, protocol="grpc+pleach")

Large CPU tensors between tasks then lie where their sender wrote them, and the receiver reads them
there. Small tensors, strings, and tensors from and to tasks without this module go by gRPC as
before. The first import compiles the plug-in for the TensorFlow that is installed, which takes
seconds and a C++ compiler; later imports find it in a cache.

PLEACH_FABRIC, PLEACH_REQUIRE, PLEACH_SECRET_FILE, PLEACH_HOST, PLEACH_INTERFACE and PLEACH_METRICS
are read by the import. The guide is ``docs/tensorflow.md``.
"""

from __future__ import annotations

import ctypes
import warnings

from pleach import _native
from pleach.tensorflow._build import PluginError, plugin as _plugin

__all__ = ["PROTOCOL", "PluginError", "counts"]

#: The protocol of servers, and ``rpc_layer`` of TF_CONFIG.
PROTOCOL = "grpc+pleach"

# Room for the reason of a failure, in bytes.
_REASON_BYTES = 1024

# In the order of `pleach_tensorflow_counts`.
_COUNTS = (
    "received_in_place",
    "received_by_fabric",
    "received_by_grpc",
    "lent",
    "links",
    "leases",
    "bytes_lent",
    "bytes_lendable",
    "waiting",
)


def _start() -> ctypes.CDLL:
    # The plug-in calls the C functions of the native module.
    ctypes.CDLL(_native.__file__, mode=ctypes.RTLD_GLOBAL)
    path = _plugin(_native.c_header())
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise PluginError(f"the plug-in of TensorFlow cannot be loaded: {error}") from error
    reason = ctypes.create_string_buffer(_REASON_BYTES)
    is_lendable = ctypes.c_int()
    if library.pleach_tensorflow_start(reason, ctypes.c_size_t(_REASON_BYTES), ctypes.byref(is_lendable)):
        raise PluginError(reason.value.decode(errors="replace"))
    if not is_lendable.value:
        warnings.warn(
            "pleach.tensorflow was imported after the first tensor was made: tensors of this process "
            "are copied once when they are sent; import it right after tensorflow",
            RuntimeWarning,
            stacklevel=2,
        )
    return library


_library = _start()


def counts() -> dict[str, int]:
    """What this process has counted, and what it holds now.

    Tensors of at least 512 KiB that were ``received_in_place``, ``received_by_fabric`` into memory
    of this process (tcp and verbs), and ``received_by_grpc``; tensors that were ``lent``. Now:
    ``links`` of both directions, ``leases`` that others hold, ``bytes_lent``, the
    ``bytes_lendable`` that tensors have touched, and requests of others that are ``waiting`` here.
    """
    values = (ctypes.c_uint64 * len(_COUNTS))()
    _library.pleach_tensorflow_counts(values)
    return dict(zip(_COUNTS, values, strict=True))
