"""What one change of one place can be: walks the syntax tree of a source, and lists its mutants.

A change is left out where nobody could notice it (text of errors, what only makes room or waits) or where everybody
would (the only dimension of a flat tensor). What macros expand to is left alone: its places are not in the file.
"""
import dataclasses
import pathlib
import re
from collections.abc import Iterator

from clang.cindex import Cursor, CursorKind as Kind, TranslationUnit, TypeKind

import words
from cursors import WRAPPERS, bare, callee_of, is_literal, only_throws, qualified


@dataclasses.dataclass(frozen=True)
class Site:
    begin: int        # bytes of the file
    end: int
    replacement: str
    operator: str     # the kind of change
    function: str     # where it stands, qualified


INTEGERS = {TypeKind.SHORT, TypeKind.USHORT, TypeKind.INT, TypeKind.UINT, TypeKind.LONG, TypeKind.ULONG,
            TypeKind.LONGLONG, TypeKind.ULONGLONG, TypeKind.INT128, TypeKind.UINT128}
NUMBERS = INTEGERS | {TypeKind.FLOAT, TypeKind.DOUBLE, TypeKind.LONGDOUBLE}
FUNCTIONS = {Kind.FUNCTION_DECL, Kind.CXX_METHOD, Kind.FUNCTION_TEMPLATE, Kind.CONSTRUCTOR, Kind.DESTRUCTOR,
             Kind.CONVERSION_FUNCTION}
SCOPES = {Kind.NAMESPACE, Kind.CLASS_DECL, Kind.STRUCT_DECL, Kind.CLASS_TEMPLATE, Kind.UNION_DECL,
          Kind.CLASS_TEMPLATE_PARTIAL_SPECIALIZATION, Kind.LINKAGE_SPEC}
LOOPS = {Kind.FOR_STMT, Kind.CXX_FOR_RANGE_STMT, Kind.WHILE_STMT, Kind.DO_STMT}


