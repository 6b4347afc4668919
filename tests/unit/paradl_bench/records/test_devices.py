"""The catalogue of devices: every number has a source, and numbers agree with each other."""

from __future__ import annotations

import msgspec
import pytest

from paradl_bench.core.errors import UserError
from paradl_bench.records.devices.sheet import DeviceSheet, device_sheet, device_sheets, sheet_of_measured

WANTED = "v100 t4 a100-sxm-40gb a100-sxm-80gb a100-pcie-80gb l4 h100-pcie h100-sxm h200 gh200 b200 mi210 mi250 mi300x"


@pytest.mark.parametrize("name", WANTED.split())
def test_the_catalogue_has_the_usual_devices(name: str) -> None:
    assert any(known.startswith(name) for known in device_sheets())


@pytest.mark.parametrize("name", device_sheets())
def test_numbers_of_a_sheet_agree_with_each_other(name: str) -> None:
    sheet = device_sheet(name)
    peaks = sheet.peak_flops
    # A tensor core does twice as many products of half the width.
    for narrow, wide in (("fp16", "tf32"), ("bf16", "tf32"), ("fp8", "fp16")):
        if narrow in peaks and wide in peaks:
            assert peaks[narrow] == pytest.approx(2 * peaks[wide], rel=0.03)
    assert peaks["fp32"] < peaks["fp16"]
    # Bytes of memory and of its bus: the whole of it is read in some tens of milliseconds on all of them.
    assert 0.015 < sheet.memory_bytes / sheet.memory_bandwidth_bytes_per_s < 0.085
    # FLOPs of fp32 products of a multiprocessor a second: 64 to 256 fused multiply-adds a clock of 1 to 2.2 GHz.
    assert 64 * 2 * 1e9 <= peaks["fp32"] / sheet.multiprocessors <= 256 * 2 * 2.2e9
    assert sheet.device_link_bytes_per_s is None or sheet.device_link_bytes_per_s >= sheet.host_link_bytes_per_s


def test_names_of_drivers_belong_to_one_device_each() -> None:
    names = [name for sheet in device_sheets().values() for name in sheet.device_names]
    assert len(set(names)) == len(names)
    found = sheet_of_measured("NVIDIA A100-SXM4-80GB")
    assert found is not None
    assert found.name == "a100-sxm-80gb"
    assert sheet_of_measured("AMD EPYC") is None


def test_an_unknown_device_or_peak_names_those_known() -> None:
    with pytest.raises(UserError, match="h100-sxm"):
        device_sheet("h100")
    with pytest.raises(UserError, match="v100-sxm2-32gb has no peak in bf16; it has fp32, fp16"):
        device_sheet("v100-sxm2-32gb").peak("bf16")
    sheet = device_sheet("a100-sxm-80gb")
    assert sheet.peak("fp32", tf32=True) == sheet.peak_flops["tf32"] == sheet.peak("bf16", tf32=True) / 2


def test_a_number_without_a_source_is_refused() -> None:
    raw = msgspec.to_builtins(device_sheet("l4"))
    raw["sources"].pop("multiprocessors")
    with pytest.raises(msgspec.ValidationError, match="a source for each of its numbers"):
        msgspec.convert(raw, DeviceSheet)
