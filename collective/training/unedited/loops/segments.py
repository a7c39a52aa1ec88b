"""The steps of eager loops: from ``with tf.GradientTape()`` to the tape's last use.

The script's statements become a function of the names that they read, in place: the code
around them, and its line numbers, stay as they are. A step that leaves its statements
otherwise than at their end (``break``, ``yield``), or that writes attributes or
elements, is left alone: it would show what one rank has computed.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import SourceFileLoader
from typing import Any, NamedTuple

import tensorflow as tf

import collective
from collective.training.unedited.job import Job
from collective.training.unedited.loops import rows
from collective.training.unedited.loops.check import agree
from collective.training.unedited.loops.step import RowStep, is_running

RUN = "__collective_step__"  # the name that rewritten code calls
_FUNCTION = "__collective_step_{}__"
_RETURNED = "__collective_returned__"
_LEAVES = (ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
_MOST_LEAVES = 1000  # of a list of tensors that may be rows


def rewrite_modules(job: Job) -> None:
    """From now on, steps in the code of the script's own modules are functions."""
    steps, loader = Steps(job), SourceFileLoader
    from_file, from_source = loader.get_code, loader.source_to_code

    def source_to_code(self: Any, data: Any, path: Any, **more: Any) -> Any:
        if _may_have_steps(path, data):
            data = ast.parse(data, path)
            rewrite(data, path, steps.steps)
        return from_source(self, data, path, **more)

    def get_code(self: Any, fullname: str) -> Any:
        if not _may_have_steps(self.path, source := self.get_data(self.path)):
            return from_file(self, fullname)
        return self.source_to_code(source, self.path)  # none that was compiled before

    job.replace(loader, "source_to_code", source_to_code)
    job.replace(loader, "get_code", get_code)
    job.replace(builtins, RUN, steps)


def _may_have_steps(path: str, source: Any) -> bool:
    """Whether a file is the user's, and opens a tape."""
    if not isinstance(source, bytes) or b"GradientTape" not in source:
        return False
    whole = os.path.realpath(path)
    homes = {sys.prefix, sys.base_prefix, os.path.dirname(collective.__file__)}
    return not any(whole.startswith(os.path.realpath(h) + os.sep) for h in homes)


def rewrite(tree: ast.Module, file: str, steps: list[Step]) -> None:
    """Makes functions of the steps in a module, in place, and adds them to a list."""
    _Rewriter(tree, file, steps).visit(tree)
    ast.fix_missing_locations(tree)


class Step(NamedTuple):
    """One step in the source."""

    place: str  # where it begins
    taped: set[str]  # names that are read inside of the ``with``: some are rows
    results: list[str]  # names whose values the code around it reads


class Steps:
    """Runs the steps of rewritten modules."""

    def __init__(self, job: Job):
        self.job = job
        self.steps: list[Step] = []
        self._found: dict[tuple[int, tuple[str, ...]], RowStep] = {}

    def __call__(self, number: int, function: Any, names: dict[str, Any]) -> Any:
        """What the step's statements assign, in the order of ``Step.results``."""
        step = self.steps[number]
        nested = self.job.inside or is_running() or not tf.executing_eagerly()
        code = function.__code__
        read = code.co_varnames[: code.co_argcount]
        given = {name: names[name] for name in read if name in names}
        if nested:
            return _picked(function(**given), step.results, names)
        arrays = {n: v for n, v in given.items() if n in step.taped and _may_be(v)}
        rest = {n: v for n, v in given.items() if n not in arrays}

        def call(inputs: dict[str, Any]) -> Any:
            return _picked(function(**rest, **inputs), step.results, names)

        found = self._found.get(key := (number, tuple(arrays)))
        if found is None:
            name = f"the training step at {step.place}"
            found = self._found[key] = RowStep(
                self.job, call, name, in_graph=False, agree=agree
            )
        found.function = call
        return found(arrays)


def _may_be(value: Any) -> bool:
    """Whether a name may stand for rows: an array, or a tree of some."""
    if rows.is_array(value):
        return True
    if not isinstance(value, dict | list | tuple) or len(value) > _MOST_LEAVES:
        return False
    return any(rows.is_array(leaf) for leaf in tf.nest.flatten(value))


def _picked(found: dict[str, Any], results: list[str], names: dict[str, Any]) -> Any:
    return tuple(found.get(name, names.get(name)) for name in results)


