"""Stands in for torchvision, whose wheels want the CUDA build of torch: what ultralytics calls.

The test of that program puts this file beside it, as `torchvision.py`.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor


def nms(boxes: Tensor, scores: Tensor, iou_threshold: float) -> Tensor:
    """Non-maximum suppression: the boxes that overlap no better one by more than the threshold.

    boxes: [n, 4], each as x1, y1, x2, y2. scores: [n]. Their indices, by falling score.
    """
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1)
    left = scores.argsort(descending=True)
    kept = []
    while left.numel():
        best, left = left[0], left[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[left, :2])
        high = torch.minimum(boxes[best, 2:], boxes[left, 2:])
        common = (high - low).clamp(min=0).prod(dim=1)
        left = left[common / (areas[best] + areas[left] - common) <= iou_threshold]
    return torch.stack(kept) if kept else torch.empty(0, dtype=torch.int64)


ops = SimpleNamespace(nms=nms)
