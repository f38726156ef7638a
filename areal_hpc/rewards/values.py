"""Plain Python values as JSON, for calls between a program under test and its tests.

What arrives is built of builtin types only, so that a program cannot return an object
that equals everything. Standard library only and free of imports from this package:
the sandbox sends this module's code to its runner.
"""

import json

MAX_DEPTH = 100


def encode_value(value, depth=0):
    """A JSON-able form of `value`; TypeError for what is not plain data."""
    if depth > MAX_DEPTH:
        raise TypeError(f"values nested deeper than {MAX_DEPTH} levels")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        # In hexadecimal: decimal digits of huge numbers are refused and slow.
        return int.__int__(value) if -(2**53) < value < 2**53 else {"i": hex(value)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, dict):
        return {"d": [[encode_value(k, depth + 1), encode_value(v, depth + 1)] for k, v in value.items()]}
    for kind, name in ((list, "l"), (tuple, "t"), (frozenset, "f"), (set, "s")):
        if isinstance(value, kind):
            return {name: [encode_value(item, depth + 1) for item in value]}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a numpy scalar
        return encode_value(value.item(), depth + 1)
    if hasattr(value, "__next__") or isinstance(value, (range, type({}.keys()), type({}.values()))):
        return {"g": [encode_value(item, depth + 1) for item in value]}
    raise TypeError(f"a value of type {type(value).__name__} is not plain data")


def decode_value(data):
    """The value that `encode_value` described; ValueError if it described none."""
    if not isinstance(data, dict):
        if isinstance(data, list):
            raise ValueError("not an encoded value")
        return data
    if len(data) != 1:
        raise ValueError("not an encoded value")
    [(kind, content)] = data.items()
    if kind == "i":
        return int(content, 16)
    if kind == "b":
        return bytes.fromhex(content)
    if kind == "c":
        return complex(*content)
    if kind == "d":
        return {decode_value(key): decode_value(value) for key, value in content}
    makers = {"l": list, "t": tuple, "s": set, "f": frozenset, "g": iter}
    if kind not in makers:
        raise ValueError("not an encoded value")
    return makers[kind]([decode_value(item) for item in content])


def dump(message):
    return json.dumps(message).encode("utf-8", "surrogatepass")


def load(data):
    return json.loads(data.decode("utf-8", "surrogatepass"))
