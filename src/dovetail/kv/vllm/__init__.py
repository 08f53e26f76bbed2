"""The adapter for vLLM: its offloading manager stays, the worker that moves blocks is ours.

vLLM is told of `spec` and `connector`; they and `region` are the only modules that import it.
"""
