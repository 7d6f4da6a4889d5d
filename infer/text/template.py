"""The Jinja environment of chat templates.

It is the environment of transformers 5 (`utils/chat_template_utils.py`), for which hub templates
are written: an immutable sandbox, trimmed blocks, loop controls, the `generation` tag, `tojson`
without HTML escapes, `raise_exception` and `strftime_now`. Functions that only web pages need are
left out.

A template is a program of somebody else. Its time is limited: each loop, call and filter looks at
it. Its values are limited in size, each one and all together. A value counts with the size that it
has when it is written out, since lists can hold one list many times. So no operation on values
takes long; a few operations can make more of values than they are, and the size of their results is
reckoned beforehand. Nothing of this depends on the thread.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MappingView
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from math import inf, prod
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import (
    ImmutableSandboxedEnvironment,
    SandboxedEscapeFormatter,
    SandboxedFormatter,
)
from jinja2.utils import Namespace

from infer.boundaries import foreign
from infer.kernels.errors import TokenizerError

SECONDS = 30.0  # the most CPU time of the thread that renders
SOURCE = 1 << 18  # the most characters of a template; published ones have up to some 50,000
# The most characters of a value, and of the result; more where the messages are long.
SIZE = 1 << 24
_TOTAL = 16  # all values together may have so many times the size of one
_DEPTH = 200  # the deepest nesting of lists

_WEB = ("pprint", "striptags", "urlize", "xmlattr")
# Filters and methods whose result, or time, grows with the product of their arguments.
_GROWING = frozenset(
    "batch center expandtabs indent join ljust lstrip rfind rindex rjust "  # noqa: SIM905
    "rpartition rsplit rstrip slice strip to_bytes tojson translate trim zfill *".split()
)
_LISTS = (list, tuple, dict, MappingView)


def render_template(source: str, variables: dict[str, Any], seconds: float = inf) -> str:
    """Renders a template with variables of JSON types. seconds: the time that it may take, SECONDS
    at most. Raises TokenizerError for a template that does not compile, takes too long or makes too
    much; errors that the template itself raises pass through."""
    compiled = compile_template(source)
    token = _budget.set(_Budget(variables, min(seconds, SECONDS)))
    try:
        return compiled.render(variables)
    finally:
        _budget.reset(token)


@lru_cache(maxsize=32)
def compile_template(source: str) -> Template:
    """Returns a chat template that is ready to be rendered. Raises TokenizerError if it is not
    Jinja."""
    if len(source) > SOURCE:
        raise TokenizerError(
            f"The chat template has {len(source):,} characters; at most {SOURCE:,} are read."
        )
    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        optimized=False,  # constants are computed while the template runs, within its limits
    )
    environment.filters["tojson"] = _to_json
    for name in _WEB:
        del environment.filters[name]
    for kind in (environment.filters, environment.tests):
        for name, function in list(kind.items()):
            kind[name] = _limited(name, function)
    del environment.globals["lipsum"]
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    # Python's own compiler refuses code that is nested too deeply, with several kinds of errors.
    with foreign("The chat template does not compile"):
        try:
            return environment.from_string(source)
        except TemplateSyntaxError as error:
            raise TokenizerError(
                f"The chat template does not compile: line {error.lineno}: {error.message}"
            ) from error


@lru_cache(maxsize=32)
def reads(source: str, name: str) -> bool:
    """Whether a template reads a variable. Raises TokenizerError if it is not Jinja."""
    names = compile_template(source).environment.parse(source).find_all(nodes.Name)
    return any(each.name == name and each.ctx == "load" for each in names)


@lru_cache(maxsize=32)
def arguments(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the variables that a template may read before it has set them, and those of them that
    a caller is meant to give, as far as the source shows: the template never sets them, or asks
    whether they are defined. Raises TokenizerError if it is not Jinja."""
    parsed = compile_template(source).environment.parse(source)
    read = find_undeclared_variables(parsed)
    asked = {
        test.node.name
        for test in parsed.find_all(nodes.Test)
        if test.name in ("defined", "undefined") and isinstance(test.node, nodes.Name)
    }
    own = {each.name for each in parsed.find_all(nodes.Name) if each.ctx == "store"} - asked
    return frozenset(read), frozenset(read - own)


