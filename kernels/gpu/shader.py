"""From a `.wgsl` file and its parameters to WGSL text: a small, strict preprocessor.

A kernel file is WGSL plus:

    // @param K u32   row length               a parameter: u32, i32, f32, bool, or a|b|c: words
    #include "name.wgsl"                       another file's text, with its parameters
    #if EXPR / #elif EXPR / #else / #endif     EXPR over parameters: Python's operators and words
    #for i in A..B / #endfor                   the lines between, once for each i with $i replaced
    #let NAME = EXPR                           a parameter more, from here on; log2 rounds down
    $(EXPR)                                    its value
    #enable f16                                a WGSL extension, moved to the top

Number and bool parameters also become `const NAME: type = value;` at the top. A parameter that is
unknown, missing, of the wrong type or never used is an error that names file and line, and every
line of the result knows the source line it came from.
"""

from __future__ import annotations

import ast
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from infer.kernels.errors import ShaderError

WGSL_FOLDER = Path(__file__).parents[1] / "wgsl"

Param = int | float | bool | str

_PARAM = re.compile(r"//\s*@param\s+(\w+)\s+([\w|]+)")
_REPEAT = re.compile(r"\$[a-z]")
_VALUE = re.compile(r"\$\(([^()]+)\)")
_FOR = re.compile(r"([a-z])\s+in\s+(.+?)\.\.(.+)")
_BINDING = re.compile(
    r"@group\(0\)\s*@binding\((\d+)\)\s*var<\s*(uniform|storage)\s*(?:,\s*(read_write|read))?\s*>\s*(\w+)"
)


@dataclass(frozen=True)
class KernelSpec:
    """A kernel and its parameters: the cache key, the label and the source of its text at once."""

    name: str
    params: tuple[tuple[str, Param], ...]

    @classmethod
    def of(cls, kernel: str, /, **params: Param) -> KernelSpec:
        return cls(kernel, tuple(sorted(params.items())))

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{name}={value}" for name, value in self.params)])


@dataclass(frozen=True)
class Line:
    """One line of text and where it stands in its source file."""

    text: str
    file: str
    number: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Binding:
    """One `@group(0)` variable of a kernel. access is "read", "read_write" or "uniform"."""

    index: int
    name: str
    access: str


@dataclass(frozen=True)
class Shader:
    """Rendered WGSL, with the source line of each of its lines and the bindings it declares."""

    code: str
    lines: tuple[Line, ...]
    bindings: tuple[Binding, ...]

    def place(self, line_number: int) -> str:
        """The `file:line` in the sources of line `line_number` (from 1) of `code`."""
        index = min(max(line_number, 1), len(self.lines)) - 1
        return self.lines[index].place

    @property
    def workgroup_storage(self) -> int:
        """Bytes of workgroup memory, as a device counts them against its limit."""
        declared = Declared.of(self.code)
        sizes = (declared.layout(kind)[1] for kind in _WORKGROUP.findall(f"\n{self.code}"))
        return sum(_round_up(16, size) for size in sizes)


@dataclass(frozen=True)
class _Block:
    """An #if or a #for: each directive of it, and what lies between that and the next."""

    branches: tuple[tuple[Line, tuple[Line | _Block, ...]], ...]


@dataclass(frozen=True, eq=False)
class _Template:
    """A kernel before its parameters are known. types: of these; words: of all its text;
    deciding: the parameters in its directives and in $(EXPR)."""

    types: dict[str, str]
    words: frozenset[str]
    deciding: tuple[str, ...]
    nodes: tuple[Line | _Block, ...]


def render(spec: KernelSpec, folder: Path = WGSL_FOLDER) -> Shader:
    """The WGSL of `spec`. Raises ShaderError for anything that is not declared or not used."""
    return _render(spec, _file_template(spec.name, folder))


def render_text(text: str, name: str = "shader", **params: Param) -> Shader:
    """Renders WGSL that is given as text instead of a file of this package. Raises ShaderError as
    `render` does."""
    lines = tuple(Line(line, name, n) for n, line in enumerate(text.splitlines(), 1))
    return _render(KernelSpec.of(name, **params), _template(lines, WGSL_FOLDER))


