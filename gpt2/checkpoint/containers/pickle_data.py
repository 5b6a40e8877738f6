"""Read a pickle as data: nothing is imported, nothing is called.

A pickle is a program for a stack machine (CPython's `pickletools.py`): GLOBAL imports any Python object, REDUCE calls it. Here
GLOBAL makes a :class:`Name` and REDUCE a :class:`Call`, which only record the request: an object of any class beside the weights
stays opaque. `torch.load(weights_only=True)` calls torch functions with untrusted numbers: it allocates what the file claims, and
such files could corrupt memory (CVE-2026-24747). Only the instructions of tensors, plain values and objects are read, in
protocols 2 to 5 (torch.save writes 2).
"""

import io
import pickletools
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from gpt2.checkpoint.containers import Damaged

OPCODES = {opcode.code.encode("latin-1"): opcode for opcode in pickletools.opcodes}
UNKNOWN = OPCODES[b"I"]  # of protocol 0, which is refused
# Instructions that push what follows them, and those that push a value of their own.
ARGUMENTS = {"BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING", "SHORT_BINBYTES", "BINBYTES", "BINFLOAT"}
ARGUMENTS |= {"BININT", "BININT1", "BININT2", "LONG1"}
CONSTANTS: dict[str, Any] = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
    "EMPTY_LIST": [],
    "EMPTY_DICT": {},
}
# Per pickle. nanoGPT's ckpt.pt of GPT-2 XL with the optimizer's state has 70,000 instructions.
INSTRUCTIONS_LIMIT = 1_000_000
# Types of a dict's keys. Not tuples: hashing one nested a million deep overflows C's stack.
KEY_TYPES = (str, int, float, bytes, type(None))


@dataclass(frozen=True, eq=False, repr=False)
class Name:
    """A Python object that a pickle names as ``module.name``; never looked up."""

    name: str

    def __repr__(self) -> str:  # also of a call: its arguments may contain each other many times
        return self.name


@dataclass(frozen=True, eq=False, repr=False)
class Call(Name):
    """A recorded call: function and arguments. ``items`` were put into its result, as into a dict; ``state`` was set on it."""

    args: tuple[Any, ...]
    items: dict[Any, Any] = field(default_factory=dict)
    state: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, repr=False)
class Persistent:
    """An object that the pickle stores elsewhere: for torch, a storage."""

    id: Any


