"""Pinned pages: unpinned while they are still mapped, and left out of forked processes."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import virtual
from onefold.device import host_pages, pinned

CUDA = torch.device("cuda")
NBYTES = 4 << 20


def mapping_of(address: int) -> dict[str, str] | None:
    """The entry of the mapping at `address` in this process; None if nothing is mapped there."""
    found: dict[str, str] | None = None
    with open("/proc/self/smaps") as f:
        for line in f:
            first, *rest = line.split()
            if not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                if found is not None:
                    break
                found = {} if begin <= address < end else None
            elif found is not None:
                found[first] = " ".join(rest)
    return found


class Runtime:
    """Takes the calls of a driver's library, and notes whether the range was mapped."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.calls: list[tuple[str, int, bool]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls.append(("register", address, mapping_of(address + nbytes - 1) is not None))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address, mapping_of(address) is not None))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    if sys.platform != "linux":
        pytest.skip("reads /proc")
    found = Runtime()
    monkeypatch.setattr(pinned, "_runtime", lambda device: found)
    return found


def test_pages_are_unpinned_before_they_are_unmapped(runtime: Runtime) -> None:
    pages = host_pages(NBYTES, huge=True, device=CUDA)
    address = pages.data_ptr()
    view = pages[-100:].view(torch.float32)
    del pages
    assert runtime.calls == [("register", address, True)], "a view still reads the pages"
    del view
    assert runtime.calls[1:] == [("unregister", address, True)]
    assert mapping_of(address) is None


def test_pages_that_the_driver_refuses_are_given_back_and_not_unpinned(runtime: Runtime) -> None:
    runtime.code = 2
    with pytest.raises(RuntimeError, match="cudaHostRegister ended with error 2"):
        host_pages(NBYTES, huge=False, device=CUDA)
    [(call, address, _)] = runtime.calls
    assert call == "register" and mapping_of(address) is None


def test_pages_of_no_device_are_not_pinned(runtime: Runtime) -> None:
    del (pages := [host_pages(NBYTES, huge=False)])[0]
    assert pages == [] and runtime.calls == []


def forked(child: Callable[[], Any]) -> str:
    """What `child` returns in a forked process; what became of it if it did not end well."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:  # nothing but this: other threads are not in the child
        try:
            os.write(write, repr(child()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as f:
        said = f.read()
    _, status = os.waitpid(pid, 0)
    return said if status == 0 else f"the child ended with {os.waitstatus_to_exitcode(status)}"


def test_a_forked_process_has_no_pinned_pages(runtime: Runtime) -> None:
    pages, others = host_pages(NBYTES, huge=True, device=CUDA), host_pages(NBYTES, huge=False)
    pages.fill_(1)
    others.fill_(1)
    here = mapping_of(pages.data_ptr())
    assert here is not None and "dc" in here["VmFlags:"].split(), here
    beside = mapping_of(others.data_ptr())
    assert beside is not None and "dc" not in beside["VmFlags:"].split(), beside
    there = forked(lambda: [mapping_of(t.data_ptr()) is not None for t in (pages, others)])
    assert there == "[False, True]"
    assert int(pages.sum()) == NBYTES


def test_a_forked_process_may_drop_pinned_pages_and_use_their_addresses(runtime: Runtime) -> None:
    kept = [host_pages(NBYTES, huge=True, device=CUDA)]
    address = kept[0].data_ptr()

    def child() -> list[Any]:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        own = libc.mmap(address, NBYTES, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        kept.clear()
        return [own == address, mapping_of(address) is not None, len(runtime.calls)]

    assert forked(child) == "[True, True, 1]", "the child's own memory was unmapped or unpinned"
    kept.clear()
    assert [call for call, _, _ in runtime.calls] == ["register", "unregister"]


@virtual.alone
def devices_that_are_current_when_pages_are_pinned() -> None:
    current: list[int] = []

    class Noting:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            current.append(torch.accelerator.current_device_index())
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            current.append(torch.accelerator.current_device_index())
            return 0

    pinned._runtime = lambda device: Noting()
    assert torch.accelerator.current_device_index() == 0
    del (pages := [host_pages(NBYTES, huge=True, device=torch.device("virtual", 2))])[0]
    assert pages == [] and current == [2, 2]
    assert torch.accelerator.current_device_index() == 0


def test_pages_are_pinned_for_their_device_also_where_another_one_is_current() -> None:
    devices_that_are_current_when_pages_are_pinned()