def _render(spec: KernelSpec, template: _Template) -> Shader:
    types, params = template.types, dict(spec.params)
    _check(spec.name, template, params)
    enables, body = _expanded(template, tuple(params[name] for name in template.deciding))
    prelude = [
        *(Line(f"enable {line.text};", line.file, line.number) for line in enables),
        *(
            Line(_const(name, types[name], value), f"{spec.name} (parameters)", 1)
            for name, value in spec.params
            if "|" not in types[name]
        ),
    ]
    text = [*prelude, *body]
    code = "\n".join(line.text for line in text) + "\n"
    bindings = [Binding(int(m[1]), m[4], m[3] or m[2]) for m in _BINDING.finditer(code)]
    bindings.sort(key=lambda binding: binding.index)
    if [binding.index for binding in bindings] != list(range(len(bindings))):
        raise ShaderError(f"{spec.label}: bindings must be numbered 0, 1, 2… without a gap")
    return Shader(code, tuple(text), tuple(bindings))


@lru_cache(maxsize=512)
def _expanded(
    template: _Template, values: tuple[Param, ...]
) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """The extensions and the lines that remain for the values of the deciding parameters. Kernels
    that differ in nothing but constants, as in most sizes, share them."""
    enables: list[Line] = []
    body: list[Line] = []
    params = dict(zip(template.deciding, values, strict=True))
    _expand(template.nodes, params, enables, body, repeats={})
    return tuple(enables), tuple(body)


@cache
def _file_template(name: str, folder: Path) -> _Template:
    return _template(_read(f"{name}.wgsl", folder), folder)


def _template(lines: tuple[Line, ...], folder: Path) -> _Template:
    seen = {lines[0].file} if lines else set()
    lines = tuple(_expand_includes(lines, folder, seen))
    types = _declared(lines)
    lines = tuple(line for line in lines if not _PARAM.match(line.text))
    words = _words(line.text.partition("//")[0] for line in lines)
    evaluated = _words(line.text for line in lines if _directive(line))
    evaluated |= _words(expression for line in lines for expression in _VALUE.findall(line.text))
    deciding = tuple(name for name in types if name in evaluated)
    return _Template(types, words, deciding, _nested(iter(lines)))


def _words(texts: Iterable[str]) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", "\n".join(texts)))


@cache
def _files(folder: Path) -> dict[str, Path]:
    """Returns the WGSL files in a folder and its subfolders, by name; no two share a name."""
    return {path.name: path for path in folder.rglob("*.wgsl")}


@cache
def _read(name: str, folder: Path) -> tuple[Line, ...]:
    if name not in _files(folder):
        raise ShaderError(f"there is no kernel file {name} in {folder}")
    text = _files(folder)[name].read_text(encoding="utf-8")
    return tuple(Line(line, name, n) for n, line in enumerate(text.splitlines(), 1))


def _expand_includes(lines: tuple[Line, ...], folder: Path, seen: set[str]) -> Iterator[Line]:
    for line in lines:
        if line.text.startswith("#include"):
            match = re.fullmatch(r'#include\s+"([\w.]+)"', line.text.rstrip())
            if match is None:
                raise ShaderError(f'{line.place}: write #include "name.wgsl"')
            if match[1] not in seen:  # twice would declare everything twice
                seen.add(match[1])
                yield from _expand_includes(_read(match[1], folder), folder, seen)
        else:
            yield line


def _declared(lines: tuple[Line, ...]) -> dict[str, str]:
    types: dict[str, str] = {}
    for line in lines:
        match = _PARAM.match(line.text)
        if match is None:
            continue
        name, kind = match[1], match[2]
        if kind not in ("u32", "i32", "f32", "bool") and "|" not in kind:
            raise ShaderError(f"{line.place}: parameter {name} has the unknown type {kind}")
        if types.setdefault(name, kind) != kind:
            raise ShaderError(f"{line.place}: parameter {name} was declared as {types[name]}")
    return types


def _check(kernel: str, template: _Template, params: dict[str, Param]) -> None:
    types = template.types
    unknown, missing = params.keys() - types.keys(), types.keys() - params.keys()
    if unknown:
        raise ShaderError(f"{kernel} declares no parameter {', '.join(sorted(unknown))}")
    if missing:
        raise ShaderError(f"{kernel} needs the parameter {', '.join(sorted(missing))}")
    for name, kind in types.items():
        value = params[name]
        fits = {
            "u32": type(value) is int and 0 <= value < 2**32,
            "i32": type(value) is int and -(2**31) <= value < 2**31,
            "f32": type(value) in (int, float),
            "bool": type(value) is bool,
        }.get(kind, value in kind.split("|"))
        if not fits:
            raise ShaderError(f"{kernel}: parameter {name} is {kind}, not {value!r}")
        if name not in template.words:
            raise ShaderError(f"{kernel}: parameter {name} is declared but never used")


def _const(name: str, kind: str, value: Param) -> str:
    if kind == "f32":
        text = repr(float(value))
        return f"const {name}: f32 = {text}f;"
    if kind == "bool":
        return f"const {name}: bool = {str(value).lower()};"
    return f"const {name}: {kind} = {value}{'u' if kind == 'u32' else 'i'};"


