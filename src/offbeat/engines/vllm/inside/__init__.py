"""Folder on the PYTHONPATH of vLLM's processes, with code to run there; they cannot import Offbeat itself."""
