"""A hash of the Triton kernels as the compiler reads them, which tells whether a table of `benchmarks.kernel_table` is up to date.

It covers the functions under `triton.jit`, the classes of problems, and the constants of these modules, without comments and docstrings.
Plans are not among them: which configuration a table's rows have is written in the rows.
"""

import ast
import hashlib
import pathlib
from collections.abc import Iterable

import jaxext.kernels as kernels

HOST = ("__init__.py", "checks.py", "launch.py", "machine.py", "plan.py")  # of which the compiler reads nothing


def digest() -> str:
    (folder,) = map(pathlib.Path, kernels.__path__)
    return digest_of([path.read_text() for path in sorted(folder.rglob("*.py")) if path.name not in HOST])


def digest_of(sources: Iterable[str]) -> str:
    kept = [ast.unparse(_without_docstrings(node)) for source in sources for node in ast.parse(source).body if _is_read(node)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()[:16]


def _is_read(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    return isinstance(node, ast.ClassDef | ast.Assign | ast.AnnAssign)


def _without_docstrings(tree: ast.stmt) -> ast.stmt:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree
