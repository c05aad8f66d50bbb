"""Serve a run's figures to Prometheus: the newest row of its `metrics.jsonl`, or of a `Meter`.

python -m onefold.integrations.prometheus runs/a --port 9400       # beside a run of `onefold train`

    exporter = onefold.integrations.prometheus.serve(9400)         # in a loop of your own
    exporter.show(meter.step(loss=loss), rank=0)

Each number of a row is a gauge: `onefold_loss`, `onefold_wire_bytes`, `onefold_held_now_master_weights`
in bytes, with the labels `run` and `rank`. Needs the extra `onefold[prometheus]`.
"""

from __future__ import annotations

import argparse
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.core import GaugeMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    if error.name != "prometheus_client":
        raise
    raise ModuleNotFoundError(
        "onefold.integrations.prometheus needs the package prometheus_client, which is not"
        " installed: pip install 'onefold[prometheus]'",
        name=error.name,
    ) from error

from onefold.observe.meter import flat
from onefold.reading import parse_json

#: Bytes at the end of `metrics.jsonl` in which the last row is searched.
_TAIL = 1 << 16


class Exporter(Collector):  # type: ignore[misc, unused-ignore]
    """Keep the newest row of each rank for Prometheus's requests. Safe to call from any thread.

    Args:
        run: the output folder of `onefold train`, whose newest row is read at each request; None if
            rows are given by `show`.

    Attributes:
        port: the port on which it is served.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None) -> None:
        self.run = Path(run) if run is not None else None
        self.port = 0
        self._rows: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()
        self._server: Any = None

    def show(self, row: Mapping[str, Any], rank: int = 0) -> None:
        """Set a rank's newest row, as `Meter.step` returns it."""
        numbers = _numbers(row)
        with self._lock:
            self._rows[str(rank)] = numbers

    def collect(self) -> Iterator[Any]:
        """Yield a family of gauges for each number."""
        rows = {"0": _numbers(last_row(self.run))} if self.run is not None else {}
        with self._lock:
            rows |= self._rows
        for name in sorted({name for row in rows.values() for name in row}):
            family = GaugeMetricFamily(f"onefold_{name}", name, labels=["run", "rank"])
            for rank, row in rows.items():
                if name in row:
                    family.add_metric([str(self.run or ""), rank], row[name])
            yield family

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()
            self._server = None


def serve(
    port: int = 9400, run: str | os.PathLike[str] | None = None, address: str = "127.0.0.1"
) -> Exporter:
    """Serve figures on `http://address:port/metrics`, from a thread of this process.

    Args:
        port: 0 takes a free port; see `Exporter.port`.
        run: see `Exporter`.
        address: "0.0.0.0" also serves other machines.

    Raises:
        ValueError: `run` is not a folder.
        OSError: the port is taken.
    """
    if run is not None and not Path(run).is_dir():
        raise ValueError(f"run={str(run)!r} is no folder: give the --output of a run.")
    exporter, registry = Exporter(run), CollectorRegistry()
    registry.register(exporter)
    server, thread = start_http_server(port, addr=address, registry=registry)
    exporter.port, exporter._server = int(server.server_port), (server, thread)
    return exporter


def last_row(run: Path) -> dict[str, Any]:
    """Return the last complete row of a step in a run's `metrics.jsonl`; {} while there is none."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return {}
    for line in reversed(lines):
        try:
            row = parse_json(line)
        except ValueError:  # the line is still being written, or its beginning was not read
            continue
        if isinstance(row, dict) and "step" in row:
            return row
    return {}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's finite numbers, under names that Prometheus accepts."""
    return {
        re.sub(r"\W+", "_", name): float(value)
        for name, value in flat(dict(row)).items()
        if isinstance(value, (int, float)) and abs(value) < 1e300
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m onefold.integrations.prometheus")
    parser.add_argument("run", help="the output folder of `onefold train`")
    parser.add_argument("--port", type=int, default=9400)
    parser.add_argument("--address", default="127.0.0.1", help="0.0.0.0 for other machines")
    asked = parser.parse_args()
    exporter = serve(asked.port, asked.run, asked.address)
    print(f"http://{asked.address}:{exporter.port}/metrics", flush=True)
    exporter._server[1].join()


if __name__ == "__main__":
    main()