class _Rewriter(ast.NodeTransformer):
    """Replaces steps by calls."""

    def __init__(self, tree: ast.Module, file: str, steps: list[Step]):
        self.file, self.steps = os.path.basename(file), steps
        self._loads = _counts(tree)
        self._scopes: list[ast.AST] = [tree]

    def _in_scope(self, node: Any) -> Any:
        self._scopes.append(node)
        try:
            return self.generic_visit(node)
        finally:
            self._scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _in_scope
    visit_Lambda = _in_scope

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)  # inner ones first: what is made is not visited
        for name in ("body", "orelse", "finalbody"):
            statements = getattr(node, name, None)
            if isinstance(statements, list) and not isinstance(node, ast.ClassDef):
                setattr(node, name, self._statements(statements))
        return node

    def _statements(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        place = 0
        while place < len(statements):
            tapes = _tapes(statements[place])
            stop = _end(statements, place, tapes) if tapes else 0
            step = statements[place:stop]
            made = self._step(step) if step else None
            result += made or [statements[place]]
            place = stop if made else place + 1
        return result

    def _step(self, step: list[ast.stmt]) -> list[ast.stmt] | None:
        """The statements in place of a step; None: it is left alone."""
        last, returns = step[-1], isinstance(step[-1], ast.Return)
        body = list(step)
        if isinstance(last, ast.Return):
            value = last.value or ast.Constant(None)
            stored = ast.Assign([ast.Name(_RETURNED, ast.Store())], value)
            body[-1] = ast.copy_location(stored, last)
        if not all(map(_stays_inside, body)):
            return None
        stored_names, read = _names(body, ast.Store), _read_first(body)
        inside = _counts(ast.Module(body, []))
        results = [
            name
            for name in sorted(stored_names)
            if name == _RETURNED or self._loads.get(name, 0) > inside.get(name, 0)
        ]
        scope = self._scopes[-1]
        own = _bound(scope) | _arguments(scope)
        number = len(self.steps)
        taped = _read_first(body[:1])
        self.steps.append(Step(f"{self.file}:{step[0].lineno}", taped, results))
        name = _FUNCTION.format(number)
        function = _function(name, sorted(read & own), body)
        targets = ast.Tuple([ast.Name(n, ast.Store()) for n in results], ast.Store())
        call = ast.Call(
            ast.Name(RUN, ast.Load()),
            [
                ast.Constant(number),
                ast.Name(name, ast.Load()),
                ast.Call(ast.Name("locals", ast.Load()), [], []),
            ],
            [],
        )
        assign = ast.Assign([targets], call) if results else ast.Expr(call)
        made: list[ast.stmt] = [function, assign]
        if returns:
            made.append(ast.Return(ast.Name(_RETURNED, ast.Load())))
        for statement in made:
            for node in ast.walk(statement):
                if not hasattr(node, "lineno"):
                    ast.copy_location(node, step[0])
        return made


def _function(name: str, names: list[str], body: list[ast.stmt]) -> ast.FunctionDef:
    """``def name(a=None, ...)``, which returns what it has bound."""
    arguments = ast.arguments(
        posonlyargs=[],
        args=[ast.arg(n) for n in names],
        kwonlyargs=[],
        kw_defaults=[],
        defaults=[ast.Constant(None) for _ in names],
    )
    bound = ast.Return(ast.Call(ast.Name("locals", ast.Load()), [], []))
    node = ast.parse(f"def {name}(): pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    node.args, node.body = arguments, [*body, bound]
    return node


def _tapes(statement: ast.stmt) -> set[str]:
    """The names of the tapes that a ``with`` opens."""
    found = set()
    for item in statement.items if isinstance(statement, ast.With) else ():
        call, name = item.context_expr, item.optional_vars
        if isinstance(call, ast.Call) and isinstance(name, ast.Name):
            made = call.func
            what = (
                made.attr
                if isinstance(made, ast.Attribute)
                else getattr(made, "id", "")
            )
            if what == "GradientTape":
                found.add(name.id)
    return found


def _end(statements: list[ast.stmt], begin: int, tapes: set[str]) -> int:
    """Behind the last statement that uses a tape; 0: none does after the ``with``."""
    using = [
        place
        for place in range(begin + 1, len(statements))
        if tapes & _names([statements[place]], (ast.Load, ast.Del))
    ]
    return using[-1] + 1 if using else 0


def _stays_inside(statement: ast.stmt) -> bool:
    """Whether nothing but names carries what a statement has computed."""
    for node in ast.walk(statement):
        if isinstance(node, (*_LEAVES, ast.Nonlocal, ast.Return)):
            return False
        elements = isinstance(node, ast.Attribute | ast.Subscript)
        if elements and isinstance(node.ctx, ast.Store):  # type: ignore[attr-defined]
            return False
    return True


def _names(statements: Sequence[ast.AST], context: Any) -> set[str]:
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, context)
    }


def _read_first(statements: Sequence[ast.stmt]) -> set[str]:
    """The names that are read before they are stored, if they are."""
    found, stored = set[str](), set[str]()
    waiting: list[ast.AST] = list(statements)
    while waiting:
        statement = waiting.pop(0)
        if isinstance(statement, ast.With):
            waiting = [*statement.items, *statement.body, *waiting]
            continue
        found |= _names([statement], ast.Load) - stored
        if isinstance(statement, ast.AugAssign) and isinstance(
            statement.target, ast.Name
        ):
            found |= {statement.target.id} - stored
        stored |= _names([statement], ast.Store)
    return found


def _bound(scope: ast.AST) -> set[str]:
    """The names that a scope binds itself, without the scopes in it."""
    found, waiting = set(), list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)
    return found


def _arguments(scope: ast.AST) -> set[str]:
    arguments = getattr(scope, "args", None)
    return (
        {a.arg for a in ast.walk(arguments) if isinstance(a, ast.arg)}
        if arguments
        else set()
    )


def _counts(tree: ast.AST) -> dict[str, int]:
    """How often each name is read."""
    found: dict[str, int] = {}
    for node in _loads(tree):
        found[node.id] = found.get(node.id, 0) + 1
    return found


def _loads(tree: ast.AST) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node
