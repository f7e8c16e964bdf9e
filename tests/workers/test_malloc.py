from pathlib import Path

import pytest
import torch

from tandem.workers.host.malloc import use_huge_pages


def huge_bytes(begin: int, end: int) -> int:
    """Returns how much of this process's memory between two addresses lies in huge pages."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            start, stop = (int(each, 16) for each in first.split("-"))
            is_inside = start < end and begin < stop
        elif is_inside and first == "AnonHugePages:":
            total += int(rest[0]) * 1024
    return total


def test_tensors_lie_in_huge_pages_and_keep_their_numbers() -> None:
    tensors = [torch.randn(600, 700) for _ in range(20)]  # 32 MiB, each less than a huge page
    numbers = [tensor.clone() for tensor in tensors]
    begin, end = (
        min(each.data_ptr() for each in tensors),
        max(each.data_ptr() + each.nbytes for each in tensors),
    )
    use_huge_pages(tensors)
    assert all(map(torch.equal, tensors, numbers))
    if huge_bytes(begin, end) == 0:
        pytest.skip("this kernel moves no memory into huge pages")


def test_tensors_without_memory_of_their_own_are_left_alone() -> None:
    packed = torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64))
    use_huge_pages([torch.empty(8, device="meta"), packed, torch.empty(0)])
