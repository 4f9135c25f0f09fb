"""The memory timeline of PyTorch's profiler as an HTML page."""

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
    """Write a page with the memory usage over time by category: weights, gradients, activations and more.

    Args:
        prof: A `torch.profiler.profile` that has recorded shapes, memory and stacks.
        path: Path of the page.
        device: Device whose memory is shown. Default: the accelerator, or the host without one.
        figsize: Width and height in inches.
        title: Title above the plot.
        yxis_step_size: Distance of the ticks of the memory axis, in GiB.
        return_fig: Whether to return the figure.

    Returns:
        The `matplotlib.figure.Figure` with `return_fig`, else `None`.

    Raises:
        ImportError: If matplotlib is not installed.
        ValueError: If the profiler has no record of the device's memory.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The memory timeline needs matplotlib: pip install matplotlib") from error
    # torch has no public API for the memory categories, and its own page calls CUDA even without a CUDA device.
    from torch.profiler import _memory_profiler as categories

    timeline = categories.MemoryProfileTimeline(prof._memory_profile())
    times_us, sizes = timeline._coalesce_timeline(str(_device(device)))
    if not times_us:
        raise ValueError(f"The profiler has recorded no memory of {_device(device)}. Pass the model's device.")
    since_ms = [(time - times_us[0]) / 1e3 for time in times_us]
    stacked = torch.tensor(sizes, dtype=torch.float64).cumsum(dim=1) / 1024**3
    # Not through pyplot, which would keep the figure in memory.
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
    # torch's timeline has an index in each device's name, except for the CPU.
    return torch.device(device.type, 0) if device.type != "cpu" and device.index is None else device


def _write_page(figure: Any, path: str | os.PathLike[str], title: str) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    encoded = base64.b64encode(picture.getvalue()).decode()
    # The image is embedded, so that the page is a single file.
    with open(path, "w", encoding="utf-8") as file:
        file.write(
            f'<!doctype html><html><head><meta charset="utf-8"><title>{html.escape(title)}</title></head>'
            f'<body><img alt="memory by category over time" src="data:image/png;base64,{encoded}"></body></html>\n'
        )
