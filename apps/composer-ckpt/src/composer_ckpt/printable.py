"""Text of files that nobody trusts, on its way to a terminal."""

__all__ = ["as_lines", "printable"]


def printable(text: str) -> str:
    r"""Return a text with escapes in place of what a terminal would obey rather than show; line ends stay.

    Example:
        >>> printable("\x1b[31mred\nblue")
        '\\x1b[31mred\nblue'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else ascii(character)[1:-1] for character in text
    )


def as_lines(lines: list[str]) -> str:
    r"""Join lines, with escapes for what is not printable in them: a name in a file must not begin a line of its own.

    Example:
        >>> print(as_lines(["ok", "a\nok: forged"]))
        ok
        a\nok: forged
    """
    return "\n".join(printable(line).replace("\n", r"\n") for line in lines)
