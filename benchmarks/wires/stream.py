"""One plain stream over the link, for the rate that it really carries: `stream.py receive`, then
`stream.py send ADDRESS SECONDS`.

The receiver prints payload bits a second between its first block and its last, the sender the
milliseconds of the quickest round trip of one byte.
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 29400
ROUND_TRIPS = 5


def receive() -> None:
    with socket.create_server(("0.0.0.0", PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            room = memoryview(bytearray(1 << 20))
            for _ in range(ROUND_TRIPS):
                connection.sendall(connection.recv(1))
            connection.recv_into(room)
            begun, got = time.perf_counter(), 0
            while taken := connection.recv_into(room):
                got += taken
                ended = time.perf_counter()
    print(8 * got / (ended - begun) if got else 0.0)


def send(address: str, seconds: float) -> None:
    with socket.create_connection((address, PORT)) as connection:
        trips = []
        for _ in range(ROUND_TRIPS):
            begun = time.perf_counter()
            connection.sendall(b"?")
            connection.recv(1)
            trips.append(time.perf_counter() - begun)
        print(1000 * min(trips))
        block, end = bytes(1 << 18), time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(block)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], float(sys.argv[3]))
