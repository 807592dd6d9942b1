"""The public operations by name, off the folders of jaxext/ops, for tests that run over all of a kind."""

import inspect

import jaxext

OPERATIONS = {name: f for name, f in vars(jaxext).items() if getattr(f, "__module__", "").startswith("jaxext.ops.")}
ARGUMENTS = {
    name: [argument.name for argument in inspect.signature(f).parameters.values() if argument.kind is not argument.KEYWORD_ONLY]
    for name, f in OPERATIONS.items()
}
OF_ONE_MATRIX = {name: OPERATIONS[name] for name, arguments in ARGUMENTS.items() if arguments == ["x"]}
