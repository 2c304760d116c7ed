from types import SimpleNamespace

import pytest

from pshard.session.this_machine import free_by_driver


@pytest.mark.parametrize(
    ("named", "free"),
    [
        (None, {0: 10, 1: 20, 2: 30}),
        ("2,0", {0: 30, 1: 10}),
        ("GPU-b", {0: 20}),
        ("1,7,0", {0: 20}),
        ("", {}),
        ("MIG-a", {}),
    ],
)
def test_free_memory_of_gpus_has_the_numbers_that_a_process_sees(
    named: str | None, free: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = pytest.importorskip("pynvml", reason="the driver's library is not installed")
    monkeypatch.setattr(driver, "nvmlInit", lambda: None)
    monkeypatch.setattr(driver, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(driver, "nvmlDeviceGetHandleByIndex", lambda i: i)
    monkeypatch.setattr(driver, "nvmlDeviceGetHandleByUUID", lambda uuid: "abc".index(uuid[-1]))
    monkeypatch.setattr(driver, "nvmlDeviceGetMemoryInfo", lambda i: SimpleNamespace(free=10 * i + 10))
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert free_by_driver() == free
