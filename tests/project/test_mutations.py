"""The table of planted defects is well-formed, and mutations.py finds the functions that it names."""

import dataclasses

import pytest
from mutations import ROOT, Defect, cpp_spans, defects, planted, python_spans

PYTHON = """
@wrapped(lambda f: f)
def f():
    return g(1)

class C:
    def f(self):
        if self:
            def inner():
                return 1
        return f(2)
"""
CPP = """
int F(int x);  // not here: {
constexpr int kMost[] = {1, 2};
template <typename T>
__global__ void __launch_bounds__(kMost[0]) F(T x, int (*f)(int)) {
  if (G(x)) { F(x); } else { f('{'); }
}
struct S : Base {
  bool G() const { return F(1) == kMost[1]; }
};
constexpr int kLeast = 1;
"""


def test_the_table_is_well_formed():
    table = defects()
    for defect in table:
        assert defect.file and defect.function and defect.name and defect.tests and defect.old.strip(), defect
        assert defect.old.split() != defect.new.split(), defect
    assert len(table) >= 32 and len({defect.name for defect in table}) == len(table)
    assert len({defect.file for defect in table}) >= 32


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("C.f", "    def f(self)", "return f(2)\n"),
        ("C.f.inner", "            def inner", "return 1\n"),
        ("C", "class C", "return f(2)\n"),
    ],
)
def test_python_functions(name, begin, end):
    ((first, last),) = python_spans(PYTHON, name)
    assert PYTHON[first:last].startswith(begin) and PYTHON[first:last].endswith(end)


def test_a_python_function_of_two_classes_and_those_that_are_not_there():
    assert [PYTHON[first : first + 5].strip() for first, _ in python_spans(PYTHON, "f")] == ["@wrap", "d"]
    assert not python_spans(PYTHON, "g") and not python_spans(PYTHON, "inner.f") and not python_spans(PYTHON, "f.inner.g")


@pytest.mark.parametrize(
    ("name", "begin", "end"),
    [
        ("F", "__global__", "('{'); }\n}"),
        ("S", "struct", "}\n}"),
        ("G", "  bool G", "kMost[1]; }"),
        ("kMost", "constexpr", "{1, 2}"),
        ("kLeast", "constexpr", "= 1;"),
    ],
)
def test_cpp_functions(name, begin, end):
    ((first, last),) = cpp_spans(CPP, name)
    assert CPP[first:last].startswith(begin) and CPP[first:last].endswith(end)


def test_cpp_functions_that_are_not_there():
    assert not cpp_spans(CPP, "f") and not cpp_spans(CPP, "x") and not cpp_spans(CPP, "kMos")


@pytest.mark.parametrize(
    ("function", "old", "new", "error"),
    [
        ("C.f", "return  f(\n2)", "return f(3)", None),
        ("-", "return 1", "return 2", None),
        ("C.f", "return g(1)", "", "0 times, in 1 definitions of C.f"),
        ("C.f", "return", "", "2 times, in 1 definitions of C.f"),
        ("g", "return", "", "0 times, in 0 definitions of g"),
        ("f", "retur", "", "0 times"),
        ("-", "return 1", "return (", "never closed"),
    ],
)
def test_a_defect_is_planted_or_refused(tmp_path, function, old, new, error):
    (tmp_path / "file.py").write_text(PYTHON)
    defect = Defect("a defect", "file.py", function, old, new, ("tests/project/test_mutations.py::test_python_functions[C]",))
    if error:
        with pytest.raises((LookupError, SyntaxError), match=error):
            planted(tmp_path, defect)
    else:
        assert planted(tmp_path, defect) == (tmp_path / "file.py", PYTHON.replace(" ".join(old.split()).replace("( ", "("), new))


def test_a_file_in_a_renamed_folder_and_what_is_not_there():
    own = "tests/project/test_mutations.py"
    defect = Defect("a defect", "former/mutations.py", "planted", "path.exists", "path.is_dir", (f"{own}::test_cpp_functions",))
    assert planted(ROOT, defect)[0] == ROOT / "tests/mutations.py"
    with pytest.raises(LookupError, match="there is no former/mutation.py"):
        planted(ROOT, dataclasses.replace(defect, file="former/mutation.py"))
    with pytest.raises(LookupError, match=f"there is no {own}::test_cpp"):
        planted(ROOT, dataclasses.replace(defect, tests=(f"{own}::test_cpp",)))
