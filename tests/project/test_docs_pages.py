"""The pages of operations and demands: each operation has one, what the site puts into them exists, their tables are current, and what they
say of kernels is so."""

import importlib.util
import json
import pathlib
import pkgutil
import re
import sys

import jax
import pytest

import jaxext
from jaxext import ops
from jaxext.backends.cuda import cuda_binding

DOCS = pathlib.Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ROOT = DOCS.parent


def of_docs(name):
    """A module of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables, refusals = of_docs("tables"), of_docs("refusals")


def test_each_operation_has_a_page():
    folders = [module.name for module in pkgutil.iter_modules(ops.__path__)]
    operations = {name for folder in folders for name in importlib.import_module(f"jaxext.ops.{folder}").__all__}
    assert operations <= {*jaxext.__all__}
    index = (DOCS / "operations" / "index.md").read_text()
    assert operations <= {*re.findall(r"`(\w+)`", index)}


@pytest.mark.parametrize("folder", ["operations", "help"])
def test_each_page_is_in_the_index_and_on_the_site(folder):
    pages = {page.name for page in (DOCS / folder).glob("*.md")}
    index, site = (DOCS / folder / "index.md").read_text(), (DOCS.parent / "mkdocs.yml").read_text()
    assert pages - {"index.md"} <= {*re.findall(r"\]\((\S+?\.md)\)", index)}
    assert pages == {*re.findall(rf"\b{folder}/(\S+\.md)", site)}


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_are_current(page):
    text = page.read_text()
    assert tables.written(text) == text, "run `python docs/tables.py`"


def test_a_table_that_is_stale_is_written_anew():
    text = (DOCS / "operations" / "matmul.md").read_text()
    stale = re.sub(r"\d\.\d\d", "9.99", text.replace("| yes |", "| no |"))
    assert stale.count("9.99") > 9 and "| no |" in stale and tables.written(stale) == text
    for table in ("refusals", "speed"):  # a page as it is written at first
        stale = re.sub(rf"(<!-- table: {table} matmul -->).*?(<!-- end of table -->)", r"\1\n\2", text, flags=re.DOTALL)
        assert len(stale) < len(text) and tables.written(stale) == text


def test_names_are_told_in_a_sentence():
    """The sentence is that of the documentation, which the site has in full."""
    text = (DOCS / "api" / "quantization.md").read_text()
    line = "[`jaxext.quantization.pack_int4`](../../jaxext/quantization.py): Pack int4 or uint4 numbers, two per byte."
    assert (
        f"- {line} <!-- ::: jaxext.quantization.pack_int4 -->\n" in text
        and tables.written(text.replace("two per byte", "two per bit")) == text
    )
    assert "\n::: jaxext.quantization.pack_int4\n" in tables.expanded(text, "api")
    policies = tables.expanded((DOCS / "api" / "checkpoint_policies.md").read_text(), "api")
    assert "\n::: jaxext.checkpoint_policies\n    options:\n      show" in policies
    with pytest.raises((AttributeError, ImportError)):
        tables.written("- <!-- ::: jaxext.no_such_name -->")


def test_files_of_all_pages_exist():
    expanded = {page: tables.expanded(page.read_text(), str(page.parent.relative_to(DOCS)).removeprefix(".")) for page in PAGES}
    assert not [page for page, text in expanded.items() if re.search(r"<!-- include -->$", text, re.MULTILINE)]
    text = expanded[DOCS / "adding-an-operation.md"]
    assert "<summary>rowscale.h</summary>\n\n```cpp\n// " in text and '<summary>form.py</summary>\n\n```python\n"""' in text


def test_a_table_or_file_that_does_not_exist_is_noticed():
    for missing in ("speed none", "none conv"):
        with pytest.raises(KeyError):
            tables.written(f"<!-- table: {missing} -->\n{tables.END}")
    for unended in ("<!-- table: speed conv -->", f"<!-- table: speed -->\n{tables.END}", "<!-- table: speed conv -->\n" + 2 * tables.END):
        with pytest.raises(ValueError, match="want `<!-- table"):
            tables.written(unended)
    with pytest.raises(FileNotFoundError):
        tables.expanded("[a](none.py) <!-- include -->", "operations")


