"""The tables and figures of the pages, and the files that the site includes.

    python docs/tables.py     # writes the tables, the figures and the lists of names anew

A table stands between `<!-- table: speed matmul -->` and `<!-- end of table -->`, a figure between `<!-- figure: status -->` and
`<!-- end -->`.  Speed comes from benchmarks/results, where each file holds what was measured last; refusals from
docs/operations/refusals.json; what is verified from the package's record.  `tests/project/test_docs_pages.py` fails where a page is not
what this would write.

Pages list names with the first sentence of their documentation.  Each has `<!-- ::: name -->` behind it, in whose place the
site has all of it.
"""

import functools
import importlib
import inspect
import json
import math
import pathlib
import posixpath
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RECORD = ROOT / "jaxext" / "tables" / "verified.json"
BEGIN, END = re.compile(r"^<!-- table: (\w+) (\w+) -->$", re.MULTILINE), "<!-- end of table -->"
FIGURE = re.compile(r"<!-- figure: (\w+)((?: \w+)*) -->.*?<!-- end -->")
CODE = re.compile(r"^\[[^\]]*\]\(([\w./-]+\.(\w+))\) <!-- include -->$", re.MULTILINE)
NAME = re.compile(r"^- [^\n]*<!-- (::: ([\w.]+)(?:(?!-->).)*?)\s*-->$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")

# Benchmarks of one operation, or of several, which the rows name, against jnp: benchmarks/results/NAME_cpu.json.
OWN = [path.stem.removesuffix("_cpu") for path in RESULTS.glob("*_cpu.json")]

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

Found = Iterator[tuple[str, str, float]]  # row of the table, column, and how many times as long the other takes


def written(markdown: str) -> str:
    """The page with its tables, figures, and sentences of docstrings, as they are now.

    Raises:
      KeyError: there is no such table or figure.
      ValueError: a table has no end.
    """
    head, *parts = re.split(r"(?=^<!-- table: )", markdown, flags=re.MULTILINE)
    for part in parts:
        match = BEGIN.match(part)
        if match is None or part.count(END) != 1:
            raise ValueError(f"want `<!-- table: KIND NAME -->` and one `{END}` behind it, got {part.splitlines()[0]}")
        head += f"{match[0]}\n\n{TABLES[match[1]](match[2])}\n\n{END}{part.partition(END)[2]}"
    head = FIGURE.sub(lambda match: f"<!-- figure: {match[1]}{match[2]} -->{FIGURES[match[1]](*match[2].split())}<!-- end -->", head)
    return NAME.sub(lambda match: f"- {first_sentence(match[2])} <!-- {match[1]} -->", head)


def first_sentence(name: str) -> str:
    """Return the first sentence of the documentation of `name`, with a link to its file from a folder of docs."""
    path, _, attribute = name.rpartition(".")
    whole = importlib.import_module(path)
    found = getattr(whole, attribute, None) or importlib.import_module(name)
    documented = inspect.ismodule(found) or inspect.isclass(found) or inspect.isfunction(found)
    file = pathlib.Path(inspect.getsourcefile(inspect.unwrap(found) if documented else whole) or "").resolve().relative_to(ROOT)
    text = " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split()) if documented else ""
    sentence = re.split(r"(?<=\.) ", text)[0]
    escaped = re.sub(r"(`[^`]*`)|([*<])", lambda match: match[1] or f"\\{match[2]}", sentence)
    return f"[`{name}`](../../{file})" + (f": {escaped}" if escaped else "")


def expanded(markdown: str, folder: str) -> str:
    """Expand the files that a page in `folder` of docs/ includes, and its directives for mkdocstrings."""
    markdown = NAME.sub(lambda match: f"\n{match[1]}\n", markdown)
    return CODE.sub(lambda match: code(match[1], match[2], folder), markdown)


def code(path: str, language: str, folder: str) -> str:
    """A file as a block of code, which opens by a click."""
    language = {"h": "cpp", "cu": "cpp", "py": "python"}[language]
    name, text = posixpath.basename(path), (ROOT / "docs" / folder / path).read_text()
    return f"<details markdown><summary>{name}</summary>\n\n```{language}\n{text}```\n\n</details>"


# --- what each implementation refuses


