"""Draws the pictures of the operations' pages: `python docs/geometry.py` writes docs/images/geometry_*.svg.

Cells of a grid, arrows and words, in plain SVG with the reader's own font, and dark where the reader's browser is.
`tests/project/test_docs_pages.py` draws them again.
"""

import pathlib

FOLDER = pathlib.Path(__file__).parent / "images"
CELL = 26
PLAIN, ZERO, ONE, TWO, THREE = "#ffffff", "#e4e7ec", "#7aa7e8", "#f2a65a", "#86c98e"
GROUND, INK, LINE = "#fbfbfc", "#1f2733", "#5b6472"
DARK_MODE = {
    PLAIN: "#2b303b",
    ZERO: "#474e5b",
    ONE: "#3f6cb3",
    TWO: "#a8662a",
    THREE: "#3f8149",
    GROUND: "#1e2129",
    INK: "#e2e4e9",
    LINE: "#9aa3b2",
}


class Picture:
    def __init__(self, width: float, height: float, alt: str):
        self.size, self.alt, self.parts = (width, height), alt, []

    def grid(self, x: float, y: float, rows: list[list[str]], texts: dict[tuple[int, int], str] | None = None):
        """Cells of these colours from (x, y) on; `texts` stand in the cells (row, column)."""
        for i, row in enumerate(rows):
            for j, colour in enumerate(row):
                at = f'x="{x + j * CELL}" y="{y + i * CELL}" width="{CELL}" height="{CELL}"'
                self.parts.append(f'<rect {at} fill="{colour}" stroke="{LINE}"/>')
                if text := (texts or {}).get((i, j)):
                    self.text(x + (j + 0.5) * CELL, y + (i + 0.5) * CELL + 4, text, middle=True)

    def text(self, x: float, y: float, words: str, middle: bool = False):
        anchor = ' text-anchor="middle"' if middle else ""
        self.parts.append(f'<text x="{x}" y="{y}"{anchor}>{words}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float):
        self.parts.append(f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#head)"/>')

    def __str__(self) -> str:
        width, height = self.size
        point = f'<path d="M0,0 L6,3 L0,6 z" fill="{LINE}"/>'
        head = f'<marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">{point}</marker>'
        rules = (f'[{kind}="{light}"]{{{kind}:{dark}}}' for light, dark in DARK_MODE.items() for kind in ("fill", "stroke"))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
                f'font-family="sans-serif" font-size="12" fill="{INK}">',
                f"<title>{self.alt}</title>",
                f"<style>@media (prefers-color-scheme: dark){{{''.join(rules)}}}</style>",
                f"<defs>{head}</defs>",
                f'<rect width="{width}" height="{height}" rx="6" fill="{GROUND}"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


def filled(rows: int, columns: int, colour: str = PLAIN, at: dict[tuple[int, int], str] | None = None) -> list[list[str]]:
    """A grid of one colour; `at` gives others for (row, column)."""
    grid = [[colour] * columns for _ in range(rows)]
    for (i, j), other in (at or {}).items():
        grid[i][j] = other
    return grid


def conv() -> Picture:
    picture = Picture(520, 236, "A filter of 3 by 3 moves over a padded input in steps of 2")
    border = {(i, j): ZERO for i in range(7) for j in range(7) if i in (0, 6) or j in (0, 6)}
    window = {(i, j): ONE for i in range(3) for j in range(2, 5)}
    picture.grid(20, 30, filled(7, 7, at=border | window))
    picture.text(20, 20, "x, 5 by 5, padding 1")
    picture.grid(250, 70, filled(3, 3, ONE))
    picture.text(250, 60, "w, 3 by 3")
    picture.grid(400, 70, filled(3, 3, at={(0, 1): ONE}))
    picture.text(400, 60, "y, 3 by 3")
    picture.arrow(210, 110, 244, 110)
    picture.arrow(334, 110, 394, 110)
    picture.text(20, 228, "stride 2: the blue window is two cells to the right of the first one")
    return picture


def conv_transpose() -> Picture:
    picture = Picture(600, 190, "A transposed convolution with stride 2 is a dense convolution for each residue of the output")
    picture.text(20, 20, "x")
    picture.grid(20, 30, [[ONE, ONE, ONE, ONE]])
    picture.text(20, 82, "what lax convolves: x with zeros between")
    picture.grid(20, 92, [[ONE, ZERO, ONE, ZERO, ONE, ZERO, ONE]], {(0, j): "0" for j in (1, 3, 5)})
    picture.text(20, 144, "y, by jaxext: one residue from w₀ and w₂, the other from w₁ and w₃, without zeros")
    picture.grid(20, 154, [[TWO, THREE] * 4])
    picture.text(300, 20, "w, 4 taps")
    picture.grid(300, 30, [[TWO, THREE, TWO, THREE]], {(0, j): f"w{'₀₁₂₃'[j]}" for j in range(4)})
    return picture


def causal() -> Picture:
    picture = Picture(560, 206, "A causal convolution of 4 taps reads the present step and three before it, of the same sequence")
    sequence = [ZERO] * 3 + [ONE] * 6 + [TWO] * 5
    picture.text(20, 20, "x along time, one channel: zeros or the state, then two packed sequences (seq_idx)")
    picture.grid(20, 30, [sequence], {(0, j): "0" if j < 3 else "1" if j < 9 else "2" for j in range(14)})
    picture.grid(20 + 3 * CELL, 130, [sequence[3:]])
    for tap in range(4):
        picture.arrow(20 + (4 + tap + 0.5) * CELL, 58, 20 + 7.5 * CELL, 126)
    for tap in range(2):
        picture.arrow(20 + (9 + tap + 0.5) * CELL, 58, 20 + 10.5 * CELL, 126)
    picture.text(20, 176, "y: a step reads k = 4 inputs. The second step of sequence 2 reads two,")
    picture.text(20, 192, "for the others belong to sequence 1")
    return picture


def ragged() -> Picture:
    picture = Picture(520, 250, "Each group of rows is multiplied by the matrix of its group")
    colours = [ONE] * 3 + [THREE] * 2 + [ZERO]
    picture.text(20, 20, "x, rows sorted by group")
    picture.grid(20, 30, [[colour] * 4 for colour in colours])
    picture.text(180, 20, "w[g], one for each group")
    for g, colour in enumerate((ONE, TWO, THREE)):
        picture.grid(180 + g * 26, 30 + g * 46, filled(2, 3, colour))
    picture.text(360, 20, "y")
    picture.grid(360, 30, [[colour] * 3 for colour in colours])
    picture.arrow(132, 100, 172, 100)
    picture.arrow(316, 100, 354, 100)
    picture.text(20, 226, "group_sizes = [3, 0, 2]: the orange matrix has no rows and is not read;")
    picture.text(20, 242, "the last row belongs to no group and is zero in y")
    return picture


def symmetric() -> Picture:
    picture = Picture(460, 180, "The tiles on and below the diagonal are computed and mirrored")
    tiles = {(i, j): ONE if j <= i else ZERO for i in range(4) for j in range(4)}
    picture.text(20, 20, "x xᵀ in tiles: blue ones are computed, grey ones are their mirrors")
    picture.grid(20, 34, filled(4, 4, at=tiles))
    picture.arrow(20 + 1.2 * CELL, 34 + 2.8 * CELL, 20 + 2.4 * CELL, 34 + 1.8 * CELL)
    picture.text(150, 70, "n (n + 1) / 2 of n² tiles:")
    picture.text(150, 90, "10 of 16 here, and half of many")
    picture.text(20, 166, "so y is symmetric to the last bit")
    return picture


def scaled_dot() -> Picture:
    picture = Picture(580, 200, "Scales of rows, of blocks along the sum, and of squares")
    for n, (title, colours) in enumerate(
        {
            "(M, 1): rows": [[c] * 6 for c in (ONE, TWO, THREE, ONE)],
            "(M, K / 3): neighbours": [[c] * 3 + [d] * 3 for c, d in ((ONE, TWO), (THREE, ONE), (TWO, THREE), (ONE, TWO))],
            "(M / 2, K / 3): blocks": [[c] * 3 + [d] * 3 for c, d in ((ONE, TWO), (ONE, TWO), (THREE, ONE), (THREE, ONE))],
        }.items()
    ):
        picture.text(20 + n * 180, 24, title)
        picture.grid(20 + n * 180, 34, colours)
    picture.text(20, 164, "Neighbours of one colour have one scale. Its shape says how many blocks each axis has:")
    picture.text(20, 180, "here M = 4 rows, and K = 6 numbers along the sum")
    return picture


DRAWN = {f.__name__: f for f in (conv, conv_transpose, causal, ragged, symmetric, scaled_dot)}

if __name__ == "__main__":
    for name, draw in DRAWN.items():
        (FOLDER / f"geometry_{name}.svg").write_text(str(draw()))
