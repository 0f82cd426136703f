"""What a change puts in the place of what, and which calls it leaves alone."""
import re

COMPARISONS = {"<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",)}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/"}
ASSIGNMENTS = {"+=": ("-=", "="), "-=": ("+=", "="), "*=": ("/=", "="), "/=": ("*=", "="), "|=": ("&=", "="),
               "&=": ("|=", "="), "^=": ("=",)}
NAMES = {"min": "max", "max": "min", "floor": "ceil", "ceil": "floor", "any_of": "all_of", "all_of": "any_of",
         "none_of": "any_of", "lower_bound": "upper_bound", "upper_bound": "lower_bound", "front": "back",
         "back": "front", "minimum": "maximum", "maximum": "minimum", "add_": "sub_", "sub_": "add_", "mul_": "div_",
         "div_": "mul_", "zeros": "ones", "zeros_like": "ones_like", "add": "sub", "mul": "div", "amin": "amax",
         "amax": "amin", "logical_and": "logical_or", "push_back": "push_front", "pop_front": "pop_back",
         "pop_back": "pop_front"}
QUEUES = {"push_back", "push_front", "pop_back", "pop_front"}  # where both ends are open
DTYPES = {"kFloat": ("kBFloat16", "kDouble"), "kDouble": ("kFloat",), "kBFloat16": ("kHalf", "kFloat"),
          "kHalf": ("kBFloat16", "kFloat"), "kLong": ("kInt",), "kInt": ("kLong",), "kBool": ("kByte",),
          "kComplexFloat": ("kFloat",)}
# The order of these arguments makes no difference.
COMMUTATIVE = {"min", "max", "equal", "swap", "is_same", "is_alias_of", "allclose", "add", "mul", "minimum", "maximum",
               "logical_and", "logical_or", "eq", "ne"}
# Room and patience: what they change is time and memory, never a result.
UNSEEN = {"reserve", "shrink_to_fit", "sleep_for", "sleep_until", "yield", "sched_yield", "usleep", "nanosleep",
          "madvise", "setThreadName", "prctl", "warn", "info", "debug"}
# Says where a rank was, for errors.
SAYING = {"here"}
# A first argument 0 is the only dimension of what is flat.
DIMENSIONED = {"narrow", "select", "size", "cat", "slice", "split", "index_select", "index_add_", "sum", "stride",
               "chunk"}
# Sweeping up what has ended already makes room, too; and a digest of other numbers tells as much as one of these.
SWEEPING = re.compile(r"\.expired\(\)")
DIGESTS = re.compile(r"Digest|Hash", re.I)
LOCKS = re.compile(r"lock|mutex", re.I)
GUARDS = re.compile(r"(Guard|Mode|Scope)\w*(<.*>)?$")
LARGEST_CONSTANT = 512  # beyond it: time-outs, sizes of blocks, multipliers of hashes