def refusals(page: str) -> str:
    """A row for each call; primitives with the same outcome share one."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for row in json.loads((ROOT / "docs" / "operations" / "refusals.json").read_text())[page]:
        triton, cuda = (row[name].replace("|", "\\|") for name in ("triton", "cuda"))
        cuda = "the same" if cuda == triton != "yes" else cuda
        groups.setdefault((row["call"], triton, cuda, f"`{row['unnamed']}`"), []).append(row["product"])
    lines = [[call, ", ".join(products), *outcome] for (call, *outcome), products in groups.items()]
    return _table(["call", "primitive", "`triton`", "`cuda`", "unnamed"], [], lines) + _below(
        "For an H100. *Unnamed*: what runs without a name if all kernels are [verified](../implementations.md#verified-kernels)."
    )


# --- speed on a CPU


def suite(file: str, kinds: Callable[[dict], Iterable[str]]) -> tuple[dict, Found]:
    """Rows of `python -m jaxext bench`: lax's time over jaxext's, by kind and role."""
    report = json.loads((RESULTS / file).read_text())
    names = {"fprop": "forward", "dgrad": "gradient of the input", "wgrad": "gradient of the filter"}

    def found() -> Found:
        for row in report["rows"]:
            times = row["results"]
            ours = row["default"][0]["implementation"]
            if "lax" in times and ours in times:
                for kind in kinds(row):
                    yield kind, names.get(row["role"], row["role"]), times["lax"]["ms"][1] / times[ours]["ms"][1]

    return report["environment"], found()


def pairs(file: str, kind: Callable[[dict], str], others: dict[str, str]) -> tuple[dict, Found]:
    """Rows of the smaller benchmarks: the time of each other program over jaxext's."""
    report = json.loads((RESULTS / file).read_text())
    rows = (row for row in report["rows"] if "jaxext" in row["ms"])
    return report["environment"], (
        (kind(row), title, row["ms"][name] / row["ms"]["jaxext"]) for row in rows for name, title in others.items() if name in row["ms"]
    )


def own_kind(row: dict) -> str:
    return f"{row['row']} of {row['operation']}, {row['dtype']}"


def tags(*names: str) -> Callable[[dict], list[str]]:
    """Return a function that gives the first of a row's tags that is one of `names`."""
    return lambda row: [name for name in names if name in row["tags"]][:1]


def conv_kinds(row: dict) -> list[str]:
    special = ("per-example", "batched-filters", "transposed", "causal", "depthwise", "grouped")
    kinds = tags(*special, "three-axes", "one-axis", "stem", "strided", "pointwise", "dense")(row)
    return [kind for kind in kinds if kind != "transposed" and not {"matmul", "skinny", "batched"} & {*row["tags"]}]


SPEED = {name: functools.partial(pairs, f"{name}_cpu.json", own_kind, {"jnp": "jnp"}) for name in OWN} | {
    "conv": lambda: suite("cpu.json", conv_kinds),
    "conv_transpose": lambda: suite("cpu.json", lambda row: [row["problem"]] if "transposed" in row["tags"] else []),
    "matmul": lambda: suite("cpu.json", tags("skinny", "batched", "matmul")),
    "linear": lambda: suite("fused_cpu.json", lambda row: [f"{row['problem'].split(',')[0]}, {row['dtype']}"]),
    "ragged": lambda: suite(
        "ragged_cpu.json", lambda row: [f"{'reduced layers' if 'reduced' in row['tags'] else 'for a CPU'}, {row['dtype']}"]
    ),
    "causal_conv1d": lambda: pairs(
        "causal_cpu.json",
        lambda row: row["row"],
        {"lax": "lax", "sum_of_padded": "a sum of padded inputs", "padded_once": "padded once", "jnp": "concatenate, multiply, sum"},
    ),
    "causal_conv": lambda: pairs(
        "causal_conv_cpu.json", lambda row: row["row"], {"lax": "lax, the whole", "stream": "the same in chunks, by a scan"}
    ),
    "long_conv": lambda: pairs(
        "long_conv_cpu.json",
        lambda row: f"{row['row']}, (T, C, K) = ({', '.join(map(str, row['shape']))})",
        {"lax": "lax", "jnp.fft": "FFT by hand"},
    ),
    "quantized_matmul": lambda: pairs(
        "quantized_cpu.json",
        lambda row: f"{row['row']}, {row['format']}",
        {"dequantized": "dequantized first", "wide": "unquantised"},
    ),
    "scaled_dot": lambda: pairs(
        "quantized_fp8_cpu.json",
        lambda row: f"{row['row']}, {row['format']}",
        {"dequantized": "dequantized first", "wide": "unquantised"},
    ),
    "ragged_scaled_dot": lambda: pairs(
        "quantized_experts_cpu.json",
        lambda row: row["format"],
        {"dequantized": "dequantized first", "wide": "unquantised"},
    ),
    "loops": lambda: pairs(
        "loops_cpu.json", lambda row: f"{row['row']}, {row['problem']}", {"lax": "lax in the loop", "unrolled": "lax without it"}
    ),
}


