"""Modules for vLLM's own processes, which cannot import Offbeat: this folder is put on their path instead."""
