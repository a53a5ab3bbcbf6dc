"""The API over the socket: HTTP and JSON under `/v1`.

auth       the caller's identity, from the kernel
schema     the fields of a submission, with types and ranges; also the OpenAPI document
validate   JSON to checked values
render     values to the JSON that scripts rely on
routes     the table of routes; the handlers are in `handlers`
"""
