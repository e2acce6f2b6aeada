"""Backends by role. Importing a role or a backend loads no torch, vllm, ray, verl or transformers."""
