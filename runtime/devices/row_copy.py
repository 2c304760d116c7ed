"""Copies of matrices whose rows lie apart, between device and host, by the CUDA driver in one call.

torch copies such tensors through a contiguous temporary on either side, which allocates and, on the host, waits.
"""

import ctypes

import torch

from pshard.runtime.devices.cuda_driver import check, cuda_driver

_HOST, _DEVICE = 1, 2  # CUmemorytype


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D of the driver's interface (cuda.h): one side, the other side, extent."""

    _fields_ = (
        ("src_x", ctypes.c_size_t), ("src_y", ctypes.c_size_t), ("src_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p), ("src_device", ctypes.c_uint64), ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x", ctypes.c_size_t), ("dst_y", ctypes.c_size_t), ("dst_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p), ("dst_device", ctypes.c_uint64), ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    )  # fmt: skip


def check_rows(dst: torch.Tensor, src: torch.Tensor) -> None:
    """Raises ValueError unless both are contiguous and of equal bytes, or matrices of one shape with such rows."""
    if dst.is_contiguous() and src.is_contiguous() and dst.nbytes == src.nbytes:
        return
    alike = dst.shape == src.shape and dst.dtype == src.dtype and dst.dim() == 2
    if not (alike and dst.stride(1) == 1 and src.stride(1) == 1):
        raise ValueError("copies are between contiguous tensors of equal size, or matrices with contiguous rows")


def copy_rows(dst: torch.Tensor, src: torch.Tensor, stream: int) -> None:
    """Queue dst = src on the CUDA stream (its handle); one is on the device, the other in page-locked host memory.

    Raises ValueError for tensors that are no such matrices, RuntimeError when the driver refuses.
    """
    check_rows(dst, src)
    copy = _Copy2D(width=src.shape[1] * src.element_size(), height=src.shape[0])
    for side, tensor in (("src", src), ("dst", dst)):
        on_device = tensor.is_cuda
        setattr(copy, f"{side}_type", _DEVICE if on_device else _HOST)
        setattr(copy, f"{side}_{'device' if on_device else 'host'}", tensor.data_ptr())
        setattr(copy, f"{side}_pitch", tensor.stride(0) * tensor.element_size())
    check(cuda_driver().cuMemcpy2DAsync_v2(ctypes.byref(copy), stream), f"a copy of {src.shape[0]} rows")
