"""Messages between a worker and a server over TCP: a JSON header, followed by numbers.

In a gloo process group, the death of one member breaks the group, and all members have to restart.
The key-value store uses a separate connection between each worker and each server instead, so a
broken connection affects only one worker and one server. Both ends prove that they know a secret,
which the server puts into the attempt's store.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

_FRAME = struct.Struct("<IQ")  # header bytes, payload bytes
NONCE_BYTES = 32
MAX_HEADER_BYTES = 1 << 24
DTYPES: Final = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Types of pushed gradients, keyed by their names in a job document."""
SECRET_BYTES: Final = 32
CONNECT_LIMIT_S: Final = 60.0
PROOF_LIMIT_S: Final = 30.0
"""Time limit for the other end to prove that it knows the secret."""
ACCEPT_PAUSE_S: Final = 0.1
"""Pause, in seconds, after a failure to accept a connection."""


class ConnectionLost(dist.DistNetworkError):
    """The other end has closed the connection or died."""


class TensorConnection:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_a_lost_node(sock)
        self._socket = sock
        self.sent_bytes = 0

    def prove(self, secret: bytes, *, is_server: bool) -> None:
        """Make both ends prove that they know the secret. Raises ConnectionLost if the other end
        does not know the secret."""
        self._socket.settimeout(PROOF_LIMIT_S)
        mine, other = (b"server", b"worker") if is_server else (b"worker", b"server")
        nonce = secrets.token_bytes(NONCE_BYTES)
        self._write(nonce)
        theirs = self._read(NONCE_BYTES)
        self._write(_proof(secret, mine, theirs))
        if not hmac.compare_digest(self._read(NONCE_BYTES), _proof(secret, other, nonce)):
            raise ConnectionLost("the other end does not know the secret")
        self._socket.settimeout(None)

    def send(self, header: Mapping[str, Any], *payload: Tensor) -> None:
        """Send a message. payload: contiguous CPU tensors; the other end receives them as one
        tensor of bytes."""
        text = json.dumps(header).encode()
        self._write(_FRAME.pack(len(text), sum(t.nbytes for t in payload)) + text)
        for tensor in payload:
            if tensor.nbytes:
                self._write(tensor.detach().reshape(-1).view(torch.uint8).numpy().data)

    def receive(self, max_payload_bytes: int | None = None) -> tuple[dict[str, Any], Tensor]:
        """Return (header, payload as a tensor of bytes). Raises ConnectionLost if the message is
        too large.

        max_payload_bytes: None if the other end is trusted not to exhaust this process's memory.
        """
        header_bytes, payload_bytes = _FRAME.unpack(self._read(_FRAME.size))
        if header_bytes > MAX_HEADER_BYTES:
            raise ConnectionLost(f"a header of {header_bytes} bytes")
        if max_payload_bytes is not None and payload_bytes > max_payload_bytes:
            raise ConnectionLost(f"a message of {payload_bytes} bytes")
        header: dict[str, Any] = json.loads(self._read(header_bytes))
        payload = torch.empty(payload_bytes, dtype=torch.uint8)
        if payload_bytes:
            self._read_into(payload.numpy().data)
        return header, payload

    def check_open(self) -> None:
        """Raise ConnectionLost if the other end has closed the connection. Reads no data."""
        try:
            if not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
                raise ConnectionLost("the other end has closed the connection")
        except BlockingIOError:
            return
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def close(self) -> None:
        """Close the connection, even while another thread is waiting for the other end."""
        with contextlib.suppress(OSError):  # it may be closed already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _write(self, data: bytes | memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise ConnectionLost(str(error)) from error
        self.sent_bytes += len(data)

    def _read(self, size: int) -> bytes:
        data = bytearray(size)
        self._read_into(memoryview(data))
        return bytes(data)

    def _read_into(self, buffer: memoryview) -> None:
        while buffer:
            try:
                count = self._socket.recv_into(buffer)
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not count:
                raise ConnectionLost("a worker or parameter server has closed the connection")
            buffer = buffer[count:]


@contextlib.contextmanager
def listening(
    store: Any, key: str, address: str, serve: Callable[[TensorConnection], None]
) -> Iterator[None]:
    """Accept workers while this context is open. For each worker that connects and proves that it
    knows the secret, `serve` runs in a thread until the connection is lost. store: the attempt's
    torch store, to which this server's address and secret are written. address: an address of this
    node."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 0), family=family) as listener:
        secret = secrets.token_bytes(SECRET_BYTES)
        host, port = listener.getsockname()[:2]
        store.set(key, json.dumps({"host": host, "port": port, "secret": secret.hex()}))

        def accept() -> None:
            while True:
                try:
                    sock, _ = listener.accept()
                except OSError:  # no file descriptors left, or the worker is gone
                    if listener.fileno() < 0:
                        return
                    time.sleep(ACCEPT_PAUSE_S)
                    continue
                threading.Thread(
                    target=welcome, args=(TensorConnection(sock),), daemon=True
                ).start()

        def welcome(connection: TensorConnection) -> None:
            try:
                connection.prove(secret, is_server=True)
                serve(connection)
            except ConnectionLost:
                pass  # the worker has finished, or its death is noticed elsewhere
            finally:
                connection.close()

        threading.Thread(target=accept, name="dray-accept", daemon=True).start()
        try:
            yield
        finally:  # `close` would not wake the thread, or free the port
            with contextlib.suppress(OSError):  # not on every system
                listener.shutdown(socket.SHUT_RDWR)


def connect(store: Any, key: str) -> TensorConnection:
    """Connect to the server whose address is in the store under this key. Raises ConnectionLost if
    the server can't be reached."""
    about = json.loads(store.get(key))
    try:
        sock = socket.create_connection((about["host"], about["port"]), CONNECT_LIMIT_S)
    except OSError as error:
        raise ConnectionLost(f"a server does not respond: {error}") from error
    connection = TensorConnection(sock)
    connection.prove(bytes.fromhex(about["secret"]), is_server=False)
    return connection


Shapes = Sequence[tuple[str, Sequence[int]]]
"""(name, shape) of each tensor, as contained in message headers."""


def shapes_of(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return the shapes of the fp32 tensors in a payload."""
    return [(name, list(tensor.shape)) for name, tensor in tensors.items()]


def unpacked(shapes: Shapes, payload: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a payload as views of the payload."""
    values, found, first = payload.view(torch.float32), {}, 0
    for name, shape in shapes:
        size = torch.Size(shape).numel()
        found[name] = values[first : first + size].view(torch.Size(shape))
        first += size
    return found


def _notice_a_lost_node(sock: socket.socket) -> None:
    """Make the kernel probe a silent peer, so that the loss of its node is detected."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _proof(secret: bytes, role: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, role + nonce, "sha256")
