"""Measure how the source is built and worded, and compare with the committed numbers in `tools/house.json`.

    house.py [--check | --update | --words | --json]

Without an option it prints a table of the packages and the totals. `--check` fails if a number is worse than the
committed one, `--update` commits today's numbers, and `--words` lists every place that the language counters found.
Modules and lines may grow with a feature, by `--update` in the same commit, as long as modules do not get smaller on
average; all others only get better. Modules that tools/faces.py writes are left out.
"""

import argparse
import ast
import collections
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from faces import MARK

ROOT = Path(__file__).resolve().parent.parent
COMMITTED = ROOT / "tools" / "house.json"
OPENERS = re.compile(r"^(Whether|What|Which|How|Who|Whose|Where|Answer|Say|Let|Of|Telling|That)\b")
WORDS = re.compile(
    r"\b([Aa]new|[Ww]hoever|[Ww]homever|[Nn]obody|[Ss]omebody|[Ww]hatever|is no [a-z]+|are no [a-z]+|is none|"
    r"none that there|of one's own|be it|as which|[Ww]ho (types|wants|asks|names|needs)|there is to|goes on|going on)\b"
)
CHECKS = re.compile(r"_?(check|refuse|require|validate)(_|$)|_?(warn_of|ensure_)")
TINY, LARGE = 80, 700
MAX_COMPLEXITY = 15
COLUMNS = ("modules", "lines", "faces", "tiny", "large", "functions", "checks", "complex", "openers", "words")
GROWING = {"lines", "modules", "functions", "comments"}


def sources() -> Iterator[Path]:
    """Yield the files of all packages, except generated ones."""
    for base in ("packages", "apps"):
        for path in sorted((ROOT / base).glob("*/src/**/*.py")):
            if not path.read_text().startswith(MARK):
                yield path


def module_name(path: Path) -> str:
    """Return a file's dotted name."""
    parts = list(path.parts[path.parts.index("src") + 1 :])
    parts[-1] = parts[-1].removesuffix(".py")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, known: collections.abc.Container[str]) -> Iterator[str]:
    """Yield the modules of the project that a module imports, also inside functions, except for type checking only."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            skipped.update(id(inner) for part in node.body for inner in ast.walk(part))
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known or node.module in known:
                    yield whole if whole in known else node.module


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle."""
    reachable = {}
    for start in edges:
        seen, pending = set(), [start]
        while pending:
            for following in edges.get(pending.pop(), ()):
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
        reachable[start] = seen
    on_circle = {name for name, seen in reachable.items() if name in seen}
    groups = {
        frozenset(other for other in on_circle & reachable[name] if name in reachable[other]) for name in on_circle
    }
    return sorted(sorted(group) for group in groups)


def complexity(function: ast.AST) -> int:
    """Return one more than the number of branches in a function."""
    score = 1
    for node in ast.walk(function):
        if isinstance(node, (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.Assert, ast.comprehension)):
            score += 1
        elif isinstance(node, ast.BoolOp):
            score += len(node.values) - 1
        elif isinstance(node, ast.Match):
            score += len(node.cases)
    return score


def measure_module(text: str, tree: ast.Module) -> tuple[collections.Counter[str], list[tuple[int, str]]]:
    """Return a module's counts, and the lines that the language counters found with what they found."""
    lines = text.count("\n")
    defines = any(isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) for node in tree.body)
    tokens = tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__)
    row = collections.Counter(
        modules=1,
        lines=lines,
        faces=not defines,
        tiny=defines and lines < TINY,
        large=lines > LARGE,
        comments=sum(token.type == tokenize.COMMENT for token in tokens),
    )
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            row.update(
                functions=1,
                checks=bool(CHECKS.match(node.name)),
                complex=complexity(node) > MAX_COMPLEXITY,
            )
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node)
            if doc and OPENERS.match(doc):
                row["openers"] += 1
                found.append((getattr(node, "lineno", 1), f"opener: {doc.splitlines()[0]}"))
    for number, line in enumerate(text.splitlines(), 1):
        for match in WORDS.finditer(line):
            row["words"] += 1
            found.append((number, f"{match.group(0)!r}: {line.strip()[:110]}"))
    return row, found