class Walk:
    def __init__(self, unit: TranslationUnit, path: pathlib.Path):
        self.name, self.bytes = str(path), path.read_bytes()
        self.macros = []
        self.tops = []
        for cursor in unit.cursor.get_children():
            if cursor.location.file is None or cursor.location.file.name != self.name:
                continue
            if cursor.kind == Kind.MACRO_INSTANTIATION:
                self.macros.append(self.span(cursor))
            elif not cursor.kind.is_preprocessing():
                self.tops.append(cursor)

    def sites(self) -> list[Site]:
        found = {}
        for top in self.tops:
            for site in self.visit(top, [], ""):
                if self.bytes[site.begin:site.end].decode() != site.replacement:
                    found.setdefault((site.begin, site.end, site.replacement), site)
        return [found[key] for key in sorted(found)]

    # --- places ---

    @staticmethod
    def span(cursor: Cursor) -> tuple[int, int]:
        return cursor.extent.start.offset, cursor.extent.end.offset

    def text(self, cursor: Cursor) -> str:
        begin, end = self.span(cursor)
        return self.bytes[begin:end].decode()

    def here(self, cursor: Cursor) -> bool:
        """Whether the cursor is written in this file, outside of macros."""
        start = cursor.extent.start
        if start.file is None or start.file.name != self.name or cursor.extent.end.file is None:
            return False
        begin, end = self.span(cursor)
        return end > begin and not any(b <= begin < e or b < end < e for b, e in self.macros)

    def matching(self, at: int) -> int:
        """The place of the bracket that closes the one at `at`, seeing through text and comments."""
        depth = 0
        token = re.compile(rb'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|[(){}\[\]]', re.S)
        for found in token.finditer(self.bytes, at):
            if found[0] in (b"(", b"{", b"["):
                depth += 1
            elif found[0] in (b")", b"}", b"]"):
                depth -= 1
                if depth == 0:
                    return found.start()
        return -1

    def operator_between(self, left: Cursor, right: Cursor) -> tuple[str, int, int] | None:
        begin, end = left.extent.end.offset, right.extent.start.offset
        between = re.sub(rb"//[^\n]*|/\*.*?\*/", lambda m: b" " * len(m[0]), self.bytes[begin:end], flags=re.S)
        found = re.fullmatch(rb"\s*([-+*/%<>=!&|^]+)\s*", between)
        return (found[1].decode(), begin + found.start(1), begin + found.end(1)) if found else None

    # --- the tree ---

    def visit(self, cursor: Cursor, parents: list[Cursor], function: str) -> Iterator[Site]:
        kind = cursor.kind
        if kind in SCOPES:
            for child in cursor.get_children():
                yield from self.visit(child, [], function)
            return
        if kind.is_preprocessing() or kind in (Kind.STATIC_ASSERT, Kind.TYPE_REF, Kind.TEMPLATE_REF, Kind.NAMESPACE_REF,
                                               Kind.CXX_THROW_EXPR, Kind.USING_DECLARATION, Kind.TYPEDEF_DECL,
                                               Kind.TYPE_ALIAS_DECL, Kind.ENUM_DECL):
            return
        if kind in FUNCTIONS:
            if not cursor.is_definition():
                return
            function = qualified(cursor)
        elif kind.is_expression() or kind.is_statement():
            if not self.here(cursor) and not (kind in WRAPPERS):
                return
        if kind.is_expression() and self.is_text(cursor) or kind == Kind.CALL_EXPR and cursor.spelling in words.SAYING:
            return
        if self.here(cursor):
            for begin, end, replacement, operator in self.changes(cursor, parents):
                yield Site(begin, end, replacement, operator, function)
        parents.append(cursor)
        for child in cursor.get_children():
            yield from self.visit(child, parents, function)
        parents.pop()

    def is_text(self, cursor: Cursor) -> bool:
        """Errors, and what is put together for people: places to name, text with a literal in it."""
        name = cursor.type.get_canonical().spelling
        if re.search(r"\bplumb::(\w+::)*(Error|RanksGone|Where)$", name):
            return True
        return bool(re.search(r"basic_string<char|^const char ?[\[*]|basic_ostream", name)) and '"' in self.text(cursor)

    def changes(self, cursor: Cursor, parents: list[Cursor]) -> Iterator[tuple[int, int, str, str]]:
        kind = cursor.kind
        children = list(cursor.get_children())
        if kind in FUNCTIONS or kind == Kind.LAMBDA_EXPR:
            yield from self.early_returns(cursor, children)
        elif kind in (Kind.BINARY_OPERATOR, Kind.COMPOUND_ASSIGNMENT_OPERATOR) and len(children) == 2:
            yield from self.binary(cursor, children[0], children[1])
        elif kind == Kind.UNARY_OPERATOR and children:
            yield from self.unary(cursor, children[0])
        elif kind == Kind.CALL_EXPR:
            overloaded = cursor.spelling.startswith("operator") and not cursor.spelling[8:9].isalnum()
            if overloaded and len(children) == 3:
                yield from self.binary(cursor, children[0], children[2])
            elif not overloaded:
                yield from self.call(cursor)
        elif kind == Kind.INIT_LIST_EXPR:
            yield from self.swapped(cursor, children)
        elif kind == Kind.IF_STMT:
            yield from self.branch(cursor, children)
        elif kind == Kind.CONDITIONAL_OPERATOR and len(children) == 3 and self.here(children[0]):
            for value in ("true", "false"):
                yield *self.span(children[0]), value, "dropped branch"
        elif kind in LOOPS:
            yield from self.loop(cursor, children)
        elif kind == Kind.BREAK_STMT or kind == Kind.CONTINUE_STMT:
            around = next((p.kind for p in reversed(parents) if p.kind in LOOPS | {Kind.SWITCH_STMT}), None)
            if around in LOOPS:
                other = "continue" if kind == Kind.BREAK_STMT else "break"
                yield *self.span(cursor), other, "loop control"
        elif kind == Kind.CXX_BOOL_LITERAL_EXPR:
            yield *self.span(cursor), "false" if self.text(cursor) == "true" else "true", "constant"
        elif kind == Kind.INTEGER_LITERAL:
            yield from self.integer(cursor, parents)
        elif kind == Kind.FLOATING_LITERAL and re.fullmatch(r"[\d.]+(e-?\d+)?[fF]?", self.text(cursor)):
            zero = float(self.text(cursor).rstrip("fF")) == 0
            yield *self.span(cursor), "1.0" if zero else f"(2 * {self.text(cursor)})", "constant"
        elif kind == Kind.DECL_REF_EXPR:
            yield from self.named(cursor, parents)
        elif kind == Kind.RETURN_STMT and children and self.here(children[0]):
            yield from self.off_by_one(children[0])
            if children[0].type.get_canonical().kind == TypeKind.BOOL and not is_literal(children[0]):
                yield *self.span(children[0]), f"!({self.text(children[0])})", "negation"
        elif kind == Kind.VAR_DECL and children and children[-1].kind.is_expression() and self.here(children[-1]):
            if cursor.type.get_canonical().kind in INTEGERS and not cursor.type.spelling.startswith("const char"):
                yield from self.off_by_one(children[-1])
        elif kind == Kind.DECL_STMT and len(children) == 1 and children[0].kind == Kind.VAR_DECL:
            name = children[0].type.spelling
            if words.GUARDS.search(name) and not words.LOCKS.search(name):
                yield *self.span(cursor), ";", "dropped guard"
        if kind.is_expression():
            yield from self.dropped(cursor, parents)

    # --- the kinds of change ---

    def binary(self, whole: Cursor, left: Cursor, right: Cursor) -> Iterator[tuple[int, int, str, str]]:
        found = self.operator_between(left, right)
        if not found:
            return
        sign, begin, end = found
        for other in words.COMPARISONS.get(sign, ()):
            yield begin, end, other, "comparison"
        if sign in ("&&", "||"):
            yield begin, end, "||" if sign == "&&" else "&&", "logic"
            yield whole.extent.start.offset, right.extent.start.offset, "", "dropped operand"
            yield left.extent.end.offset, whole.extent.end.offset, "", "dropped operand"
        for other in words.ASSIGNMENTS.get(sign, ()):
            if self.is_number(left) or other == "=":
                yield begin, end, other, "assignment"
        if sign in words.ARITHMETIC and self.is_number(left) and self.is_number(right):
            yield begin, end, words.ARITHMETIC[sign], "arithmetic"
            if sign in "-/%" and self.text(left) != self.text(right):
                around = self.bytes[left.extent.end.offset:right.extent.start.offset].decode()
                yield *self.span(whole), f"({self.text(right)}){around}({self.text(left)})", "swapped operands"

    def is_number(self, cursor: Cursor) -> bool:
        """Numbers, tensors, what a template leaves open: no text, no iterators, no pointers."""
        kind = cursor.type.get_canonical()
        if kind.kind == TypeKind.LVALUEREFERENCE:
            kind = kind.get_pointee()
        return kind.kind in NUMBERS | {TypeKind.DEPENDENT, TypeKind.UNEXPOSED} or "Tensor" in kind.spelling

    def unary(self, cursor: Cursor, operand: Cursor) -> Iterator[tuple[int, int, str, str]]:
        begin, end = self.span(cursor)
        sign = self.bytes[begin:begin + 1]
        if sign == b"!" and self.bytes[begin + 1:begin + 2] != b"=":
            yield begin, begin + 1, "", "negation"
        elif sign == b"-" and self.bytes[begin:begin + 2] != b"--":
            if self.is_number(operand) and not is_literal(operand):
                yield begin, begin + 1, "", "arithmetic"
        for one, other in ((b"++", "--"), (b"--", "++")):
            if self.bytes[begin:begin + 2] == one:
                yield begin, begin + 2, other, "arithmetic"

    def call(self, cursor: Cursor) -> Iterator[tuple[int, int, str, str]]:
        name = cursor.spelling
        if name in words.UNSEEN:
            return
        arguments = [a for a in cursor.get_arguments() if a is not None and self.here(a)]
        if name in words.NAMES:
            callee = callee_of(cursor)
            at = callee.location.offset if callee else 0
            if name in words.QUEUES and not (callee and "deque" in callee.referenced.semantic_parent.spelling):
                at = len(self.bytes)
            if self.bytes[at:at + len(name)].decode() == name:
                yield at, at + len(name), words.NAMES[name], "minimum and maximum"
        if name not in words.COMMUTATIVE:
            yield from self.swapped(cursor, arguments)
        owner = cursor.referenced.semantic_parent if cursor.referenced else None
        if name in ("to_string", "str", "move", "forward") or owner and words.DIGESTS.search(owner.spelling):
            return
        for argument in arguments:
            if argument.type.get_canonical().kind in INTEGERS:
                yield from self.off_by_one(argument)

    def swapped(self, cursor: Cursor, arguments: list[Cursor]) -> Iterator[tuple[int, int, str, str]]:
        if cursor.kind == Kind.INIT_LIST_EXPR and (
                cursor.type.get_canonical().kind != TypeKind.RECORD or "initializer_list" in cursor.type.spelling):
            return
        for one, other in zip(arguments, arguments[1:]):
            if not (self.here(one) and self.here(other)) or self.text(one) == self.text(other):
                continue
            if bare(one) != bare(other) or (is_literal(one) and is_literal(other)):
                continue
            if re.search(r"(begin|end)\(\)$", self.text(one)):
                continue
            if cursor.spelling in words.DIMENSIONED and is_literal(one):
                continue
            between = self.bytes[one.extent.end.offset:other.extent.start.offset].decode()
            if re.fullmatch(r"\s*,\s*", between):
                yield one.extent.start.offset, other.extent.end.offset, self.text(other) + between + self.text(one), \
                    "swapped arguments"

    def branch(self, cursor: Cursor, children: list[Cursor]) -> Iterator[tuple[int, int, str, str]]:
        begin, _ = self.span(cursor)
        head = re.compile(rb"if\s*\(").match(self.bytes, begin)
        if not head:  # if constexpr, if consteval
            return
        opened, closed = head.end() - 1, self.matching(head.end() - 1)
        inside = self.bytes[opened + 1:closed].decode()
        first = next((c for c in children if opened < c.extent.start.offset < closed), None)
        if first is None or not self.here(first) and first.kind != Kind.DECL_STMT:
            return
        split = inside.rfind(";")
        if split < 0 and first.kind in (Kind.VAR_DECL, Kind.DECL_STMT):  # if (const auto* x = …)
            yield closed, closed, "; false", "dropped branch"
            return
        start = opened + 1 + split + 1
        start += len(self.bytes[start:closed]) - len(self.bytes[start:closed].lstrip())
        if any(c.kind in (Kind.VAR_DECL, Kind.DECL_STMT) and c.extent.start.offset >= start for c in children[:2]):
            return
        then = next((c for c in children if c.extent.start.offset > closed), None)
        yield start, closed, "false", "dropped branch"
        if then is not None and not only_throws(then):
            yield start, closed, "true", "dropped branch"

    def loop(self, cursor: Cursor, children: list[Cursor]) -> Iterator[tuple[int, int, str, str]]:
        if not children:
            return
        if cursor.kind == Kind.WHILE_STMT and children[0].kind.is_expression() and self.here(children[0]):
            yield *self.span(children[0]), "false", "dropped loop"
        if cursor.kind == Kind.DO_STMT and self.here(children[-1]):
            yield *self.span(children[-1]), "false", "dropped loop"
        body = children[0] if cursor.kind == Kind.DO_STMT else children[-1]
        if body.kind == Kind.COMPOUND_STMT and self.here(body):
            last = list(body.get_children())[-1:]
            if last and last[0].kind not in (Kind.BREAK_STMT, Kind.RETURN_STMT, Kind.CXX_THROW_EXPR):
                yield body.extent.end.offset - 1, body.extent.end.offset - 1, "break; ", "loop control"

    def early_returns(self, cursor: Cursor, children: list[Cursor]) -> Iterator[tuple[int, int, str, str]]:
        body = children[-1] if children and children[-1].kind == Kind.COMPOUND_STMT else None
        if body is None or not self.here(body) or cursor.kind in (Kind.CONSTRUCTOR, Kind.DESTRUCTOR, Kind.LAMBDA_EXPR):
            return
        statements = [s for s in body.get_children()]
        result = cursor.result_type.get_canonical()
        if result.kind == TypeKind.VOID:
            for statement in statements:
                if statement.kind not in (Kind.RETURN_STMT, Kind.NULL_STMT) and self.bytes[
                        statement.extent.start.offset:][:6] != b"throw ":
                    yield statement.extent.start.offset, statement.extent.start.offset, "return; ", "early return"
            return
        if "basic_string<char" in result.spelling or result.kind in (TypeKind.LVALUEREFERENCE, TypeKind.DEPENDENT,
                                                                      TypeKind.UNEXPOSED):
            return
        values = ("true", "false") if result.kind == TypeKind.BOOL else ("{}",)
        if len(statements) == 1 and statements[0].kind == Kind.RETURN_STMT and re.match(
                r"return\s*(\{\}|true|false|0|nullptr)?\s*$", self.text(statements[0])):
            return
        for value in values:
            yield body.extent.start.offset + 1, body.extent.start.offset + 1, f" return {value}; ", "early return"

    def integer(self, cursor: Cursor, parents: list[Cursor]) -> Iterator[tuple[int, int, str, str]]:
        found = re.fullmatch(r"(0[xX][\da-fA-F]+|\d+)([uUlLzZ]*)", self.text(cursor))
        if not found or re.match(r"0\d", found[1]) or int(found[1], 0) > words.LARGEST_CONSTANT:  # 0666: a mode
            return
        value, suffix = int(found[1], 0), found[2]
        above = [p for p in parents if p.kind not in WRAPPERS]
        parent = above[-1] if above else None
        if parent is not None:
            if parent.kind == Kind.BINARY_OPERATOR and re.search(r"<<", self.text(parent)):
                return
            if parent.kind == Kind.CALL_EXPR and parent.spelling in words.DIMENSIONED | words.UNSEEN:
                first = next(iter(parent.get_arguments()), None)
                if first is not None and self.span(first) == self.span(cursor):
                    return
            if parent.kind == Kind.UNARY_OPERATOR and self.text(parent).startswith("-"):  # -1, as a rule: nothing
                yield *self.span(parent), "0" if value == 1 else f"-{value - 1}{suffix}", "constant"
                return
        yield *self.span(cursor), f"{value + 1}{suffix}", "constant"
        if value > 0:
            yield *self.span(cursor), f"{value - 1}{suffix}", "constant"

    def off_by_one(self, cursor: Cursor) -> Iterator[tuple[int, int, str, str]]:
        if cursor.type.get_canonical().kind not in INTEGERS or is_literal(cursor):
            return
        # Sizes, literals with a sign, the colon of a range.
        if re.search(r"<<|^sizeof|^-\d+$", self.text(cursor)) or not re.search(r"\w", self.text(cursor)):
            return
        simple = re.fullmatch(r"[\w.:>\-\[\]()]+", self.text(cursor)) and " " not in self.text(cursor)
        text = self.text(cursor) if simple else f"({self.text(cursor)})"
        yield *self.span(cursor), f"{text} + 1", "off by one"
        yield *self.span(cursor), f"{text} - 1", "off by one"

    def named(self, cursor: Cursor, parents: list[Cursor]) -> Iterator[tuple[int, int, str, str]]:
        name, at = cursor.spelling, cursor.location.offset
        if self.bytes[at:at + len(name)].decode(errors="replace") != name:
            return
        for other in words.DTYPES.get(name, ()):
            yield at, at + len(name), other, "dtype"
        constant = cursor.referenced
        if constant is None or constant.kind != Kind.ENUM_CONSTANT_DECL:
            return
        if any(p.kind == Kind.CASE_STMT for p in parents[-2:]):
            return
        if "memory_order" in constant.semantic_parent.spelling:
            return
        every = [c.spelling for c in constant.semantic_parent.get_children() if c.kind == Kind.ENUM_CONSTANT_DECL]
        if 2 <= len(every) <= 16 and name in every:
            yield at, at + len(name), every[(every.index(name) + 1) % len(every)], "constant"

    def dropped(self, cursor: Cursor, parents: list[Cursor]) -> Iterator[tuple[int, int, str, str]]:
        """A whole statement that is an expression: a call, an assignment."""
        places = LOOPS | {Kind.COMPOUND_STMT, Kind.IF_STMT, Kind.CASE_STMT, Kind.DEFAULT_STMT}
        if not parents or parents[-1].kind not in places:
            return
        begin, end = self.span(cursor)
        if not re.match(rb"\s*;", self.bytes[end:end + 8]) or not re.search(
                rb"([;{}):]|\belse|\bdo)\s*(//[^\n]*\s*|/\*[^*]*\*/\s*)*$", self.bytes[max(0, begin - 400):begin]):
            return
        if parents[-1].kind == Kind.FOR_STMT and begin < list(parents[-1].get_children())[-1].extent.start.offset:
            return
        inner = cursor
        while inner.kind in WRAPPERS and (below := list(inner.get_children())):
            inner = below[0]
        if inner.kind == Kind.CALL_EXPR and not inner.spelling.startswith("operator"):
            if inner.spelling not in words.UNSEEN and not words.SWEEPING.search(self.text(inner)):
                yield begin, end, "(void)0", "dropped call"
        elif inner.kind in (Kind.BINARY_OPERATOR, Kind.COMPOUND_ASSIGNMENT_OPERATOR, Kind.UNARY_OPERATOR,
                            Kind.CALL_EXPR):
            yield begin, end, "(void)0", "dropped assignment"