class _Budget:
    """The work that a template may still do before it is stopped."""

    def __init__(self, variables: dict[str, Any], seconds: float) -> None:
        # Lists with their sizes and depths, by id().
        self._known: dict[int, tuple[Any, int, int]] = {}
        self.size = SIZE + 8 * self._measure(variables)[0]
        self.left = _TOTAL * self.size
        self._seconds = seconds
        self._end, self._ticks = time.thread_time() + seconds, 0

    def tick(self) -> None:
        """Checks the time that the template has taken, but only at some of the calls."""
        self._ticks += 1
        if self._ticks % 16 == 0 and time.thread_time() > self._end:
            raise TokenizerError(
                f"The chat template was stopped after {self._seconds:.0f} seconds: it does not end."
            )

    def made(self, value: Any) -> Any:
        """Counts a value that the template has made, and returns it."""
        size, depth = self._measure(value)
        self.left -= size
        if size > self.size or self.left < 0:
            self._too_much()
        if depth > _DEPTH:
            raise TokenizerError(f"The chat template nests lists more than {_DEPTH} deep.")
        return value

    def before(self, name: str, values: list[Any]) -> None:
        """Counts the work of a filter, method or operator before it runs. values: its arguments,
        first the value on which it is called."""
        self.tick()
        if name in _GROWING:
            if name == "tojson":  # separators
                values = [
                    v for value in values for v in (value if type(value) is tuple else [value])
                ]
            growth = prod(max(self._factor(value), 1) for value in values)
        elif name == "replace" and len(values) > 2 and isinstance(values[0], str):
            old, new = str(values[1]), str(values[2])
            growth = (values[0].count(old) + 1) * len(new)
        elif name == "wordwrap" and isinstance(values[0], str):
            # jinja copies the rest of a long word for each of its lines.
            width = values[1] if len(values) > 1 and isinstance(values[1], int) else 79
            growth = sum(len(word) ** 2 for word in values[0].split()) // max(width, 1)
        elif name == "%" and values and isinstance(values[0], str):
            form, rest = values[0], values[1:]
            given = rest[0] if len(rest) == 1 and isinstance(rest[0], tuple | dict) else rest
            inner = list(given.values()) if isinstance(given, dict) else given
            widths = [_widest(form)]
            if "*" in form:  # a width among the values
                widths += [abs(value) for value in inner if isinstance(value, int)]
            growth = form.count("%") * (sum(self._measure(v)[0] for v in inner) + max(widths))
        elif name == "round":
            growth = max((abs(v) for v in values[1:] if isinstance(v, int)), default=0) ** 2
        elif name == "**":
            base, power = (v if isinstance(v, int) else 1 for v in values)
            growth = base.bit_length() * abs(power)
        else:
            return
        if growth > 4 * self.size:
            self._too_much()

    def _too_much(self) -> NoReturn:
        raise TokenizerError(
            f"The chat template makes too much: more than {self.size:,} characters."
        )

    def _factor(self, value: Any) -> int:
        return abs(value) if isinstance(value, int) else self._measure(value)[0]

    def _measure(self, value: Any) -> tuple[int, int]:
        """Returns the number of characters of a value when it is written out, and how deep it is
        nested."""
        if isinstance(value, str | bytes):
            return len(value), 0
        if isinstance(value, int):
            return value.bit_length() // 3 + 1, 0
        if not isinstance(value, _LISTS):
            return 1, 0
        known = self._known.get(id(value))
        if known is None:
            entries: Any = getattr(value, "mapping", value)  # a view is measured by its dictionary
            if isinstance(entries, Mapping):
                entries = [part for item in entries.items() for part in item]
            measures = [self._measure(part) for part in entries]
            size = 2 + sum(size + 16 for size, _ in measures)  # an entry takes memory too
            depth = 1 + max((depth for _, depth in measures), default=0)
            known = self._known[id(value)] = (value, size, depth)
        return known[1:]


