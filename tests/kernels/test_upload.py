"""The staging ring: every byte arrives, and a failure leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from infer.kernels.errors import DeviceError
from infer.kernels.gpu import upload
from infer.kernels.gpu.bandwidth import COPIED, copy
from infer.kernels.gpu.device import Device
from infer.kernels.gpu.native import wgpu_native
from infer.kernels.gpu.upload import Fill, Uploader


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with Device.open() as device:
        yield device


@pytest.fixture(autouse=True)
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that a few hundred kilobytes go round several times."""
    monkeypatch.setattr(upload, "STAGING_BYTES", 1 << 14)
    monkeypatch.setattr(upload, "SOFTWARE_STAGING_BYTES", 1 << 14)
    monkeypatch.setattr(upload, "PIECE_BYTES", 1 << 12)


def random_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def copy_of(data: np.ndarray) -> Fill:
    def fill(view: memoryview, start: int) -> None:
        view[:] = data[start : start + len(view)].data

    return fill


@pytest.mark.parametrize("nbytes", [4, 1 << 12, (1 << 14) + 4, 300_004])
def test_data_arrives_whatever_its_size(device: Device, nbytes: int) -> None:
    data, buffer = random_bytes(nbytes), device.buffer(nbytes + 8)
    with Uploader(device, nbytes) as uploader:
        uploader.write(buffer, 4, nbytes, copy_of(data))
    np.testing.assert_array_equal(device.read(buffer, np.uint8, nbytes, 4), data)
    assert not device.read(buffer, np.uint8, 4).any()
    device.destroy([buffer])


def test_many_small_writes_share_staging_buffers(device: Device) -> None:
    submitted: list[int] = []
    data = random_bytes(1 << 16)
    buffers = [device.buffer(1 << 15) for _ in range(2)]
    with Uploader(device, data.nbytes, submitted.append) as uploader:
        for start in range(0, data.nbytes, 1024):  # alternately to both buffers
            half, place = divmod(start, 2048)
            part = data[start : start + 1024]
            uploader.write(buffers[place // 1024], half * 1024, 1024, copy_of(part))
    read = [device.read(buffer, np.uint8).reshape(-1, 1, 1024) for buffer in buffers]
    np.testing.assert_array_equal(np.concatenate(read, 1).ravel(), data)
    assert sum(submitted) == data.nbytes
    assert len(submitted) == 4  # one submission for each full staging buffer
    device.destroy(buffers)


def test_flush_waits_and_more_may_follow(device: Device) -> None:
    first, second = random_bytes(50_000, 1), random_bytes(50_000, 2)
    buffer = device.buffer(50_000)
    with Uploader(device, 50_000) as uploader:
        uploader.write(buffer, 0, 50_000, copy_of(first))
        uploader.flush()
        np.testing.assert_array_equal(device.read(buffer, np.uint8, 50_000), first)
        uploader.write(buffer, 0, 50_000, copy_of(second))
    np.testing.assert_array_equal(device.read(buffer, np.uint8, 50_000), second)
    device.destroy([buffer])


@pytest.mark.parametrize("unit", [2, 4, 48, 1000, 1 << 14])
def test_parts_are_cut_at_multiples_of_the_unit(device: Device, unit: int) -> None:
    nbytes, parts = unit * 40, []
    data, buffer = random_bytes(nbytes), device.buffer(nbytes)

    def fill(view: memoryview, start: int) -> None:
        parts.append((start, len(view)))
        view[:] = data[start : start + len(view)].data

    with Uploader(device, nbytes) as uploader:
        uploader.write(buffer, 0, nbytes, fill, unit)
    assert all(start % unit == 0 and size % unit == 0 for start, size in parts)
    assert sum(size for _, size in parts) == nbytes
    np.testing.assert_array_equal(device.read(buffer, np.uint8, nbytes), data)
    device.destroy([buffer])


def test_a_unit_that_cannot_be_staged_is_refused(device: Device) -> None:
    buffer = device.buffer(1 << 15)
    with Uploader(device, 1 << 15) as uploader, pytest.raises(DeviceError, match="Cut it"):
        uploader.write(buffer, 0, 1 << 15, copy_of(random_bytes(1 << 15)), 1 << 15)
    device.destroy([buffer])


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt()])
def test_a_failing_fill_comes_out_and_frees_the_ring(device: Device, error: BaseException) -> None:
    buffer, before = device.buffer(200_000), threading.active_count()
    allocated = device.memory_stats().allocated

    def fill(view: memoryview, start: int) -> None:
        if start > 100_000:
            raise error

    with pytest.raises(type(error)), Uploader(device, 200_000) as uploader:
        uploader.write(buffer, 0, 200_000, fill)
    assert device.memory_stats().allocated == allocated
    assert threading.active_count() == before
    device.destroy([buffer])


def test_an_error_in_the_block_frees_the_ring(device: Device) -> None:
    buffer, allocated = device.buffer(200_000), device.memory_stats().allocated
    uploader = Uploader(device, 200_000)
    uploader.write(buffer, 0, 200_000, copy_of(random_bytes(200_000)))
    with pytest.raises(KeyboardInterrupt), uploader:
        raise KeyboardInterrupt
    assert device.memory_stats().allocated == allocated
    device.destroy([buffer])


def test_an_interrupt_in_the_callback_of_a_mapping_is_not_lost(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.adapter.webgpu != "wgpu-native":
        pytest.skip("its package takes the callback, and passes no interrupt on")
    allocated = device.memory_stats().allocated

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(wgpu_native._Mapping, "_mapped", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Uploader(device, 1 << 14)
    assert device.memory_stats().allocated == allocated


def test_the_ring_is_freed_when_it_cannot_be_allocated(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocated, made = device.memory_stats().allocated, []
    real = device.buffer

    def buffer(*arguments: object) -> object:
        if len(made) == 2:
            raise DeviceError("full")
        made.append(real(*arguments))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(device, "buffer", buffer)
    with pytest.raises(DeviceError, match="full"):
        Uploader(device, 1 << 14)
    assert device.memory_stats().allocated == allocated


def test_a_kernel_runs_between_what_is_written_before_and_after(device: Device) -> None:
    """Rows go through one buffer, from which a kernel copies them before the next ones come."""
    nbytes = 3 * COPIED
    parts = [random_bytes(nbytes, seed) for seed in range(9)]
    passed = device.buffer(nbytes)
    submitted: list[int] = []
    kept = [device.buffer(nbytes) for _ in parts]
    with Uploader(device, nbytes * len(parts), submitted.append) as uploader:
        for data, buffer in zip(parts, kept, strict=True):
            uploader.write(passed, 0, nbytes, copy_of(data))
            uploader.run(copy(device, passed, buffer))
    for data, buffer in zip(parts, kept, strict=True):
        np.testing.assert_array_equal(device.read(buffer, np.uint8), data)
    assert sum(submitted) == nbytes * len(parts)
    device.destroy([passed, *kept])
