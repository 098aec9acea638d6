"""A receiver of tensors that is no TensorFlow: gRPC, with the messages by hand.

The wheel has no stubs of TensorFlow's service of workers.
"""

import struct

import grpc
from tensorflow.core.framework import device_attributes_pb2

SERVICE = "/tensorflow.WorkerService/"
VERSION = 1
VARINT, BYTES = 0, 2


def varint(number):
    number %= 1 << 64
    encoded = bytearray()
    while True:
        encoded.append(number & 127 | (128 if number > 127 else 0))
        number >>= 7
        if not number:
            return bytes(encoded)


def field(number, value):
    """A field of a message: a number, or bytes."""
    if isinstance(value, int):
        return varint(number << 3 | VARINT) + varint(value)
    return varint(number << 3 | BYTES) + varint(len(value)) + value


def fields(message):
    """The fields of a message that are numbers or bytes."""
    place, found = 0, []

    def take():
        nonlocal place
        number = shift = 0
        while True:
            byte = message[place]
            place += 1
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number

    while place < len(message):
        tag = take()
        value = take()
        if tag & 7 == BYTES:
            value, place = message[place : place + value], place + value
        found.append((tag >> 3, value))
    return found


def ask(incarnation):
    """The message by which a receiver asks for an offer, as `plugin/messages.h` has it."""
    name = b"type.googleapis.com/pleach.Ask"
    return field(1, name) + field(2, struct.pack("<QQ", VERSION, incarnation % (1 << 64)))


class Receiver:
    def __init__(self, address):
        options = [("grpc.max_receive_message_length", -1)]
        self.channel = grpc.insecure_channel(address, options=options)

    def call(self, method):
        return self.channel.unary_unary(SERVICE + method, lambda sent: sent, lambda received: received)

    def device_incarnation(self, name):
        for number, value in fields(self.call("GetStatus")(b"", timeout=60)):
            device = device_attributes_pb2.DeviceAttributes.FromString(value) if number == 1 else None
            if device is not None and device.name == name:
                return device.incarnation
        raise AssertionError(f"there is no {name}")

    def next_step(self, graph):
        """The step that the next run of this number has."""
        answer = self.call("GetStepSequence")(field(1, varint(graph)), timeout=60)
        return dict(fields(fields(answer)[0][1]))[2]

    def start(self, step, key, incarnation, request=0):
        """RecvTensor that asks for an offer of the endpoint of this incarnation."""
        message = field(1, step) + field(2, key.encode()) + field(6, ask(incarnation)) + field(7, request)
        return self.call("RecvTensor").future(message, timeout=60)

    def start_buffer(self, step, key, device, device_incarnation, incarnation, request):
        """RecvBuf that asks for an offer of the endpoint of this incarnation."""
        message = field(1, step) + field(2, key.encode()) + field(7, ask(incarnation))
        message += field(8, device.encode()) + field(10, request) + field(11, device_incarnation)
        return self.call("RecvBuf").future(message, timeout=60)

    def introduction(self):
        """The incarnation and the address of the task's endpoint, as it says them."""
        answer = self.start(0, "pleach introduction", 0).result()
        options = dict(fields(dict(fields(answer))[4]))
        assert options[1] == b"type.googleapis.com/pleach.Introduction"
        version, incarnation = struct.unpack_from("<QQ", options[2])
        assert version == VERSION
        return incarnation, options[2][16:].decode()