def test_ratios_are_those_of_the_rows(tmp_path, monkeypatch):
    row = {"tags": ["transposed"], "problem": "p", "role": "fprop", "default": [{"implementation": "xla"}]}
    rows = [row | {"results": {"lax": {"ms": [0, lax, 9]}, "xla": {"ms": [0, ours, 9]}}} for lax, ours in ((8.0, 2.0), (3.0, 3.0))]
    environment = {"device": "d", "versions": {"jax": "j"}, "date": "2026-01-01T", "commit": "abcdefgh"}
    (tmp_path / "cpu.json").write_text(json.dumps({"environment": environment, "rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "| p | 2.00 (1.00 to 4.00) |" in tables.speed("conv_transpose") and "commit abcdefg." in tables.speed("conv_transpose")


def test_figures_are_those_of_the_rows(tmp_path, monkeypatch):
    rows = [{"row": row, "ms": {"lax": lax, "jaxext": 2.0}} for row, lax in (("forward", 1.0), ("gradients", 5.0), ("gradients", 43.21))]
    (tmp_path / "a.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    stale = "It takes <!-- figure: spread a lax gradients -->9<!-- end --> times as long."
    assert re.sub("<!--.*?-->", "", tables.written(stale)) == "It takes 2.5 to 22 times as long."


def test_status_is_that_of_the_record(tmp_path, monkeypatch):
    outcome = {"compiler": "nvcc 13.0", "date": "2026-01-01", "error": 0.5}
    found = {"cuda conv f bf16": outcome | {"right": True}, "cuda conv f fp16": outcome | {"right": False}}
    monkeypatch.setattr(tables, "RECORD", tmp_path / "verified.json")
    tables.RECORD.write_text(json.dumps({"entries": [{"device": "GPU", "measured": "2026-01-02", "verified": found}]}))
    assert tables.status() == "On an GPU 1 of 2 kinds of kernels were right (nvcc 13.0; 2026-01-02)"
    assert tables.verified("all").splitlines()[2:] == ["| `cuda` | `conv` | GPU | nvcc 13.0 | 2026-01-01 | 2 | 1 | 5e-01 |"]


def test_the_version_is_one():
    root = DOCS.parent
    assert f"version: {jaxext.__version__}\n" in (root / "CITATION.cff").read_text()
    assert re.findall(r"^## .*?(\d+\.\d+\.\d+)", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == jaxext.__version__
    assert {*re.findall(r"jaxext-(\d+\.\d+\.\d+)-", (DOCS / "installing.md").read_text())} == {jaxext.__version__}
    assert f"jaxext-kernels-cu13=={jaxext.__version__};" in (root / "pyproject.toml").read_text()
    assert f"\n  version: {jaxext.__version__}\n" in (root / "packaging/conda/recipe.yaml").read_text()
    assert f"jaxext {jaxext.__version__}:" in (DOCS / "versions.md").read_text()


def test_refusals_are_the_implementations_own():
    compiled = cuda_binding.missing() is None
    with jax.enable_x64(True):
        asked = refusals.asked(("triton", "cuda") if compiled else ("triton",))
    kept = json.loads(refusals.PATH.read_text())
    keys = {page: [key for key in rows[0] if compiled or key != "unnamed"] for page, rows in asked.items()}
    told, got = ({page: [{key: row[key] for key in keys[page]} for row in rows] for page, rows in each.items()} for each in (kept, asked))
    assert got == told, "run `python docs/refusals.py` where the CUDA kernels are compiled"


def test_four_in_ten_unnamed_calls_take_a_kernel():
    """All kernels count as verified."""
    taken = [row["unnamed"] for rows in json.loads(refusals.PATH.read_text()).values() for row in rows]
    assert len(taken) == 108 and len(taken) - taken.count("xla") == 49 and {"triton", "cuda"} <= {*taken}
