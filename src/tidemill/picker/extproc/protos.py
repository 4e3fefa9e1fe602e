"""Envoy's messages, as far as they are used here.

They are declared here because the published package of generated modules (xds-protos) overwrites files of another
dependency (both install `cel/__init__.py`), and its string fields refuse header values that are not UTF-8. Numbers
and names are those of envoy/service/ext_proc/v3/external_processor.proto and envoy/config/core/v3/base.proto.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from tidemill.api.protos import STRUCT, Fields, Message, declare

__all__ = ["OVERWRITE_IF_EXISTS_OR_ADD", "Message", "Metadata", "Mode", "ProcessingRequest", "ProcessingResponse"]

_MESSAGES: Mapping[str, Fields] = {
    "HeaderValue": {"key": (1, "string"), "value": (2, "bytes"), "raw_value": (3, "bytes")},
    "HeaderMap": {"headers": (1, "many:HeaderValue")},
    "HeaderValueOption": {"header": (1, "HeaderValue"), "append_action": (3, "int32")},
    "HeaderMutation": {"set_headers": (1, "many:HeaderValueOption"), "remove_headers": (2, "many:string")},
    "Metadata": {"filter_metadata": (1, f"map:{STRUCT}")},
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
        "attributes": (9, f"map:{STRUCT}"),
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
        "dynamic_metadata": (8, STRUCT),
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


_class = declare("tidemill.extproc", _MESSAGES)
Metadata = _class("Metadata")
ProcessingRequest = _class("ProcessingRequest")
ProcessingResponse = _class("ProcessingResponse")
