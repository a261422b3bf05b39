# SPDX-License-Identifier: Apache-2.0
"""Messages of Envoy's external processing protocol: parts of a request are read, answers are built.

Headers that name endpoints follow the endpoint picker protocol (v1.0.0) of Gateway API's inference
extension.
"""

from collections.abc import Iterable, Iterator, Sequence

from serving.protocol import DESTINATION, DESTINATION_SERVED, DESTINATION_SUBSET
from serving.router.epp import ext_proc_pb2 as pb

Headers = list[tuple[bytes, bytes]]

PIECE = 62_000
"""Bytes of a body in one message: some data planes take no more than 64 KiB."""
LB = "envoy.lb"
SUBSET_HINT = "envoy.lb.subset_hint"
UPSTREAM_ADDRESS = "upstream.address"
"""The attribute that replaces DESTINATION_SERVED if a gateway does not set that."""
FULL_DUPLEX = pb.ProcessingMode.FULL_DUPLEX_STREAMED


# incoming messages


def headers(message: pb.HttpHeaders) -> Headers:
    """The headers in their order, and pseudo-headers like `:path`."""
    return [
        (it.key.encode("latin-1"), it.raw_value or it.value.encode())
        for it in message.headers.headers
    ]


def subset(message: pb.ProcessingRequest) -> frozenset[str] | None:
    """The endpoints that the gateway allows. None if all are allowed."""
    hint = message.metadata_context.filter_metadata.get(SUBSET_HINT)
    if hint is None or DESTINATION_SUBSET not in hint.fields:
        return None
    value = hint.fields[DESTINATION_SUBSET]
    if value.WhichOneof("kind") == "string_value":  # as some data planes send it
        named = value.string_value.split(",")
    else:
        named = [it.string_value for it in value.list_value.values]
    return frozenset(it.strip() for it in named if it.strip())


def served(message: pb.ProcessingRequest) -> str:
    """The endpoint that has answered, or "" if the gateway does not report it."""
    known = message.metadata_context.filter_metadata.get(LB)
    if known is not None and DESTINATION_SERVED in known.fields:
        return str(known.fields[DESTINATION_SERVED].string_value)
    for attributes in message.attributes.values():
        if UPSTREAM_ADDRESS in attributes.fields:
            return str(attributes.fields[UPSTREAM_ADDRESS].string_value)
    return ""


# answers


def _set(lines: Headers, removed: Iterable[bytes] = ()) -> pb.HeaderMutation:
    overwrite = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    return pb.HeaderMutation(
        set_headers=[
            pb.HeaderValueOption(
                header=pb.HeaderValue(key=name.decode("latin-1"), raw_value=value),
                append_action=overwrite,
            )
            for name, value in lines
        ],
        remove_headers=[name.decode("latin-1") for name in removed],
    )


def routed(
    endpoints: Sequence[str], lines: Headers, removed: Iterable[bytes]
) -> pb.ProcessingResponse:
    """The request goes to the first of these endpoints that takes it. lines: other headers that it
    gets. removed: names of headers that it loses.
    """
    value = ",".join(endpoints)
    response = pb.ProcessingResponse(
        request_headers=pb.HeadersResponse(
            response=pb.CommonResponse(
                header_mutation=_set([(DESTINATION, value.encode()), *lines], removed),
                clear_route_cache=True,
            )
        )
    )
    response.dynamic_metadata.get_or_create_struct(LB)[DESTINATION.decode()] = value
    return response


def answer_head(lines: Headers) -> pb.ProcessingResponse:
    """An answer's head passes, and gets these headers."""
    response = pb.CommonResponse(header_mutation=_set(lines))
    return pb.ProcessingResponse(response_headers=pb.HeadersResponse(response=response))


def _streamed(body: bytes, *, end: bool) -> pb.BodyResponse:
    piece = pb.StreamedBodyResponse(body=body, end_of_stream=end)
    mutation = pb.BodyMutation(streamed_response=piece)
    return pb.BodyResponse(response=pb.CommonResponse(body_mutation=mutation))


def request_body(body: bytes, *, end: bool) -> Iterator[pb.ProcessingResponse]:
    """More of the request's body passes. end: and that was all."""
    for at in range(0, max(len(body), 1), PIECE):
        piece = body[at : at + PIECE]
        last = end and at + PIECE >= len(body)
        yield pb.ProcessingResponse(request_body=_streamed(piece, end=last))


def answer_body(message: pb.HttpBody, *, full_duplex: bool) -> pb.ProcessingResponse:
    """More of the answer's body passes."""
    if not full_duplex:
        return pb.ProcessingResponse(response_body=pb.BodyResponse())
    piece = _streamed(message.body, end=message.end_of_stream)
    return pb.ProcessingResponse(response_body=piece)


def immediate(status: int, body: bytes, lines: Headers) -> pb.ProcessingResponse:
    """The request is answered here."""
    response = pb.ImmediateResponse(
        status=pb.HttpStatus(code=status), headers=_set(lines), body=body
    )
    return pb.ProcessingResponse(immediate_response=response)


def request_trailers() -> pb.ProcessingResponse:
    return pb.ProcessingResponse(request_trailers=pb.TrailersResponse())


def answer_trailers() -> pb.ProcessingResponse:
    return pb.ProcessingResponse(response_trailers=pb.TrailersResponse())
