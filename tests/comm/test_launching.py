"""Kernels go to the device of their tensors, on devices that have them; the devices are mocks,
since no test has two GPUs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from onefold.comm import launching
from onefold.quant import codec, kernels
from onefold.quant.registry import WITH_KERNELS

GPU_1 = torch.device("cuda", 1)


class Devices(threading.local):
    """Which device is current, in each thread: 0 at first."""

    current = 0

    @contextlib.contextmanager
    def device_index(self, index):
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before


@pytest.fixture
def devices(monkeypatch):
    found = Devices()
    monkeypatch.setattr(torch.accelerator, "device_index", found.device_index)
    return found


class Kernel:
    """Stands for a Triton kernel: records its launches, and the device that was current."""

    def __init__(self, devices):
        self.devices, self.launches = devices, []

    def __getitem__(self, grid):
        return lambda *arguments, **options: self.launches.append(
            (self.devices.current, grid, options)
        )


def on_gpu_1(numel, dtype=torch.float32):
    with FakeTensorMode():
        return torch.empty(numel, dtype=dtype, device=GPU_1)


def test_a_kernel_is_launched_on_the_device_of_its_tensors(devices):
    kernel = Kernel(devices)
    launching.launch(kernel, 7, on_gpu_1(4), "arguments")
    assert kernel.launches == [(1, (7,), {"num_warps": 4, "enable_fp_fusion": False})]
    assert devices.current == 0, "the thread's device was not put back"


def test_a_thread_whose_current_device_is_another_launches_there_too(devices):
    kernel = Kernel(devices)

    def work():
        devices.current = 3
        launching.launch(kernel, 1, on_gpu_1(4))
        kernel.after = devices.current

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert [device for device, *_ in kernel.launches] == [1] and kernel.after == 3


def test_no_program_is_no_launch(devices):
    kernel = Kernel(devices)
    launching.launch(kernel, 0, on_gpu_1(0))
    assert not kernel.launches


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_every_kernel_goes_to_the_device_of_its_tensors(devices, monkeypatch):
    """Encode, decode and sum, by the functions that call them."""
    from onefold.comm import triton_sums
    from onefold.quant import triton_kernels

    kernel = Kernel(devices)
    for room, name in (
        (triton_kernels, "_encode"),
        (triton_kernels, "_decode"),
        (triton_sums, "_sum"),
    ):
        monkeypatch.setattr(room, name, kernel)
    monkeypatch.setattr(
        triton_kernels, "pairs", lambda device: torch.empty(256, dtype=torch.float64)
    )
    source = on_gpu_1(512)
    for name in WITH_KERNELS:
        by = codec(name)
        with source.fake_mode:
            payload = torch.empty(by.payload_bytes(512), dtype=torch.uint8, device=GPU_1)
            kept = torch.empty(512 // by.block, dtype=torch.bfloat16, device=GPU_1)
            assert triton_kernels.encode(by, source, payload, kept, None) == 512
            assert triton_kernels.decode(by, payload, kept, source, 0) == 512
    with source.fake_mode:
        triton_sums.sum_parts(
            source.view(4, 128), torch.empty(128, device=GPU_1), 0.25, None, 0, None
        )
    assert [device for device, *_ in kernel.launches] == [1] * 9
    assert devices.current == 0


def test_a_fake_tensor_has_no_kernels(monkeypatch):
    monkeypatch.setattr(launching, "usable", lambda device: True)
    fake = on_gpu_1(512)
    assert fake.is_cuda and not launching.served(fake) and not kernels.serve(codec("int8"), fake)


@pytest.fixture
def asked_anew(monkeypatch):
    """`usable` without what it has found before."""
    monkeypatch.setattr(launching, "usable", launching.usable.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    return monkeypatch


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_kernels_serve_from_compute_capability_8_on(asked_anew, capability, expected):
    asked_anew.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    asked_anew.setattr(launching, "_starts", lambda device: True)
    assert launching.usable(GPU_1) == expected


def test_kernels_serve_no_device_without_triton(asked_anew):
    asked_anew.setattr(importlib.util, "find_spec", lambda name: None)
    assert not launching.usable(GPU_1)
    assert not launching.usable(torch.device("xpu", 0))


def test_a_triton_that_cannot_build_is_told_once_and_left_alone(asked_anew):
    def broken(*arguments, **options):
        raise RuntimeError(
            "Failed to find C compiler. Please specify via CC environment variable.\nmore"
        )

    asked_anew.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    asked_anew.setattr(launching, "launch", broken)
    asked_anew.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
    with pytest.warns(
        UserWarning,
        match=(
            r"Triton is installed but cannot run a kernel \(RuntimeError: Failed to find C"
            r" compiler. .*\)\. Sums"
        ),
    ):
        assert not launching.usable(GPU_1)


def test_torch_does_it_inside_by_torch_in_this_thread_only(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", True)
    monkeypatch.setattr(launching, "usable", lambda device: True)
    elsewhere = []
    with launching.by_torch():
        assert not launching.served(torch.zeros(1))
        thread = threading.Thread(target=lambda: elsewhere.append(launching.served(torch.zeros(1))))
        thread.start()
        thread.join()
    assert launching.served(torch.zeros(1)) and elsewhere == [True]


def test_the_interpreter_serves_the_cpu_and_nothing_without_memory(monkeypatch):
    monkeypatch.setattr(launching, "INTERPRETED", True)
    monkeypatch.setattr(launching, "_starts", lambda device: True)
    monkeypatch.setattr(launching, "usable", launching.usable.__wrapped__)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert launching.served(torch.zeros(1)) and not launching.served(torch.zeros(1, device="meta"))
    monkeypatch.setattr(launching, "INTERPRETED", False)
    assert not launching.served(torch.zeros(1))
