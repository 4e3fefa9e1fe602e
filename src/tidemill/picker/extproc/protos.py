"""Envoy's messages, as far as they are used here.

They are declared in a table instead of taken from a package of generated modules: the published one
(xds-protos) overwrites files of another dependency (both install `cel/__init__.py`), and its string fields refuse
header values that are not UTF-8. Fields that are not in the table are skipped when a message is read. Numbers and
names are those of envoy/service/ext_proc/v3/external_processor.proto and envoy/config/core/v3/base.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, TypeAlias

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, struct_pb2

Message: TypeAlias = Any
"""An instance of a class made here; what has no stub has no better type."""

_PACKAGE = "tidemill.extproc"
_STRUCT = "google.protobuf.Struct"
_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    "string": _Field.TYPE_STRING,
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,  # on the wire, an enumeration is one
}

# Message: field: (number, type). "one:X" is a member of the message's oneof, "many:X" is repeated, "map:X" a map
# from strings.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "bytes"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "many:HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "many:HeaderValueOption"), "remove_headers": (2, "many:string")},
    "Metadata": {"filter_metadata": (1, f"map:{_STRUCT}")},
    "HttpHeaders": {"headers": (1, "HeaderMap"), "end_of_stream": (3, "bool")},
    "HttpBody": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "HttpTrailers": {"trailers": (1, "HeaderMap")},
    "ProtocolConfiguration": {"request_body_mode": (1, "int32"), "response_body_mode": (2, "int32")},
    "ProcessingRequest": {
        "request_headers": (2, "one:HttpHeaders"),
        "response_headers": (3, "one:HttpHeaders"),
        "request_body": (4, "one:HttpBody"),
        "response_body": (5, "one:HttpBody"),
        "request_trailers": (6, "one:HttpTrailers"),
        "response_trailers": (7, "one:HttpTrailers"),
        "metadata_context": (8, "Metadata"),
        "attributes": (9, f"map:{_STRUCT}"),
        "protocol_config": (11, "ProtocolConfiguration"),
    },
    "StreamedBodyResponse": {"body": (1, "bytes"), "end_of_stream": (2, "bool")},
    "BodyMutation": {"body": (1, "one:bytes"), "streamed_response": (3, "one:StreamedBodyResponse")},
    "CommonResponse": {
        "header_mutation": (2, "HeaderMutation"),
        "body_mutation": (3, "BodyMutation"),
        "clear_route_cache": (5, "bool"),
    },
    "HeadersResponse": {"response": (1, "CommonResponse")},
    "BodyResponse": {"response": (1, "CommonResponse")},
    "TrailersResponse": {"header_mutation": (1, "HeaderMutation")},
    "HttpStatus": {"code": (1, "int32")},
    "ImmediateResponse": {
        "status": (1, "HttpStatus"),
        "headers": (2, "HeaderMutation"),
        "body": (3, "bytes"),
        "details": (5, "string"),
    },
    "ProcessingResponse": {
        "request_headers": (1, "one:HeadersResponse"),
        "response_headers": (2, "one:HeadersResponse"),
        "request_body": (3, "one:BodyResponse"),
        "response_body": (4, "one:BodyResponse"),
        "request_trailers": (5, "one:TrailersResponse"),
        "response_trailers": (6, "one:TrailersResponse"),
        "immediate_response": (7, "one:ImmediateResponse"),
        "dynamic_metadata": (8, _STRUCT),
    },
}

OVERWRITE_IF_EXISTS_OR_ADD = 2  # HeaderValueOption.HeaderAppendAction


class Mode(IntEnum):
    """How Envoy sends a body (ProcessingMode.BodySendMode)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name="tidemill/extproc.proto", package=_PACKAGE, syntax="proto3",
        dependency=[struct_pb2.DESCRIPTOR.name],
    )  # fmt: skip
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        if any(kind.startswith("one:") for _, kind in fields.values()):
            message.oneof_decl.add(name="request" if name == "ProcessingRequest" else "choice")
        for field_name, (number, kind) in fields.items():
            shape, _, base = kind.rpartition(":")
            if shape == "map":
                entry_name = "".join(part.capitalize() for part in field_name.split("_")) + "Entry"
                entry = message.nested_type.add(name=entry_name)
                entry.options.map_entry = True
                entry.field.add(name="key", number=1, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
                _typed(entry.field.add(name="value", number=2, label=_Field.LABEL_OPTIONAL), base)
                base = f"{name}.{entry_name}"
            many = shape in ("many", "map")
            field = message.field.add(
                name=field_name, number=number, label=_Field.LABEL_REPEATED if many else _Field.LABEL_OPTIONAL
            )
            _typed(field, base)
            if shape == "one":
                field.oneof_index = 0
    return file


def _typed(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    scalar = _SCALARS.get(kind)
    if scalar is not None:
        field.type = scalar
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{kind}" if kind == _STRUCT else f".{_PACKAGE}.{kind}"


# A pool of its own: another library in the process may have registered Envoy's.
_pool = descriptor_pool.DescriptorPool()
_pool.AddSerializedFile(struct_pb2.DESCRIPTOR.serialized_pb)
_pool.AddSerializedFile(_file().SerializeToString())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


ProcessingRequest = _class("ProcessingRequest")
ProcessingResponse = _class("ProcessingResponse")
