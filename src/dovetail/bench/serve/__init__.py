"""`dovetail bench kv --serve`: prefixes of prompts in a model of transformers, end to end.

`model` makes a model with random weights, `contender` the ways to get a prefix, `server` runs a request,
`first_token` and `throughput` measure, `verdict` says what came out.
"""
