"""What torch's profiler has seen of the memory, as a page."""

from __future__ import annotations

import base64
import html
import io
import os
from typing import Any

import torch

__all__ = ["export_memory_timeline_html"]


def export_memory_timeline_html(
    prof: Any,
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    figsize: tuple[float, float] = (20, 12),
    title: str | None = None,
    yxis_step_size: float = 1.0,
    return_fig: bool = False,
) -> Any:
    """Write a page that shows what the memory was used for over time: weights, gradients, activations and more.

    Args:
        prof: A `torch.profiler.profile` that has recorded shapes, memory and stacks.
        path: Where the page goes.
        device: Whose memory. By default that of the accelerator, or of the host if there is none.
        figsize: Width and height in inches.
        title: Stands above the picture.
        yxis_step_size: How far apart the marks of the memory's axis are, in GiB.
        return_fig: Whether to return the picture.

    Returns:
        The `matplotlib.figure.Figure`, if it is asked for.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the profiler has not recorded what is needed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The timeline of memory is drawn by matplotlib: pip install matplotlib") from error
    # torch has no other way to the categories of memory; its own page of them asks CUDA also where there is none.
    from torch.profiler import _memory_profiler as categories

    timeline = categories.MemoryProfileTimeline(prof._memory_profile())
    times_us, sizes = timeline._coalesce_timeline(str(_device(device)))
    if not times_us:
        raise ValueError(f"The profiler has seen no memory of {_device(device)}. Pass the device that the model is on.")
    since_ms = [(time - times_us[0]) / 1e3 for time in times_us]
    stacked = torch.tensor(sizes, dtype=torch.float64).cumsum(dim=1) / 1024**3
    figure = Figure(figsize=figsize, dpi=80)
    axes = figure.gca()
    colors = categories._CATEGORY_TO_COLORS
    for category, color in colors.items():
        index = categories._CATEGORY_TO_INDEX[category]
        axes.fill_between(since_ms, stacked[:, index], stacked[:, index + 1], color=color, alpha=0.7)
    figure.legend(["Unknown" if category is None else category.name for category in colors])
    axes.set_xlabel("Time (ms)")
    axes.set_ylabel("Memory (GiB)")
    top = float(stacked.max())
    if top > yxis_step_size:
        axes.set_yticks([step * yxis_step_size for step in range(int(top / yxis_step_size) + 2)])
    axes.set_title("\n".join([title] if title else []) + f"\nPeak of what the profiler saw: {top:.3f} GiB")
    _write_page(figure, path, title or "Memory over time")
    return figure if return_fig else None


def _device(device: str | torch.device | None) -> torch.device:
    if device is None:
        device = torch.accelerator.current_accelerator() or "cpu"
    device = torch.device(device)
    return torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device


def _write_page(figure: Any, path: str | os.PathLike[str], title: str) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    encoded = base64.b64encode(picture.getvalue()).decode()
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f'<!doctype html><html><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>'
            f'<body><img alt="memory by category over time" src="data:image/png;base64,{encoded}"></body></html>\n'
        )