def speed(page: str) -> str:
    """A table of geometric means; where there are several rows, with the least and the largest."""
    environment, found = SPEED[page]()
    cells: dict[tuple[str, str], list[float]] = {}
    for kind, column, ratio in found:
        cells.setdefault((kind, column), []).append(ratio)
    kinds, columns = (list(dict.fromkeys(key[i] for key in cells)) for i in (0, 1))
    lines = ["| case | " + " | ".join(columns) + " |", "|---|" + "--:|" * len(columns)]
    lines += [f"| {kind} | " + " | ".join(_cell(cells.get((kind, column), [])) for column in columns) + " |" for kind in kinds]
    return "\n".join(lines) + _below(
        f"Speedup on a CPU over each alternative (above 1 jaxext wins): geometric mean over sizes (range). {_made(environment)}."
    )


# --- each row of a benchmark


def of_invariant(rows: list[dict]) -> Iterator[list[str]]:
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["product"], {})[row["row"]] = row["ms"]["invariant"] / row["ms"]["jaxext"]
    for product, ratios in found.items():
        yield [product, *(f"{ratios[row]:.1f}" for row in ("forward", "gradient in x"))]


def of_private(rows: list[dict]) -> Iterator[list[str]]:
    for row in rows:
        facts = f"{row['network']}, {row['parameters'] / 1e6:.2g} million parameters"
        yield [facts, *(f"{row['ms'][name]:.3g}" for name in row["ms"]), *(f"{row['MiB'][name]:.0f}" for name in row["ms"])]


def of_models(rows: list[dict]) -> Iterator[list[str]]:
    for row in sorted(rows, key=lambda row: -row["step"]["lax over jaxext"][1]):
        cells = [row["network"], row["package"], "{} of {}".format(*row["rewritten"])]
        for part in ("forward", "step"):
            least, ratio, most = row[part]["lax over jaxext"]
            cells += [f"{row[part]['lax']['ms'][1]:.0f}", f"{ratio:.2f} ({least:.2f} to {most:.2f})"]
        yield cells


def costs_of_models(rows: list[dict]) -> Iterator[list[str]]:
    for row in sorted(rows, key=lambda row: -row["step"]["lax over jaxext"][1]):
        cells = [row["network"]]
        for cost, unit in (("bytes", 2**20), ("build_ms", 1e3)):
            for part in ("forward", "step"):
                lax, ours = (row[part][library][cost] for library in ("lax", "jaxext"))
                cells.append(f"{lax / unit:.{0 if cost == 'bytes' else 1}f}, {ours / lax:.2f}")
        errors = [f"{row['error'][library]:.0e}" if row["error"] else "" for library in ("lax", "jaxext")]
        yield [*cells, *errors, f"{row['difference']['step']:.0e}"]


def gpu_rows(rows: list[dict]) -> Iterator[list[str]]:
    """Microseconds; lax's over the better of our kernels."""
    libraries = ("triton", "cuda", "xla", "lax")
    for row in rows:
        took = {name: row["results"][name]["ms"][1] * 1e3 for name in libraries if "ms" in row["results"].get(name, {})}
        best = min(took.keys() & {"triton", "cuda"}, key=lambda name: took[name])
        ratio = f"{took['lax'] / took[best]:.2f}" if "lax" in took else ""
        figures = [f"{took[name]:,.0f}" if name in took else "" for name in libraries]
        yield [row["name"], *figures, ratio, f"{row['results'][best]['error']:.0e}"]


def fastest(part: str) -> str:
    """Return the largest median of lax's time over jaxext's, of the whole models that a library has the layers of."""
    rows = json.loads((RESULTS / "models_cpu.json").read_text())["rows"]
    return f"{max(row[part]['lax over jaxext'][1] for row in rows if not row['package'].startswith('jax ')):.1f}"


