"""Tables as text: for programs, and for people."""

import json
from collections.abc import Sequence
from typing import Any

from composer_events.logger_destination import format_log_data_value

__all__ = ["table_as_json", "table_as_text"]

_WIDEST = 60  # characters; one long text must not push all other columns off the screen


def table_as_json(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table as pandas writes it with `to_json(orient='split', index=False)`, other letters as they are.

    Example:
        >>> table_as_json(["a", "b"], [[1, "x"]])
        '{"columns":["a","b"],"data":[[1,"x"]]}'
    """
    table = {"columns": list(columns), "data": [list(row) for row in rows]}
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False, default=_to_json)


def table_as_text(columns: Sequence[str], rows: Sequence[Sequence[Any]], indent: str = "") -> str:
    """Return a table with its columns below each other, numbers to the right.

    Example:
        >>> print(table_as_text(["name", "loss"], [["first", 0.51234], ["b", 12.0]]))
        name      loss
        -----  -------
        first   0.5123
        b      12.0000

    Raises:
        ValueError: If a row has more or fewer cells than there are columns.
    """
    columns = [str(column) for column in columns]
    for number, row in enumerate(rows):
        if len(row) != len(columns):
            raise ValueError(
                f"rows[{number}]={list(row)!r} has {len(row)} cells, and the table {len(columns)} columns: "
                f"{', '.join(columns)}. Give each row a cell for each column."
            )
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(line[column]) for line in [columns, *cells]) for column in range(len(columns))]
    is_number = [all(isinstance(row[column], int | float) for row in rows) for column in range(len(columns))]

    def line(texts: Sequence[str]) -> str:
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(texts, widths, is_number, strict=True)
        ]
        return (indent + "  ".join(parts)).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: Any) -> str:
    text = " ".join((value if isinstance(value, str) else format_log_data_value(value)).split())
    return text if len(text) <= _WIDEST else text[: _WIDEST - 1] + "…"


def _to_json(value: Any) -> Any:
    """Turn what JSON does not know into what it does: numbers of NumPy and tensors, or text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
