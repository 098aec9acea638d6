"""Asks a served model for inference by tritonclient: raw contents, shared memory, many at once.

Nothing here is pleach's; the program works with any server of this protocol:

    pleach graph serve model.onnx --ranks 2 --listen 127.0.0.1:8001 --name m --allow-client-shm
    python examples/triton_client.py 127.0.0.1:8001 m
"""

import queue
import sys

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import shared_memory, triton_to_np_dtype

REQUESTS = 16


def main(address: str, model: str) -> None:
    client = triton.InferenceServerClient(address)
    metadata = client.get_model_metadata(model)
    spec, wanted = metadata.inputs[0], metadata.outputs[0].name
    shape = [max(size, 1) for size in spec.shape]
    draw = np.random.default_rng(1)
    values = [draw.random(shape).astype(triton_to_np_dtype(spec.datatype)) for _ in range(REQUESTS)]

    # The values in the message.
    given = triton.InferInput(spec.name, shape, spec.datatype)
    given.set_data_from_numpy(values[0])
    output = client.infer(model, [given]).as_numpy(wanted)

    # Many requests at once: they fill the pipeline of ranks.
    answers: queue.Queue = queue.Queue()
    for number, value in enumerate(values):
        given = triton.InferInput(spec.name, shape, spec.datatype)
        given.set_data_from_numpy(value)
        client.async_infer(
            model, [given], lambda result, error: answers.put((result, error)), request_id=str(number)
        )
    outputs = {}
    for _ in values:
        result, error = answers.get(timeout=60)
        assert error is None, error
        outputs[result.get_response().id] = result.as_numpy(wanted)
    assert np.array_equal(outputs["0"], output)

    # Values and results in shared memory: neither is in a message.
    size = values[0].nbytes
    region = shared_memory.create_shared_memory_region("region", "triton_client", size + output.nbytes)
    try:
        shared_memory.set_shared_memory_region(region, [values[0]])
        client.register_system_shared_memory("region", "triton_client", size + output.nbytes)
        given = triton.InferInput(spec.name, shape, spec.datatype)
        given.set_shared_memory("region", size)
        asked = triton.InferRequestedOutput(wanted)
        asked.set_shared_memory("region", output.nbytes, offset=size)
        client.infer(model, [given], outputs=[asked])
        found = shared_memory.get_contents_as_numpy(region, output.dtype, output.shape, offset=size)
        assert np.array_equal(found, output)
        del found
        client.unregister_system_shared_memory("region")
    finally:
        shared_memory.destroy_shared_memory_region(region)
    print(f"{wanted}: {output.shape} of {output.dtype}, the same in {len(outputs)} concurrent requests and shared memory")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: triton_client.py HOST:PORT MODEL")
    main(sys.argv[1], sys.argv[2])
