"""What a run leaves behind, and one page that shows it: curves, the time of a step, who acted when, configuration."""

from typing import TYPE_CHECKING

from composer._lazy import lazy_face

if TYPE_CHECKING:
    from composer.report.page import write_page as write_page
    from composer.report.recorder import RunRecorder as RunRecorder
    from composer.report.runs import Run as Run
    from composer.report.runs import read_run as read_run

__all__ = ["Run", "RunRecorder", "read_run", "write_page"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "composer.report.page": ["write_page"],
        "composer.report.recorder": ["RunRecorder"],
        "composer.report.runs": ["Run", "read_run"],
    },
)