def measure() -> tuple[dict[str, collections.Counter[str]], list[list[str]], list[str]]:
    """Return the counts of each package, the circles of imports, and the places with words to avoid."""
    paths = {module_name(path): path for path in sources()}
    rows: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    edges, words = {}, []
    for name, path in paths.items():
        text = path.read_text()
        tree = ast.parse(text)
        place = path.relative_to(ROOT)
        row, found = measure_module(text, tree)
        rows[place.parts[1]].update(row if path.name not in ("__main__.py", "sitecustomize.py") else row | {"tiny": 0})
        words += [f"{place}:{number} {what}" for number, what in found]
        edges[name] = set(imports(tree, paths)) - {name}
    return dict(rows), circles(edges), words


def totals(rows: dict[str, collections.Counter[str]], rings: list[list[str]]) -> dict[str, float]:
    """Return the numbers that are committed: sums over all packages, and what a run passes through."""
    total = sum(rows.values(), collections.Counter())
    numbers = {column: total[column] for column in (*COLUMNS, "comments")} | {"circles": len(rings)}
    run = [sys.executable, str(Path(__file__).with_name("rooms.py")), "--json"]
    rooms = json.loads(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
    return numbers | {f"{key} of {name}": row[key] for name, row in rooms.items() for key in ("rooms", "changes")}


def worse(numbers: dict[str, float], committed: dict[str, float]) -> Iterator[str]:
    """Yield a sentence for each number that is worse than the committed one."""
    for name, number in numbers.items():
        if name in GROWING:
            continue
        slack = 1.03 if name.startswith("changes") else 1  # threads change places at times of their own
        if number > slack * committed[name]:
            yield f"{name}: {number}, and the committed number is {committed[name]}."
    for name in ("modules", "lines"):
        if numbers[name] > committed[name]:
            yield f"{name}: {numbers[name]}, and the committed number is {committed[name]}. If needed, --update."
    if numbers["comments"] / numbers["lines"] < 0.99 * committed["comments"] / committed["lines"]:
        yield f"comments: {numbers['comments']} in {numbers['lines']} lines, a smaller share than the committed one."


def main() -> int:
    """Print, check or commit the numbers, and return the exit status."""
    parser = argparse.ArgumentParser(description="Measure how the source is built and worded.")
    for option, what in (("check", "fail if a number is worse"), ("update", "commit the numbers of today")):
        parser.add_argument(f"--{option}", action="store_true", help=what)
    parser.add_argument("--words", action="store_true", help="list what the language counters found")
    parser.add_argument("--json", action="store_true", help="print the totals alone, as JSON")
    options = parser.parse_args()
    rows, rings, words = measure()
    if options.words:
        print("\n".join(words))
        return 0
    numbers = totals(rows, rings)
    if options.json:
        print(json.dumps(numbers))
        return 0
    if options.update:
        COMMITTED.write_text(json.dumps(numbers, indent=2) + "\n")
        return 0
    if options.check:
        found = [
            *worse(numbers, json.loads(COMMITTED.read_text())),
            *("circle: " + " <-> ".join(ring) for ring in rings),
        ]
        print("\n".join(found) or "No number of tools/house.json has got worse.")
        return 1 if found else 0
    print(f"{'package':<22}" + "".join(f"{column:>11}" for column in COLUMNS))
    for name, row in [*sorted(rows.items()), ("all", sum(rows.values(), collections.Counter()))]:
        print(f"{name:<22}" + "".join(f"{row[column]:>11}" for column in COLUMNS))
    print(f"comments {100 * numbers['comments'] / numbers['lines']:.2f} % of lines; circles {len(rings)}")
    print("\n".join("  " + " <-> ".join(ring) for ring in rings))
    for name, number in numbers.items():
        if " of " in name:
            print(f"{name:<24}{number:>6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
