"""Messages of other people's protocols, declared in a table instead of taken from generated modules.

Only what is used is in a table; other fields are skipped when a message is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

Message: TypeAlias = Any
"""An instance of a class made here; what has no stub has no better type."""

Fields: TypeAlias = Mapping[str, tuple[int, str]]
"""Field: (number, type). "one:X" is a member of the message's oneof, "many:X" is repeated, "map:X" a map from
strings."""

STRUCT = "google.protobuf.Struct"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,  # on the wire, an enumeration is one
    "int64": _Field.TYPE_INT64,
    "double": _Field.TYPE_DOUBLE,
}


def declare(package: str, messages: Mapping[str, Fields]) -> Callable[[str], Any]:
    """Classes by name for the `messages` of a table."""
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{package}.proto", package=package, syntax="proto3", dependency=[struct_pb2.DESCRIPTOR.name]
    )
    for name, fields in messages.items():
        _add(file, package, name, fields)
    # A pool of its own: another library in the process may have registered the same names.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(file.SerializeToString())
    return lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))


def _add(file: descriptor_pb2.FileDescriptorProto, package: str, name: str, fields: Fields) -> None:
    message = file.message_type.add(name=name)
    if any(kind.startswith("one:") for _, kind in fields.values()):
        message.oneof_decl.add(name="request" if name.endswith("Request") else "choice")
    for field_name, (number, kind) in fields.items():
        shape, _, base = kind.rpartition(":")
        if shape == "map":
            entry_name = f"{field_name[0].upper()}{_camel(field_name[1:])}Entry"
            entry = message.nested_type.add(name=entry_name)
            entry.options.map_entry = True
            entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
            _typed(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), package, base)
            base = f"{name}.{entry_name}"
        many = shape in ("many", "map")
        field = message.field.add(
            name=field_name, number=number, label=_Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL
        )
        _typed(field, package, base)
        if shape == "one":
            field.oneof_index = 0


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _typed(field: descriptor_pb2.FieldDescriptorProto, package: str, kind: str) -> None:
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        field.type = scalar
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{kind}" if kind == STRUCT else f".{package}.{kind}"
