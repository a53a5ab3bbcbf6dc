"""What clients may ask over the socket: HTTP and JSON under `/v1`.

identity   who asks, from the kernel
schema     the fields of a submission, with types and ranges; shared with the OpenAPI document
validate   from JSON to checked values
render     from values to the JSON that scripts rely on
routes     the table of routes; handlers live in jobs.py and site.py
openapi    the document that describes the table
"""
