"""The words of a command in a shell script, from its text alone: nothing is run.

What is followed is what scripts that start a training are made of: continued lines, comments, quotes, variables and
arrays of the script, defaults (`${N:-8}`), arithmetic. What only running could tell (the output of a command, a
variable that is set under a condition or not at all) is `Unknown`, with why.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that the text does not tell."""

    why: str


@dataclass(frozen=True, slots=True)
class Word:
    """A word of a command after expansion. `raw` is how it is written: what it names is not filled in."""

    value: str | Unknown
    raw: str
    line: int


@dataclass(frozen=True, slots=True)
class Command:
    """`words` without assignments in front."""

    words: tuple[Word, ...]
    line: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a word as written. `kind`: text, variable (name or `name:-default`), arithmetic, or command."""

    kind: str
    text: str
    quoted: bool


@dataclass(slots=True)
class _Token:
    """A word as written, or an operator (`op`), with what it holds if it is `name=( ... )`."""

    pieces: list[_Piece] = field(default_factory=list)
    raw: str = ""
    line: int = 0
    op: str = ""
    items: list[_Token] | None = None

    @property
    def plain(self) -> str:
        """Its text if nothing in it must be expanded or was quoted; else empty."""
        return self.pieces[0].text if [(p.kind, p.quoted) for p in self.pieces] == [("text", False)] else ""


ARGUMENTS = frozenset({"@", "*"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_OPEN, _CLOSE = (
    frozenset({"if", "for", "while", "until", "case", "select", "{"}),
    frozenset({"fi", "done", "esac", "}"}),
)
_BETWEEN = frozenset({"then", "else", "elif", "do", "!", "time"})
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})


def commands(text: str, environment: Mapping[str, str]) -> list[Command]:
    """Every command outside of conditions, loops and functions, in order; the script's own arguments are none.

    ValueError, with the line, for a quote or a parenthesis that is never closed.
    """
    names: dict[str, str | Unknown | list[Word]] = dict(environment)
    out: list[Command] = []
    depth = 0
    for line in _lines(_tokens(text)):
        rest = list(line)
        while rest and (word := rest[0].plain) in _OPEN | _CLOSE | _BETWEEN:
            depth += (word in _OPEN) - (word in _CLOSE)
            rest.pop(0)
        declares = bool(rest) and rest[0].plain in _DECLARE
        given = [t for t in (rest[1:] if declares else rest) if _assigned(t)] if declares else _leading(rest)
        others = rest[1 + len(given) :] if declares else rest[len(given) :]
        if declares or not others:
            for token in given:
                _assign(names, token, depth)
        elif not depth:
            words = [w for t in others for w in _expand(t, names)]
            out.append(Command(tuple(words), others[0].line))
    return out


def _leading(tokens: Sequence[_Token]) -> list[_Token]:
    count = next((i for i, t in enumerate(tokens) if not _assigned(t)), len(tokens))
    return list(tokens[:count])


def _assigned(token: _Token) -> re.Match[str] | None:
    first = token.pieces[0] if token.pieces else None
    return _ASSIGNMENT.match(first.text) if first and first.kind == "text" and not first.quoted else None


def _assign(names: dict[str, str | Unknown | list[Word]], token: _Token, depth: int) -> None:
    found = _assigned(token)
    assert found is not None
    name, more = found[1], bool(found[2])
    if depth:
        names[name] = Unknown(f"${name} is set under a condition, in a loop or in a function (line {token.line})")
    elif token.items is not None:
        before = names.get(name) if more else None
        names[name] = [
            *(before if isinstance(before, list) else []),
            *(w for t in token.items for w in _expand(t, names)),
        ]
    else:
        first = replace(token.pieces[0], text=token.pieces[0].text[found.end() :])
        value = _joined([first, *token.pieces[1:]], names)
        before = names.get(name, "") if more else ""
        unknown = next((v for v in (before, value) if isinstance(v, Unknown)), None)
        names[name] = unknown or f"{before}{value}"


# -- expansion ---------------------------------------------------------------------------------------------------


def _expand(token: _Token, names: Mapping[str, str | Unknown | list[Word]]) -> list[Word]:
    """The words that one word of the script becomes: several for an array, or an unquoted variable with spaces."""
    if len(token.pieces) == 1 and token.pieces[0].kind == "variable":
        name, _, items = token.pieces[0].text.partition("[")
        if items in ("@]", "*]") and isinstance(array := names.get(name), list):
            return array
    fields: list[str | Unknown] = []
    open_field = False  # whether the next piece goes on with the last field
    for piece in token.pieces:
        if piece.kind == "variable" and re.fullmatch(r"[@*](:\d+)*", piece.text):
            continue  # the script's own arguments, of which there are none
        value = _EXPAND[piece.kind](piece.text, names)
        if isinstance(value, Unknown):
            return [Word(value, token.raw, token.line)]
        split = not piece.quoted and piece.kind != "text"
        parts = re.split(r"[ \t\n]+", value) if split else [value]
        for i, part in enumerate(parts):
            if open_field and not i:
                fields[-1] = f"{fields[-1]}{part}"
            elif part or not split:
                fields.append(part)
        open_field = bool(fields) and bool(parts[-1] or not split or (len(parts) == 1 and open_field))
    return [Word(field, token.raw, token.line) for field in fields]


def _joined(pieces: Sequence[_Piece], names: Mapping[str, str | Unknown | list[Word]]) -> str | Unknown:
    texts: list[str] = []
    for piece in pieces:
        value = _EXPAND[piece.kind](piece.text, names)
        if isinstance(value, Unknown):
            return value
        texts.append(value)
    return "".join(texts)


def _text(text: str, _: object) -> str:
    return text


def _variable(text: str, names: Mapping[str, str | Unknown | list[Word]]) -> str | Unknown:
    found = re.fullmatch(r"(\w+|[@*#?$!-])(?:(:?[-=])(.*))?", text, re.DOTALL)
    if not found:
        return Unknown(f"${{{text}}} is more than a name and a default")
    name, form, default = found[1], found[2], found[3]
    value = names.get(name)
    if isinstance(value, list):
        return " ".join(str(w.value) for w in value[:1])  # as in bash: the first item
    if value is not None and not (form and form[0] == ":" and value == ""):
        return value
    if form:
        inner = _tokens(f'"{default}"')  # a default may hold variables itself
        return _joined(inner[0].pieces, names) if default and inner else ""
    if name.isdigit() or name in ARGUMENTS:
        return Unknown(f"${name} is an argument of the script, and it was given none")
    return Unknown(f"${name} is set neither in the script nor in the environment")


def _command(text: str, names: Mapping[str, str | Unknown | list[Word]]) -> str | Unknown:
    if text.strip() == "pwd" and isinstance(here := names.get("PWD"), str):
        return here
    return Unknown(f"$({text.strip()}) is the output of a command, and the script is read, not run")


_ARITHMETIC: dict[type[ast.AST], Callable[..., int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Mod: lambda a, b: a - b * int(a / b),
    ast.Div: lambda a, b: int(a / b),
    ast.USub: lambda a: -a,
    ast.UAdd: lambda a: a,
}


def _arithmetic(text: str, names: Mapping[str, str | Unknown | list[Word]]) -> str | Unknown:
    """Sums and products of whole numbers and variables, as bash has them: division cuts toward zero."""
    plain = re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip()

    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return int(str(names.get(name, "")))
            case ast.UnaryOp(op=op, operand=operand):
                return _ARITHMETIC[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right):
                return _ARITHMETIC[type(op)](value(left), value(right))
        raise ValueError

    try:
        return str(value(ast.parse(plain, mode="eval")))
    except (ValueError, SyntaxError, KeyError, ZeroDivisionError, RecursionError):
        return Unknown(f"$(({text})) is not read: only + - * / % of whole numbers and variables that are set are")


_EXPAND: dict[str, Callable[[str, Mapping[str, str | Unknown | list[Word]]], str | Unknown]] = {
    "text": _text,
    "variable": _variable,
    "arithmetic": _arithmetic,
    "command": _command,
}


# -- words and operators -----------------------------------------------------------------------------------------


def _lines(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """Simple commands: what stands between operators. A redirection and what it names is left out."""
    out: list[list[_Token]] = [[]]
    skip = False
    for token in tokens:
        if token.op.strip("0123456789&-")[:1] in ("<", ">"):
            skip = not re.search(r"&[\d-]$", token.op)  # `2>&1` names no file
        elif token.op:
            out.append([])
            skip = False
        elif skip:
            skip = False
        else:
            out[-1].append(token)
    return [line for line in out if line]


_OPERATOR = re.compile(r"\n|;;?|&>>?|&&?|\|[|&]?|[<>]&[\d-]?|>>|<<<|<<-?|[<>]|[()]")
_NUMBERED = re.compile(r"\d(?:[<>]&[\d-]?|>>|[<>])")
"""A redirection with the number of a stream, where a word may begin."""


def _tokens(text: str) -> list[_Token]:
    return _Lexer(text).tokens()


class _Lexer:
    """Walks over the text once, by bash's rules of quoting."""

    def __init__(self, text: str):
        self.text, self.at = text.replace("\r\n", "\n"), 0
        self._here: list[str] = []
        """Ends of here-documents that begin with the next line."""

    def tokens(self, end: str = "") -> list[_Token]:
        """Up to the operator `end`, which is taken too."""
        out: list[_Token] = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t":
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "#":
                self.at = self._find("\n")
            elif found := _NUMBERED.match(self.text, self.at) or _OPERATOR.match(self.text, self.at):
                self.at = found.end()
                if found[0] == end:
                    return out
                if not (end and found[0] == "\n"):  # inside an array, a new line is a space
                    out.append(_Token(op=found[0], line=self._line()))
                if found[0] == "\n":
                    self._skip_documents()
                if found[0] in ("<<", "<<-"):
                    self._here.append(self._word().raw.strip("'\""))
            else:
                out.append(self._word())
        if end:
            raise ValueError(f"'{end}' is missing at the end of the script")
        return out

    def _line(self) -> int:
        return self.text.count("\n", 0, self.at) + 1

    def _find(self, what: str) -> int:
        place = self.text.find(what, self.at)
        return len(self.text) if place < 0 else place

    def _skip_documents(self) -> None:
        for end in self._here:
            found = re.compile(rf"^\t*{re.escape(end)}$", re.MULTILINE).search(self.text, self.at)
            self.at = found.end() if found else len(self.text)
        self._here = []

    def _word(self) -> _Token:
        start, token = self.at, _Token(line=self._line())
        literal = ""

        def flush() -> None:
            nonlocal literal
            if literal:
                token.pieces.append(_Piece("text", literal, False))
                literal = ""

        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "(" and literal and _ASSIGNMENT.fullmatch(literal) and not token.pieces:
                flush()
                self.at += 1
                token.items = self.tokens(end=")")
                break
            if char in " \t" or _OPERATOR.match(self.text, self.at):
                break
            if char == "\\":
                literal += self.text[self.at + 1 : self.at + 2].replace("\n", "")
                self.at += 2
            elif char in "'\"$`":
                flush()
                token.pieces += self._special(char)
            else:
                literal += char
                self.at += 1
        flush()
        token.raw = self.text[start : self.at]
        return token

    def _special(self, char: str) -> list[_Piece]:
        """A quote, or something to expand, outside of quotes."""
        if char == '"':
            return self._double()
        if char == "'" or self.text.startswith("$'", self.at):
            return [self._single()]
        return [self._dollar(quoted=False) if char == "$" else self._backtick(quoted=False)]

    def _single(self) -> _Piece:
        line, escapes = self._line(), self.text[self.at] == "$"
        self.at += 1 + escapes
        start = self.at
        while self.at < len(self.text) and self.text[self.at] != "'":
            self.at += 2 if escapes and self.text[self.at] == "\\" else 1
        if self.at >= len(self.text):
            raise ValueError(f"the quote ' of line {line} is never closed")
        inner = self.text[start : self.at]
        self.at += 1
        return _Piece("text", _unescaped(inner) if escapes else inner, True)

    def _double(self) -> list[_Piece]:
        line, out, literal = self._line(), list[_Piece](), ""
        self.at += 1
        while self.at < len(self.text):
            char, following = self.text[self.at], self.text[self.at + 1 : self.at + 2]
            if char == '"':
                self.at += 1
                return [*out, _Piece("text", literal, True)] if literal or not out else out
            if char == "\\" and following and following in '$`"\\\n':
                literal += following.replace("\n", "")
                self.at += 2
            elif char == "`" or (char == "$" and re.match(r"[\w{(@*#?!$]", following)):
                if literal:
                    out.append(_Piece("text", literal, True))
                    literal = ""
                out.append(self._dollar(quoted=True) if char == "$" else self._backtick(quoted=True))
            else:
                literal += char
                self.at += 1
        raise ValueError(f'the quote " of line {line} is never closed')

    def _dollar(self, quoted: bool) -> _Piece:
        if self.text.startswith("$((", self.at) and (inner := self._balanced(1, "(", ")")).startswith("("):
            return _Piece("arithmetic", inner[1:-1], quoted)
        if self.text.startswith("$(", self.at):
            return _Piece("command", self._balanced(1, "(", ")"), quoted)
        if self.text.startswith("${", self.at):
            return _Piece("variable", self._balanced(1, "{", "}"), quoted)
        found = re.compile(r"\$([A-Za-z_]\w*|[\d@*#?!$-])").match(self.text, self.at)
        self.at = found.end() if found else self.at + 1
        return _Piece("variable", found[1], quoted) if found else _Piece("text", "$", quoted)

    def _balanced(self, skip: int, opening: str, closing: str) -> str:
        """What stands between the parenthesis at `at + skip` and its partner."""
        line, depth, start = self._line(), 0, self.at + skip
        for place in range(start, len(self.text)):
            depth += (self.text[place] == opening) - (self.text[place] == closing)
            if not depth:
                self.at = place + 1
                return self.text[start + 1 : place]
        raise ValueError(f"'{opening}' of line {line} is never closed")

    def _backtick(self, quoted: bool) -> _Piece:
        line, start = self._line(), self.at + 1
        self.at = start
        end = self._find("`")
        if end == len(self.text):
            raise ValueError(f"the quote ` of line {line} is never closed")
        self.at = end + 1
        return _Piece("command", self.text[start:end], quoted)


_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), text, flags=re.DOTALL)