class Pickle:
    """Read the pickle at byte ``start`` as data, in bounded time and memory. Raises Damaged.

    ``value`` has plain values as themselves, an OrderedDict as a dict, all else as Name, Call or Persistent. ``names`` are all
    objects that it names, ``persistent`` the ids of all objects stored elsewhere; ``end`` is the next byte.
    """

    def __init__(self, data: bytes, start: int = 0) -> None:
        self.stream = io.BytesIO(data)
        self.stream.seek(start)
        self.names: dict[str, None] = {}
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.persistent: list[Any] = []
        try:
            self.value = self.run()
        except (IndexError, KeyError, TypeError):
            raise Damaged(f"makes no sense at byte {self.stream.tell():,} of its pickle") from None
        self.end = self.stream.tell()

    def above_mark(self) -> list[Any]:
        at = self.marks.pop()
        if at > len(self.stack):
            raise IndexError
        items = self.stack[at:]
        del self.stack[at:]
        return items

    def name(self, module: Any, name: Any) -> Name:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError
        full = f"{module}.{name}".replace("__builtin__.", "builtins.", 1)
        self.names[full] = None
        return Name(full)

    def store(self, target: Any, keys: list[Any], values: list[Any]) -> None:
        target = target.items if type(target) is Call else target
        if type(target) is not dict or len(keys) != len(values):
            raise TypeError
        keys = [key if isinstance(key, KEY_TYPES) else Name("a key") for key in keys]  # which no other key equals
        if any(isinstance(key, int) and abs(key) >= 1 << 60 for key in keys):  # security: attackers can make them share one hash
            raise Damaged("has a dict with huge numbers as keys in its pickle")
        before = len(target)
        target.update(zip(keys, values, strict=True))
        if len(target) != before + len(keys):
            raise Damaged(f"has a key twice before byte {self.stream.tell():,} of its pickle")

    def call(self, function: Any, args: Any) -> Any:
        if not isinstance(function, Name) or type(args) is not tuple:
            raise TypeError
        if function.name != "collections.OrderedDict":
            return Call(function.name, args)
        pairs = args[0] if args else []  # Python 2's form: a list of [key, value]
        if len(args) > 1 or type(pairs) is not list or not all(type(pair) in (list, tuple) and len(pair) == 2 for pair in pairs):
            raise TypeError
        result: dict[Any, Any] = {}
        self.store(result, [key for key, _ in pairs], [value for _, value in pairs])
        return result

    def argument(self, opcode: pickletools.OpcodeInfo) -> Any:
        """Read the text, bytes or number after an opcode."""
        assert opcode.arg is not None
        try:
            argument = self.lines() if opcode.name in ("GLOBAL", "INST") else opcode.arg.reader(self.stream)
            if isinstance(argument, str):
                argument.encode()  # fails on a lone surrogate, which is not text
        except UnicodeError:
            raise Damaged(f"has text that is not UTF-8 at byte {self.stream.tell():,} of its pickle") from None
        except ValueError:
            raise Damaged("has a pickle that is cut short") from None
        return argument

    def lines(self) -> str:
        """Read module and name, a line each; keep backslashes, which pickletools would unescape."""
        lines = [self.stream.readline() for _ in range(2)]
        if not all(line.endswith(b"\n") for line in lines):
            raise ValueError
        return " ".join(line[:-1].decode() for line in lines)

    def run(self) -> Any:
        stack, memo = self.stack, self.memo
        for _ in range(INSTRUCTIONS_LIMIT):
            if not (code := self.stream.read(1)):
                raise Damaged("has a pickle that is cut short")
            opcode = OPCODES.get(code, UNKNOWN)
            match opcode.name:
                case name if name in ARGUMENTS:
                    stack.append(self.argument(opcode))
                case name if name in CONSTANTS:
                    stack.append(copy(CONSTANTS[name]))
                case "BINPUT" | "LONG_BINPUT":
                    memo[self.argument(opcode)] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[self.argument(opcode)])
                case "MEMOIZE":
                    memo[len(memo)] = stack[-1]
                case "MARK":
                    self.marks.append(len(stack))
                case "TUPLE":
                    stack.append(tuple(self.above_mark()))
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    stack.append(tuple(stack.pop() for _ in range(int(opcode.name[-1])))[::-1])
                case "SETITEM":
                    value, key = stack.pop(), stack.pop()
                    self.store(stack[-1], [key], [value])
                case "SETITEMS":
                    items = self.above_mark()
                    self.store(stack[-1], items[::2], items[1::2])
                case "APPEND" | "APPENDS":
                    items = [stack.pop()] if opcode.name == "APPEND" else self.above_mark()
                    if type(stack[-1]) is not Call:
                        list.extend(stack[-1], items)
                case "GLOBAL":
                    stack.append(self.name(*self.argument(opcode).split(" ", 1)))
                case "STACK_GLOBAL":
                    stack.append(self.name(*(stack.pop(), stack.pop())[::-1]))
                case "REDUCE" | "NEWOBJ" | "NEWOBJ_EX":
                    options = stack.pop() if opcode.name == "NEWOBJ_EX" else {}
                    args, function = stack.pop(), stack.pop()
                    stack.append(self.call(function, (*args, options) if options else args))
                case "EMPTY_SET" | "FROZENSET":
                    stack.append(Call("builtins.set", tuple(self.above_mark()) if opcode.name == "FROZENSET" else ()))
                case "ADDITEMS":
                    self.above_mark()
                case "BUILD":
                    state = stack.pop()
                    if type(stack[-1]) is Call and type(state) is dict:
                        stack[-1].state.update(state)
                case "BINPERSID":
                    stack[-1] = Persistent(stack[-1])
                    self.persistent.append(stack[-1].id)
                case "PROTO" | "FRAME":
                    self.argument(opcode)
                case "STOP":
                    return stack.pop()
                case _:
                    raise Damaged(f"has an instruction {code!r} in its pickle that no tensors need")
        raise Damaged(f"has more than {INSTRUCTIONS_LIMIT:,} instructions in its pickle")