_budget: ContextVar[_Budget] = ContextVar("budget")


def _widest(form: str) -> int:
    """Returns the largest number in a text, or something as large."""
    # Python reads digits of all scripts, and any number of zeros in front.
    numbers = ("".join(str(int(d)) for d in n) for n in re.findall(r"\d+", form))
    return max((int(number.lstrip("0")[:9] or 0) for number in numbers), default=0)


class _Formatter(SandboxedFormatter):
    """The formatter of one str.format. It counts fields before they are written out: their widths
    may be among the values."""

    def __init__(self, env: ImmutableSandboxedEnvironment, **options: Any) -> None:
        super().__init__(env, **options)
        self._room = 4 * _budget.get().size

    def format_field(self, value: Any, format_spec: str) -> Any:
        budget = _budget.get()
        budget.tick()
        self._room -= _widest(format_spec) + budget._measure(value)[0]
        if self._room < 0:
            budget._too_much()
        return super().format_field(value, format_spec)


class _EscapingFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


class _Generator(CodeGenerator):
    """Generates code that counts the values of literals and `~`, and checks the time in each
    loop."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:  # noqa: N802
        tick = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(tick, node.test)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self._counted(super().visit_Concat, node, frame)

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._counted(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._counted(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _counted(self, visit: Callable[..., None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)


class _Environment(ImmutableSandboxedEnvironment):
    """The Jinja environment of chat templates, which counts and limits what a template does."""

    code_generator_class = _Generator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def tick(self) -> bool:
        return True  # the call itself has checked the time

    def made(self, value: Any) -> Any:
        return _budget.get().made(value)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget, name = _budget.get(), getattr(function, "__name__", "")
        if name == "join":
            args = tuple(map(_listed, args))
        # The sandbox wraps str.format; this is the method itself.
        own = getattr(function, "__wrapped__", function)
        given = (value for key, value in kwargs.items() if not key.startswith("_"))
        budget.before(name, [getattr(own, "__self__", None), *args, *given])
        return budget.made(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns the function that stands for str.format or str.format_map in a template; None
        for anything else."""
        if super().wrap_str_format(value) is None:
            return None
        form = value.__self__

        @wraps(value)
        def wrapped(*args: Any, **kwargs: Any) -> str:
            if hasattr(form, "escape"):  # the form is Markup, which a filter has made
                formatter: _Formatter = _EscapingFormatter(self, escape=form.escape)
            else:
                formatter = _Formatter(self)
            if value.__name__ == "format_map":
                text = formatter.vformat(form, (), *args, **kwargs)
            else:
                text = formatter.vformat(form, args, kwargs)
            return type(form)(text)  # type: ignore[no-any-return]

        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.before(operator, [left, right])
        return budget.made(super().call_binop(context, operator, left, right))

    def concat(self, pieces: Iterable[str]) -> str:
        """Joins the pieces that the whole template, a macro or a block writes, while they come."""
        budget, written, room = _budget.get(), [], _budget.get().size
        for piece in pieces:
            budget.tick()
            written.append(piece)
            room -= len(piece)
            if room < 0:
                budget._too_much()
        return str(budget.made("".join(written)))


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter or a test that keeps within the limits of the budget."""
    # The place of the value among the arguments: jinja passes some functions its context first.
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        if name == "join":
            args = tuple(map(_listed, args))
        budget.before("%" if name == "format" else name, [*args[first:], *kwargs.values()])
        return budget.made(function(*args, **kwargs))

    return limited


def _listed(value: Any) -> Any:
    return list(value) if isinstance(value, Iterator) else value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(lineno)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _Dict:
    """The calls of `dict` that templates may make, without the class itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """Jinja's `namespace`, without names that reach into Python objects."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # written so, as a namespace may contain itself


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")
