"""The picture of a report, or of whole networks: the speedup of jaxext over lax.

    python -m benchmarks.pictures benchmarks/results/cpu.json docs/cpu.svg
    python -m benchmarks.pictures benchmarks/results/models_cpu.json docs/models.svg

Colours are Okabe and Ito's, which the colour-blind can distinguish; an SVG has others for dark pages.  A report gives the same SVG every
time.  matplotlib is imported when the picture is drawn.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxext.bench import findings
from jaxext.bench.bench_report import KINDS, OTHER, PRECISION, Measured, Report, read

BLUE, VERMILION, GREY, DARK = "#0072B2", "#D55E00", "#9A9A9A", "#333333"
COLOURS = {findings.FASTER: BLUE, findings.SAME: GREY, findings.SLOWER: VERMILION}
DARK_MODE = {"#ffffff": "#1e2129", "#000000": "#e2e4e9", DARK: "#e2e4e9", GREY: "#8b8f98", "#e4e4e4": "#3d424d"}
DARK_MODE |= {BLUE: "#56b4e9", VERMILION: "#f5874a"}
LABELS = {findings.FASTER: "faster than lax", findings.SAME: "within the noise", findings.SLOWER: "slower than lax"}
INPUT, WEIGHTS = ("^", "gradient in the input"), ("s", "gradient in the weights")
MARKS = dict.fromkeys(("fprop", "forward", "nn"), ("o", "forward")) | {"step": ("D", "training step")}
MARKS |= {"dgrad": INPUT, "nt": INPUT, "wgrad": WEIGHTS, "tn": WEIGHTS}
LANES = {"o": 0.24, "^": 0.08, "s": -0.08, "D": -0.24}  # heights of the marks about their line
WIDTH = 8.3  # inches
STYLE: Any = {
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "font.size": 9,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "jaxext",
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def ratios(report: Report, path: pathlib.Path) -> None:
    """Draw the speedup over lax of the implementation that jaxext takes if none is named: a mark for each row, by kind of problem.

    The suffix of the path is .png or .svg.
    """
    groups = {kind: [row for row in report.rows if row.kind == kind] for kind in (*KINDS, PRECISION, OTHER)}
    means = [mean for kind, rows in groups.items() if (mean := findings.mean(kind, rows, findings.DEFAULT, "lax"))]
    means.sort(key=lambda mean: mean.geometric_mean)
    rows, losers = (sum(getattr(mean, count) for mean in means) for count in ("rows", "losers"))
    where = "a GPU" if report.environment.get("capability") else "a CPU"
    title = f"On {where}: how many times faster than lax ({rows} measured, {losers} slower)"
    _save(path, title, _where(report.environment, report.reduced), len(means), lambda axes: _draw(axes, means, groups))


def networks(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draw the speedup over lax of whole networks, the forward pass above the training step: median and quartiles."""
    rows = sorted(report["rows"], key=lambda row: row["step"]["lax over jaxext"][1])
    title = "Whole networks on a CPU: how many times faster than lax"
    _save(path, title, _where(report["environment"], False), len(rows), lambda axes: _draw_networks(axes, rows))


def _save(path: pathlib.Path, title: str, below: str, count: int, draw: Callable) -> None:
    """Draw a figure with so many lines, and write it as the path's suffix says."""
    import matplotlib
    from matplotlib.figure import Figure

    height = 2.2 + 0.34 * count
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure.add_subplot())
        figure.get_layout_engine().set(rect=(0, 0, 1, 1 - 0.55 / height))  # type: ignore[union-attr]
        figure.text(0.01, 1 - 0.1 / height, title, va="top", fontweight="bold", fontsize=11)
        figure.text(0.01, 1 - 0.33 / height, below, va="top", fontsize=8, color=DARK)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    if path.suffix == ".svg":
        path.write_text(with_dark_mode(path.read_text()))


def with_dark_mode(svg: str) -> str:
    """Return matplotlib's SVG with other colours for readers who prefer dark pages."""
    rules = [f"text {{ fill: {DARK_MODE['#000000']} }}"]
    for light, dark in DARK_MODE.items():
        rules += [f'[style*="{kind}: {light.lower()}"] {{ {kind}: {dark} !important }}' for kind in ("fill", "stroke")]
    style = "@media (prefers-color-scheme: dark) {\n" + "\n".join(rules) + "\n}"
    return svg.replace("</style>", f"\n{style}</style>", 1)


