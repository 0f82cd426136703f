"""A sample of a list of mutants: seeded, and stable, so that an edit elsewhere leaves it as it is."""
import hashlib


def sample(mutants: list[dict], seed: int, count: int) -> list[dict]:
    """`count` of them, each as likely as any other, but that no line is changed twice before every line was once."""
    by_lot = sorted(mutants, key=lambda m: hashlib.sha256(f"{seed}/{m['id']}".encode()).digest())
    turns: dict[tuple, int] = {}  # how often a line has come already
    order = {}
    for mutant in by_lot:
        line = (mutant["file"], mutant["line"])
        order[mutant["id"]] = turns[line] = turns.get(line, 0) + 1
    return sorted(by_lot, key=lambda m: order[m["id"]])[:count]