_CLOSING = {"#if": "#endif", "#for": "#endfor"}


def _nested(lines: Iterator[Line]) -> tuple[Line | _Block, ...]:
    """The lines, those from an #if or a #for to its end as a block."""
    return tuple(_block(line, lines) if _directive(line) in _CLOSING else line for line in lines)


def _block(opener: Line, lines: Iterator[Line]) -> _Block:
    """The block that `opener` begins, which is consumed up to its end."""
    opening = _directive(opener)
    branches: list[tuple[Line, list[Line | _Block]]] = [(opener, [])]
    for line in lines:
        word = _directive(line)
        if word == _CLOSING[opening]:
            return _Block(tuple((directive, tuple(nodes)) for directive, nodes in branches))
        if opening == "#if" and word in ("#elif", "#else"):
            if _directive(branches[-1][0]) == "#else":
                raise ShaderError(f"{line.place}: a branch after #else")
            branches.append((line, []))
        else:
            branches[-1][1].append(_block(line, lines) if word in _CLOSING else line)
    raise ShaderError(f"{opener.place}: {opening} without {_CLOSING[opening]}")


def _directive(line: Line) -> str:
    """The word that a line begins with, if that is a directive."""
    text = line.text.lstrip()
    return text.split(maxsplit=1)[0] if text.startswith("#") else ""


def _expand(
    nodes: tuple[Line | _Block, ...],
    params: dict[str, Param],
    enables: list[Line],
    body: list[Line],
    repeats: dict[str, int],
) -> None:
    """Add the lines that remain of `nodes` to body, and extensions to enables."""
    for node in nodes:
        if isinstance(node, _Block):
            _expand_block(node, params, enables, body, repeats)
        elif "$" not in node.text and "#" not in node.text:  # most lines
            body.append(node)
        elif node.text.lstrip().startswith("#"):
            _obey(node, _replace(node, params, repeats).lstrip(), params, enables)
        else:
            body.append(Line(_replace(node, params, repeats), node.file, node.number))


def _expand_block(
    block: _Block,
    params: dict[str, Param],
    enables: list[Line],
    body: list[Line],
    repeats: dict[str, int],
) -> None:
    for line, nodes in block.branches:
        directive, _, rest = _replace(line, params, repeats).strip().partition(" ")
        if directive == "#for":
            match = _FOR.fullmatch(rest.strip())
            if match is None:
                raise ShaderError(f"{line.place}: write #for LETTER in FIRST..END")
            first, end = (_evaluate(line, part, params) for part in match.group(2, 3))
            for i in range(int(first), int(end)):
                _expand(nodes, params, enables, body, {**repeats, match[1]: i})
        elif directive == "#else" or _evaluate(line, rest, params):
            _expand(nodes, params, enables, body, repeats)
            return


def _obey(line: Line, text: str, params: dict[str, Param], enables: list[Line]) -> None:
    """Follows a directive of one line: it adds to params or to enables."""
    if text.startswith("#let "):
        name, equals, value = (part.strip() for part in text[len("#let ") :].partition("="))
        if not (name.isidentifier() and equals) or name in params:
            raise ShaderError(f"{line.place}: write #let NAME = EXPR with a new name")
        params[name] = _evaluate(line, value, params)
    elif text.startswith("#enable "):
        extension = text[len("#enable ") :].strip()
        if all(extension != other.text for other in enables):
            enables.append(Line(extension, line.file, line.number))
    else:
        raise ShaderError(f"{line.place}: unexpected {text.split()[0]}")


def _replace(line: Line, params: dict[str, Param], repeats: dict[str, int]) -> str:
    """The line with $i and $(EXPR) replaced by their values."""
    text = line.text
    if "$" not in text:
        return text
    for letter, i in repeats.items():
        text = text.replace(f"${letter}", str(i))
    if "$" not in text:
        return text
    if unknown := _REPEAT.search(text):
        raise ShaderError(f"{line.place}: {unknown[0]} is not the name of an enclosing #for")
    return _VALUE.sub(lambda match: str(_evaluate(line, match[1], params)), text)


# CPython 3.11's parser is not safe in threads, where pipelines are made.
_PARSER = threading.Lock()

_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}

Expression = Callable[[Mapping[str, Param]], Any]


