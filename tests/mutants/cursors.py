"""What libclang's cursors do not answer by themselves."""
from clang.cindex import Cursor, CursorKind as Kind, TypeKind

WRAPPERS = {Kind.UNEXPOSED_EXPR, Kind.PAREN_EXPR}


def callee_of(call: Cursor) -> Cursor | None:
    """The name that is called, where it is written: the first of the first children."""
    cursor = call
    while children := list(cursor.get_children()):
        cursor = children[0]
        if cursor.kind in (Kind.DECL_REF_EXPR, Kind.MEMBER_REF_EXPR) and cursor.spelling == call.spelling:
            return cursor
    return None


def bare(cursor: Cursor) -> str:
    kind = cursor.type.get_canonical()
    if kind.kind in (TypeKind.LVALUEREFERENCE, TypeKind.RVALUEREFERENCE):
        kind = kind.get_pointee()
    return kind.spelling.removeprefix("const ")


def is_literal(cursor: Cursor) -> bool:
    while cursor.kind in WRAPPERS and (children := list(cursor.get_children())):
        cursor = children[0]
    return cursor.kind in (Kind.INTEGER_LITERAL, Kind.FLOATING_LITERAL, Kind.CXX_BOOL_LITERAL_EXPR, Kind.STRING_LITERAL,
                           Kind.CXX_NULL_PTR_LITERAL_EXPR)


def only_throws(statement: Cursor) -> bool:
    while statement.kind in WRAPPERS | {Kind.COMPOUND_STMT}:
        children = list(statement.get_children())
        if len(children) != 1:
            return False
        statement = children[0]
    return statement.kind == Kind.CXX_THROW_EXPR


def qualified(cursor: Cursor) -> str:
    names = []
    while cursor is not None and cursor.kind != Kind.TRANSLATION_UNIT:
        if cursor.spelling and cursor.spelling != "plumb" and not cursor.spelling.startswith("("):
            names.append(cursor.spelling)
        cursor = cursor.semantic_parent
    return "::".join(reversed(names))