# table -> its file, the columns that are words, those that are numbers, and the cells
ROWS = {
    "invariant": ("invariant_cpu", "operation", "forward; gradient in x", of_invariant),
    "h100": ("h100", "row", "`triton`; `cuda`; `xla`; lax; lax over ours; error", gpu_rows),
    "models": (
        "models_cpu",
        "network, made with",
        "rewritten; forward, lax, ms; lax over jaxext; step, lax, ms; lax over jaxext",
        of_models,
    ),
    "models_costs": (
        "models_cpu",
        "network",
        "forward, MiB; step, MiB; forward, to build, s; step, to build, s; error of lax; of jaxext; difference",
        costs_of_models,
    ),
    "private": (
        "private_cpu",
        "network",
        "jaxext.privacy, ms; `vmap, lax`, ms; `vmap, jaxext`, ms; MiB; MiB, `vmap, lax`; MiB, `vmap, jaxext`",
        of_private,
    ),
}


def each_row(name: str) -> str:
    file, words, numbers, cells = ROWS[name]
    report = json.loads((RESULTS / f"{file}.json").read_text())
    titles, figures = words.split(", "), numbers.split("; ")
    return _table(titles, figures, cells(report["rows"])) + _below(f"{_made(report['environment'])}.")


def kinds(name: str) -> str:
    """The means of a report's rows, by kind of problem."""
    from jaxext.bench import findings
    from jaxext.bench.bench_report import read

    report = read(RESULTS / f"{name}.json")
    of_kind: dict[str, list] = {}
    for row in report.rows:
        of_kind.setdefault(row.kind, []).append(row)
    means = filter(None, (findings.mean(kind, rows, findings.DEFAULT, "lax") for kind, rows in of_kind.items()))
    lines = (
        [str(mean.group), str(mean.rows), f"{mean.geometric_mean:.2f}", f"{mean.least:.2f}", mean.least_row, str(mean.losers or "none")]
        for mean in sorted(means, key=lambda mean: -mean.geometric_mean)
    )
    head = "| kind | rows | geometric mean | least | which is | slower than lax |\n|---|--:|--:|--:|---|--:|\n"
    return head + "\n".join(f"| {' | '.join(line)} |" for line in lines) + _below(f"{_made(dict(report.environment))}.")


# --- which kernels were right on a GPU


def verified(_: str) -> str:
    """A row for each family of kernels and GPU."""
    lines = []
    for entry in json.loads(RECORD.read_text())["entries"]:
        families: dict[tuple[str, str, str], list[dict]] = {}
        for kind, outcome in entry["verified"].items():
            library, family, _ = kind.split(" ", 2)
            families.setdefault((library, family, outcome["compiler"]), []).append(outcome)
        for (library, family, compiler), found in sorted(families.items()):
            right, worst, dates = (
                sum(each["right"] for each in found),
                max(each["error"] for each in found),
                [each["date"] for each in found],
            )
            lines.append(
                [f"`{library}`", f"`{family}`", entry["device"], compiler, max(dates), str(len(found)), str(right), f"{worst:.0e}"]
            )
    titles = ["implementation", "kernels", "GPU", "by", "date"]
    return _table(titles, ["kinds", "right", "largest error"], lines)


def shardings(_: str) -> str:
    """The collectives that each split label of a form needs, in each role."""
    from jaxext import parallel

    small = {"matmul": dict(B=2, M=4, K=4, N=4), "conv2d": dict(N=4, H=4, W=4, G=4, C=4, K=4, R=3, S=3)}
    lines = []
    for form, label, name, how in SHARDINGS:
        roles = parallel.cost(form, {label: 2}, sizes=small[form], **how).values()
        cells = (", ".join(dict.fromkeys(f"{each.kind} {each.slot}" for each in role.collectives)) or "-" for role in roles)
        lines.append([form, label, name, *cells])
    return _table(["form", "split", "which is", "nn / fprop", "nt / dgrad", "tn / wgrad"], [], lines)


SHARDINGS: tuple[tuple[str, str, str, dict], ...] = (
    ("matmul", "B", "batch of matrices, experts", {}),
    ("matmul", "B", "`expert_parallel`", {"sent": {"a": ("M", "B"), "c": ("M", "B")}}),
    ("matmul", "M", "rows: data", {}),
    ("matmul", "M", "data, parameters scattered", {"scattered": {"b": "K"}}),
    ("matmul", "N", "columns: tensor", {}),
    ("matmul", "N", "`all_gather_matmul`", {"scattered": {"a": "M"}}),
    ("matmul", "K", "contracted: tensor", {}),
    ("matmul", "K", "`matmul_reduce_scatter`", {"scattered": {"c": "M"}}),
    ("conv2d", "N", "images: data", {}),
    ("conv2d", "N", "data, parameters scattered", {"scattered": {"w": "K"}}),
    ("conv2d", "G", "groups", {}),
    ("conv2d", "K", "output channels: tensor", {}),
    ("conv2d", "C", "input channels: tensor", {}),
    ("conv2d", "H", "rows, halos", {}),
    ("conv2d", "H", "rows, `jit`", {"spatial": "gather"}),
)