def _evaluate(line: Line, text: str, params: dict[str, Param]) -> Any:
    """The value of a directive's expression. A lower-case word that is no name stands for itself,
    so that `#if WEIGHT == bf16` reads as it should."""
    text = text.partition("//")[0].strip()
    try:
        return _compiled(text)(params)
    except SyntaxError:
        raise ShaderError(f"{line.place}: cannot read the expression {text!r}") from None
    except (KeyError, TypeError) as error:
        raise ShaderError(f"{line.place}: cannot evaluate {error.args[0]!r}") from None


@cache
def _compiled(text: str) -> Expression:
    with _PARSER:
        node = ast.parse(text, mode="eval").body
    return _function(node)


def _function(node: ast.expr) -> Expression:
    """Returns a function that computes an expression from parameters. Raises TypeError for syntax
    that is not supported; the function raises KeyError for an unknown name."""
    match node:
        case ast.Constant(value=value):
            return lambda params: value
        case ast.Name(id=name) if name.islower():
            return lambda params: params.get(name, name)
        case ast.Name(id=name):
            return lambda params: params[name]
        case ast.BoolOp(op=op, values=values):
            parts = [_function(value) for value in values]
            decide = all if isinstance(op, ast.And) else any
            return lambda params: decide(part(params) for part in parts)
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=args, keywords=[]):
            parts = [_function(arg) for arg in args]
            choose = max if name == "max" else min
            return lambda params: choose(part(params) for part in parts)
        case ast.Call(func=ast.Name(id="log2"), args=[arg], keywords=[]):
            number = _function(arg)
            return lambda params: number(params).bit_length() - 1
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            part = _function(operand)
            return lambda params: not part(params)
        case (
            ast.BinOp(left=left, op=op, right=right)
            | ast.Compare(left=left, ops=[op], comparators=[right])
        ) if type(op) in _OPERATORS:
            operate, first, second = _OPERATORS[type(op)], _function(left), _function(right)
            return lambda params: operate(first(params), second(params))
    raise TypeError(ast.unparse(node))


# How much workgroup memory a kernel takes

# They begin with a text that has to be there, not with ^: Python finds that ten times faster.
_WORKGROUP = re.compile(r"\nvar<workgroup> \w+: ([^;]+);")
_DECLARED = (
    re.compile(r"\nconst (\w+)(?:: \w+)? = ([^;]+);"),
    re.compile(r"\nalias (\w+) = ([^;]+);"),
    re.compile(r"\nstruct (\w+) \{(.*?)\}", re.S),
)
_TYPE = re.compile(r"(\w+)(?:<(.+)>|)")
_ARRAY = re.compile(r"(.+>|\w+), (.+)")  # an element and how many there are
_INTEGER = re.compile(r"\b(0x[0-9a-f]+|\d+)[ui]\b")


@dataclass(frozen=True)
class Declared:
    """The constants, aliases and structs of a kernel: the texts behind their names."""

    constants: Mapping[str, str]
    aliases: Mapping[str, str]
    structs: Mapping[str, str]

    @classmethod
    def of(cls, code: str) -> Declared:
        code = re.sub(r"//.*", "", f"\n{code}")
        return cls(*(dict(pattern.findall(code)) for pattern in _DECLARED))

    def layout(self, kind: str) -> tuple[int, int]:
        """The alignment and the size of a type, in bytes (WGSL 14.4.1)."""
        match = _TYPE.fullmatch(kind.strip())
        name, inner = match.group(1, 2) if match else (kind, "")
        if name in self.aliases:
            return self.layout(self.aliases[name])
        if name in self.structs:
            alignment, size = 1, 0
            for member in re.split(r",\s*\n", self.structs[name].strip().removesuffix(",")):
                own, more = self.layout(member.partition(":")[2])
                alignment, size = max(alignment, own), _round_up(own, size) + more
            return alignment, _round_up(alignment, size)
        if name == "array" and (parts := _ARRAY.fullmatch(inner)):
            alignment, size = self.layout(parts[1])
            return alignment, _round_up(alignment, size) * self.number(parts[2])
        if name == "atomic" or name in ("u32", "i32", "f32", "bool"):
            return 4, 4
        if name in ("vec2", "vec3", "vec4"):
            count = int(name[-1])
            return 16 if count > 2 else 8, 4 * count
        raise ShaderError(f"the size of {kind} is not known")

    def number(self, text: str) -> int:
        """The value of an expression of integers."""
        text = _INTEGER.sub(r"\1", text.strip())
        names = self.constants.keys() & set(re.findall(r"\w+", text))
        try:
            return int(_compiled(text)({name: self.number(self.constants[name]) for name in names}))
        except (SyntaxError, KeyError, TypeError, ValueError):
            raise ShaderError(f"the value of {text} is not known") from None


def _round_up(step: int, size: int) -> int:
    return -(-size // step) * step
