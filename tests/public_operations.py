"""The public operations by name, off the folders of jaxext/ops, for tests that run over all of a kind."""

import inspect

import jaxext

OPERATIONS = {name: f for name, f in vars(jaxext).items() if getattr(f, "__module__", "").startswith("jaxext.ops.")}
ARGUMENTS = {name: inspect.signature(f).parameters for name, f in OPERATIONS.items()}
# Products of one matrix: no other array, and the dtype of a sum.
OF_ONE_MATRIX = {
    name: OPERATIONS[name]
    for name, arguments in ARGUMENTS.items()
    if [a.name for a in arguments.values() if a.kind is not a.KEYWORD_ONLY] == ["x"] and "preferred_element_type" in arguments
}