def _draw(axes, means: list[findings.Mean], groups: dict[str, list[Measured]]) -> None:
    axes.axvline(1, color=DARK, linewidth=1, zorder=1)
    for y, mean in enumerate(means):
        _marks(axes, y, groups[str(mean.group)])
        axes.vlines(mean.geometric_mean, y - 0.38, y + 0.38, color=DARK, linewidth=2, zorder=2)
        text = {"xycoords": ("axes fraction", "data"), "va": "center", "color": DARK}
        number = f"{mean.geometric_mean:.{2 if mean.geometric_mean < 10 else 1}f}×"
        axes.annotate(number, (1.02, y), fontweight="bold", **text)
        axes.annotate(f"{mean.losers} of {mean.rows}", (1.12, y), **text | {"color": VERMILION if mean.losers else GREY})
    for x, heading in ((1.02, "mean"), (1.12, "slower")):
        axes.annotate(heading, (x, len(means) - 0.45), xycoords=("axes fraction", "data"), fontsize=8, color=DARK)
    axes.set_yticks(range(len(means)), [mean.group for mean in means])
    axes.set_ylim(-0.6, len(means) - 0.4)
    axes.tick_params(axis="y", length=0)
    _ratio_axis(axes)
    _legend(axes, [row for rows in groups.values() for row in rows])


def _draw_networks(axes, rows: list[dict]) -> None:
    axes.axvline(1, color=DARK, linewidth=1, zorder=1)
    for y, row in enumerate(rows):
        for part in ("forward", "step"):
            least, ratio, most = row[part]["lax over jaxext"]
            standing = findings.FASTER if least > 1 and ratio > 1.05 else findings.SLOWER if most < 1 and ratio < 0.95 else findings.SAME
            mark, _ = MARKS[part]
            style = {"color": COLOURS[standing], "markersize": 5, "markeredgewidth": 0, "linewidth": 1.2, "zorder": 3}
            axes.errorbar(ratio, y + LANES[mark] / 2, xerr=[[ratio - least], [most - ratio]], fmt=mark, **style)
    axes.set_yticks(range(len(rows)), [row["network"] for row in rows])
    axes.set_ylim(-0.6, len(rows) - 0.4)
    axes.tick_params(axis="y", length=0)
    _ratio_axis(axes, "time of lax / time of jaxext (logarithmic): median and quartiles")
    _key(axes, COLOURS, [MARKS["forward"], MARKS["step"]])


def _marks(axes, y: float, rows: list[Measured]) -> None:
    """Losers are drawn last, over the others."""
    for standing in (findings.SAME, findings.FASTER, findings.SLOWER):
        for row in rows:
            if findings.standing(row, findings.DEFAULT, "lax") == standing:
                mark, _ = MARKS.get(row.role, MARKS["fprop"])
                where = (findings.ratio(row, findings.DEFAULT, "lax"), y + LANES[mark])
                axes.plot(*where, mark, color=COLOURS[standing], markersize=5, alpha=0.8, markeredgewidth=0, zorder=3)


def _ratio_axis(axes, label: str = "time of lax / time of jaxext (logarithmic); the bar is the geometric mean") -> None:
    """A logarithmic axis with ticks at 1, 2, 5, 10 and so on, that shows at least a half to two."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.5), max(high, 2))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}×"))
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(label)


def _legend(axes, rows: list[Measured]) -> None:
    """The colours of standings and the marks of roles in the picture."""
    standings = {findings.standing(row, findings.DEFAULT, "lax") for row in rows}
    _key(axes, standings, {MARKS.get(row.role, MARKS["fprop"]) for row in rows if findings.standing(row, findings.DEFAULT, "lax")})


def _key(axes, standings: Iterable, marks: Iterable) -> None:
    from matplotlib.lines import Line2D

    entries = [(Line2D([], [], color=COLOURS[it], linewidth=6), LABELS[it]) for it in COLOURS if it in standings]
    entries += [(Line2D([], [], color=DARK, marker=mark, linestyle=""), role) for mark, role in sorted(marks, key=lambda m: -LANES[m[0]])]
    axes.figure.legend(*zip(*entries, strict=True), loc="outside lower center", ncols=4, frameon=False, fontsize=8)


def _where(environment: Mapping[str, Any], reduced: bool) -> str:
    versions = environment["versions"]
    named = " ".join(f"{package} {versions[package]}" for package in ("jax", "jaxext") if package in versions)
    return f"{environment['device']}, {environment['date'][:10]}, {named}{', reduced sizes' if reduced else ''}"


if __name__ == "__main__":
    of, into = map(pathlib.Path, sys.argv[1:3])
    if "network" in (report := json.loads(of.read_text()))["rows"][0]:
        networks(report, into)
    else:
        ratios(read(of), into)
