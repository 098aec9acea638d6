"""Programs of tritonclient and grpcio, unchanged, ask `pleach graph serve`.

usage: triton_clients.py PLEACH

PLEACH: the command, of a build with gRPC. `.ci/steps` runs this. The commands that "docs/graph.md"
shows are among the tests.
"""

import asyncio
import contextlib
import pathlib
import queue
import subprocess
import sys
import tempfile
import unittest

import grpc
import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException, shared_memory

ROOT = pathlib.Path(__file__).parent.parent
PLEACH = ""  # set by the argument

MODEL = """pleach-graph 1
graph g
opset 17
input ids i64 [2]
input x f32 [batch, 4]
input b bool [3]
node s Add(ids, ids) -> s ? ?
node y Relu(x) -> y ? ?
node n Not(b) -> n ? ?
output s
output y
output n
"""


class Server:
    """A server, as long as the block lasts."""

    def __init__(self, arguments: list[str], folder: pathlib.Path) -> None:
        self.process = subprocess.Popen(
            [PLEACH, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=folder
        )

    def __enter__(self) -> str:
        line = self.process.stdout.readline()
        assert line.startswith("listening on "), line
        return line.removeprefix("listening on ").strip()

    def __exit__(self, *_) -> None:
        self.process.terminate()
        self.process.wait(timeout=30)
        self.process.stdout.close()


def given(name: str, values: np.ndarray, datatype: str) -> triton.InferInput:
    one = triton.InferInput(name, list(values.shape), datatype)
    one.set_data_from_numpy(values)
    return one


def inputs(number: int) -> list[triton.InferInput]:
    return [
        given("ids", np.array([number, 3], np.int64), "INT64"),
        given("x", np.full((number % 3 + 1, 4), number - 5, np.float32), "FP32"),
        given("b", np.array([True, False, True]), "BOOL"),
    ]


class Clients(unittest.TestCase):
    def check(self, result: triton.InferResult, number: int) -> None:
        self.assertEqual(result.as_numpy("s").tolist(), [2 * number, 6])
        expected = np.full((number % 3 + 1, 4), max(number - 5, 0), np.float32)
        np.testing.assert_array_equal(result.as_numpy("y"), expected)
        self.assertEqual(result.as_numpy("n").tolist(), [False, True, False])

    def refused(self, code: str, text: str, call, *arguments, **named) -> None:
        with self.assertRaises(InferenceServerException) as caught:
            call(*arguments, **named)
        self.assertEqual(caught.exception.status(), f"StatusCode.{code}")
        self.assertIn(text, caught.exception.message())

    def test_tritonclient(self) -> None:
        client = triton.InferenceServerClient(self.address)
        self.assertTrue(client.is_server_live() and client.is_server_ready() and client.is_model_ready("m"))
        self.assertFalse(client.is_model_ready("n"))
        self.assertIn("system_shared_memory", client.get_server_metadata().extensions)
        metadata = client.get_model_metadata("m", as_json=True)
        self.assertEqual(metadata["inputs"][1], {"name": "x", "datatype": "FP32", "shape": ["-1", "4"]})
        config = client.get_model_config("m", as_json=True)["config"]
        self.assertEqual(config["input"][0], {"name": "ids", "data_type": "TYPE_INT64", "dims": ["2"]})
        for number in range(8):
            self.check(client.infer("m", inputs(number)), number)
        only = client.infer("m", inputs(7), outputs=[triton.InferRequestedOutput("y")], request_id="7")
        self.assertEqual([one.name for one in only.get_response().outputs], ["y"])
        self.assertEqual(only.get_response().id, "7")

    def test_tritonclient_many_at_once(self) -> None:
        client = triton.InferenceServerClient(self.address)
        answers: queue.Queue = queue.Queue()
        for number in range(64):
            done = lambda result, error, number=number: answers.put((number, result, error))
            client.async_infer("m", inputs(number), done)
        for _ in range(64):
            number, result, error = answers.get(timeout=60)
            self.assertIsNone(error)
            self.check(result, number)

    def test_tritonclient_of_asyncio(self) -> None:
        async def ask() -> None:
            async with triton_aio.InferenceServerClient(self.address) as client:
                results = await asyncio.gather(*(client.infer("m", inputs(number)) for number in range(16)))
                for number, result in enumerate(results):
                    self.check(result, number)

        asyncio.run(ask())

    def test_errors_are_those_of_the_protocol(self) -> None:
        client = triton.InferenceServerClient(self.address)
        self.refused("NOT_FOUND", "there is no model", client.infer, "n", inputs(1))
        self.refused("NOT_FOUND", "no version", client.get_model_metadata, "m", "9")
        self.refused("INVALID_ARGUMENT", "is missing", client.infer, "m", inputs(1)[:2])
        wrong = [given("ids", np.array([1, 3], np.int32), "INT32"), *inputs(1)[1:]]
        self.refused("INVALID_ARGUMENT", "'ids' is INT64 [2]", client.infer, "m", wrong)
        asked = [triton.InferRequestedOutput("y", class_count=1)]
        self.refused("UNIMPLEMENTED", "classification", client.infer, "m", inputs(1), outputs=asked)
        self.refused("UNIMPLEMENTED", "sequences", client.infer, "m", inputs(1), sequence_id=5)
        self.refused("UNIMPLEMENTED", "", client.infer, "m", inputs(1), compression_algorithm="gzip")
        self.refused("UNIMPLEMENTED", "RepositoryModelLoad", client.load_model, "m")
        self.refused("UNIMPLEMENTED", "ModelStatistics", client.get_inference_statistics, "m")
        answers: queue.Queue = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        # It may already know that the stream has ended.
        with contextlib.suppress(InferenceServerException):
            client.async_stream_infer("m", inputs(1))
        result, error = answers.get(timeout=60)
        self.assertIsNone(result)
        self.assertIn("ModelStreamInfer", error.message())
        client.stop_stream()
        self.check(client.infer("m", inputs(1)), 1)

    def test_shared_memory(self) -> None:
        client = triton.InferenceServerClient(self.address)
        x = np.array([[1, -2, 3, -4]], np.float32)
        region = shared_memory.create_shared_memory_region("r", "pleach_triton_clients", 64)
        try:
            shared_memory.set_shared_memory_region(region, [x])
            client.register_system_shared_memory("r", "pleach_triton_clients", 64)
            status = client.get_system_shared_memory_status(as_json=True)
            self.assertEqual(status["regions"]["r"]["byte_size"], "64")
            mixed = inputs(1)
            mixed[1] = triton.InferInput("x", [1, 4], "FP32")
            mixed[1].set_shared_memory("r", 16)
            y, n = triton.InferRequestedOutput("y"), triton.InferRequestedOutput("n")
            y.set_shared_memory("r", 32, offset=24)
            result = client.infer("m", mixed, outputs=[y, n])
            found = shared_memory.get_contents_as_numpy(region, np.float32, [1, 4], offset=24).copy()
            np.testing.assert_array_equal(found, np.maximum(x, 0))
            self.assertEqual(result.as_numpy("n").tolist(), [False, True, False])
            mixed[1].set_shared_memory("r", 16, offset=60)
            self.refused("INVALID_ARGUMENT", "do not lie in the region", client.infer, "m", mixed)
            client.unregister_system_shared_memory("r")
            mixed[1].set_shared_memory("r", 16)
            self.refused("NOT_FOUND", "no region", client.infer, "m", mixed)
        finally:
            shared_memory.destroy_shared_memory_region(region)

    def test_grpcio(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            self.assertTrue(stub.ServerReady(service_pb2.ServerReadyRequest()).ready)
            request = service_pb2.ModelInferRequest(model_name="m")
            for name, datatype, shape, contents in (
                ("ids", "INT64", [2], {"int64_contents": [4, 5]}),
                ("x", "FP32", [1, 4], {"fp32_contents": [1, -1, 2, -2]}),
                ("b", "BOOL", [3], {"bool_contents": [False, True, False]}),
            ):
                one = request.inputs.add(name=name, datatype=datatype, shape=shape)
                one.contents.CopyFrom(service_pb2.InferTensorContents(**contents))
            calls = [stub.ModelInfer.future(request, timeout=60) for _ in range(8)]
            calls[3].cancel()
            for call in calls[:3] + calls[4:]:
                raw = call.result().raw_output_contents
                self.assertEqual(np.frombuffer(raw[0], np.int64).tolist(), [8, 10])
                self.assertEqual(np.frombuffer(raw[1], np.float32).tolist(), [1, 0, 2, 0])
                self.assertEqual(raw[2], b"\1\0\1")

    def test_the_lines_of_the_documents(self) -> None:
        page = (ROOT / "docs/graph.md").read_text()
        mark = "<!-- run: by tests/triton_clients.py, "
        self.assertEqual(page.count(mark), 1)
        serve, ask = page.split(mark)[1].split("```sh\n")[1].split("\n```")[0].splitlines()
        serve = serve.replace("127.0.0.1:8001", "127.0.0.1:0").split()[1:]
        with Server(serve, ROOT) as address:
            command = ask.replace("127.0.0.1:8001", address).split()
            command[0] = sys.executable
            done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=ROOT)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("(1, 1000, 1, 1) of float32, the same in 16 concurrent requests", done.stdout)


def main() -> None:
    global PLEACH
    PLEACH = str(pathlib.Path(sys.argv.pop(1)).resolve())
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "model.graph").write_text(MODEL)
        arguments = "graph serve model.graph --name m --ranks 2 --depth 3 --listen 127.0.0.1:0 --allow-client-shm"
        with Server(arguments.split(), pathlib.Path(folder)) as address:
            Clients.address = address
            unittest.main(verbosity=2)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main()