# --- figures in sentences


def status() -> str:
    """Return the counts of the record, in a sentence."""
    found = []
    for entry in json.loads(RECORD.read_text())["entries"]:
        outcomes = entry["verified"].values()
        right, compilers = sum(each["right"] for each in outcomes), ", ".join(sorted({each["compiler"] for each in outcomes}))
        found.append(f"On an {entry['device']} {right} of {len(outcomes)} kinds of kernels were right ({compilers}; {entry['measured']})")
    return "; ".join(found)


def spread(name: str, other: str, row: str = "") -> str:
    """The least and the largest of another program's time over jaxext's, in all rows or in those of one kind."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    found = [each["ms"][other] / each["ms"]["jaxext"] for each in rows if row in ("", each["row"])]
    return f"{min(found):.2g} to {max(found):.2g}"


# --- how many splits over devices are wrong


def splits(name: str) -> str:
    """A row for each operation: faults of lax on each version, and of jaxext."""
    runs = json.loads((RESULTS / f"{name}.json").read_text())
    of = {(run["jax"], row["name"]): row for run in runs for row in run["rows"]}
    versions, operations = (list(dict.fromkeys(key)) for key in zip(*((v, name.rpartition(", ")[0]) for v, name in of), strict=True))
    operations = [name for name in operations if (versions[0], f"{name}, lax") in of]
    heads = ["operation", "splits", *(f"lax, jax {version}" for version in versions), "jaxext, each"]
    lines = [heads, ["---"] * len(heads)]
    for operation in operations:
        lax, ours = ([of[version, f"{operation}, {ops}"] for version in versions] for ops in ("lax", "jaxext"))
        wrong = [", ".join(f"{n} {kind}" for kind, n in row.items() if kind not in ("name", "splits")) for row in lax]
        lines.append([operation, str(lax[0]["splits"]), *(cell or "0" for cell in wrong), str(max(sum(_wrong(row)) for row in ours))])
    totals = [f"{sum(sum(_wrong(of[v, f'{name}, {ops}'])) for name in operations)}" for v in versions for ops in ("lax", "jaxext")]
    lines.append(
        ["all", str(sum(of[versions[0], f"{name}, lax"]["splits"] for name in operations)), *totals[::2], max(totals[1::2], key=int)]
    )
    kinds = (
        f"A sample of {runs[0]['sample']} splits of each, seed {runs[0]['seed']}, under `jit` with automatic axes on simulated devices. "
        "*values*: the result is wrong. *gradients*: only those are. *abort*: the process ends. *error*: XLA refuses its own program. "
        "*communication*: results are right, but data is sent although the split axes of operands and result agree."
    )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + _below(kinds)


def _wrong(row: dict) -> Iterator[int]:
    return (n for kind, n in row.items() if kind not in ("name", "splits"))


def _table(titles: list[str], figures: list[str], rows: Iterable[list[str]]) -> str:
    head, *lines = (f"| {' | '.join(line)} |" for line in [titles + figures, *rows])
    return "\n".join([head, "|---" * len(titles) + "|--:" * len(figures) + "|", *lines])


def _made(environment: dict) -> str:
    return f"{environment['device']}, jax {environment['versions']['jax']}, {environment['date'][:10]}, commit {environment['commit'][:7]}"


def _below(text: str) -> str:
    return "\n\n" + textwrap.fill(text, 150)


def _cell(ratios: list[float]) -> str:
    if not ratios:
        return ""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.2f}" if len(ratios) == 1 else f"{mean:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


TABLES = {
    "speed": speed,
    "refusals": refusals,
    "rows": each_row,
    "kinds": kinds,
    "splits": splits,
    "verified": verified,
    "shardings": shardings,
}
FIGURES: dict[str, Callable[..., str]] = {"status": status, "fastest": fastest, "spread": spread}

if __name__ == "__main__":
    for page in PAGES:
        text = page.read_text()
        if (anew := written(text)) != text:
            page.write_text(anew)
            print(page.relative_to(ROOT))
